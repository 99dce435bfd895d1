"""How well the simulated schedule predicts the time of a step, and what a step moves (docs/PLAN.md).

The calibrating runs take turns with the measured ones, so that a machine whose speed drifts treats them alike; a case is
predicted with the calibrations on both sides of it. None of the cases that are judged was fitted on: the calibrating runs
are reported apart. Bytes follow from the shape (gathers) and from the residency core (``plan.traffic``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tierstore.bench.checks import at_least, more_than_0, work_directory
from tierstore.bench.overlap.device import Computation
from tierstore.bench.overlap.rank import CAUGHT_UP, RankRequest, RankSteps
from tierstore.bench.overlap.run import Balance, RankProcesses, links_for
from tierstore.bench.overlap.stack import StackShape
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named
from tierstore.cache.access import Phase
from tierstore.links import LinkConfig, LinksConfig
from tierstore.machine_profile import ASSUMED, Cost
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.simulate import SteadyState, outcome, simulate
from tierstore.plan.traffic import Moved, StepWindow, Traffic, step_traffic
from tierstore.prefetch.operations import Kind, Operation, PassSizes, operations
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule
from tierstore.store.adamw import AdamWConfig
from tierstore.tiers.slots import DeviceSlots
from tierstore.train.budgets import Budgets
from tierstore.train.config import TrainConfig

_RANKS, _SLOTS = 2, 8
_STEPS, _SETTLED = 4, 2
_STEP_BYTES = 28
#: Cases between two calibrations.
_BETWEEN = 3
#: How far a predicted step may be from the measured one at most.
_ERROR = 0.15


@dataclass(frozen=True)
class Case:
    """One configuration: the balance of its links, and its shape."""

    name: str
    balance: Balance
    shape: StackShape


@dataclass(frozen=True, kw_only=True)
class PredictionBench:
    """What to measure. ``forward_s``: computation of one layer's forward pass."""

    directory: Path = Path("tierstore-bench")
    steps: int = 4
    warmup: int = 6
    forward_s: float = 0.02
    computation: Computation = Computation.DEVICE

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, warmup=self.warmup)
        more_than_0(forward_s=self.forward_s)

    @property
    def span(self) -> StepWindow:
        """The steps that are measured, counted from the first."""
        return StepWindow(self.warmup + CAUGHT_UP, self.steps)


def cases(bench: PredictionBench) -> list[Case]:
    """The configurations that are judged."""
    base = StackShape(forward_s=bench.forward_s, computation=bench.computation)
    variants = {
        "": base,
        "no prefetch": replace(base, horizontal_depth=0, vertical_depth=0),
        "horizontal only": replace(base, vertical_depth=0),
        "vertical only": replace(base, horizontal_depth=0),
        "one pass ahead": replace(base, horizontal_depth=1, vertical_depth=1),
        "half as deep": replace(base, layers=8, cached_layers=4.0),
        "two experts a layer": replace(base, experts=2),
        "little cache": replace(base, cached_layers=3.0, vertical_depth=2),
    }
    found = [Case(f"{balance.value}", balance, base) for balance in Balance]
    for name in list(variants)[1:]:
        found.append(Case(f"{Balance.EQUAL.value}, {name}", Balance.EQUAL, variants[name]))
    for balance in (Balance.GATHERS, Balance.FETCHES):
        name = "one pass ahead"
        found.append(Case(f"{balance.value}, {name}", balance, variants[name]))
    return found


# The simulated stack ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackCalibration(Figures):
    """What this machine adds: seconds to drive one dense pass and one expert beside what they compute."""

    dense_s: float = field(metadata=named("dense_drive_s"))
    expert_s: float = field(metadata=named("expert_drive_s"))
    adamw: Cost = field(default=ASSUMED.adamw, metadata=INTERNAL)


@dataclass(frozen=True)
class StackWorkload:
    """One rank of the stack as operations: what each moves, and how long it takes over ``links``."""

    shape: StackShape
    links: LinksConfig
    calibration: StackCalibration
    #: The steps that are measured.
    span: StepWindow = field(default_factory=StepWindow)

    @cached_property
    def setting(self) -> Setting:
        """The stack's experts as a plan sees them: every one is used in every pass."""
        shape = self.shape
        layers = tuple(range(shape.layers))
        config = TrainConfig(
            model=ModelConfig(n_layers=shape.layers, experts=shape.experts, top_k=shape.experts),
            prefetch=PrefetchConfig(depth=shape.vertical_depth, predictor=PredictorName.ALL),
            adamw=AdamWConfig(),
        )
        model = Architecture(
            units=(DenseUnit(matrices=0, others=shape.dense_numel),) * shape.layers,
            moe_layers=layers,
            experts=shape.experts,
            expert_numel=shape.expert_numel,
            top_k=shape.experts,
        )
        return Setting(config=config, model=model)

    @cached_property
    def traffic(self) -> Traffic:
        cache, lookahead = self.shape.budgets
        slots = DeviceSlots(self.shape.expert_numel, ComputeDtype.FP32, _SLOTS, _SLOTS)
        divided = Budgets(cache=cache, device=slots.nbytes, lookahead=lookahead, slots=slots)
        return step_traffic(self.setting, Capacity((), divided), self.span)

    @cached_property
    def schedule(self) -> Schedule:
        """The stack's, with the lookahead that its store allows."""
        asked, (_, lookahead) = self.shape.schedule(), self.shape.budgets
        vertical = QueueLimits(asked.vertical.depth, lookahead) if lookahead else QueueLimits(0)
        return replace(asked, vertical=vertical)

    @cached_property
    def operations(self) -> list[Operation]:
        return operations(self.schedule, self.sizes, steps=_STEPS, slots=_SLOTS, gradient_slots=_SLOTS)

    def sizes(self, item: Pass) -> PassSizes:
        shape, traffic = self.shape, self.traffic
        assert item.moe_layer is not None
        backward = item.phase is Phase.BACKWARD
        sent = 4 * shape.dense_numel * (_RANKS - 1) // _RANKS
        moved = traffic.moved_for.get((item.phase, item.moe_layer), Moved())
        return PassSizes(
            gather=sent,
            reduce=sent,
            experts=shape.experts,
            fetch=round(moved.loaded / shape.experts),
            fetch_state=round(moved.state / shape.experts),
            evict=round(moved.written / shape.experts),
            load=4 * shape.expert_numel,
            to_host=4 * shape.expert_numel if backward else 0,
        )

    def seconds(self, operation: Operation) -> float:
        links, shape, machine = self.links, self.shape, self.calibration
        moved = {
            Kind.GATHER: links.gather,
            Kind.REDUCE: links.gather,
            Kind.FETCH: links.disk,
            Kind.WRITE: links.disk,
            Kind.LOAD: links.copy,
            Kind.COPY_TO_HOST: links.copy,
        }
        if operation.kind in moved:
            return _over(moved[operation.kind], operation.nbytes)
        if operation.kind is Kind.EXPERT_STEP:
            return machine.adamw.seconds(shape.expert_numel * _STEP_BYTES)
        if operation.kind is Kind.STEP:
            return 0.0  # a slice of a unit: measured with the driving of dense passes
        passes = self.schedule.passes
        forward = passes[operation.position % len(passes)].phase is Phase.FORWARD
        half = shape.forward_s * (0.5 if forward else 1.0)
        if operation.kind is Kind.DENSE:
            return half + machine.dense_s
        return half / shape.experts + machine.expert_s

    def run(self) -> SteadyState:
        """The steady state."""
        done = simulate(self.operations, self.seconds)
        return outcome(done, len(self.schedule.passes), steps=_STEPS, settled=_SETTLED)

    def moved_bytes(self) -> tuple[float, float]:
        """What one step sends to the other rank, and what it moves to and from disk."""
        per_step = len(self.schedule.passes)
        last = [o for o in self.operations if o.position // per_step == _STEPS - 1]
        sent = sum(o.nbytes for o in last if o.kind in (Kind.GATHER, Kind.REDUCE))
        return float(sent), float(self.traffic.read_bytes + self.traffic.written_bytes)


def _over(link: LinkConfig, nbytes: int) -> float:
    if not (nbytes and link.on):
        return 0.0
    return link.latency + (nbytes / link.bandwidth if link.bandwidth else 0.0)


# Measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PredictedCase(Figures):
    """One case: its step and its bytes, predicted and measured."""

    case: str
    predicted_step_s: float
    measured_step_s: float
    measured_step_samples_s: Sequence[float]
    predicted_to_measured_ratio: float
    bottleneck: str
    predicted_sent_bytes: float
    measured_sent_bytes: float
    predicted_disk_bytes: float
    measured_disk_bytes: float
    gather_link_bytes_per_s: float
    disk_link_bytes_per_s: float

    @property
    def error_ratio(self) -> float:
        return abs(self.predicted_to_measured_ratio - 1)


@dataclass(frozen=True, kw_only=True)
class PredictionResult(Figures):
    """What ``run`` found."""

    ranks_count: int = _RANKS
    computation: Computation
    cases: Sequence[PredictedCase]
    calibrations: Sequence[StackCalibration]
    largest_error_ratio: float
    median_error_ratio: float


def run(bench: PredictionBench, say: Callable[[str], None] = lambda _: None) -> PredictionResult:
    """Measures. Raises ConfigError (``directory`` exists), WorkerError, OSError."""
    with work_directory(bench.directory), RankProcesses() as ranks:
        return _run(bench, ranks, say)


def _run(bench: PredictionBench, ranks: RankProcesses, say: Callable[[str], None]) -> PredictionResult:
    asked = RankRequest(directory=bench.directory, steps=bench.steps, warmup=bench.warmup)
    every = cases(bench)
    calibrations, found = [_calibrate(bench, ranks, asked)], list[PredictedCase]()
    for begin in range(0, len(every), _BETWEEN):
        part = []
        for case in every[begin : begin + _BETWEEN]:
            say(case.name)
            free = StackWorkload(case.shape, LinksConfig(), _NOTHING, bench.span)
            sent, moved = free.moved_bytes()
            links = links_for(case.balance, _computing_s(case.shape), sent, moved)
            part.append((case, links, ranks.measure(replace(asked, shape=case.shape, links=links))))
        say("calibration")
        calibrations.append(_calibrate(bench, ranks, asked))
        between = _between(*calibrations[-2:])
        for case, links, steps in part:
            work = StackWorkload(case.shape, links, between, bench.span)
            found.append(_predicted(work, case.name, steps))
    errors = [one.error_ratio for one in found]
    return PredictionResult(
        computation=bench.computation,
        cases=found,
        calibrations=calibrations,
        largest_error_ratio=max(errors),
        median_error_ratio=statistics.median(errors),
    )


_NOTHING = StackCalibration(0.0, 0.0)


def _computing_s(shape: StackShape) -> float:
    """What a step computes, by its shape: once forward, twice backward."""
    return 3 * shape.layers * shape.forward_s


def _calibrate(bench: PredictionBench, ranks: RankProcesses, asked: RankRequest) -> StackCalibration:
    """The costs of driving passes, from two shapes over unlimited links: with many experts, and with few."""
    base = StackShape(forward_s=bench.forward_s, computation=bench.computation, cached_layers=17.0)
    few, many = replace(base, experts=1), replace(base, experts=6)
    extra = {}
    for shape in (few, many):
        found = ranks.measure(replace(asked, shape=shape, links=LinksConfig()))
        extra[shape.experts] = max(found.step_s - _computing_s(shape), 0.0) / (2 * base.layers)
    expert_s = max((extra[many.experts] - extra[few.experts]) / (many.experts - few.experts), 0.0)
    return StackCalibration(max(extra[few.experts] - few.experts * expert_s, 0.0), expert_s)


def _between(before: StackCalibration, after: StackCalibration) -> StackCalibration:
    return StackCalibration((before.dense_s + after.dense_s) / 2, (before.expert_s + after.expert_s) / 2)


def _predicted(work: StackWorkload, name: str, found: RankSteps) -> PredictedCase:
    predicted = work.run()
    sent, moved = work.moved_bytes()
    return PredictedCase(
        case=name,
        predicted_step_s=predicted.step_s,
        measured_step_s=found.step_s,
        measured_step_samples_s=found.step_samples_s,
        predicted_to_measured_ratio=predicted.step_s / found.step_s,
        bottleneck=predicted.bottleneck.value,
        predicted_sent_bytes=sent,
        measured_sent_bytes=found.sent_bytes,
        predicted_disk_bytes=moved,
        measured_disk_bytes=found.disk_bytes,
        gather_link_bytes_per_s=work.links.gather.bandwidth,
        disk_link_bytes_per_s=work.links.disk.bandwidth,
    )


def measurements(result: PredictionResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for one in result.cases:
        how, ratio = {"case": one.case}, one.predicted_to_measured_ratio
        yield measured("step", one.measured_step_samples_s, "s", Better.LOWER, parameters=how)
        yield derived("predicted to measured step", ratio, "ratio", Better.NEITHER, parameters=how)
        yield derived(
            "error of the prediction", one.error_ratio, "ratio", Better.LOWER, parameters=how, target=_ERROR
        )


def table(result: PredictionResult) -> Sequence[tuple[str, ...]]:
    """The cases for people: name, predicted, measured, ratio, bottleneck."""
    return [
        (
            one.case,
            f"{one.predicted_step_s:.3f} s",
            f"{one.measured_step_s:.3f} s",
            f"{one.predicted_to_measured_ratio:.3f}",
            f"{one.predicted_disk_bytes / max(one.measured_disk_bytes, 1.0):.3f}",
            one.bottleneck,
        )
        for one in result.cases
    ]
