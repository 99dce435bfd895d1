"""Frozen experts over a store: read in both directions, ahead of the passes, and never written."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from tierstore._native import GroupOrder, HugePages
from tierstore.cache import CacheConfig
from tierstore.cache.access import Need, Phase
from tierstore.capabilities import Capability
from tierstore.errors import StoreError
from tierstore.prefetch import PredictorName, Schedule, make_predictor
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.program import FrozenProgram
from tierstore.stats import StallLedger
from tierstore.store import (
    IoBackendName,
    IoConfig,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    Training,
    WeightFormat,
)
from tierstore.store.core import StoreCore
from tierstore.tiers import DeviceSlots, WeightLoads, open_device_tier
from tierstore.trace.replay import replay

NUMEL, LAYERS, EXPERTS = 2048, (0, 2), 4
PAGE = 4096  # one frozen record
W = int(Need.WEIGHTS)


@dataclass
class Frozen:
    """``experts`` over ``store``."""

    store: StoreCore
    experts: FrozenExperts

    def read(self, phase: Phase, layer: int, *experts: int) -> dict[int, torch.Tensor]:
        """The weights that a pass sees."""
        source = self.experts.forward if phase is Phase.FORWARD else self.experts.backward
        seen = {}
        for lease in source(layer, experts):
            assert (lease.gradients, lease.pair) == (None, None)
            seen[lease.expert] = lease.weights.clone()
        return seen

    @property
    def counts(self) -> tuple[int, int, int]:
        """Hits, misses, bytes read ahead."""
        stats = self.store.cache.residency.stats()
        return stats.hits, stats.misses, stats.prefetch_read_bytes


def initial(layer: int, expert: int) -> np.ndarray:
    return np.random.default_rng([layer, expert]).normal(size=NUMEL).astype(np.float32)


def rounded(layer: int, expert: int) -> torch.Tensor:
    return torch.from_numpy(initial(layer, expert)).bfloat16()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Frozen]]:
    """Makes frozen sources over stores of their own with room for ``room`` experts; nothing is resident."""
    with ExitStack() as stack:

        def made(
            *,
            room: int,
            depth: int = 0,
            predictor: PredictorName = PredictorName.NONE,
            lookahead: int = 0,
            loads: WeightLoads = WeightLoads.COPIED,
            slots: int = 2,
            mapped: bool = False,
            order: GroupOrder = GroupOrder.RESIDENT_FIRST,
            trace: Path | None = None,
        ) -> Frozen:
            schema = RecordSchema("expert", NUMEL, WeightFormat.BF16, training=Training.FROZEN)
            io = IoConfig(backend=IoBackendName.PMEM, mapped_weights=Capability.ON) if mapped else IoConfig()
            config = StoreConfig(
                host_budget=room * PAGE,
                lookahead=lookahead * PAGE,
                io=io,
                group_order=order,
                cache=CacheConfig(device_policy="next-use"),
            )
            with ParameterStore.create(tmp_path / "s", [schema], config) as store:
                store.register_many(
                    NewRecord(f"{layer}.{expert}", "expert", layer, initial(layer, expert))
                    for layer in LAYERS
                    for expert in range(EXPERTS)
                )
                store.commit()
            opened = ParameterStore.open(tmp_path / "s", config, trace=trace)
            stack.callback(opened.close)
            core = opened.core
            held = DeviceSlots(NUMEL, torch.bfloat16, weights=slots, gradients=0)
            tier = open_device_tier(core.engine, held, torch.device("cpu"), HugePages.OFF, loads)
            stack.callback(tier.close)
            experts = FrozenExperts(
                core,
                tier,
                {layer: {e: core.record(f"{layer}.{e}") for e in range(EXPERTS)} for layer in LAYERS},
                predictor=make_predictor(predictor, range(EXPERTS)),
                schedule=Schedule.of_layers(LAYERS, depth=depth),
                ledger=StallLedger(),
            )
            return Frozen(core, experts)

        yield made


def test_many_steps_in_memory_for_three(make: Callable[..., Frozen]) -> None:
    """Bits are those of the rounding in every pass, whatever came and went; nothing is ever written."""
    frozen = make(room=3, depth=2, predictor=PredictorName.ALL, lookahead=1)
    for _ in range(5):
        with frozen.store.optimizer_step(0.1):
            frozen.experts.begin_micro(index=0, count=1)
            for layer in LAYERS:
                seen = frozen.read(Phase.FORWARD, layer, *range(EXPERTS))
                assert all(torch.equal(seen[e], rounded(layer, e)) for e in range(EXPERTS))
            for layer in reversed(LAYERS):
                seen = frozen.read(Phase.BACKWARD, layer, 0, 1, 3)
                assert all(torch.equal(seen[e], rounded(layer, e)) for e in (0, 1, 3))
            assert frozen.experts.gradients.sum_of_squares() == 0.0
            frozen.experts.gradients.apply(1.0)
    frozen.experts.gradients.step_pending()
    stats = frozen.store.cache.residency.stats()
    assert stats.evictions > 40
    assert (stats.write_backs, stats.written_bytes, frozen.store.engine.stats()["written_bytes"]) == (0, 0, 0)


def test_reads_ahead_in_both_directions(make: Callable[..., Frozen]) -> None:
    loads = WeightLoads.IN_PLACE
    frozen = make(room=16, depth=1, predictor=PredictorName.ALL, lookahead=8, loads=loads)
    frozen.experts.begin_micro(index=0, count=1)
    frozen.read(Phase.FORWARD, 0, 0)
    assert frozen.counts == (0, 1, 4 * PAGE), "all of the next layer"
    frozen.read(Phase.FORWARD, 2, 1, 3)
    assert frozen.counts == (2, 1, 4 * PAGE), "its own backward pass comes next, and needs what is there"
    frozen.read(Phase.BACKWARD, 2, 1, 3)
    assert frozen.counts == (4, 1, 4 * PAGE), "and then the experts that layer 0 used, not all"
    frozen.read(Phase.BACKWARD, 0, 0)
    assert frozen.counts == (5, 1, 7 * PAGE), "then the next step's forward pass"


@pytest.mark.parametrize("order", [GroupOrder.RESIDENT_FIRST, GroupOrder.KEY])
def test_mapped_experts_pass_the_host_cache_by(
    make: Callable[..., Frozen], tmp_path: Path, order: GroupOrder
) -> None:
    """Three passes that lease 4 + 2 + 3 experts where their file has them, in memory for one: no frame is taken, nothing is
    requested of the cache, read or prefetched, and the trace is exact.
    """
    frozen = make(
        room=1,
        depth=2,
        predictor=PredictorName.ALL,
        lookahead=1,
        loads=WeightLoads.IN_PLACE,
        mapped=True,
        order=order,
        trace=tmp_path / "trace",
    )
    before = frozen.store.engine.stats()["reads"]
    frozen.experts.begin_micro(index=0, count=1)
    for phase, layer, experts in (
        (Phase.FORWARD, 0, (0, 1, 2, 3)),
        (Phase.FORWARD, 2, (1, 3)),
        (Phase.BACKWARD, 2, (0, 1, 3)),
    ):
        seen = frozen.read(phase, layer, *experts)
        assert list(seen) == list(experts)
        assert all(torch.equal(seen[e], rounded(layer, e)) for e in experts)
    mapped = frozen.store.mapped
    assert (mapped.leases, mapped.leased_bytes) == (9, 9 * 2 * NUMEL)
    assert frozen.counts == (0, 0, 0)
    assert frozen.store.engine.stats()["reads"] == before
    assert frozen.store.cache.residency.used_frames == 0
    live = frozen.store.cache.residency.stats()
    frozen.store.end_trace()
    assert replay(tmp_path / "trace") == live


def test_a_device_with_slots_copies_what_could_be_mapped(make: Callable[..., Frozen]) -> None:
    frozen = make(room=4, mapped=True)
    assert torch.equal(frozen.read(Phase.FORWARD, 0, 1)[1], rounded(0, 1))
    assert (frozen.store.mapped.leases, frozen.counts) == (0, (0, 1, 0))


def test_a_closed_store_leases_nothing(make: Callable[..., Frozen]) -> None:
    frozen = make(room=1, mapped=True, loads=WeightLoads.IN_PLACE)
    frozen.read(Phase.FORWARD, 0, 1)
    frozen.store.close()
    with refuses(StoreError, "the store is closed"):
        frozen.read(Phase.FORWARD, 0, 1)


def test_the_program_by_hand() -> None:
    program = FrozenProgram(
        Schedule.of_layers(LAYERS, depth=2), make_predictor(PredictorName.NONE, range(EXPERTS))
    )
    told: list[tuple[Phase, int, list[int], list[int]]] = []

    def carried_out(phase: Phase, *experts: int) -> list[tuple[Phase, int, list[int], list[int]]]:
        (access,) = (program.forward if phase is Phase.FORWARD else program.backward)(2, experts)
        assert (access.flags.tolist(), access.actions.tolist()) == ([W] * len(experts), [0] * len(experts))
        told.clear()

        def prefetch(ahead: object) -> int:
            told.append((ahead.phase, ahead.layer, ahead.experts.tolist(), ahead.flags.tolist()))  # type: ignore[attr-defined]
            return len(told[-1][2])

        program.speculate(access, prefetch, lambda: None)
        program.done(access, range(len(experts)))
        return list(told)

    program.begin_micro(index=0, count=2)
    list(program.forward(0, [1]))
    backward = [(Phase.BACKWARD, 2, [0, 3], [W, W]), (Phase.BACKWARD, 0, [1], [W])]
    assert carried_out(Phase.FORWARD, 0, 3) == backward
    assert carried_out(Phase.FORWARD, 0, 3) == backward, (
        "recomputed: the layer's own backward pass comes next"
    )
    assert carried_out(Phase.BACKWARD, 0, 3) == backward[1:]


@pytest.mark.parametrize("slots", [3, 5, 6, 7, 8])
def test_copies_of_both_directions(make: Callable[..., Frozen], slots: int) -> None:
    """Two micro-batches: four passes over E = 8 experts that nothing changes. Each finds at most S, and at least those that
    are not of the layer that computes; with a slot for each, nothing is copied.
    """
    frozen, every = make(room=8, slots=slots), range(EXPERTS)

    def step() -> None:
        with frozen.store.optimizer_step(0.1):
            for micro in range(2):
                frozen.experts.begin_micro(index=micro, count=2)
                for layer in LAYERS:
                    frozen.read(Phase.FORWARD, layer, *every)
                for layer in reversed(LAYERS):
                    frozen.read(Phase.BACKWARD, layer, *every)

    for _ in range(3):
        step()
    before = frozen.experts.walk.slots.copies
    step()
    copied = frozen.experts.walk.slots.copies - before
    kept = slots if slots == 8 else max(slots - EXPERTS, 0)
    assert 4 * (8 - slots) <= copied <= 4 * (8 - kept)
