"""Intervals that hold what they should as often as they say, and notice that neighbours are alike."""

import numpy as np
import pytest
from scipy import stats

from tierstore.lab.bootstrap import block_length, paired_interval, student_quantile


def test_by_hand():
    found = paired_interval([1, 2, 3, 4, 5, 6], [10] * 6)
    assert found.estimate == pytest.approx(21 / 60)
    assert found.low <= found.estimate <= found.high
    constant = paired_interval([2] * 40, [10] * 40)
    assert (constant.low, constant.estimate, constant.high) == pytest.approx((0.2, 0.2, 0.2))
    assert not constant.holds_zero


def test_few_steps_say_nothing():
    found = paired_interval([5] * 5, [10] * 5)
    assert (found.low, found.high, found.blocks) == (-np.inf, np.inf, 0)
    assert found.holds_zero


def test_few_blocks_say_nothing():
    found = paired_interval(np.random.default_rng(0).normal(9, 1, 12), np.ones(12))
    assert (found.low, found.high, found.blocks) == (-np.inf, np.inf, 4)


def autoregression(rng, steps, rho):
    """``steps`` of mean 0, each ``rho`` times the one before it and noise."""
    series = rng.normal(size=steps)
    for step in range(1, steps):
        series[step] += rho * series[step - 1]
    return series


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("steps", [12, 24, 50, 400])
def test_nothing_is_rarely_taken_for_a_difference(steps, rho):
    rng = np.random.default_rng(0)
    wrong = sum(
        not paired_interval(autoregression(rng, steps, rho), np.ones(steps), resamples=300).holds_zero
        for _ in range(300)
    )
    assert wrong / 300 <= 0.12  # 5% is meant; two standard errors of the test are 3%


@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
def test_student_s_quantile(probability):
    freedom = np.arange(7, 200)
    found = [student_quantile(probability, int(n)) for n in freedom]
    np.testing.assert_allclose(found, stats.t.ppf(probability, freedom), rtol=3e-4)


def test_equal_replays_are_a_tie():
    found = paired_interval(np.zeros(100), np.full(100, 7))
    assert (found.estimate, found.low, found.high) == (0, 0, 0)
    assert found.holds_zero


def test_independent_steps_have_the_normal_interval():
    values = np.random.default_rng(3).normal(1, 2, 400)
    found = paired_interval(values, np.ones(400))
    error = values.std(ddof=1) / np.sqrt(400)
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.5 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.5 * error)


def test_it_covers_the_truth_of_correlated_steps():
    # First-order autoregression, true mean 0: single steps as the sample would cover about 60%.
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        noise = rng.normal(size=1200)
        series = np.empty(1200)
        level = 0.0
        for i, step in enumerate(noise):
            level = 0.8 * level + step
            series[i] = level
        held += paired_interval(series[200:], np.ones(1000), resamples=400).holds_zero
    assert held >= 86


def test_blocks_are_longer_where_neighbours_are_alike():
    rng = np.random.default_rng(1)
    white = rng.normal(size=1000)
    assert block_length(white) <= 12
    assert block_length(np.repeat(white[:50], 20)) >= 20
    assert block_length(np.arange(8.0)) == 2


def test_the_seed_decides():
    values = np.random.default_rng(2).normal(size=200)
    assert paired_interval(values, np.ones(200), seed=1) == paired_interval(values, np.ones(200), seed=1)
    assert paired_interval(values, np.ones(200), seed=1) != paired_interval(values, np.ones(200), seed=2)


def test_long_series_are_summed_first():
    values = np.random.default_rng(2).normal(1, 1, size=100_000)
    found = paired_interval(values, np.ones(100_000))
    assert found.estimate == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 / np.sqrt(100_000), rel=0.2)
