"""PipeMoE's Algorithm 1 as printed (sections III and IV), errors included: what a plan compares the exact solver with.

Where the paper contradicts itself, or is wrong:

- line 5 has ``t_1 = 2 (alpha_e + beta_e n_e) + alpha_a + beta_a n_d``: two computations and one all-to-all. Eq. 19 has
  two all-to-alls and one computation, and is right;
- line 6 divides by ``alpha_e - alpha_e``, which is 0; Eq. 28, which it means, by ``alpha_a - alpha_e``;
- Eq. 27 divides Eq. 26 by ``alpha_a - alpha_e`` without a case for ``alpha_a < alpha_e``, where the inequality turns round:
  Q1 then holds up to that r, not from it on (so on the paper's 16 GPUs);
- Eq. 9 to 12 let combines run beside dispatches, which share the network; the text before them forbids it;
- Eq. 29 leaves out two all-to-alls of each kind, Eq. 30 one;
- lines 2 and 3 multiply by E / P, the experts of a rank, though B L k rows are what a rank computes already. The paper's
  figures follow from it, so ``PaperLayer`` keeps it;
- ``solve`` gives a real r. The better of the whole numbers beside it is taken here.

Line 6 is taken as Eq. 28, all else as printed. ``solve`` is an argument: the paper's is SLSQP, whose answer depends on
where it starts and may break the constraints; ``solve_exactly`` finds the best whole r that keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tierstore.parallel.pipeline_degree import LayerPass, PipelineCosts, forward_pass

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
    costs: PipelineCosts,
    work: LayerPass,
    *,
    seconds: Callable[[int], float],
    solve: Callable[[Problem], Solution] = solve_exactly,
) -> int:
    """The r of Algorithm 1 for a pass whose dispatch and combine are alike (of others, their mean).

    ``seconds``: what a pass in r chunks takes, which chooses between the whole numbers beside a real r.
    """
    a, ae = (
        costs.alpha_a * (work.dispatch.starts + work.combine.starts) / 2,
        costs.alpha_e * work.experts.starts,
    )
    bn = costs.beta_a * (work.dispatch.amount + work.combine.amount) / 2
    w = costs.beta_e * work.experts.amount
    t1 = 2 * (ae + w) + a + bn  # line 5
    r2 = _line_6(a, bn, ae, w)
    t2 = 2 * r2 * a + 2 * bn

    def computes_longer(r: float) -> float:  # Q1 does not hold: Eq. 35 and 42
        return ae + w / r - a - bn / r

    def hides_all_but_one(r: float) -> float:  # Q2, Eq. 36
        return r * ae + w - 2 * (r - 1) * (a + bn / r)

    third = solve(Problem(lambda r: 2 * a + w + 2 * bn / r + ae * r, (computes_longer, hides_all_but_one)))
    fourth = solve(Problem(lambda r: 2 * a * r + 2 * bn, (computes_longer, lambda r: -hides_all_but_one(r))))
    best = min(Solution(r2, t2), third, fourth, key=lambda found: found.seconds)
    return 1 if best.seconds >= t1 else min(_beside(best.degree), key=seconds)


def _line_6(a: float, bn: float, ae: float, w: float) -> float:
    """Eq. 28. Where the starts are equal Q1 holds for every r or for none."""
    return 2.0 if a == ae else max(2.0, math.ceil((w - bn) / (a - ae)))


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
    def costs(self) -> PipelineCosts:
        """Fig. 6's."""
        return PipelineCosts(*ALL_TO_ALL[self.gpus], 2 * GEMM[0], 2 * GEMM[1])

    @property
    def forward(self) -> LayerPass:
        """Lines 1 to 3; amounts are elements."""
        rows = self.batch * self.length * self.local * self.top_k
        return forward_pass(rows * self.width, rows * self.width * self.hidden)


def table4() -> Iterator[PaperLayer]:
    """The 864 combinations of Table IV, two experts a token: 3 P x 3 B x 3 L x 4 H x 4 M x 2 E/P."""
    sizes = (1024, 2048, 4096, 8192)
    for gpus in ALL_TO_ALL:
        for batch in (2, 4, 8):
            for length in (512, 1024, 2048):
                for hidden in sizes:
                    for width in sizes:
                        for local in (1, 2):
                            yield PaperLayer(gpus, batch, length, hidden, width, local)
