"""One rank of ``bench overlap``, in its own process: a stack of synthetic layers, or the trainer, and its measurement.

It is separate from the benchmark, whose options are listed without torch. ``experiments/`` use the emulated device.

The data path is the real one (collectives, store, host cache, device tier, engine, schedule and its two queues);
only the layers are synthetic: all they do is take time. Each is one MoE layer that uses all of its experts.

The emulated device only takes time. As with a GPU's stream, it executes in order what is launched, while the program that
launches it continues. Weights and gradients in its slots stay unchanged until it has finished, and collectives start on
their link when the device has reached the point where they were issued, like those of NCCL. (Each rank has its own device;
ranks do not wait for one another's devices, which compute the same and keep in step.)
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import InitVar, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierstore._native import Activity, Engine, HugePages, Link
from tierstore.bench.overlap import CAUGHT_UP, Computation, RankRequest, RankSteps, Stack, StackShape
from tierstore.bench.processes import serve
from tierstore.cache.access import Phase
from tierstore.config import from_dict
from tierstore.links import CollectiveLink, LinkConfig, open_link, wait_until
from tierstore.parallel import Mesh
from tierstore.parallel.collectives import RankGroup, Work
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import LimitedGroup
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
from tierstore.prefetch.experts import ExpertTiers
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import RecordSchema
from tierstore.store.parameter_store import ParameterStore
from tierstore.tiers import DeviceSlots, HostDeviceTier, LimitedTier, limited_tier
from tierstore.timeline import OperationSpans, TimelineSink, Track, open_timeline
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.setup import stall_spans


class Computer(ABC):
    """Computes for given times, one after another; by default on the calling thread, with nothing left pending."""

    @abstractmethod
    def launch(self, seconds: float) -> None: ...

    def finished(self) -> list[int]:
        """Tickets after which everything launched is done."""
        return []

    def synchronize(self) -> None:  # noqa: B027
        """Return when everything launched is done."""

    def clock_ns(self) -> int:
        """Now, or the time when everything launched will be done: while it computes, time does not pass."""
        return time.monotonic_ns()


class Processor(Computer):
    """Computes products on the calling thread."""

    def __init__(self) -> None:
        self._x = torch.ones(64, 512)
        self._w = torch.eye(512)
        self._out = torch.empty(64, 512)
        self._s = self._measure()

    def _measure(self) -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(10):
                torch.mm(self._x, self._w, out=self._out)
            times.append(time.perf_counter() - started)
        return min(times) / 10

    def launch(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / self._s))):
            torch.mm(self._x, self._w, out=self._out)


class EmulatedDevice(Computer):
    """A device that is busy for given times."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free_at_ns = 0
        self._last: list[int] = []

    def launch(self, seconds: float) -> None:
        now = time.monotonic_ns()
        self._free_at_ns = max(now, self._free_at_ns) + round(seconds * 1e9)
        # A separate link, used only to wait for one point in time.
        left = Link(math.inf, (self._free_at_ns - now) / 1e9)
        self._last = [self._engine.hold(left, 0, Activity.OTHER)]

    def finished(self) -> list[int]:
        return self._last

    def synchronize(self) -> None:
        wait_until(self._free_at_ns)

    def clock_ns(self) -> int:
        return max(time.monotonic_ns(), self._free_at_ns)


def schedule_of(shape: StackShape) -> Schedule:
    """One unit per layer, each stepped as soon as its gradients exist."""
    units = tuple(Unit(f"layer {i}", 4 * shape.dense_numel, i) for i in range(shape.layers))
    return Schedule(
        units=units,
        horizontal=QueueLimits(shape.horizontal_depth),
        vertical=QueueLimits(shape.vertical_depth),
        timing=StepTiming.IMMEDIATE,
    )


@dataclass(eq=False)
class SlicedUnits:
    """Flat fp32 units of ``numel`` in equal slices, gathered into buffers that are reused."""

    group: RankGroup
    link: CollectiveLink
    units: InitVar[int]
    numel: int
    ledger: StallLedger
    timeline: TimelineSink

    def __post_init__(self, units: int) -> None:
        self._slices = [torch.full((self.numel // self.group.size,), float(unit)) for unit in range(units)]
        self._spare: deque[torch.Tensor] = deque()
        self._gathered: dict[int, tuple[torch.Tensor, Work]] = {}
        self._reducing: dict[int, tuple[torch.Tensor, torch.Tensor, Work]] = {}

    def _buffer(self) -> torch.Tensor:
        return self._spare.popleft() if self._spare else torch.empty(self.numel)

    def gather(self, unit: int) -> None:
        buffer = self._buffer()
        self._gathered[unit] = (buffer, self.group.all_gather(buffer, self._slices[unit]))
        self.timeline.add(Track.GATHERS, f"gather {unit}", *self.link.last_turn)

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
        """Reduce-scatter a gradient (the parameters themselves) without waiting for it."""
        buffer = self._buffer()
        buffer.copy_(self._gathered[unit][0])
        piece = torch.empty_like(self._slices[unit])
        self._reducing[unit] = (buffer, piece, self.group.reduce_scatter(buffer, piece))
        self.timeline.add(Track.REDUCTIONS, f"scatter {unit}", *self.link.last_turn)

    def step(self, unit: int) -> None:
        buffer, piece, work = self._reducing.pop(unit)
        with self.ledger.stall(layer=unit, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        self._slices[unit].add_(piece, alpha=1e-6)
        self._spare.append(buffer)


@dataclass(eq=False, kw_only=True)
class SyntheticStack:
    """One rank's layers, ready to step."""

    shape: StackShape
    schedule: Schedule
    store: StoreCore
    dense: SlicedUnits
    experts: TieredExperts
    ledger: StallLedger
    computer: Computer
    timeline: TimelineSink

    def __post_init__(self) -> None:
        self._queue = HorizontalQueue(self.schedule, self.dense, self.ledger)
        self._operations = OperationSpans(self.store.engine, self.timeline)

    def compute_only(self) -> float:
        """Seconds that the computations of a step take when nothing is moved."""
        started = self.computer.clock_ns()
        for item in self.schedule.passes:
            if item.phase is not Phase.OPTIMIZER:
                for _ in range(self.shape.experts):
                    self.computer.launch(self._expert_s(item.phase))
                self.computer.launch(self._dense_s(item.phase))
        self.computer.synchronize()
        return (self.computer.clock_ns() - started) / 1e9

    def step(self) -> float:
        """Run one training step; returns its seconds."""
        clock_ns = self.computer.clock_ns
        started = clock_ns()
        with self.store.optimizer_step(1e-3):
            self.experts.begin_micro(index=0, count=1)
            self._queue.begin(training=True)
            for item in self.schedule.passes:
                begun = clock_ns()
                with self._queue.during(item.unit, item.phase):
                    if item.phase is Phase.FORWARD:
                        self._forward(item.unit)
                    elif item.phase is Phase.BACKWARD:
                        self._backward(item.unit)
                    else:
                        self.dense.step(item.unit)
                name = f"{item.phase.name.lower()} {item.unit}"
                self.timeline.add(Track.COMPUTE, name, begun, clock_ns())
        seconds = (clock_ns() - started) / 1e9
        self._operations.drain()
        return seconds

    def _forward(self, unit: int) -> None:
        self.computer.launch(self._dense_s(Phase.FORWARD))
        self.computer.synchronize()  # as a program does to request the experts that a router chose
        for _ in self.experts.forward(unit, range(self.shape.experts)):
            self.computer.launch(self._expert_s(Phase.FORWARD))

    def _backward(self, unit: int) -> None:
        for lease in self.experts.backward(unit, range(self.shape.experts)):
            self.computer.launch(self._expert_s(Phase.BACKWARD))
            assert lease.gradients is not None
            torch.mul(lease.flat, 1e-3, out=lease.gradients)
        self.computer.launch(self._dense_s(Phase.BACKWARD))
        self.dense.reduce(unit)

    def _dense_s(self, phase: Phase) -> float:
        return self.shape.forward_s * (0.5 if phase is Phase.FORWARD else 1.0)

    def _expert_s(self, phase: Phase) -> float:
        return self._dense_s(phase) / self.shape.experts

    def drain(self) -> None:
        """Release what was gathered ahead."""
        self.dense.wait_all()
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
    """A stack over a new store in ``directory``. ``link``: that of ``group``, whose messages follow the computation."""
    schedule = schedule_of(shape)
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
        emulated = HostDeviceTier(store.engine, slots, HugePages.OFF, computed=computer.finished)
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
                timing=StepTiming.IMMEDIATE,
                predictor=make_predictor(PredictorName.ALL, range(shape.experts)),
                schedule=schedule,
                ledger=ledger,
            )
            dense = SlicedUnits(group, link, shape.layers, shape.dense_numel, ledger, timeline)
            yield SyntheticStack(
                shape=shape,
                schedule=schedule,
                store=store,
                dense=dense,
                experts=experts,
                ledger=ledger,
                computer=computer,
                timeline=timeline,
            )
        finally:
            link.clock_ns = clock_ns
            tier.close()


# Measuring ----------------------------------------------------------------------------------------------------


def _measure(asked: RankRequest, world: RankGroup, link: CollectiveLink) -> RankSteps:
    link.link = open_link(asked.links.gather)
    directory = asked.directory / str(world.rank)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_stack(
                asked.shape,
                directory,
                world,
                link,
                disk=asked.links.disk,
                copy=asked.links.copy,
                timeline=timeline,
            ) as stack,
        ):
            world.barrier()
            for _ in range(asked.warmup):
                stack.step()
            computing = [stack.compute_only()]
            for _ in range(CAUGHT_UP):
                stack.step()
            found = _steps(stack.step, asked.steps, stack.store, stack.experts, stack.ledger, link)
            world.barrier()
            computing += [stack.compute_only() for _ in range(2)]
            stack.drain()
        return replace(found, computing_s=statistics.median(computing))
    finally:
        link.link = None
        shutil.rmtree(directory, ignore_errors=True)


def _steps(
    step: Callable[[], float],
    count: int,
    store: StoreCore,
    experts: ExpertTiers,
    ledger: StallLedger,
    link: CollectiveLink,
) -> RankSteps:
    """Measure ``count`` calls of ``step``, which returns its seconds. The whole step counts as computation."""
    before, stalls = _counts(store, experts, link), _stalls(ledger)
    seconds = [step() for _ in range(count)]
    after, stalled = _counts(store, experts, link), _stalls(ledger)
    return RankSteps(
        step_samples_s=seconds,
        computing_s=statistics.median(seconds),
        stalls={name: (spent - stalls.get(name, 0.0)) / count for name, spent in stalled.items()},
        **{name: (after[name] - before[name]) / count for name in after},
    )


def _counts(store: StoreCore, experts: ExpertTiers, link: CollectiveLink) -> dict[str, float]:
    """Counters of bytes moved; those from disk count at the request, since some are always in flight when a step ends."""
    engine, residency = store.engine.stats(), store.cache.residency.stats()
    device = experts.walk.slots.device
    return {
        "disk_bytes": float(residency.read_bytes + residency.written_bytes),
        "disk_transfers": engine["reads"] + engine["writes"],
        "sent_bytes": link.sent_bytes,
        "collectives": link.messages,
        "copied_bytes": float(device.link.stats()["nbytes"]) if isinstance(device, LimitedTier) else 0.0,
    }


def _stalls(ledger: StallLedger) -> dict[str, float]:
    """Seconds by dimension and cause."""
    totals = ledger.totals(lambda key: f"{key.tier.dimension.value}: {key.cause.value}")
    return {str(name): spent / 1e9 for name, spent in totals.items()}


def _measure_training(asked: RankRequest, mesh: Mesh, link: CollectiveLink) -> RankSteps:
    """Measure the trainer as ``_measure`` does the synthetic stack. Its computation cannot run alone: the step over
    unlimited links is used instead.
    """
    link.link = open_link(asked.links.gather)
    config = replace(asked.train, store=asked.directory, links=asked.links)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_session(config, Opening.CREATE, mesh=mesh, timeline=timeline) as trainer,
        ):
            for _ in range(asked.warmup):
                trainer.step()
            found = _steps(
                lambda: trainer.step().seconds,
                asked.steps,
                trainer.store,
                trainer.experts,
                trainer.ledger,
                link,
            )
        # No rank begins the next measurement, in the same directory, before all have finished this one.
        mesh.world.barrier()
        if mesh.world.rank == 0:
            shutil.rmtree(asked.directory)
        mesh.world.barrier()
        return found
    finally:
        link.link = None


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    import torch

    torch.set_num_threads(1)
    # Exchanges never use the gathers' link: the overlap of the queues is measured.
    link, exchange = CollectiveLink(None), CollectiveLink(None)
    groups = partial(LimitedGroup, link=link, exchange=exchange)
    with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
        for request in requests:
            asked = from_dict(RankRequest, request)
            if asked.stack is Stack.TRAINER:
                yield asdict(_measure_training(asked, mesh, link))
            else:
                yield asdict(_measure(asked, mesh.world, link))


if __name__ == "__main__":
    serve(_answers)
