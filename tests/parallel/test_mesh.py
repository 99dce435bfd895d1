"""Who owns which experts, and which ranks form which groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks

from tierstore.errors import ConfigError
from tierstore.parallel import ExpertBlocks, Mesh, ParallelConfig
from tierstore.parallel.mesh import expert_ranks


def test_blocks_by_hand() -> None:
    blocks = ExpertBlocks(experts=7, ranks=3)
    assert [list(blocks.owned(rank)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [blocks.owner(expert) for expert in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    few = ExpertBlocks(experts=2, ranks=4)
    assert [len(few.owned(rank)) for rank in range(4)] == [1, 1, 0, 0]
    for expert in (-1, 2):
        with pytest.raises(ValueError, match=f"expected an expert of 0 to 1, got {expert}"):
            few.owner(expert)


@given(st.integers(0, 60), st.integers(1, 9))
def test_every_expert_has_one_owner(experts: int, ranks: int) -> None:
    blocks = ExpertBlocks(experts, ranks)
    owned = [(expert, rank) for rank in range(ranks) for expert in blocks.owned(rank)]
    assert [expert for expert, _ in owned] == list(range(experts))
    assert all(blocks.owner(expert) == rank for expert, rank in owned)
    sizes = [len(blocks.owned(rank)) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 1


def _groups(mesh: Mesh) -> dict[str, object]:
    torch_mesh = mesh.device_mesh
    return {
        "torch": None if torch_mesh is None else (torch_mesh.mesh_dim_names, torch_mesh.mesh.tolist()),
        "world": mesh.world.ranks,
        "expert": (mesh.expert.ranks, mesh.expert.rank, mesh.expert is mesh.world),
        "replica": (mesh.replica.ranks, mesh.replica.rank, mesh.replica is mesh.world),
        "heard": (
            mesh.expert.all_gather_object(mesh.place.rank),
            mesh.replica.all_gather_object(mesh.place.rank),
        ),
    }


def test_groups(ranks: Ranks) -> None:
    everyone = (0, 1, 2, 3)
    for rank, found in enumerate(ranks.run(4, _groups, expert=2)):
        expert, replica = [(0, 1), (2, 3)][rank // 2], [(0, 2), (1, 3)][rank % 2]
        assert found == {
            "torch": (("replica", "expert"), [[0, 1], [2, 3]]),
            "world": everyone,
            "expert": (expert, rank % 2, False),
            "replica": (replica, rank // 2, False),
            "heard": (list(expert), list(replica)),
        }
    for rank, found in enumerate(ranks.run(4, _groups)):
        assert found["expert"] == (everyone, rank, True)
        assert found["replica"] == ((rank,), 0, False)
    for rank, found in enumerate(ranks.run(4, _groups, expert=1)):
        assert found["expert"] == ((rank,), 0, False)
        assert found["replica"] == (everyone, rank, True)


def test_expert_groups_divide_the_world() -> None:
    assert expert_ranks(ParallelConfig(), 6) == 6
    assert expert_ranks(ParallelConfig(expert=3), 6) == 3
    with pytest.raises(ConfigError, match=r"^parallel\.expert: expected a divisor of the 6 ranks, got 4"):
        expert_ranks(ParallelConfig(expert=4), 6)


@pytest.mark.parametrize(
    ("field", "value"), [("expert", -1), ("timeout_s", 0.0), ("grace_s", float("inf")), ("timeout_s", -1.0)]
)
def test_bad_values_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^parallel.{field}:"):
        ParallelConfig(**{field: value})
