"""Algorithm 1 as printed, over the layers of the paper's own evaluation."""

from collections import Counter
from functools import cache, partial

import pytest
from effort import THOROUGH, share
from pipemoe_solvers import PaperLayer, Problem, Solution, algorithm_1, solve_exactly, table4, table6

from tierstore.parallel.chunk_degree import ChunkCosts, best_degree, forward_pass, pass_seconds


@cache
def _best(layer: PaperLayer) -> int:
    return best_degree(layer.costs, layer.forward, most=200).degree


def _regret(layer: PaperLayer, degree: int) -> float:
    """By how much more than the best ``degree`` takes."""
    best = pass_seconds(layer.costs, layer.forward, _best(layer))
    return pass_seconds(layer.costs, layer.forward, degree) / best - 1


def _slsqp(problem: Problem) -> Solution:
    """The paper's solver, from r = 2, in ms; its answer is taken whether or not it converged."""
    optimize = pytest.importorskip("scipy.optimize")
    found = optimize.minimize(
        lambda r: problem.objective(r[0]) * 1e3,
        [2.0],
        method="SLSQP",
        bounds=[(2, None)],
        constraints=[
            {"type": "ineq", "fun": lambda r, least=least: least(r[0]) * 1e3} for least in problem.constraints
        ],
    )
    return Solution(float(found.x[0]), float(found.fun) / 1e3)


def test_best_of_table_4() -> None:
    layers = list(table4())
    assert len(layers) == 864
    found = Counter(map(_best, layers))
    assert {r: found[r] for r in (1, 2, 3)} == {1: 49, 2: 541, 3: 88}


def test_table_6_by_the_model() -> None:
    """One expert of a GPU, by hand: 2 x 512 tokens to two experts each, 2,048 rows of 1,024 elements. On 16 GPUs an
    all-to-all takes .0172 + .621 ms, and 2,048 x 1,024 x 1,024 operations .1238 + .176 ms, backward twice that. In one
    chunk 1.576 and 1.876 ms; in two the network decides forward, 1.311 ms, and the device backward, 1.503; in three 1.543.
    """
    layer = PaperLayer(16, 2, 512, 1024, 1024, 1)
    forward, backward = (partial(pass_seconds, *one) for one in layer.passes)
    assert (forward(1), backward(1)) == pytest.approx((1.576e-3, 1.876e-3), abs=1e-6)
    assert (forward(2), backward(2)) == pytest.approx((1.311e-3, 1.503e-3), abs=1e-6)
    assert backward(3) == pytest.approx(1.543e-3, abs=1e-6)
    assert layer.auto_s(1) == forward(1) + backward(1)
    assert layer.auto_s(16) == forward(2) + backward(2)
    means = {gpus: [mean for mean, _ in table6(gpus).values()] for gpus in (16, 32, 64)}
    assert means[16] == pytest.approx([0.280, 0.077, 0.021, 0.021, 0.178], abs=5e-4)
    assert means[32] == pytest.approx([0.254, 0.059, 0.045, 0.085, 0.155], abs=5e-4)
    assert means[64] == pytest.approx([0.198, 0.042, 0.090, 0.218, 0.112], abs=5e-4)


@pytest.mark.slow
def test_as_printed_with_slsqp() -> None:
    """In .ci/run of all layers, otherwise of every fifth."""
    every = THOROUGH // share(THOROUGH)
    regrets = [
        _regret(layer, algorithm_1(layer.costs, layer.forward, seconds=_seconds(layer), solve=_slsqp))
        for layer in [*table4()][::every]
    ]
    worse, worst = {1: (172, 0.393), 5: (34, 0.374)}[every]
    assert sum(regret > 1e-9 for regret in regrets) == worse
    assert max(regrets) == pytest.approx(worst, abs=5e-4)


def test_as_printed_with_its_constraints_kept() -> None:
    """Most by line 5, which finds r = 1 too cheap; the worst by Eq. 27, where an all-to-all starts faster."""
    chosen = {
        layer: algorithm_1(layer.costs, layer.forward, seconds=_seconds(layer), solve=solve_exactly)
        for layer in table4()
    }
    wrong = {layer: r for layer, r in chosen.items() if _regret(layer, r) > 1e-9}
    assert len(wrong) == 533
    assert sum(r == 1 for r in wrong.values()) == 322
    worst = max(wrong, key=lambda layer: _regret(layer, wrong[layer]))
    assert (worst.gpus, wrong[worst]) == (16, 2)
    assert _regret(worst, wrong[worst]) == pytest.approx(0.393, abs=5e-4)


def _seconds(layer: PaperLayer) -> partial[float]:
    return partial(pass_seconds, layer.costs, layer.forward)


def test_the_papers_own_misprediction() -> None:
    """(B, L, M, H, E/P) = (2, 2048, 8192, 4096, 2) on 64 GPUs: r = 2 predicted, 289 ms; r = 8 measured, 253 ms (.875).

    With k E/P = 8 rows a token, forward alone says 2. The backward pass computes twice as much: both together are faster
    with 8.
    """
    layer = PaperLayer(64, 2, 2048, 4096, 8192, 2, top_k=4)
    forward = layer.forward
    backward = forward_pass(forward.dispatch.amount, 2 * forward.experts.amount)
    twice = ChunkCosts(layer.costs.alpha_a, layer.costs.beta_a, 2 * layer.costs.alpha_e, layer.costs.beta_e)
    both = {r: pass_seconds(layer.costs, forward, r) + pass_seconds(twice, backward, r) for r in (2, 8)}
    assert best_degree(layer.costs, forward, most=8).degree == 2
    assert both[2] * 1e3 == pytest.approx(494.8, abs=0.05)
    assert both[8] * 1e3 == pytest.approx(437.4, abs=0.05)
    assert both[8] / both[2] == pytest.approx(0.884, abs=5e-4)
    alone = best_degree(twice, backward, most=8)
    assert alone.degree == 7  # and each with its own takes less than either
    assert pass_seconds(layer.costs, forward, 2) + alone.seconds < both[8]


def test_line_6_by_hand() -> None:
    """Starts of 1 and 2 s, 10 and 13 s in all. Q1, 1 + 10 / r >= 2 + 13 / r, holds for no r, yet line 6 gives max(2, -3) and
    t_2 = 24 s, which r = 2 does not reach: it takes 2 + 10 + 4 + 13 = 29 s, and r = 3 takes 2 + 20 / 3 + 6 + 13.
    """
    costs = ChunkCosts(1.0, 1.0, 2.0, 1.0)
    work = forward_pass(10.0, 13.0)
    assert algorithm_1(costs, work, seconds=partial(pass_seconds, costs, work)) == 2
    best = best_degree(costs, work, most=8)
    assert best.degree == 3
    assert best.seconds == pytest.approx(21 + 20 / 3)


def test_exact_solver_of_constraints() -> None:
    assert solve_exactly(Problem(lambda r: (r - 5) ** 2, (lambda r: 4 - r,))) == Solution(4, 1)
    assert solve_exactly(Problem(lambda r: r, (lambda r: 1 - r,))).seconds == float("inf")
