"""Chunks simulated event by event: by hand, and against the closed form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipemoe_solvers import equal_chunks, exhaustive_degree, search, simulate_chunks

from tierstore.parallel.chunk_degree import ChunkCosts, LayerPass, Share, best_degree, pass_seconds

TIMES = st.floats(0, 10)
SHARES = st.builds(Share, st.integers(1, 3), st.floats(0, 100))


def test_two_chunks_by_hand() -> None:
    """Dispatches 0-2, 2-4; experts 2-5, 5-8; combines 5-7, 8-10."""
    run = simulate_chunks([(2, 3, 2)] * 2)
    assert list(zip(run.begun, run.ended, strict=True)) == [(0, 2), (2, 4), (2, 5), (5, 8), (5, 7), (8, 10)]


def test_unequal_chunks_by_hand() -> None:
    """Dispatches 0-1, 1-4; experts 1-2, 4-9; the first combine waits for the network until 4."""
    run = simulate_chunks([(1, 1, 1), (3, 5, 3)])
    assert list(zip(run.begun, run.ended, strict=True)) == [(0, 1), (1, 4), (1, 2), (4, 9), (4, 5), (9, 12)]
    assert run.seconds == 12


@given(
    st.builds(ChunkCosts, TIMES, TIMES, TIMES, TIMES),
    st.builds(LayerPass, SHARES, SHARES, SHARES),
    st.integers(1, 12),
)
def test_closed_form(costs: ChunkCosts, work: LayerPass, degree: int) -> None:
    simulated = simulate_chunks(equal_chunks(costs, work, degree)).seconds
    assert pass_seconds(costs, work, degree) == pytest.approx(simulated, rel=1e-12, abs=1e-12)


@given(
    st.builds(ChunkCosts, TIMES, TIMES, TIMES, TIMES),
    st.builds(LayerPass, SHARES, SHARES, SHARES),
    st.integers(1, 10),
)
def test_exact_is_exhaustive(costs: ChunkCosts, work: LayerPass, most: int) -> None:
    exact, found = best_degree(costs, work, most=most), exhaustive_degree(costs, work, most=most)
    assert exact.seconds == pytest.approx(found.seconds, rel=1e-12, abs=1e-12)


def test_drawn_cases() -> None:
    found = search(2000, seed=7)
    assert (found["cases_count"], found["disagreements_count"]) == (2000, 0)
    assert sum(found["best_degrees_count"].values()) == 2000
    assert found["largest_difference_ratio"] < 1e-12
    assert found["algorithm_1_worse_count"] > 0
