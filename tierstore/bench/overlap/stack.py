"""One rank's stack of synthetic layers: dense parameters gathered from all ranks, experts fetched from its own store.

The data path is the real one (collectives, store, host cache, device tier, engine, schedule and its two queues);
only the layers are made up: all they do is to take time. Each unit is one layer with an MoE layer in it that uses all of
its experts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.bench.checks import at_least, more_than_0
from tierstore.bench.overlap.device import Computation, Computer, EmulatedDevice, EmulatedTier, Processor
from tierstore.cache.access import Phase
from tierstore.links import CollectiveLink, LinkConfig
from tierstore.parallel.collectives import RankGroup, Work
from tierstore.prefetch import (
    HorizontalQueue,
    PredictorName,
    QueueLimits,
    Schedule,
    StepTiming,
    TieredExperts,
    Unit,
    make_predictor,
)
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import RecordSchema
from tierstore.store.parameter_store import ParameterStore
from tierstore.tiers import DeviceSlots, limited_tier
from tierstore.timeline import OperationSpans, TimelineSink, Track
from tierstore.train.config import TrainConfig
from tierstore.train.session import stall_spans


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """The size of a stack of layers, and how far ahead its queues look.

    ``forward_s``: computation of one forward pass; a backward pass takes twice that. Half of it is the experts'.
    ``cached_layers``: how many layers' experts, whole, the host cache holds. ``experts``: of each layer, on each rank.
    """

    layers: int = 16
    experts: int = 4
    dense_side: int = 512
    expert_side: int = 256
    cached_layers: float = 8.0
    forward_s: float = 0.02
    computation: Computation = Computation.MATMUL
    horizontal_depth: int = 2
    vertical_depth: int = 12

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers)
        more_than_0(forward_s=self.forward_s)

    @property
    def dense_numel(self) -> int:
        return self.dense_side**2

    @property
    def expert_numel(self) -> int:
        return self.expert_side**2

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of the host cache, and how many of them speculation may hold."""
        layer = self.experts * 16 * self.expert_numel
        lookahead = int(max(self.cached_layers - 1.0, 0.0) * layer) if self.vertical_depth else 0
        return int(self.cached_layers * layer), lookahead

    def schedule(self) -> Schedule:
        units = tuple(Unit(f"layer {i}", 4 * self.dense_numel, i) for i in range(self.layers))
        return Schedule(
            units=units,
            horizontal=QueueLimits(self.horizontal_depth),
            vertical=QueueLimits(self.vertical_depth),
            timing=StepTiming.IMMEDIATE,
        )


class SlicedUnits:
    """Flat fp32 units in equal slices; what is gathered lies in buffers that are reused."""

    def __init__(
        self,
        group: RankGroup,
        link: CollectiveLink,
        units: int,
        numel: int,
        ledger: StallLedger,
        timeline: TimelineSink,
    ) -> None:
        self._group = group
        self._link = link
        self._ledger = ledger
        self._timeline = timeline
        self._slices = [torch.full((numel // group.size,), float(unit)) for unit in range(units)]
        self._numel = numel
        self._spare: deque[torch.Tensor] = deque()
        self._gathered: dict[int, tuple[torch.Tensor, Work]] = {}
        self._reducing: dict[int, tuple[torch.Tensor, torch.Tensor, Work]] = {}

    def gather(self, unit: int) -> None:
        buffer = self._spare.popleft() if self._spare else torch.empty(self._numel)
        self._gathered[unit] = (buffer, self._group.all_gather(buffer, self._slices[unit]))
        self._timeline.add(Track.GATHERS, f"gather {unit}", *self._link.last_turn)

    def use(self, unit: int) -> None:
        self._gathered[unit][1].wait()

    def wait_all(self) -> None:
        for _, work in self._gathered.values():
            work.wait()

    def release(self, unit: int) -> None:
        self._spare.append(self._gathered.pop(unit)[0])

    def parameters(self, unit: int) -> torch.Tensor:
        return self._gathered[unit][0]

    def reduce(self, unit: int) -> None:
        """Scatters a gradient (the parameters themselves) without waiting for it."""
        buffer = self._spare.popleft() if self._spare else torch.empty(self._numel)
        buffer.copy_(self._gathered[unit][0])
        piece = torch.empty_like(self._slices[unit])
        self._reducing[unit] = (buffer, piece, self._group.reduce_scatter(buffer, piece))
        self._timeline.add(Track.REDUCTIONS, f"scatter {unit}", *self._link.last_turn)

    def step(self, unit: int) -> None:
        buffer, piece, work = self._reducing.pop(unit)
        with self._ledger.stall(layer=unit, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        self._slices[unit].add_(piece, alpha=1e-6)
        self._spare.append(buffer)


class SyntheticStack:
    """One rank's layers, ready to step."""

    def __init__(
        self,
        shape: StackShape,
        schedule: Schedule,
        store: StoreCore,
        dense: SlicedUnits,
        experts: TieredExperts,
        ledger: StallLedger,
        *,
        computer: Computer,
        timeline: TimelineSink,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self._computer = computer
        self._shape = shape
        self._schedule = schedule
        self._dense = dense
        self._experts = experts
        self._timeline = timeline
        self._queue = HorizontalQueue(schedule, dense, ledger)
        self._operations = OperationSpans(store.engine, timeline)

    def compute_only(self) -> float:
        """Seconds that the computations of a step take when nothing is moved."""
        started = self._computer.clock_ns()
        for item in self._schedule.passes:
            if item.phase is not Phase.OPTIMIZER:
                for _ in range(self._shape.experts):
                    self._computer.launch(self._expert_s(item.phase))
                self._computer.launch(self._dense_s(item.phase))
        self._computer.synchronize()
        return (self._computer.clock_ns() - started) / 1e9

    def step(self) -> float:
        """One training step; returns its seconds."""
        clock_ns = self._computer.clock_ns
        started = clock_ns()
        with self.store.optimizer_step(1e-3):
            self._experts.begin_micro(index=0, count=1)
            self._queue.begin(training=True)
            for item in self._schedule.passes:
                begun = clock_ns()
                with self._queue.during(item.unit, item.phase):
                    if item.phase is Phase.FORWARD:
                        self._forward(item.unit)
                    elif item.phase is Phase.BACKWARD:
                        self._backward(item.unit)
                    else:
                        self._dense.step(item.unit)
                name = f"{item.phase.name.lower()} {item.unit}"
                self._timeline.add(Track.COMPUTE, name, begun, clock_ns())
        seconds = (clock_ns() - started) / 1e9
        self._operations.drain()
        return seconds

    def _forward(self, unit: int) -> None:
        self._computer.launch(self._dense_s(Phase.FORWARD))
        self._computer.synchronize()  # the program asks for the experts that a router has chosen
        for _ in self._experts.forward(unit, range(self._shape.experts)):
            self._computer.launch(self._expert_s(Phase.FORWARD))

    def _backward(self, unit: int) -> None:
        for lease in self._experts.backward(unit, range(self._shape.experts)):
            self._computer.launch(self._expert_s(Phase.BACKWARD))
            assert lease.gradients is not None
            torch.mul(lease.flat, 1e-3, out=lease.gradients)
        self._computer.launch(self._dense_s(Phase.BACKWARD))
        self._dense.reduce(unit)

    def _dense_s(self, phase: Phase) -> float:
        return self._shape.forward_s * (0.5 if phase is Phase.FORWARD else 1.0)

    def _expert_s(self, phase: Phase) -> float:
        return self._dense_s(phase) / self._shape.experts

    def drain(self) -> None:
        """Releases what was gathered ahead."""
        self._dense.wait_all()
        self._queue.reset()


@contextlib.contextmanager
def open_stack(
    shape: StackShape,
    directory: Path,
    group: RankGroup,
    link: CollectiveLink,
    *,
    disk: LinkConfig,
    copy: LinkConfig,
    timeline: TimelineSink,
) -> Iterator[SyntheticStack]:
    """A stack over a new store in ``directory``. ``link`` is that of ``group``, whose messages follow what was computed."""
    schedule = shape.schedule()
    schema = RecordSchema("expert", shape.expert_numel)
    host_budget, lookahead = shape.budgets
    config = StoreConfig(
        host_budget=host_budget,
        lookahead=lookahead,
        layers=tuple(range(shape.layers)),
        disk=disk,
        cache=TrainConfig().cache,
    )
    with ParameterStore.create(directory, [schema], config, adamw=AdamWConfig()) as opened:
        for layer in range(shape.layers):
            for expert in range(shape.experts):
                opened.register(f"{layer}.{expert}", "expert", layer=layer)
        opened.commit()
        store = opened.core
        slots = DeviceSlots(shape.expert_numel, torch.float32, weights=8, gradients=8)
        device = shape.computation is Computation.DEVICE
        computer: Computer = EmulatedDevice(store.engine) if device else Processor()
        # While the device computes, nothing stalls.
        ledger = StallLedger(
            clock=computer.clock_ns, listener=stall_spans(timeline) if timeline.enabled else None
        )
        emulated = EmulatedTier(store.engine, slots, computer)
        tier = limited_tier(emulated, store.engine, copy, computer.finished)
        clock_ns, link.clock_ns = link.clock_ns, computer.clock_ns
        try:
            experts = TieredExperts(
                store,
                tier,
                {
                    layer: {expert: store.record(f"{layer}.{expert}") for expert in range(shape.experts)}
                    for layer in range(shape.layers)
                },
                weight_slots=slots.weights,
                timing=StepTiming.IMMEDIATE,
                predictor=make_predictor(PredictorName.ALL, range(shape.experts)),
                schedule=schedule,
                ledger=ledger,
            )
            dense = SlicedUnits(group, link, shape.layers, shape.dense_numel, ledger, timeline)
            yield SyntheticStack(
                shape, schedule, store, dense, experts, ledger, computer=computer, timeline=timeline
            )
        finally:
            link.clock_ns = clock_ns
            tier.close()
