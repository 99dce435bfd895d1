"""Steps of real training in many layouts of 1, 2 and 4 ranks, and what ``tierstore plan --layouts`` says of them.

The model computes on an emulated device, and links are limited; experts are all in the host's cache. Layouts take turns,
in changing order, those that costs are fitted on among them. A step has ended when all ranks have taken it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.layouts.cases import FITTED, JUDGED, LayoutCase
from tierstore.bench.layouts.fitting import Overheads, PlannedCase, fit
from tierstore.bench.processes.ranks import AskedRanks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named
from tierstore.errors import ConfigError
from tierstore.stats import percentile

#: How far a predicted step may be from the measured one, and in how many of the judged layouts it must not be farther.
ERROR = 0.15
WITHIN, OF = 20, 24
_TEXT_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LayoutsBench(Figures):
    """What to measure: the layouts of ``ranks`` ranks, each for ``steps`` steps in each of ``rounds``."""

    directory: Path = field(default=Path("tierstore-bench"), metadata=INTERNAL)
    ranks: Sequence[int] = field(default=(1, 2, 4), metadata=named("ranks_count"))
    rounds: int = field(default=3, metadata=named("rounds_count"))
    steps: int = field(default=2, metadata=named("steps_count"))

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds, steps=self.steps)
        known = {case.choice.ranks.world for case in JUDGED}
        if not self.ranks or not known.issuperset(self.ranks):
            raise ConfigError(f"ranks: expected some of {sorted(known)}, got {list(self.ranks)}")

    def of(self, cases: Sequence[LayoutCase]) -> list[LayoutCase]:
        """Those of ``cases`` with as many ranks as are asked for."""
        return [case for case in cases if case.choice.ranks.world in self.ranks]


@dataclass(frozen=True, kw_only=True)
class LayoutTime(Figures):
    """One layout: the median step, and the plan's. ``judged``: or else fitted on. ``again_ratio``: the step of a round over
    that of all, of the round that is farthest from it.
    """

    layout: str
    kind: str
    ranks: int = field(metadata=named("ranks_count"))
    judged: bool
    step_samples_s: Sequence[float]
    step_s: float
    predicted_step_s: float
    predicted_to_measured_ratio: float
    again_ratio: float

    @property
    def within(self) -> bool:
        return abs(self.predicted_to_measured_ratio - 1) <= ERROR


@dataclass(frozen=True, kw_only=True)
class FittedOverheads(Figures):
    """What was fitted with a number of ranks."""

    ranks: int = field(metadata=named("ranks_count"))
    overheads: Overheads


@dataclass(frozen=True, kw_only=True)
class LayoutsResult(Figures):
    """What ``run`` found. ``noise_ratio``: by how much the steps of a round differ from those of all, in nine layouts of
    ten; ``worst_error_ratio``: of the judged ones.
    """

    bench: str = "layouts"
    asked: LayoutsBench
    overheads: Sequence[FittedOverheads]
    noise_ratio: float
    within_count: int
    judged_count: int
    worst_error_ratio: float
    layouts: Sequence[LayoutTime]

    @property
    def passed(self) -> bool:
        """Whether as large a part of the judged layouts as 20 of 24 is within 15%."""
        return self.within_count * OF >= WITHIN * self.judged_count


def run(bench: LayoutsBench, say: Callable[[str], None] = lambda _: None) -> LayoutsResult:
    """Measures. Raises ConfigError, BudgetError, WorkerError, OSError."""
    judged, fitted = bench.of(JUDGED), bench.of(FITTED)
    with work_directory(bench.directory) as directory:
        text = directory / "text"
        # Bytes of even frequency: experts of a model that has learned nothing then get about as many tokens each.
        text.write_bytes(random.Random(0).randbytes(_TEXT_BYTES))
        planned = {case: PlannedCase(case, text) for case in (*judged, *fitted)}
        rounds = _measure(bench, [*judged, *fitted], directory, text, say)
    return summary(bench, planned, rounds)


def summary(
    bench: LayoutsBench,
    planned: Mapping[LayoutCase, PlannedCase],
    rounds: Mapping[LayoutCase, Sequence[Sequence[float]]],
) -> LayoutsResult:
    """``rounds``: each layout's steps, seconds by round."""
    steps_s = {case: statistics.median(_joined(of)) for case, of in rounds.items()}
    overheads = {}
    for ranks in bench.ranks:
        known = [case for case in bench.of(FITTED) if case.choice.ranks.world == ranks]
        overheads[ranks] = fit([planned[case] for case in known], [steps_s[case] for case in known])
    times = [
        _time(case, rounds[case], planned[case].step_s(overheads[case.choice.ranks.world])) for case in rounds
    ]
    judged = [each for each in times if each.judged]
    return LayoutsResult(
        asked=bench,
        overheads=[FittedOverheads(ranks=ranks, overheads=found) for ranks, found in overheads.items()],
        noise_ratio=percentile([abs(each.again_ratio - 1) for each in times], 90),
        within_count=sum(each.within for each in judged),
        judged_count=len(judged),
        worst_error_ratio=max(abs(each.predicted_to_measured_ratio - 1) for each in judged),
        layouts=times,
    )


def _time(case: LayoutCase, rounds: Sequence[Sequence[float]], predicted_s: float) -> LayoutTime:
    samples = _joined(rounds)
    median = statistics.median(samples)
    of_rounds = [statistics.median(steps) / median for steps in rounds]
    return LayoutTime(
        layout=case.name,
        kind=case.kind,
        ranks=case.choice.ranks.world,
        judged=case in JUDGED,
        step_samples_s=samples,
        step_s=median,
        predicted_step_s=predicted_s,
        predicted_to_measured_ratio=predicted_s / median,
        again_ratio=max(of_rounds, key=lambda ratio: abs(ratio - 1)),
    )


def _joined(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [step for steps in rounds for step in steps]


def measurements(result: LayoutsResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for each in result.layouts:
        how = {"layout": each.layout}
        yield measured("step", each.step_samples_s, "s", Better.LOWER, parameters=how)
        yield derived("predicted to measured", each.predicted_to_measured_ratio, "ratio", parameters=how)
    within = result.within_count / result.judged_count
    yield derived("within 15%", within, "ratio", Better.HIGHER, target=WITHIN / OF)


# The ranks --------------------------------------------------------------------------------------------------


def _measure(
    bench: LayoutsBench,
    cases: Sequence[LayoutCase],
    directory: Path,
    text: Path,
    say: Callable[[str], None],
) -> dict[LayoutCase, list[list[float]]]:
    """Seconds of each layout's steps, by round, each round in a new session."""
    found: dict[LayoutCase, list[list[float]]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        worlds = {
            ranks: stack.enter_context(AskedRanks("tierstore.bench.layouts.rank", ranks))
            for ranks in bench.ranks
        }
        for number in range(bench.rounds):
            for done, case in enumerate(cases if number % 2 == 0 else cases[::-1], start=1):
                say(f"round {number + 1} of {bench.rounds}, layout {done} of {len(cases)}: {case.name}")
                store = directory / "store"
                request = {"settings": case.settings(text), "store": str(store), "steps": bench.steps}
                ranks = case.choice.ranks.world
                answers = worlds[ranks].ask([request] * ranks)
                shutil.rmtree(store)
                taken = zip(*(each["step_s"] for each in answers), strict=True)
                found[case].append([max(steps) for steps in taken])
    return found
