"""A ring of K of N layers' experts against all of them resident, on an emulated device (SE-MoE section 3.2).

The experts, their store, the host cache, the device slots and the ring are real; what computes a layer only takes time, as a
GPU's stream does: the program that launches it goes on meanwhile. Each pass asks for all experts of each layer. The time of
a layer is measured with everything resident, and the copy link is then limited such that loading a layer's experts takes
0.9 and 1.0 of it. Copies over an unlimited link stand beside. All of them take turns in one process.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tierstore.bench.checks import at_least, more_than_0, work_directory
from tierstore.bench.overlap.device import EmulatedDevice, EmulatedTier
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import Figures
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig
from tierstore.serve.experts.ring import Ring
from tierstore.serve.experts.slots import Asked, ExpertSlots
from tierstore.stats import StallLedger
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.format import RecordSchema, Training, WeightFormat
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord
from tierstore.tiers import DeviceSlots, limited_tier
from tierstore.timeline import NullTimeline, Timeline, TimelineSink, Track
from tierstore.units import format_bytes

#: Of the speed with everything resident, with a ring of this part of the layers.
_TARGET, _TARGET_SHARE = 0.95, 0.4


@dataclass(frozen=True, kw_only=True)
class RingBench:
    """What to measure. ``shares``: K as parts of the layers. ``loads``: times of loading a layer's experts, in times of
    computing the layer. ``forward_s``: computation of a layer, half of it the experts'. ``timeline``: a file for that of the
    ring that the target is for.
    """

    directory: Path = Path("tierstore-bench")
    layers: int = 20
    experts: int = 8
    expert_bytes: int = 1 << 20
    forward_s: float = 0.01
    shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    loads: tuple[float, ...] = (0.9, 1.0)
    passes: int = 3
    rounds: int = 7
    timeline: Path | None = None

    def __post_init__(self) -> None:
        at_least(1, experts=self.experts, passes=self.passes, rounds=self.rounds)
        at_least(2, layers=self.layers, expert_bytes=self.expert_bytes)
        more_than_0(forward_s=self.forward_s)
        for share in self.shares:
            if not 0 < share < 1:
                raise ConfigError(f"shares: expected parts between 0 and 1, got {share}")
        for load in self.loads:
            more_than_0(loads=load)

    @property
    def counts(self) -> list[int]:
        """K of each ring, ascending."""
        return sorted({max(1, round(share * self.layers)) for share in self.shares})

    @property
    def numel(self) -> int:
        return self.expert_bytes // 2


@dataclass(frozen=True, kw_only=True)
class RingPasses(Figures):
    """Passes with a ring. ``load_ratio``: of loading a layer to computing it; None: copies as fast as they are.

    ``speed_ratio``: the median of rounds, to everything resident.
    """

    layers_count: int
    load_ratio: float | None
    device_bytes: int
    saved_ratio: float
    pass_s: Sequence[float]
    pass_median_s: float
    round_speed_ratio: Sequence[float]
    speed_ratio: float
    pass_stall_s: float


@dataclass(frozen=True, kw_only=True)
class RingResult(Figures):
    """What ``run`` found. ``copy_layer_s``: copying a layer's experts over the unlimited link, with nothing else to do."""

    bench: str = "ring"
    layers_count: int
    experts_count: int
    expert_bytes: int
    rounds_count: int
    layer_s: float
    copy_layer_s: float
    resident_device_bytes: int
    resident_pass_s: Sequence[float]
    resident_pass_median_s: float
    rings: Sequence[RingPasses] = field(default=())


def run(bench: RingBench, say: Callable[[str], None] = lambda _: None) -> RingResult:
    """Measures. Raises ConfigError (``directory`` exists), BudgetError, OSError."""
    with work_directory(bench.directory), contextlib.ExitStack() as stack:
        store = stack.enter_context(_open_store(bench))
        rack = _Rack(bench, store, stack)
        resident = rack.contestant(bench.layers, None)
        for _ in range(2):  # the first reads all experts from disk
            resident.passes(bench.passes)
        layer_s = statistics.median(resident.passes(1) for _ in range(5)) / bench.layers
        copy_s = rack.copy_layer()
        say(f"a layer computes in {layer_s * 1e3:.2f} ms; its copy takes {copy_s * 1e3:.2f} ms")
        layer_bytes = bench.experts * bench.expert_bytes
        rings = []
        for load in (*bench.loads, None):
            link = (
                LinkConfig() if load is None else LinkConfig(bandwidth=round(layer_bytes / (load * layer_s)))
            )
            rings += [rack.contestant(count, load, link) for count in bench.counts]
        for ring in rings:
            ring.passes(1)
        _take_turns(resident, rings, bench, say)
        if bench.timeline is not None:
            _draw(bench, rings, stack)
    return _result(bench, resident, rings, layer_s, copy_s)


def _take_turns(
    resident: _Contestant, rings: Sequence[_Contestant], bench: RingBench, say: Callable[[str], None]
) -> None:
    """Each ring has a neighbour of its own with everything resident, in each round: other work treats the two alike."""
    for number in range(bench.rounds):
        say(f"round {number + 1} of {bench.rounds}")
        for ring in rings:
            pair = (resident, ring) if number % 2 == 0 else (ring, resident)
            for contestant in pair:
                contestant.measure(bench.passes)
            ring.speeds.append(resident.pass_s[-1] / ring.pass_s[-1])


def _draw(bench: RingBench, rings: Sequence[_Contestant], stack: contextlib.ExitStack) -> None:
    wanted = max(1, round(_TARGET_SHARE * bench.layers))
    drawn = min(rings, key=lambda ring: (abs(ring.count - wanted), -(ring.load or 0.0)))
    drawn.draw(stack.enter_context(Timeline(bench.timeline)) if bench.timeline else NullTimeline())


@contextlib.contextmanager
def _open_store(bench: RingBench) -> Iterator[StoreCore]:
    schema = RecordSchema("expert", bench.numel, WeightFormat.BF16, training=Training.FROZEN)
    # Records are padded to pages, and everything is to stay in memory.
    budget = bench.layers * bench.experts * (bench.expert_bytes + (1 << 16)) + (8 << 20)
    config = StoreConfig(host_budget=budget, layers=tuple(range(bench.layers)))
    weights = np.linspace(-1.0, 1.0, bench.numel, dtype=np.float32)
    with ParameterStore.create(bench.directory / "store", [schema], config) as opened:
        opened.register_many(
            NewRecord(f"{layer}.{expert}", "expert", layer, weights)
            for layer in range(bench.layers)
            for expert in range(bench.experts)
        )
        opened.commit()
        yield opened.core


class _Rack:
    """Rings over one store, each with slots of its own."""

    def __init__(self, bench: RingBench, store: StoreCore, stack: contextlib.ExitStack) -> None:
        self._bench = bench
        self._store = store
        self._stack = stack
        self._records = {
            layer: {expert: store.record(f"{layer}.{expert}") for expert in range(bench.experts)}
            for layer in range(bench.layers)
        }
        self.device = EmulatedDevice(store.engine)

    def contestant(self, count: int, load: float | None, link: LinkConfig | None = None) -> _Contestant:
        ledger = StallLedger(clock=self.device.clock_ns)
        slots = self.slots(count, link or LinkConfig(), ledger)
        nbytes = count * self._bench.experts * DeviceSlots(self._bench.numel, torch.bfloat16).weight_bytes
        return _Contestant(self._bench, self.device, slots, ledger, count=count, load=load, nbytes=nbytes)

    def slots(self, count: int, link: LinkConfig, ledger: StallLedger) -> ExpertSlots:
        shape = DeviceSlots(
            self._bench.numel, torch.bfloat16, weights=count * self._bench.experts, gradients=0
        )
        tier = EmulatedTier(self._store.engine, shape, self.device)
        self._stack.callback(tier.close)
        limited = limited_tier(tier, self._store.engine, link, self.device.finished)
        return ExpertSlots(self._store, limited, self._records, ledger=ledger)

    def copy_layer(self) -> float:
        """Seconds of copying a layer's experts with nothing else to do: the median of several."""
        experts = range(self._bench.experts)
        slots = self.slots(1, LinkConfig(), StallLedger())
        spent = []
        for layer in range(self._bench.layers):
            started = time.perf_counter()
            slots.load(layer, experts, experts, Asked.NOW)
            for slot in experts:
                slots.weights(slot, layer)
                slots.release(slot)
            spent.append(time.perf_counter() - started)
        return statistics.median(spent)


class _Contestant:
    """Passes over all layers, whose experts come from a ring of ``count`` layers."""

    def __init__(
        self,
        bench: RingBench,
        device: EmulatedDevice,
        slots: ExpertSlots,
        ledger: StallLedger,
        *,
        count: int,
        load: float | None,
        nbytes: int,
    ) -> None:
        self._bench = bench
        self._device = device
        self._slots = slots
        self._ring = Ring(slots, range(bench.layers), bench.experts, count=count)
        self.ledger = ledger
        self.count, self.load, self.nbytes = count, load, nbytes
        self.pass_s: list[float] = []
        #: Of each round, to that of its neighbour.
        self.speeds: list[float] = []

    def passes(self, count: int) -> float:
        """Seconds of ``count`` passes, one after another."""
        dense_s = self._bench.forward_s / 2
        started = self._device.clock_ns()
        for _ in range(count):
            for layer in range(self._bench.layers):
                self._device.launch(dense_s)
                self._device.synchronize()  # the program asks for the experts that a router has chosen
                for _ in self._ring.forward(layer, range(self._bench.experts)):
                    self._device.launch(dense_s / self._bench.experts)
            self._device.synchronize()  # the next token depends on this one
        return (self._device.clock_ns() - started) / 1e9

    def measure(self, count: int) -> None:
        """One round: the ring is brought to where it goes on first."""
        self.passes(1)
        self.pass_s.append(self.passes(count) / count)

    def draw(self, timeline: TimelineSink) -> None:
        """Two passes on ``timeline``."""
        ring, self._ring = (
            self._ring,
            Ring(
                self._slots,
                range(self._bench.layers),
                self._bench.experts,
                count=self.count,
                timeline=timeline,
            ),
        )
        with timeline.span(Track.COMPUTE, "two passes"):
            self.passes(2)
        self._ring = ring


def _result(
    bench: RingBench, resident: _Contestant, rings: Sequence[_Contestant], layer_s: float, copy_s: float
) -> RingResult:
    found = []
    for ring in rings:
        found.append(
            RingPasses(
                layers_count=ring.count,
                load_ratio=ring.load,
                device_bytes=ring.nbytes,
                saved_ratio=1 - ring.nbytes / resident.nbytes,
                pass_s=ring.pass_s,
                pass_median_s=statistics.median(ring.pass_s),
                round_speed_ratio=ring.speeds,
                speed_ratio=statistics.median(ring.speeds),
                pass_stall_s=ring.ledger.total_s / (1 + bench.rounds * (1 + bench.passes)),
            )
        )
    return RingResult(
        layers_count=bench.layers,
        experts_count=bench.experts,
        expert_bytes=bench.expert_bytes,
        rounds_count=bench.rounds,
        layer_s=layer_s,
        copy_layer_s=copy_s,
        resident_device_bytes=resident.nbytes,
        resident_pass_s=resident.pass_s,
        resident_pass_median_s=statistics.median(resident.pass_s),
        rings=found,
    )


def measurements(result: RingResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    yield measured("pass", result.resident_pass_s, "s", Better.LOWER, parameters={"ring": "all"})
    wanted = round(_TARGET_SHARE * result.layers_count)
    for ring in result.rings:
        load = "unlimited" if ring.load_ratio is None else f"{ring.load_ratio:g}"
        how: dict[str, float | str] = {"ring": ring.layers_count, "load": load}
        target = _TARGET if ring.layers_count == wanted and ring.load_ratio is not None else None
        yield measured("pass", ring.pass_s, "s", Better.LOWER, parameters=how)
        yield derived(
            "speed to everything resident",
            ring.round_speed_ratio,
            "ratio",
            Better.HIGHER,
            parameters=how,
            target=target,
        )
        yield counted("device memory", ring.device_bytes, "bytes", Better.LOWER, parameters=how)


def table(result: RingResult) -> list[tuple[str, ...]]:
    """A row for each ring: K, loading a layer to computing it, device memory, saved, speed, stalled in a pass."""
    rows: list[tuple[str, ...]] = [
        (
            f"{result.layers_count} of {result.layers_count}",
            "-",
            format_bytes(result.resident_device_bytes),
            "0%",
            "1.000",
            "-",
        )
    ]
    for ring in result.rings:
        real = result.copy_layer_s / result.layer_s
        rows.append(
            (
                f"{ring.layers_count} of {result.layers_count}",
                f"{ring.load_ratio:g}" if ring.load_ratio is not None else f"real copies ({real:.3f})",
                format_bytes(ring.device_bytes),
                f"{ring.saved_ratio:.0%}",
                f"{ring.speed_ratio:.3f} ({min(ring.round_speed_ratio):.3f} to {max(ring.round_speed_ratio):.3f})",
                f"{ring.pass_stall_s * 1e3:.2f} ms",
            )
        )
    return rows
