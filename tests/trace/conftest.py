"""Traces to write and read."""

import numpy as np
import pytest

from tierstore.trace.files import TraceWriter
from tierstore.trace.format import EventColumns, TraceHeader, TraceKind, TraceRecord


@pytest.fixture
def header():
    return TraceHeader(
        8, policy="lru", records=(TraceRecord(0, (1, 0, 0), (10, 0, 0), 1),) * 3, origin="a test"
    )


@pytest.fixture
def small(tmp_path, header):
    """An access to records 0 and 2 in step 4, and the step's end."""
    path = tmp_path / "small.trace"
    with TraceWriter(path, header) as writer:
        writer.event(
            TraceKind.ACCESS,
            step=4,
            phase=1,
            layer=0,
            records=np.array([0, 2], np.uint32),
            flags=np.array([1, 9], np.uint16),
        )
        writer.event(TraceKind.END_STEP, step=4)
    return path


@pytest.fixture
def columns():
    """Thousands of events of 0 to 4 units with values all over."""
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 5, 5000)
    return EventColumns.build(
        counts,
        rng.integers(0, 2**32, counts.sum(), dtype=np.uint32),
        kinds=rng.integers(0, 11, 5000),
        phases=rng.integers(0, 2, 5000),
        layers=rng.integers(0, 2**16, 5000),
        at=rng.integers(0, 9, 5000),
        steps=np.arange(5000) // 7,
        flags=rng.integers(0, 2**9, counts.sum()),
    )
