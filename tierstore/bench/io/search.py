"""The block size and depth at which a disk moves the most bytes, for stores to use (docs/BENCH.md).

Of points near the best the one with the fewest bytes in flight wins: it asks for less memory, and what is urgent waits less
behind it. Depths below 4 are measured but not chosen: a store also compares checksums between transfers, and with fewer in
flight the disk would wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tierstore.bench.io.load import FileSet, Load, TransferKind
from tierstore.bench.io.series import Coverage, IoBench
from tierstore.bench.results.figures import Figures
from tierstore.io_profile import IoPoint
from tierstore.stats import percentile

FINALISTS = 4
_NEAR = 0.97
_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = {
    Coverage.QUICK: (256 * _KIB, _MIB, 4 * _MIB),
    Coverage.FULL: tuple(64 * _KIB << shift for shift in range(0, 10)),  # .. 32 MiB
}
_DEPTHS = {Coverage.QUICK: (4, 8, 32), Coverage.FULL: (1, 2, 4, 8, 16, 32, 64)}
_LEAST_DEPTH = 4
_STORE_IN_FLIGHT = 128 * _MIB  # more than this a store should not have under way


@dataclass(frozen=True, kw_only=True)
class GridPointFigures(Figures):
    """A point's medians."""

    block_bytes: int
    depth: int
    rounds_count: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(kw_only=True)
class GridPoint:
    """A block size and a depth, and what they reached in each round (bytes per second)."""

    block_bytes: int
    depth: int
    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    @property
    def in_flight_bytes(self) -> int:
        return self.block_bytes * self.depth

    @property
    def bytes_per_s(self) -> float:
        """Of as many bytes read as written, by the medians."""
        return 2 / (1 / percentile(self.reads, 50) + 1 / percentile(self.writes, 50))

    def figures(self) -> GridPointFigures:
        return GridPointFigures(
            block_bytes=self.block_bytes,
            depth=self.depth,
            rounds_count=len(self.reads),
            read_bytes_per_s=percentile(self.reads, 50),
            write_bytes_per_s=percentile(self.writes, 50),
        )


@dataclass(frozen=True, kw_only=True)
class Found(Figures):
    """Of one directory: the best point, and all that were tried."""

    best: GridPointFigures
    tried: Sequence[GridPointFigures]

    def point(self) -> IoPoint:
        return IoPoint(
            chunk_bytes=self.best.block_bytes,
            queue_depth=self.best.depth,
            read_bytes_per_s=self.best.read_bytes_per_s,
            write_bytes_per_s=self.best.write_bytes_per_s,
            measured=datetime.now(UTC).date().isoformat(),
        )


def grid(bench: IoBench) -> list[GridPoint]:
    """The points to try: a store can afford their bytes in flight, and the file is large enough."""
    return [
        GridPoint(block_bytes=block, depth=depth)
        for block in _BLOCKS[bench.coverage]
        for depth in _DEPTHS[bench.coverage]
        if block * depth <= min(_STORE_IN_FLIGHT, bench.size)
    ]


def choose(points: Sequence[GridPoint]) -> GridPoint:
    """Of those near the best the one with the fewest bytes in flight; of equals the one with the larger blocks."""
    best = max(point.bytes_per_s for point in points)
    near = [point for point in points if point.bytes_per_s >= _NEAR * best]
    return min(near, key=lambda point: (point.in_flight_bytes, point.depth))


def search(
    bench: IoBench, files: FileSet, *, seconds: float, tick: Callable[[], None] = lambda: None
) -> Found:
    """Tries the grid with the first of the bench's backends. Raises OSError."""
    points = grid(bench)
    for point in points:
        _measure(bench, point, files, seconds, tick)
    deep = [point for point in points if point.depth >= _LEAST_DEPTH]
    finalists = sorted(deep, key=lambda point: -point.bytes_per_s)[:FINALISTS]
    for number in range(bench.rounds - 1):
        for point in finalists if number % 2 == 0 else reversed(finalists):
            _measure(bench, point, files, seconds, tick)
    return Found(best=choose(finalists).figures(), tried=[point.figures() for point in points])


def _measure(
    bench: IoBench, point: GridPoint, files: FileSet, seconds: float, tick: Callable[[], None]
) -> None:
    for kind, found in ((TransferKind.READ, point.reads), (TransferKind.WRITE, point.writes)):
        job = bench.job(kind, point.block_bytes, point.depth)
        with contextlib.closing(Load(job, files)) as load:
            found.append(load.run(seconds).bytes_per_s)
        tick()
