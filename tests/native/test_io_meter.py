"""What a drive's meter counts: bytes, and the length of the union of the transfers' times."""

import os
from pathlib import Path

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native as native


def test_overlapping_transfers_count_once() -> None:
    meter = native.Meter()
    meter.add(10, 0, 100, 200)
    meter.add(0, 5, 150, 250)
    meter.add(1, 0, 400, 500)
    assert meter.reading() == (11, 5, pytest.approx(250e-9))
    meter.add(0, 0, 50, 450)  # a long one, reported last, bridges the gap
    assert meter.reading() == (11, 5, pytest.approx(450e-9))


@settings(max_examples=share(60))
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=40))
def test_busy_time_is_the_union(transfers: list[tuple[int, int]]) -> None:
    """Oracle: a set of nanoseconds; in any order of reporting."""
    meter, busy = native.Meter(), set()
    for start, length in transfers:
        meter.add(0, 1, start, start + length)
        busy |= set(range(start, start + length))
    read, written, seconds = meter.reading()
    assert (read, written) == (0, len(transfers))
    assert round(seconds * 1e9) == len(busy)


@pytest.mark.parametrize("backend", [native.IoBackend.THREADS, native.IoBackend.AUTO])
def test_the_engine_counts_its_transfers(tmp_path: Path, backend: native.IoBackend) -> None:
    size, meter = 1 << 16, native.Meter()
    arena = native.Arena(size, native.HugePages.OFF)
    arena.view()[:] = np.frombuffer(os.urandom(size), np.uint8)
    section = native.Buffer(arena, [(0, size)], size)
    counted = native.File(tmp_path / "counted", create=native.FileCreate.YES, meter=meter)
    other = native.File(tmp_path / "other", create=native.FileCreate.YES)
    with native.Engine(backend=backend) as engine, counted, other:
        written = [engine.write(file, 0, [section]) for file in (counted, other)]
        synced = engine.sync(counted, after=written)
        engine.wait_all([engine.read(counted, 0, [section], after=[synced]), synced])
    read, wrote, busy_s = meter.reading()
    assert (read, wrote) == (size, size)
    assert busy_s > 0


@pytest.mark.parametrize("backend", [native.IoBackend.THREADS, native.IoBackend.AUTO])
def test_holes_are_no_work_of_the_drive(tmp_path: Path, backend: native.IoBackend) -> None:
    """They move no bytes: counted as time they would make it look slow."""
    meter = native.Meter()
    counted = native.File(tmp_path / "counted", create=native.FileCreate.YES, meter=meter)
    with native.Engine(backend=backend) as engine, counted:
        counted.allocate(0, 1 << 20)
        engine.wait(engine.punch(counted, 0, 1 << 19))
    assert meter.reading() == (0, 0, 0.0)
