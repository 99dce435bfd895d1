"""Latency histograms: a worked example, and any durations against sorting them."""

import math

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.bench.probes import Latencies

DURATIONS = st.lists(st.integers(0, 2**62), min_size=1, max_size=60)


def test_a_worked_example() -> None:
    """Nine of 100 ns, which has a bucket of its own; one of 1000 ns.

    1000 has 10 bits, and is kept to its upper 8: 1000 >> 2 = 250, the bucket 1000..1003.
    """
    found = Latencies()
    found.add([100] * 9)
    found.add([1000])
    assert found.count == 10
    assert found.percentile_ns(50) == 100
    assert found.percentile_ns(90) == 100  # rank 9
    assert (
        found.percentile_ns(90.1) == 1000
    )  # rank 10: the bucket's top is 1003, but nothing was longer than 1000
    found.add([1002])
    assert found.percentile_ns(85) == 1002
    assert found.summary()["greatest_s"] == pytest.approx(1.002e-6)
    assert set(found.summary()) == {"p50_s", "p90_s", "p99_s", "p99.9_s", "greatest_s"}


def test_times_and_merge_are_adding() -> None:
    one, other, all_of_it = Latencies(), Latencies(), Latencies()
    one.add([5, 70_000], times=[3, 1])
    other.add([123_456_789])
    all_of_it.add([5, 5, 5, 70_000, 123_456_789])
    one.merge(other)
    for percent in (0, 20, 50, 60, 80, 99, 100):
        assert one.percentile_ns(percent) == all_of_it.percentile_ns(percent)
    assert one.greatest_ns == 123_456_789


@settings(max_examples=share(200))
@given(DURATIONS, st.floats(0, 100))
def test_within_one_part_in_128_of_the_nearest_rank(durations: list[int], percent: float) -> None:
    found = Latencies()
    found.add(durations)
    rank = max(math.ceil(percent / 100 * len(durations) - 1e-9), 1)
    exact = sorted(durations)[rank - 1]
    assert exact <= found.percentile_ns(percent) <= exact + exact // 128
    assert found.percentile_ns(100) == max(durations) == found.greatest_ns


@pytest.mark.parametrize("shift", range(8, 62))
def test_powers_of_two_begin_a_bucket(shift: int) -> None:
    for value in (2**shift - 1, 2**shift, 2**shift + 1):
        found = Latencies()
        found.add([value, 2**62])
        assert value <= found.percentile_ns(50) <= value + value // 128


def test_bad_input() -> None:
    empty = Latencies()
    assert empty.summary() == {}
    with pytest.raises(ValueError, match="0 durations"):
        empty.percentile_ns(50)
    with pytest.raises(ValueError, match="-1 ns"):
        empty.add([-1])
    empty.add([])
    assert empty.count == 0
