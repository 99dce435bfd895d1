"""Whose turn it is, and how shares follow what drives give."""

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.store.disk.drives import BandwidthEstimator, WeightedRoundRobin, apportion

MB = 1 << 20
WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)


def test_turns_are_spread_out() -> None:
    """Weights 5, 1, 1, by hand: a a b a c a a, and again."""
    turns = WeightedRoundRobin(3)
    taken = [turns.next((5, 1, 1), range(3)) for _ in range(14)]
    assert taken == [0, 0, 1, 0, 2, 0, 0] * 2


def test_equal_drives_take_turns_and_a_full_one_is_passed_over() -> None:
    turns = WeightedRoundRobin(3)
    assert [turns.next((1, 1, 1), range(3)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [turns.next((1, 1, 1), (0, 2)) for _ in range(4)] == [0, 2, 0, 2]


@settings(max_examples=share(60))
@given(WEIGHTS, st.integers(1, 300))
def test_any_number_of_turns_is_shared_by_weight(weights: list[float], count: int) -> None:
    turns = WeightedRoundRobin(len(weights))
    taken = [turns.next(weights, range(len(weights))) for _ in range(count)]
    for number, weight in enumerate(weights):
        assert abs(taken.count(number) - count * weight / sum(weights)) < len(weights)


@settings(max_examples=share(60))
@given(WEIGHTS, st.integers(0, 10**6))
def test_apportioned_parts_add_up_and_are_off_by_less_than_one(weights: list[float], total: int) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6


def test_apportioning_by_hand() -> None:
    assert apportion(10, (1, 1, 1)) == [4, 3, 3]
    assert apportion(7, (0.5, 0.25, 0.25)) == [3, 2, 2]  # 3.5, 1.75, 1.75: the larger remainders first


def test_shares_follow_bandwidth() -> None:
    estimator = BandwidthEstimator([0, 0])
    assert estimator.shares == [0.5, 0.5]
    estimator.observe([(300 * MB, 1.0), (100 * MB, 1.0)])
    assert estimator.bandwidths == [300 * MB, 100 * MB]
    assert estimator.shares == [0.75, 0.25]


def test_a_drive_that_slows_down_gets_less_at_once_and_its_due_in_a_few_commits() -> None:
    estimator = BandwidthEstimator([400 * MB, 400 * MB])
    shares = []
    for _ in range(8):
        estimator.observe([(400 * MB, 1.0), (100 * MB, 1.0)])
        shares.append(estimator.shares[1])
    # A quarter at once counts as half: 200 of 600.
    assert shares[0] == pytest.approx(1 / 3)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(0.2, rel=0.15)


def test_one_hiccup_is_forgotten() -> None:
    estimator = BandwidthEstimator([400 * MB, 400 * MB])
    estimator.observe([(400 * MB, 1.0), (400 * MB, 1000.0)])
    assert estimator.shares[1] == pytest.approx(1 / 3)
    for _ in range(6):
        estimator.observe([(400 * MB, 1.0), (400 * MB, 1.0)])
    assert estimator.shares[1] == pytest.approx(0.5, rel=0.1)


def test_noise_and_little_traffic_change_nothing() -> None:
    estimator = BandwidthEstimator([100 * MB, 100 * MB])
    estimator.observe([(100 * MB, 1.0), (90 * MB, 1.0)])
    assert estimator.shares == [0.5, 0.5]
    for _ in range(3):
        estimator.observe([(100 * MB, 1.0), (MB, 10.0)])
    assert estimator.bandwidths[1] == pytest.approx(100 * MB * 0.9**0.5)
    estimator.observe([(0, 0.0), (MB, 10.0)])  # the fourth: enough to count
    assert estimator.shares[1] < 0.4


def test_no_drive_is_starved_and_a_new_one_counts_as_the_mean() -> None:
    assert BandwidthEstimator([1e9, 1.0]).shares[1] == pytest.approx(1 / 32, rel=0.05)
    assert BandwidthEstimator([100.0, 300.0, 0.0]).shares == pytest.approx([1 / 6, 1 / 2, 1 / 3])


def test_fixed_weights_hold() -> None:
    estimator = BandwidthEstimator([0, 0], (3, 1))
    estimator.observe([(MB * 10, 1.0), (MB * 100, 1.0)])
    assert estimator.shares == [0.75, 0.25]
    assert estimator.bandwidths == [10 * MB, 100 * MB]
