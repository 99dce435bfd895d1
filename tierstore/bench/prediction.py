"""How well the simulated schedule predicts the time of a step.

Two ranks step the stack of synthetic layers of ``bench overlap`` over limited links, in as many configurations as
``cases`` says: which of computation, gathers and fetches is the longest, how far each queue looks ahead, how many layers,
experts and cached layers there are. Each is predicted before it is measured, from its shape, its links, the speed of AdamW
that ``plan`` assumes, and two numbers of this machine: what driving one dense pass and one expert costs beside its
computation, fitted. The calibrating runs have links without limits, and take turns with the measured ones,
so that a machine whose speed drifts treats them alike; a case is predicted with the calibrations on both sides of it.
None of the cases that are judged was fitted on: the calibrating runs are reported apart.

Bytes are predicted too: gathers from the shape, fetches and write-backs by the residency core (``plan.traffic``).
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tierstore.bench.overlap import Balance, Ranks, links_for
from tierstore.bench.overlap_device import Computation
from tierstore.bench.overlap_rank import CAUGHT_UP, Measurement
from tierstore.bench.overlap_rig import RigShape
from tierstore.bench.results import Better, derived, measured
from tierstore.bench.results import Measurement as Found
from tierstore.cache.access import Phase
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.model.config import DenseUnit, ModelConfig
from tierstore.plan.architecture import Architecture
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.costs import ASSUMED, Cost
from tierstore.plan.simulate import SteadyState, outcome, simulate
from tierstore.plan.traffic import Moved, Span, Traffic, step_traffic
from tierstore.prefetch.operations import Kind, Operation, PassSizes, operations
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule
from tierstore.store.adamw import AdamWConfig
from tierstore.tiers.slots import SlotSizes
from tierstore.train.budgets import Budgets
from tierstore.train.config import TrainConfig

__all__ = ["Calibration", "Case", "PredictionBench", "RigWorkload", "cases", "measurements", "run", "table"]

_RANKS, _SLOTS = 2, 8
_STEPS, _SETTLED = 4, 2
_STEP_BYTES = 28
#: Cases between two calibrations.
_BETWEEN = 3
#: How far a predicted step may be from the measured one at most.
_ERROR = 0.15


@dataclass(frozen=True)
class Case:
    """One configuration: how its links are balanced, and what of the shape differs."""

    name: str
    balance: Balance
    shape: RigShape


@dataclass(frozen=True, kw_only=True)
class PredictionBench:
    """What to measure. ``forward_s``: computation of one layer's forward pass."""

    place: Path = Path("tierstore-bench")
    steps: int = 4
    warmup: int = 6
    forward_s: float = 0.02
    computation: Computation = Computation.DEVICE

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1:
            raise ConfigError(f"steps, warmup: expected at least 1, got {self.steps} and {self.warmup}")
        if self.forward_s <= 0:
            raise ConfigError(f"forward_s: expected more than 0, got {self.forward_s}")

    @property
    def span(self) -> Span:
        """The steps that are measured, counted from the first."""
        return Span(self.warmup + CAUGHT_UP, self.steps)


def cases(bench: PredictionBench) -> list[Case]:
    """The configurations that are judged."""
    base = RigShape(forward_s=bench.forward_s, computation=bench.computation)
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


# The simulated rig ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What this machine adds: seconds to drive one dense pass and one expert beside what they compute."""

    dense_s: float
    expert_s: float
    adamw: Cost = ASSUMED.adamw


@dataclass(frozen=True)
class RigWorkload:
    """One rank of the rig as operations: what each moves, and how long it takes over ``links``."""

    shape: RigShape
    links: LinksConfig
    calibration: Calibration
    #: The steps that are measured.
    span: Span = field(default_factory=Span)

    @cached_property
    def setting(self) -> Setting:
        """The rig's experts as a plan sees them: every one is used in every pass."""
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
        slots = SlotSizes(self.shape.expert_numel, 4, _SLOTS, _SLOTS)
        divided = Budgets(cache=cache, device=slots.nbytes, lookahead=lookahead, slots=slots)
        return step_traffic(self.setting, Capacity((), divided), self.span)

    @cached_property
    def schedule(self) -> Schedule:
        """The rig's, with the lookahead that its store allows."""
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
            land=4 * shape.expert_numel if backward else 0,
        )

    def seconds(self, operation: Operation) -> float:
        links, shape, machine = self.links, self.shape, self.calibration
        moved = {
            Kind.GATHER: links.gather,
            Kind.REDUCE: links.gather,
            Kind.FETCH: links.disk,
            Kind.WRITE: links.disk,
            Kind.LOAD: links.copy,
            Kind.LAND: links.copy,
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


def run(bench: PredictionBench, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measures, and returns figures ready for JSON. Raises ConfigError (``place`` exists), WorkerError, OSError."""
    if bench.place.exists():
        raise ConfigError(f"store: {bench.place} exists; the benchmark wants a directory of its own")
    bench.place.mkdir(parents=True)
    try:
        with Ranks() as ranks:
            return _run(bench, ranks, say)
    finally:
        shutil.rmtree(bench.place, ignore_errors=True)


def _run(bench: PredictionBench, ranks: Ranks, say: Callable[[str], None]) -> dict[str, Any]:
    asked = Measurement(place=bench.place, steps=bench.steps, warmup=bench.warmup)
    every = cases(bench)
    calibrations, measured = [_calibrate(bench, ranks, asked)], []
    for begin in range(0, len(every), _BETWEEN):
        part = every[begin : begin + _BETWEEN]
        for case in part:
            say(case.name)
            free = RigWorkload(case.shape, LinksConfig(), _NOTHING, bench.span)
            sent, moved = free.moved_bytes()
            links = links_for(case.balance, _computing_s(case.shape), sent, moved)
            found = ranks.measure(replace(asked, shape=case.shape, links=links))
            measured.append((case, links, found, len(calibrations) - 1))
        say("calibration")
        calibrations.append(_calibrate(bench, ranks, asked))
    rows = [
        _row(
            RigWorkload(
                case.shape, links, _between(calibrations[place], calibrations[place + 1]), bench.span
            ),
            case.name,
            found,
        )
        for case, links, found, place in measured
    ]
    errors = [abs(row["predicted_to_measured_ratio"] - 1) for row in rows]
    return {
        "ranks_count": _RANKS,
        "computation": bench.computation.value,
        "cases": rows,
        "calibrations": [
            {"dense_drive_s": one.dense_s, "expert_drive_s": one.expert_s} for one in calibrations
        ],
        "largest_error_ratio": max(errors),
        "median_error_ratio": statistics.median(errors),
    }


_NOTHING = Calibration(0.0, 0.0)


def _computing_s(shape: RigShape) -> float:
    """What a step computes, by its shape: once forward, twice backward."""
    return 3 * shape.layers * shape.forward_s


def _calibrate(bench: PredictionBench, ranks: Ranks, asked: Measurement) -> Calibration:
    """The costs of driving passes, from two shapes over unlimited links: with many experts, and with few."""
    base = RigShape(forward_s=bench.forward_s, computation=bench.computation, cached_layers=17.0)
    few, many = replace(base, experts=1), replace(base, experts=6)
    extra = {}
    for shape in (few, many):
        found = ranks.measure(replace(asked, shape=shape, links=LinksConfig()))
        extra[shape.experts] = max(found["step_s"] - _computing_s(shape), 0.0) / (2 * base.layers)
    expert_s = max((extra[many.experts] - extra[few.experts]) / (many.experts - few.experts), 0.0)
    return Calibration(max(extra[few.experts] - few.experts * expert_s, 0.0), expert_s)


def _between(before: Calibration, after: Calibration) -> Calibration:
    return Calibration((before.dense_s + after.dense_s) / 2, (before.expert_s + after.expert_s) / 2)


def _row(work: RigWorkload, name: str, found: dict[str, Any]) -> dict[str, Any]:
    predicted = work.run()
    sent, moved = work.moved_bytes()
    return {
        "case": name,
        "predicted_step_s": predicted.step_s,
        "measured_step_s": found["step_s"],
        "measured_step_samples_s": found["step_samples_s"],
        "predicted_to_measured_ratio": predicted.step_s / found["step_s"],
        "bottleneck": predicted.bottleneck.value,
        "predicted_sent_bytes": sent,
        "measured_sent_bytes": found["sent_bytes"],
        "predicted_disk_bytes": moved,
        "measured_disk_bytes": found["disk_bytes"],
        "gather_link_bytes_per_s": work.links.gather.bandwidth,
        "disk_link_bytes_per_s": work.links.disk.bandwidth,
    }


def measurements(result: dict[str, Any]) -> list[Found]:
    """What ``run`` found, for a document."""
    found = []
    for row in result["cases"]:
        how, ratio = {"case": row["case"]}, row["predicted_to_measured_ratio"]
        found += [
            measured("step", row["measured_step_samples_s"], "s", Better.LOWER, parameters=how),
            derived("predicted to measured step", ratio, "ratio", Better.NEITHER, parameters=how),
            derived(
                "error of the prediction",
                abs(ratio - 1),
                "ratio",
                Better.LOWER,
                parameters=how,
                target=_ERROR,
            ),
        ]
    return found


def table(result: dict[str, Any]) -> Sequence[tuple[str, ...]]:
    """The cases for people: name, predicted, measured, ratio, bottleneck."""
    return [
        (
            row["case"],
            f"{row['predicted_step_s']:.3f} s",
            f"{row['measured_step_s']:.3f} s",
            f"{row['predicted_to_measured_ratio']:.3f}",
            f"{row['predicted_disk_bytes'] / max(row['measured_disk_bytes'], 1.0):.3f}",
            row["bottleneck"],
        )
        for row in result["cases"]
    ]
