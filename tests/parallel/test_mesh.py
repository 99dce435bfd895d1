"""Who owns which experts, and which ranks form which groups."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks

from tierstore.errors import ConfigError
from tierstore.parallel import Channel, Collective, ExpertBlocks, Mesh, ParallelConfig, RankEnvironment
from tierstore.parallel.layout import Layout, layout_of


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
    torch_mesh = mesh.device_mesh()
    names = torch_mesh.mesh_dim_names or ()
    inner = [dist.get_process_group_ranks(torch_mesh.get_group(name)) for name in names]
    return {
        "torch": (names, torch_mesh.mesh.tolist(), inner),
        "world": mesh.world.ranks,
        "expert": (mesh.expert.ranks, mesh.expert.rank, mesh.expert is mesh.world),
        "replica": (mesh.replica.ranks, mesh.replica.rank, mesh.replica is mesh.world),
        "heard": (
            mesh.expert.all_gather_object(mesh.environment.rank),
            mesh.replica.all_gather_object(mesh.environment.rank),
        ),
    }


def _communicators(mesh: Mesh) -> tuple[bool, int]:
    groups = [each for each in (mesh.world, mesh.data, mesh.expert, mesh.replica) if each.size > 1]
    used = {id(group.communicator(channel)) for group in groups for channel in Channel}
    return mesh.world.communicator(Channel.STREAM) is dist.group.WORLD, len(used)


def test_communicators_are_as_few_as_groups_need(ranks: Ranks) -> None:
    """Two for each kind of group; the one that joining made, whose threads are there anyway, is one of the world's two."""
    assert ranks.run(2, _communicators) == [(True, 2)] * 2
    assert ranks.run(4, _communicators, expert=2) == [(True, 6)] * 4


def test_groups(ranks: Ranks) -> None:
    everyone = (0, 1, 2, 3)
    for rank, found in enumerate(ranks.run(4, _groups, expert=2)):
        expert, replica = [(0, 1), (2, 3)][rank // 2], [(0, 2), (1, 3)][rank % 2]
        assert found == {
            "torch": (("replica", "expert"), [[0, 1], [2, 3]], [list(replica), list(expert)]),
            "world": everyone,
            "expert": (expert, rank % 2, False),
            "replica": (replica, rank // 2, False),
            "heard": (list(expert), list(replica)),
        }
    for rank, found in enumerate(ranks.run(4, _groups)):
        assert found["torch"] == (("expert",), [0, 1, 2, 3], [[0, 1, 2, 3]])
        assert found["expert"] == (everyone, rank, True)
        assert found["replica"] == ((rank,), 0, False)
    for rank, found in enumerate(ranks.run(4, _groups, expert=1)):
        assert found["torch"] == (("replica",), [0, 1, 2, 3], [[0, 1, 2, 3]])
        assert found["expert"] == ((rank,), 0, False)
        assert found["replica"] == (everyone, rank, True)


def test_one_process_has_no_device_mesh() -> None:
    alone = Mesh.alone(RankEnvironment(), torch.device("cpu"))
    assert alone.traffic()[Collective.ALL_GATHER].calls == 0
    with pytest.raises(ValueError, match="a single process has no device mesh"):
        alone.device_mesh()


def _sent(mesh: Mesh) -> tuple[int, int]:
    before = mesh.traffic()[Collective.ALL_REDUCE]
    for group in (mesh.world, mesh.expert, mesh.replica):
        group.all_reduce(torch.ones(2)).wait()
    after = mesh.traffic()[Collective.ALL_REDUCE]
    return after.calls - before.calls, after.sent_bytes - before.sent_bytes


def test_traffic_is_that_of_all_groups_once(ranks: Ranks) -> None:
    assert ranks.run(4, _sent, expert=2) == [(3, 8 * (3 + 1 + 1))] * 4
    assert ranks.run(4, _sent) == [(2, 8 * (3 + 3))] * 4  # world and expert group are one


def test_layouts_by_hand() -> None:
    assert layout_of(ParallelConfig(), 6) == Layout(stages=1, replicas=1, expert=6, tensor=1)
    assert layout_of(ParallelConfig(expert=3), 6) == Layout(stages=1, replicas=2, expert=3, tensor=1)
    made = layout_of(ParallelConfig(stages=2, tensor=2), 8)
    assert made == Layout(stages=2, replicas=2, expert=2, tensor=2)
    assert (made.world, made.data) == (8, 2)
    assert made.rows("world") == [list(range(8))]
    assert made.rows("tensor") == made.rows("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.rows("data") == made.rows("replica") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert made.rows("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    flat = layout_of(ParallelConfig(stages=2, expert=2), 8)
    assert flat.rows("data") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert flat.rows("tensor") == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ParallelConfig(expert=4), r"parallel\.expert: expected a divisor of the 6 ranks, got 4"),
        (ParallelConfig(stages=4), r"parallel\.stages: expected a divisor of the 6 ranks, got 4"),
        (
            ParallelConfig(stages=2, tensor=2),
            r"parallel\.tensor: expected a divisor of the 3 ranks of a stage",
        ),
        (
            ParallelConfig(stages=2, expert=2),
            r"parallel\.expert: expected a divisor of the 3 ranks of a stage",
        ),
        (ParallelConfig(tensor=2, expert=3), r"parallel\.expert: expected 0 or 2"),
    ],
)
def test_layouts_that_cannot_be(config: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        layout_of(config, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert", -1),
        ("tensor", 0),
        ("stages", 0),
        ("timeout_s", 0.0),
        ("grace_s", float("inf")),
        ("timeout_s", -1.0),
    ],
)
def test_bad_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^parallel.{field}:"):
        ParallelConfig(**{field: value})
