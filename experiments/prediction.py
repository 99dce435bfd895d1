"""How well the simulated schedule predicts the time of a step, and what a step moves (docs/PLAN.md).

    python experiments/prediction.py [--steps 4] [--warmup 6] [--layers 16] [--forward-s 0.02] [--computation device]

Two ranks run a synthetic stack over limited links in 13 configurations. The calibrating runs take turns with the
measured ones, so that a machine whose speed drifts treats them alike; a case is predicted with the calibrations on both
sides of it. None of the cases that are judged was fitted on: the calibrating runs are reported apart. Bytes follow from
the shape (gathers) and from the residency core (``plan.traffic``).

Exit status 1: a predicted step is more than 15% from the measured one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from emulation import OUTPUT, finish, options, start, table

from tierstore.bench.overlap import (
    CAUGHT_UP,
    Balance,
    Computation,
    RankProcesses,
    RankRequest,
    RankSteps,
    StackShape,
    links_for,
)
from tierstore.bench.overlap_rank import schedule_of
from tierstore.cache.access import Phase
from tierstore.links import LinkConfig, LinksConfig
from tierstore.machine_profile import ASSUMED, Cost
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.model.config import ComputeDtype, ModelConfig
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.predict import SteadyState, outcome, simulate
from tierstore.plan.traffic import SPAN, Moved, Traffic, step_traffic
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
#: The links that are balanced: copies have one that makes them short, as if so many times the disk's bytes had to be moved.
BALANCES = tuple(balance for balance in Balance if balance is not Balance.COPIES)
COPIES = 4.0
#: Cases between two calibrations.
_BETWEEN = 3
#: How far a predicted step may be from the measured one at most.
_ERROR = 0.15


class Case(NamedTuple):
    """One configuration: the balance of its links, and its shape."""

    name: str
    balance: Balance
    shape: StackShape


def cases(base: StackShape) -> list[Case]:
    """The configurations that are judged: ``base``, and what differs from it."""
    half = base.layers // 2
    ahead = replace(base, horizontal_depth=1, vertical_depth=1)
    variants = {
        "no prefetch": replace(base, horizontal_depth=0, vertical_depth=0),
        "horizontal only": replace(base, vertical_depth=0),
        "vertical only": replace(base, horizontal_depth=0),
        "one pass ahead": ahead,
        "half as deep": replace(base, layers=half, cached_layers=half / 2),
        "two experts a layer": replace(base, experts=2),
        "little cache": replace(base, cached_layers=3.0, vertical_depth=2),
    }
    found = [Case(balance.value, balance, base) for balance in BALANCES]
    found += [Case(f"{Balance.EQUAL.value}, {name}", Balance.EQUAL, of) for name, of in variants.items()]
    for balance in (Balance.GATHERS, Balance.FETCHES):
        found.append(Case(f"{balance.value}, one pass ahead", balance, ahead))
    return found


# The simulated stack ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackCalibration:
    """What this machine adds: seconds to drive one dense pass and one expert beside what they compute."""

    dense_s: float = 0.0
    expert_s: float = 0.0
    adamw: Cost = ASSUMED.adamw


@dataclass(frozen=True)
class StackWorkload:
    """One rank of the stack as operations: what each moves, and how long it takes over ``links``."""

    shape: StackShape
    links: LinksConfig
    calibration: StackCalibration
    #: The steps that are measured.
    span: tuple[int, int] = SPAN

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
        divided = Budgets(cache=cache, device=slots.nbytes, landing=0, lookahead=lookahead, slots=slots)
        return step_traffic(self.setting, Capacity((), divided), self.span)

    @cached_property
    def schedule(self) -> Schedule:
        """The stack's, with the lookahead that its store allows."""
        asked, (_, lookahead) = schedule_of(self.shape), self.shape.budgets
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
        match operation.kind:
            case Kind.GATHER | Kind.REDUCE:
                return _over(links.gather, operation.nbytes)
            case Kind.FETCH | Kind.WRITE:
                return _over(links.disk, operation.nbytes)
            case Kind.LOAD | Kind.COPY_TO_HOST:
                return _over(links.copy, operation.nbytes)
            case Kind.EXPERT_STEP:
                return machine.adamw.seconds(shape.expert_numel * _STEP_BYTES)
            case Kind.STEP:
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


def computing_s(shape: StackShape) -> float:
    """What a step computes, by its shape: once forward, twice backward."""
    return 3 * shape.layers * shape.forward_s


def calibrate(ranks: RankProcesses, asked: RankRequest, base: StackShape) -> StackCalibration:
    """The costs of driving passes, from two shapes over unlimited links: with few experts, and with many."""
    few, many = replace(base, experts=1), replace(base, experts=6)
    extra = {}
    for shape in (few, many):
        found = ranks.measure(replace(asked, shape=shape, links=LinksConfig()))
        extra[shape.experts] = max(found.step_s - computing_s(shape), 0.0) / (2 * base.layers)
    expert_s = max((extra[many.experts] - extra[few.experts]) / (many.experts - few.experts), 0.0)
    return StackCalibration(max(extra[few.experts] - few.experts * expert_s, 0.0), expert_s)


def predicted(work: StackWorkload, name: str, found: RankSteps) -> dict[str, Any]:
    """One case: its step and its bytes, predicted and measured."""
    outcome = work.run()
    sent, moved = work.moved_bytes()
    return {
        "case": name,
        "predicted_step_s": outcome.step_s,
        "measured_step_s": found.step_s,
        "measured_step_samples_s": found.step_samples_s,
        "predicted_to_measured_ratio": outcome.step_s / found.step_s,
        "bottleneck": outcome.bottleneck.value,
        "predicted_sent_bytes": sent,
        "measured_sent_bytes": found.sent_bytes,
        "predicted_disk_bytes": moved,
        "measured_disk_bytes": found.disk_bytes,
        "gather_link_bytes_per_s": work.links.gather.bandwidth,
        "disk_link_bytes_per_s": work.links.disk.bandwidth,
    }


def measure(
    ranks: RankProcesses, asked: RankRequest, every: Sequence[Case], base: StackShape
) -> list[dict[str, Any]]:
    """A row for each case; a calibration before each three of them, and one at the end."""
    span = (asked.warmup + CAUGHT_UP, asked.steps)
    before, rows = calibrate(ranks, asked, base), []
    for begin in range(0, len(every), _BETWEEN):
        part = []
        for case in every[begin : begin + _BETWEEN]:
            sent, moved = StackWorkload(case.shape, LinksConfig(), StackCalibration(), span).moved_bytes()
            links = links_for(case.balance, computing_s(case.shape), sent, moved, COPIES * moved)
            part.append((case, links, ranks.measure(replace(asked, shape=case.shape, links=links))))
        after = calibrate(ranks, asked, base)
        mean = StackCalibration((before.dense_s + after.dense_s) / 2, (before.expert_s + after.expert_s) / 2)
        for case, links, steps in part:
            rows.append(predicted(StackWorkload(case.shape, links, mean, span), case.name, steps))
        before = after
    return rows


def main() -> None:
    asked = options(__doc__, steps=4, warmup=6, layers=16, forward_s=0.02, computation="device", cases=13)
    layers, computation = asked.layers, Computation(asked.computation)
    shape = StackShape(
        layers=layers, cached_layers=layers / 2, forward_s=asked.forward_s, computation=computation
    )
    every, base = cases(shape)[: asked.cases], replace(shape, cached_layers=layers + 1.0)
    with tempfile.TemporaryDirectory(dir=".") as directory, RankProcesses() as ranks:
        request = RankRequest(directory=Path(directory), steps=asked.steps, warmup=asked.warmup)
        rows = measure(ranks, request, every, base)
    table(
        "Predicted and measured", rows, "case", "predicted_step_s", "measured_step_s", "predicted_to_measured_ratio",
        "predicted_disk_bytes", "measured_disk_bytes", "bottleneck",
    )  # fmt: skip
    errors = {row["case"]: abs(row["predicted_to_measured_ratio"] - 1) for row in rows}
    largest, median = max(errors.values()), statistics.median(errors.values())
    OUTPUT.line(f"largest error {largest:.1%}, median {median:.1%}")
    failures = [
        f"{case}: the prediction is {error:.1%} off" for case, error in errors.items() if error > _ERROR
    ]
    finish({"largest_error_ratio": largest, "median_error_ratio": median, "cases": rows}, failures)


if __name__ == "__main__":
    start(main)
