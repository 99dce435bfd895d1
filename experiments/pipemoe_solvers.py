"""PipeMoE's number of chunks by three solvers: ours, the paper's Algorithm 1 as printed, and exhaustive simulation.

    python experiments/pipemoe_solvers.py [--cases 100000]

In drawn cases our exact solver (``tierstore.parallel.chunk_degree``) is compared with an exhaustive search over
schedules that are simulated event by event, and with Algorithm 1 (sections III and IV). Exit status 1: the exact solver
is not exact. Then the layers of the paper's Table IV, by Fig. 6's constants: what the numbers that ``auto-split`` chooses
save of the time of fixed ones, as in Table VI.

**Algorithm 1 as printed, errors included.** Where the paper contradicts itself, or is wrong:

- line 5 has ``t_1 = 2 (alpha_e + beta_e n_e) + alpha_a + beta_a n_d``: two computations and one all-to-all. Eq. 19 has
two all-to-alls and one computation, and is right; - line 6 divides by ``alpha_e - alpha_e``, which is 0; Eq. 28, which
it means, by ``alpha_a - alpha_e``; - Eq. 27 divides Eq. 26 by ``alpha_a - alpha_e`` without a case for ``alpha_a <
alpha_e``, where the inequality is reversed: Q1 then holds up to that r, not from it on (as on the paper's 16 GPUs); -
Eq. 9 to 12 let combines run beside dispatches, which share the network; the text before them forbids it; - Eq. 29
leaves out two all-to-alls of each kind, Eq. 30 one; - lines 2 and 3 multiply by E / P, the experts of a rank, though B
L k rows are what a rank computes already. The paper's figures follow from it, so ``PaperLayer`` keeps it; - ``solve``
gives a real r. The better of the whole numbers beside it is taken here.

Line 6 is taken as Eq. 28, all else as printed. ``solve`` is an argument: the paper's is SLSQP, whose answer depends on
where it starts and may break the constraints; ``solve_exactly`` finds the best whole r that keeps them.

**The simulation.** The network serves one message at a time, the device one chunk's experts. All dispatches are issued
before all combines, each in the order of chunks; a chunk's experts follow its dispatch, its combine follows its experts.
``plan.predict`` runs it. It shares nothing with the closed form, so each checks the other; and chunks need not be equal.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from emulation import OUTPUT, finish, options, start, table

from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    Degree,
    LayerPass,
    Share,
    WeightGradients,
    backward_pass,
    best_degree,
    chosen_degrees,
    forward_pass,
    pass_seconds,
)
from tierstore.parallel.config import MOST_PARTS
from tierstore.plan.predict import Run, simulate
from tierstore.prefetch.operations import Kind, Operation

#: Times that differ by less than this share are equal.
_EQUAL = 1e-12
#: Chunks at most, in a drawn case.
_MOST_DRAWN = 12
#: The highest r that ``solve_exactly`` looks at.
_MOST = 512


class Solution(NamedTuple):
    """A (real) number of chunks, and what the objective is there; infinite where there is none."""

    degree: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Minimise ``objective(r)`` over r >= 2 where each of ``constraints(r)`` is at least 0."""

    objective: Callable[[float], float]
    constraints: tuple[Callable[[float], float], ...]


def solve_exactly(problem: Problem) -> Solution:
    """The best whole r."""
    allowed = (r for r in range(2, _MOST + 1) if all(least(r) >= 0 for least in problem.constraints))
    return min(
        (Solution(r, problem.objective(r)) for r in allowed),
        key=lambda found: found.seconds,
        default=Solution(math.inf, math.inf),
    )


def algorithm_1(
    costs: ChunkCosts,
    work: LayerPass,
    *,
    seconds: Callable[[int], float],
    solve: Callable[[Problem], Solution] = solve_exactly,
) -> int:
    """The r of Algorithm 1 for a pass whose dispatch and combine are alike (of others, their mean).

    ``seconds``: what a pass in r chunks takes, which chooses between the whole numbers beside a real r.
    """
    a = costs.alpha_a * (work.dispatch.starts + work.combine.starts) / 2
    ae = costs.alpha_e * work.experts.starts
    bn = costs.beta_a * (work.dispatch.amount + work.combine.amount) / 2
    w = costs.beta_e * work.experts.amount
    t1 = 2 * (ae + w) + a + bn  # line 5
    # Line 6, Eq. 28. Where the starts are equal Q1 holds for every r or for none.
    r2 = 2.0 if a == ae else max(2.0, math.ceil((w - bn) / (a - ae)))
    t2 = 2 * r2 * a + 2 * bn

    def computes_longer(r: float) -> float:  # Q1 does not hold: Eq. 35 and 42
        return ae + w / r - a - bn / r

    def hides_all_but_one(r: float) -> float:  # Q2, Eq. 36
        return r * ae + w - 2 * (r - 1) * (a + bn / r)

    third = solve(Problem(lambda r: 2 * a + w + 2 * bn / r + ae * r, (computes_longer, hides_all_but_one)))
    fourth = solve(Problem(lambda r: 2 * a * r + 2 * bn, (computes_longer, lambda r: -hides_all_but_one(r))))
    best = min(Solution(r2, t2), third, fourth, key=lambda found: found.seconds)
    return 1 if best.seconds >= t1 else min(_beside(best.degree), key=seconds)


def _beside(real: float) -> tuple[int, ...]:
    """The whole numbers of at least 2 beside ``real``, which may be one."""
    whole = round(real)
    if abs(real - whole) <= 1e-6:
        return (max(2, whole),)
    return max(2, math.floor(real)), max(2, math.ceil(real))


# The paper's evaluation -------------------------------------------------------------------------------------

#: Fig. 6: alpha_gemm and beta_gemm (an expert has two products), and of an all-to-all by the number of GPUs.
GEMM = (6.19e-5, 4.1e-14)
ALL_TO_ALL = {16: (1.72e-5, 2.96e-10), 32: (2.09e-4, 3.54e-10), 64: (7.83e-4, 3.84e-10)}


@dataclass(frozen=True, slots=True)
class PaperLayer:
    """A layer of Table IV: P GPUs, B samples of L tokens each, sizes H and M, ``local`` experts a GPU; ``top_k`` a token."""

    gpus: int
    batch: int
    length: int
    hidden: int
    width: int
    local: int
    top_k: int = 2

    @property
    def costs(self) -> ChunkCosts:
        """Fig. 6's."""
        return ChunkCosts(*ALL_TO_ALL[self.gpus], 2 * GEMM[0], 2 * GEMM[1])

    @property
    def forward(self) -> LayerPass:
        """Lines 1 to 3; amounts are elements."""
        rows = self.batch * self.length * self.local * self.top_k
        return forward_pass(rows * self.width, rows * self.width * self.hidden)

    @property
    def passes(self) -> list[tuple[ChunkCosts, LayerPass]]:
        """Forward, and backward with as many bytes and twice the work."""
        rows, work, at = self.forward.dispatch.amount, self.forward.experts.amount, WeightGradients.AT_TOKENS
        return [(self.costs, self.forward), (self.costs, backward_pass(rows, work, gradients=at))]

    def auto_s(self, most_parts: int) -> float:
        """Seconds in the numbers of chunks that AUTO chooses, with at most ``most_parts`` of an expert."""
        most = most_parts * self.local
        return sum(
            one.seconds for one in chosen_degrees(self.passes, present=(1, 1), owned=self.local, most=most)
        )


def table4() -> Iterator[PaperLayer]:
    """The 864 combinations of Table IV, two experts a token: 3 P x 3 B x 3 L x 4 H x 4 M x 2 E/P."""
    sizes = (1024, 2048, 4096, 8192)
    for each in product(ALL_TO_ALL, (2, 4, 8), (512, 1024, 2048), sizes, sizes, (1, 2)):
        yield PaperLayer(*each)


#: Table VI: mean and highest improvement over fixed numbers of chunks, by GPUs.
FIXED = (1, 2, 4, 8)
TABLE6 = {
    16: ((0.168, 0.431), (0.115, 0.261), (0.034, 0.260), (0.086, 0.350)),
    32: ((0.156, 0.338), (0.035, 0.098), (0.061, 0.339), (0.129, 0.444)),
    64: ((0.125, 0.349), (0.053, 0.120), (0.086, 0.425), (0.172, 0.458)),
}


def table6(gpus: int) -> dict[str, tuple[float, float]]:
    """The mean and highest part of a layer's time that AUTO saves: of each of ``FIXED``, and of AUTO with whole experts."""
    saved: dict[str, list[float]] = {}
    for layer in table4():
        if layer.gpus == gpus:
            auto_s = layer.auto_s(MOST_PARTS)
            others = {f"r = {r}": sum(pass_seconds(*one, r) for one in layer.passes) for r in FIXED}
            others["whole experts"] = layer.auto_s(1)
            for name, seconds in others.items():
                saved.setdefault(name, []).append(1 - auto_s / seconds)
    return {name: (statistics.mean(each), max(each)) for name, each in saved.items()}


# The simulation ---------------------------------------------------------------------------------------------


#: Seconds of one chunk's dispatch, of its experts and of its combine.
ChunkTimes = tuple[float, float, float]


def equal_chunks(costs: ChunkCosts, work: LayerPass, degree: int) -> list[ChunkTimes]:
    """``work`` in ``degree`` equal chunks."""

    def seconds(share: Share, alpha: float, beta: float) -> float:
        return alpha * share.starts + beta * share.amount / degree

    dispatch, combine = (seconds(way, costs.alpha_a, costs.beta_a) for way in (work.dispatch, work.combine))
    return [(dispatch, seconds(work.experts, costs.alpha_e, costs.beta_e), combine)] * degree


def simulate_chunks(chunks: Sequence[ChunkTimes]) -> Run[Operation]:
    """When each operation of ``chunks`` begins and ends: r dispatches, r computations, r combines."""
    count = len(chunks)
    # A chunk's number stands where bytes would.
    listed = [Operation(Kind.ALL_TO_ALL, 0, chunk, ()) for chunk in range(count)]
    listed += [Operation(Kind.EXPERT, 1, chunk, (chunk,)) for chunk in range(count)]
    listed += [Operation(Kind.ALL_TO_ALL, 2, chunk, (count + chunk,)) for chunk in range(count)]
    return simulate(listed, lambda operation: chunks[operation.nbytes][operation.position])


def exhaustive_degree(costs: ChunkCosts, work: LayerPass, *, most: int) -> Degree:
    """The best of 1..``most``, each simulated; of equal ones the smallest. ``wanted`` is no more than that."""
    times = [simulate_chunks(equal_chunks(costs, work, r)).seconds for r in range(1, most + 1)]
    limit = min(times) * (1 + _EQUAL)
    best = next(r for r, spent in enumerate(times, start=1) if spent <= limit)
    return Degree(best, times[best - 1], best)


# Drawn cases ------------------------------------------------------------------------------------------------


def search(cases: int, *, seed: int = 0) -> dict[str, Any]:
    """``cases`` drawn cases of 1 to 12 chunks at most. ``disagreements_count``: our r is not as good as the best simulated
    one, ties aside; ``algorithm_1_worse_count``: Algorithm 1's r is not as good as ours.
    """
    draw = random.Random(seed)
    wrong = ties = worse = 0
    largest, worst = 0.0, 1.0
    degrees: Counter[int] = Counter()
    for _ in range(cases):
        costs, work, most = _costs(draw), _work(draw), draw.randint(1, _MOST_DRAWN)
        exact, found = best_degree(costs, work, most=most), exhaustive_degree(costs, work, most=most)
        difference = abs(exact.seconds / found.seconds - 1)
        largest = max(largest, difference)
        wrong += difference > _EQUAL
        ties += difference <= _EQUAL and exact.degree != found.degree
        degrees[exact.degree] += 1
        seconds = partial(pass_seconds, costs, work)
        ratio = seconds(min(algorithm_1(costs, work, seconds=seconds), most)) / exact.seconds
        worse += ratio > 1 + _EQUAL
        worst = max(worst, ratio)
    return {
        "cases_count": cases,
        "disagreements_count": wrong,
        "ties_count": ties,
        "largest_difference_ratio": largest,
        "algorithm_1_worse_count": worse,
        "algorithm_1_worst_ratio": worst,
        "best_degrees_count": dict(sorted(degrees.items())),
    }


def _costs(draw: random.Random) -> ChunkCosts:
    """Starts of 1 us to 10 ms, 100 MB/s to 100 GB/s, 10 GFLOP/s to 1 PFLOP/s; one start in ten costs nothing."""

    def power(low: float, high: float) -> float:
        return float(10 ** draw.uniform(low, high))

    def start() -> float:
        return 0.0 if draw.random() < 0.1 else power(-6, -2)

    return ChunkCosts(start(), power(-11, -8), start(), power(-15, -10))


def _work(draw: random.Random) -> LayerPass:
    """In one of two cases both ways have the same bytes, as in a forward pass."""
    there = Share(draw.randint(1, 3), 10 ** draw.uniform(4, 8))
    back = there if draw.random() < 0.5 else Share(draw.randint(1, 3), 10 ** draw.uniform(4, 8))
    return LayerPass(there, Share(draw.randint(1, 3), 10 ** draw.uniform(8, 12)), back)


def main() -> None:
    found = search(options(__doc__, cases=100_000).cases)
    OUTPUT.line(
        f"{found['cases_count']:,} drawn cases: the exact solver and exhaustive simulation disagree in "
        f"{found['disagreements_count']}; exact ties: {found['ties_count']}; times differ by at most "
        f"{found['largest_difference_ratio']:.1e}"
    )
    OUTPUT.line(
        f"Algorithm 1 as printed is not as good in {found['algorithm_1_worse_count']:,} of them, at worst "
        f"{found['algorithm_1_worst_ratio']:.2f} x the best"
    )
    saved = {gpus: table6(gpus) for gpus in ALL_TO_ALL}
    printed = {gpus: dict(zip(saved[gpus], TABLE6[gpus], strict=False)) for gpus in saved}
    rows = [
        {"GPUs": gpus, **{name: f"{mean:.1%} ({highest:.1%})" for name, (mean, highest) in each.items()}}
        for gpus in saved
        for each in (saved[gpus], printed[gpus])
    ]
    title = "what AUTO saves of the time of Table IV's layers: mean (highest); below, the paper's Table VI"
    table(title, rows, *rows[0])
    found["saved_ratio"] = saved
    finish(found, ["the exact solver is not exact"] if found["disagreements_count"] else [])


if __name__ == "__main__":
    start(main)
