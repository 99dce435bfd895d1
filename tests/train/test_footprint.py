"""What a run takes outside of its budgets: by hand, and what ranks really give their dense parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks
from rank_cases import TINY, Make, Settings
from refusals import refuses
from slowness import mostly_slow

from tierstore.config import load
from tierstore.dense import DenseBytes
from tierstore.errors import BudgetError
from tierstore.machine import working_bytes
from tierstore.model.architecture import DenseUnit
from tierstore.model.config import ComputeDtype
from tierstore.parallel import Mesh
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import budgets, least_host_budget
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import fixed_cost, flat_layouts, rank_tokens, within_memory
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
        working = working_bytes(cost.activations)
        assert (cost.process, cost.text, cost.working) == (1000, 3000, working)
        assert cost.nbytes == 4000 + working + cost.dense.total + cost.activations


def given_to_dense(mesh: Mesh, settings: Settings) -> DenseBytes:
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


# Budgets that follow from memory ----------------------------------------------------------------------------

LAYERED = {"data.micro_batches": 2, "data.micro_order": "layer"}


def within(config: TrainConfig, memory: int, **changes: object) -> TrainConfig:
    given = load(TrainConfig, None, {**TINY, "data.paths": config.data.paths, "memory": memory, **changes})
    return within_memory(given, fixed_cost(given, 1000), DeviceKind.CPU)


def test_the_host_budget_is_what_memory_leaves(config: TrainConfig) -> None:
    """``TINY`` names a host budget, which wins; 0 asks for what is left."""
    fixed = fixed_cost(config, 1000).nbytes
    assert within(config, fixed + 5_000_000, host_budget=0).host_budget == 5_000_000
    assert within(config, fixed + 5_000_000).host_budget == config.host_budget
    alone = load(TrainConfig, None, {"data.paths": config.data.paths})
    assert (alone.memory, alone.host_budget) == (0, 256 << 20)
    assert within_memory(alone, fixed_cost(alone, 1000), DeviceKind.CPU) == alone


def test_memory_that_is_too_small_names_what_would_do(config: TrainConfig) -> None:
    needed = fixed_cost(config, 1000).nbytes + least_host_budget(config, DeviceKind.CPU)
    assert within(config, needed, host_budget=0).host_budget == least_host_budget(config, DeviceKind.CPU)
    with refuses(BudgetError, "memory:", str(needed), "data.batch_size"):
        within(config, needed - 1, host_budget=0)
    with refuses(BudgetError, "memory:"):
        within(config, needed, host_budget=config.host_budget + needed)


def test_tokenising_counts_where_it_takes_more_than_what_follows(config: TrainConfig) -> None:
    """It is over before experts, dense parameters and activations are there, so memory for it may be theirs."""
    fixed, least = fixed_cost(config, 1000), least_host_budget(config, DeviceKind.CPU)
    later = fixed.nbytes - 1000 + config.host_budget
    for taken, more in ((later, 0), (later + 7, 7)):
        account = replace(fixed, tokenising=taken).account(config, DeviceKind.CPU)
        assert (account.parts["tokenising"], account.nbytes) == (more, 1000 + taken)
    needed = fixed.nbytes + least + 5000
    given = replace(config, memory=needed, host_budget=0)
    tokenising = replace(fixed, tokenising=needed - 1000)
    assert within_memory(given, tokenising, DeviceKind.CPU).host_budget == least + 5000
    with refuses(BudgetError, "memory:", str(needed)):
        within_memory(replace(given, memory=needed - 1), tokenising, DeviceKind.CPU)


@given(spare=st.integers(0, 40_000))
def test_budgets_take_no_more_than_memory(spare: int) -> None:
    """In layer order block inputs spill where they would take more than half of what is left, and never less than those
    of one block stay. The account of the chosen budgets is what was allowed, but for less than one block input.
    """
    layered = load(TrainConfig, None, {**TINY, **LAYERED, "host_budget": 0, "memory": 1})
    fixed = fixed_cost(layered, 1000, text=0)
    one_block = 2 * fixed.boundaries.slot_bytes
    least = least_host_budget(layered, DeviceKind.CPU)
    allowed = fixed.nbytes - fixed.boundary_bytes + one_block + least + spare
    chosen = within_memory(replace(layered, memory=allowed), fixed, DeviceKind.CPU)
    account = fixed_cost(chosen, 1000, text=0).account(chosen, DeviceKind.CPU)
    assert allowed - fixed.boundaries.slot_bytes < account.nbytes <= allowed
    assert chosen.host_budget >= least
    assert account.parts["block inputs"] in range(one_block, fixed.boundary_bytes + 1)
    if chosen.boundary_budget:
        assert account.parts["block inputs"] <= max(one_block, (one_block + spare) // 2)
    assert budgets(chosen, DeviceKind.CPU, experts=8).cache <= chosen.host_budget
