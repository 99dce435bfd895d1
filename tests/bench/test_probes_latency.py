"""Summaries of latencies: an example worked by hand, and none."""

import numpy as np
import pytest

from tierstore.bench.probes import latency_summary


@pytest.mark.parametrize("kind", [list, lambda values: np.array(values, np.float32)])
def test_nearest_ranks_by_hand(kind: type[list[int]]) -> None:
    """A thousand, of 1 to 1000 microseconds: the rank is the percentage, ten times."""
    found = latency_summary(kind([1000 * number for number in range(1000, 0, -1)]))
    ranks = {"p50_s": 500, "p90_s": 900, "p99_s": 990, "p99.9_s": 999, "greatest_s": 1000}
    assert found == pytest.approx({key: rank * 1e-6 for key, rank in ranks.items()})
    assert latency_summary(kind([7])) == dict.fromkeys(ranks, pytest.approx(7e-9))


def test_of_none_there_is_nothing() -> None:
    assert latency_summary([]) == {}
    assert latency_summary(np.empty(0, np.float32)) == {}
