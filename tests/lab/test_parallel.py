"""Jobs in parallel: results in order, the longest first, and an error ends the rest."""

from __future__ import annotations

import threading
import time

import pytest

from tierstore.lab.simulate import in_parallel


def test_results_come_in_the_order_of_jobs():
    assert in_parallel([(1.0, lambda n=n: n * n) for n in range(20)], threads=3) == [n * n for n in range(20)]
    assert in_parallel([], threads=2) == []


def test_the_longest_begins_first():
    begun = []
    times = [1.0, 5.0, 3.0, 5.0]
    in_parallel([(time, lambda n=n: begun.append(n)) for n, time in enumerate(times)], threads=1)
    assert begun == [1, 3, 2, 0]


def test_jobs_run_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    assert in_parallel([(1.0, lambda: both.wait() >= 0)] * 2, threads=2) == [True, True]


def test_progress_and_errors():
    heard = []
    in_parallel([(1.0, int)] * 3, threads=2, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]

    def fail():
        raise KeyError("a job")

    later = []

    def slow():
        time.sleep(0.01)
        later.append(1)

    with pytest.raises(KeyError, match="a job"):
        in_parallel([(2.0, fail), *[(1.0, slow)] * 50], threads=1)
    assert len(later) < 50
