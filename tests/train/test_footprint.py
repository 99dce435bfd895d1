"""What a run takes outside of its budgets: by hand, and what ranks really give their dense parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks
from rank_cases import TINY, Make, Settings
from slowness import mostly_slow

from tierstore.config import load
from tierstore.dense import DenseBytes
from tierstore.model.architecture import DenseUnit
from tierstore.model.config import ComputeDtype
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import WORKING_BYTES, fixed_cost, flat_layouts, rank_tokens
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(3000))
    return load(TrainConfig, None, {**TINY, "data.paths": (str(text),)})


def test_by_hand(config: TrainConfig) -> None:
    """Embedding 256 x 16, two blocks of 4 x 16^2 + 2 x 16 + 6 x 16 = 1,152, norm and tied or own head; 4 x 8 tokens."""
    embedding, block = 256 * 16, 1152
    head = config.model.architecture.units[-1].numel
    alone, together = fixed_cost(config, 1000), fixed_cost(config, 1000, ranks=2)
    assert alone.dense == DenseBytes(16 * (embedding + 2 * block + head), 0, 0)
    half = head // 2 + (-(head // 2)) % 16
    assert together.dense == DenseBytes(
        slices=16 * (embedding // 2 + block + half),
        fusion=4 * (embedding + 2 * block + 2 * half),
        gradients=2 * 4 * (max(embedding, 2 * half) + 2 * block),
    )
    assert alone.activations == config.spec.activation_bytes(32)
    assert together.activations == config.spec.activation_bytes(16)
    for cost in (alone, together):
        assert (cost.process, cost.text, cost.working) == (1000, 3000, WORKING_BYTES)
        assert cost.nbytes == 4000 + WORKING_BYTES + cost.dense.total + cost.activations


def given_to_dense(mesh: Mesh, settings: Settings) -> DenseBytes:
    torch.set_num_threads(1)
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.CREATE, mesh=mesh) as trainer:
        return trainer.dense.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("size", mostly_slow([2, 4], 2))
@pytest.mark.parametrize("changes", [{}, {"model.compute_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_ranks_are_given_what_was_announced(
    ranks: Ranks, settings: Make, changes: Settings, size: int
) -> None:
    made = settings(changes)
    announced = fixed_cost(load(TrainConfig, None, {**TINY, **made}), 0, ranks=size)
    assert ranks.run(size, given_to_dense, made) == [announced.dense] * size


units = st.builds(DenseUnit, matrices=st.integers(0, 500), others=st.integers(1, 500))


@given(st.lists(units, min_size=3, max_size=6), st.integers(1, 5), st.sampled_from(ComputeDtype))
def test_slices_hold_every_parameter(units: list[DenseUnit], count: int, compute: ComputeDtype) -> None:
    for unit, layout in zip(units, flat_layouts(units, ranks=count, compute=compute), strict=True):
        assert sum(region.numel for region in layout.regions) == unit.numel
        assert layout.slice_numel * count == layout.padded_numel >= unit.numel


def test_the_largest_share_of_a_batch(config: TrainConfig) -> None:
    assert [rank_tokens(config, count) for count in (1, 2, 3, 4)] == [32, 16, 11, 8]
