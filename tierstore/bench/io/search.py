"""The block size and depth at which a disk moves the most bytes, for stores to use.

Each point of a grid is measured once; those that did best are measured again in turns. What counts is the time to read a
byte and write one, as training does. Of points within 3% of the best the one with the fewest bytes in flight wins: it asks
for less memory, and what is urgent waits less behind it. Depths below 4 are measured but not chosen: a store also compares
checksums between transfers, and with fewer in flight the disk would wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tierstore.bench.io.load import FileSet, Job, Kind, Load
from tierstore.bench.io.series import Extent, IoBench
from tierstore.io_profile import IoPoint
from tierstore.stats import percentile

__all__ = ["Candidate", "Found", "choose", "grid", "search"]

FINALISTS = 4
_NEAR = 0.97
_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = {
    Extent.QUICK: (256 * _KIB, _MIB, 4 * _MIB),
    Extent.FULL: tuple(64 * _KIB << shift for shift in range(0, 10)),  # .. 32 MiB
}
_DEPTHS = {Extent.QUICK: (4, 8, 32), Extent.FULL: (1, 2, 4, 8, 16, 32, 64)}
_LEAST_DEPTH = 4
_STORE_IN_FLIGHT = 128 * _MIB  # more than this a store should not have under way


@dataclass(kw_only=True)
class Candidate:
    """A point, and what it reached in each round (bytes per second)."""

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

    def as_json(self) -> dict[str, object]:
        return {
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "rounds_count": len(self.reads),
            "read_bytes_per_s": percentile(self.reads, 50),
            "write_bytes_per_s": percentile(self.writes, 50),
        }


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best point, and all that were tried."""

    best: Candidate
    tried: tuple[Candidate, ...]

    def point(self) -> IoPoint:
        return IoPoint(
            chunk_bytes=self.best.block_bytes,
            queue_depth=self.best.depth,
            read_bytes_per_s=percentile(self.best.reads, 50),
            write_bytes_per_s=percentile(self.best.writes, 50),
            measured=datetime.now(UTC).date().isoformat(),
        )

    def as_json(self) -> dict[str, object]:
        return {"best": self.best.as_json(), "tried": [candidate.as_json() for candidate in self.tried]}


def grid(bench: IoBench) -> list[Candidate]:
    """The points to try: those whose bytes in flight a store could afford, and a file holds."""
    return [
        Candidate(block_bytes=block, depth=depth)
        for block in _BLOCKS[bench.extent]
        for depth in _DEPTHS[bench.extent]
        if block * depth <= min(_STORE_IN_FLIGHT, bench.size)
    ]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Of those near the best the one with the fewest bytes in flight; of equals the one with the larger blocks."""
    best = max(candidate.bytes_per_s for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.bytes_per_s >= _NEAR * best]
    return min(near, key=lambda candidate: (candidate.in_flight_bytes, candidate.depth))


def search(
    bench: IoBench, files: FileSet, *, seconds: float, tick: Callable[[], None] = lambda: None
) -> Found:
    """Tries the grid with the first of the bench's backends. Raises OSError."""
    candidates = grid(bench)
    for candidate in candidates:
        _measure(bench, candidate, files, seconds, tick)
    deep = [candidate for candidate in candidates if candidate.depth >= _LEAST_DEPTH]
    finalists = sorted(deep, key=lambda candidate: -candidate.bytes_per_s)[:FINALISTS]
    for number in range(bench.rounds - 1):
        for candidate in finalists if number % 2 == 0 else reversed(finalists):
            _measure(bench, candidate, files, seconds, tick)
    return Found(best=choose(finalists), tried=tuple(candidates))


def _measure(
    bench: IoBench, candidate: Candidate, files: FileSet, seconds: float, tick: Callable[[], None]
) -> None:
    for kind, found in ((Kind.READ, candidate.reads), (Kind.WRITE, candidate.writes)):
        job = Job(
            kind=kind,
            block_bytes=candidate.block_bytes,
            depth=candidate.depth,
            backend=bench.backends[0],
            direct=bench.direct,
        )
        with contextlib.closing(Load(job, files)) as load:
            found.append(load.run(seconds).bytes_per_s)
        tick()
