"""Choosing block size and depth: by hand, by its definition, and on a real file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.bench.io.load import DataFiles
from tierstore.bench.io.search import FINALISTS, GridPoint, choose, grid, search
from tierstore.bench.io.series import Coverage, IoBench
from tierstore.capabilities import Capability
from tierstore.store.config import IoBackendName

MIB = 1 << 20
CANDIDATES = st.builds(
    GridPoint,
    block_bytes=st.integers(1, 64).map(lambda n: n * 4096),
    depth=st.integers(1, 64),
    reads=st.lists(st.floats(0.5, 2), min_size=1, max_size=3),
    writes=st.lists(st.floats(0.5, 2), min_size=1, max_size=3),
)


def candidate(block: int, depth: int, read: float, write: float) -> GridPoint:
    return GridPoint(block_bytes=block, depth=depth, reads=[read], writes=[write])


def test_a_byte_read_and_a_byte_written() -> None:
    """Read at 3, written at 1: two bytes in 1/3 + 1 seconds are 1.5 a second. The middle round counts."""
    assert candidate(4096, 1, 3, 1).bytes_per_s == pytest.approx(1.5)
    several = GridPoint(block_bytes=4096, depth=1, reads=[9, 3, 1], writes=[1, 1, 7])
    assert several.bytes_per_s == pytest.approx(1.5)


def test_little_in_flight_wins_among_the_near() -> None:
    """Best is 100. 98 is near (97 or more) and holds 8 MiB instead of 32; 96 holds less still and is not near."""
    fast, near, slow = candidate(MIB, 32, 100, 100), candidate(MIB, 8, 98, 98), candidate(MIB, 4, 96, 96)
    assert choose([fast, near, slow]) is near
    large, small = candidate(4 * MIB, 2, 99, 99), candidate(MIB, 8, 99, 99)
    assert choose([small, large]) is large  # of as many bytes, fewer transfers


@settings(deadline=None, max_examples=60)
@given(st.lists(CANDIDATES, min_size=1, max_size=8))
def test_the_definition(candidates: list[GridPoint]) -> None:
    chosen = choose(candidates)
    best = max(one.bytes_per_s for one in candidates)
    assert chosen.bytes_per_s >= 0.97 * best
    for other in candidates:
        if other.in_flight_bytes < chosen.in_flight_bytes:
            assert other.bytes_per_s < 0.97 * best


def test_a_search(tmp_path: Path) -> None:
    bench = IoBench(
        directories=(tmp_path,),
        size=8 * MIB,
        rounds=2,
        direct=Capability.OFF,
        backends=(IoBackendName.THREADS,),
    )
    ticks: list[None] = []
    with closing(DataFiles(bench.directories, bench.size)) as files:
        found = search(bench, files.striped, seconds=0.005, tick=lambda: ticks.append(None))
    points = len(grid(bench))
    assert len(found.tried) == points
    assert len(ticks) == 2 * (points + FINALISTS)
    assert sum(one.rounds_count == 2 for one in found.tried) == FINALISTS
    assert found.best.rounds_count == 2
    point = found.point()
    assert (point.chunk_bytes, point.queue_depth) == (found.best.block_bytes, found.best.depth)
    assert point.read_bytes_per_s > 0 < point.write_bytes_per_s


def test_the_full_grid_is_affordable() -> None:
    points = grid(IoBench(coverage=Coverage.FULL, size=512 * MIB))
    assert all(point.in_flight_bytes <= 128 * MIB for point in points)
    assert {64 << 10, 32 * MIB} <= {point.block_bytes for point in points}
    assert len({(point.block_bytes, point.depth) for point in points}) == len(points)
