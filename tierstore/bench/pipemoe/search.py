"""The exact solver against an exhaustive search over simulated schedules, in drawn cases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierstore.bench.results.document import Better, Measurement, derived
from tierstore.bench.results.figures import Figures, named
from tierstore.parallel.pipeline_degree import LayerPass, PipelineCosts, Share, best_degree, pass_seconds
from tierstore.plan.pipemoe.algorithm import algorithm_1
from tierstore.plan.pipemoe.simulation import exhaustive_degree

#: Times that differ by less than this share are a tie.
_TIE = 1e-12
_MOST = 12


@dataclass(frozen=True, kw_only=True)
class DegreeCount(Figures):
    """In how many cases so many chunks are the best."""

    chunks: int = field(metadata=named("chunks_count"))
    cases: int = field(metadata=named("cases_count"))


@dataclass(frozen=True, kw_only=True)
class SearchResult(Figures):
    """``disagreements``: cases where the exact solver's r is not as good as the best simulated one, ties aside;
    ``degrees``: how often each r was the best; ``algorithm_1_worse``: cases where Algorithm 1 as printed is not as good.
    """

    cases: int = field(metadata=named("cases_count"))
    disagreements: int = field(metadata=named("disagreements_count"))
    ties: int = field(metadata=named("ties_count"))
    largest_difference_ratio: float
    algorithm_1_worse: int = field(metadata=named("algorithm_1_worse_count"))
    algorithm_1_worst_ratio: float
    degrees: Sequence[DegreeCount]


def search(cases: int, *, seed: int = 0) -> SearchResult:
    """``cases`` drawn cases of 1 to 12 chunks at most. The times of every r's closed form and simulation agree too."""
    draw = random.Random(seed)
    wrong = ties = worse = 0
    largest, worst = 0.0, 1.0
    degrees: Counter[int] = Counter()
    for _ in range(cases):
        costs, work, most = _costs(draw), _work(draw), draw.randint(1, _MOST)
        exact, found = best_degree(costs, work, most=most), exhaustive_degree(costs, work, most=most)
        difference = abs(exact.seconds / found.seconds - 1)
        largest = max(largest, difference)
        wrong += difference > _TIE
        ties += difference <= _TIE and exact.degree != found.degree
        degrees[exact.degree] += 1
        seconds = partial(pass_seconds, costs, work)
        paper = min(algorithm_1(costs, work, seconds=seconds), most)
        ratio = seconds(paper) / exact.seconds
        worse += ratio > 1 + _TIE
        worst = max(worst, ratio)
    return SearchResult(
        cases=cases,
        disagreements=wrong,
        ties=ties,
        largest_difference_ratio=largest,
        algorithm_1_worse=worse,
        algorithm_1_worst_ratio=worst,
        degrees=[DegreeCount(chunks=r, cases=count) for r, count in sorted(degrees.items())],
    )


def _costs(draw: random.Random) -> PipelineCosts:
    """Starts of 1 us to 10 ms, 100 MB/s to 100 GB/s, 10 GFLOP/s to 1 PFLOP/s; one start in ten costs nothing."""

    def power(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def start() -> float:
        return 0.0 if draw.random() < 0.1 else power(-6, -2)

    return PipelineCosts(start(), power(-11, -8), start(), power(-15, -10))


def _work(draw: random.Random) -> LayerPass:
    """One pass in two has the same bytes both ways, as a forward pass."""
    there = Share(draw.randint(1, 3), 10 ** draw.uniform(4, 8))
    back = there if draw.random() < 0.5 else Share(draw.randint(1, 3), 10 ** draw.uniform(4, 8))
    return LayerPass(there, Share(draw.randint(1, 3), 10 ** draw.uniform(8, 12)), back)


def measurements(result: SearchResult) -> Iterator[Measurement]:
    """What ``search`` found, for a document."""
    yield derived("disagreements", result.disagreements, "count", Better.LOWER, target=0)
    yield derived("Algorithm 1 as printed is worse", result.algorithm_1_worse, "count")
