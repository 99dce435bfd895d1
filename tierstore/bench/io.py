"""The raw speed of disks: jobs through the engine on the bench's own files, beside fio and other libraries; and the block
size and depth with which a disk moves the most bytes, for stores to use (docs/BENCH.md).

Programs run a job in turns; each measurement gets an equal share of the total time.

Of points near the best, the one with the fewest bytes in flight wins: it needs less memory, and urgent transfers wait less
behind it. Depths below 4 are measured but not chosen: a store also compares checksums between transfers, and with fewer in
flight the disk would wait for that.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from tierstore.bench.harness import Benchmark, FigureTable, Found, Progress, size_option
from tierstore.bench.io_load import (
    IN_FLIGHT_LIMIT,
    FileSet,
    Fio,
    Job,
    Load,
    Pattern,
    TransferKind,
    check_space,
    data_files,
    find_fio,
)
from tierstore.bench.io_peers import PEERS, PeerRecords, compare_peers, missing_peers
from tierstore.bench.io_turns import (
    CPU_TARGET,
    OURS,
    JobPlan,
    ProgramComparison,
    compare,
    with_checksums,
    with_fio,
)
from tierstore.capabilities import Capability, probe_dax, probe_direct_io, probe_io_uring, resolve
from tierstore.config import check_least, check_positive, option
from tierstore.errors import ConfigError
from tierstore.machine_profile import IoPoint, save_io_point
from tierstore.stats import percentile
from tierstore.store.config import IoBackendName
from tierstore.units import format_bytes, format_seconds

_KIB, _MIB = 1 << 10, 1 << 20
_MINUTES, _FULL_MINUTES = 1.0, 30.0
_LEAST_S, _MOST_S = 0.02, 5.0
_SHARE = 0.5  # of the time is for measuring; the rest for files, buffers, fio's start, and the libraries
_BOTH = (TransferKind.READ, TransferKind.WRITE)
_CHECKED_BYTES = 256 * _MIB
_COPIES = 4  # of the records at most, in the libraries' formats
_FULL_BLOCKS = tuple(1 << shift for shift in range(12, 27, 2))  # 4 KiB .. 64 MiB
_FULL_DEPTHS = (1, 4, 16, 64)
#: Backends that can be requested; the first is measured in most detail.
_BACKENDS = tuple(each for each in IoBackendName if each is not IoBackendName.AUTO)

# For the search for the best point.
FINALISTS = 4
_NEAR = 0.97
_LEAST_DEPTH = 4
_STORE_IN_FLIGHT = 128 * _MIB  # a store should not have more than this in flight
_BLOCKS, _DEPTHS = (256 * _KIB, _MIB, 4 * _MIB), (4, 8, 32)
_ALL_BLOCKS, _ALL_DEPTHS = (
    tuple(64 * _KIB << shift for shift in range(10)),
    (1, 2, 4, 8, 16, 32, 64),
)  # .. 32 MiB


@dataclass(frozen=True, kw_only=True)
class IoBench(Benchmark):
    """Bandwidth, latency and CPU time of the disks under DIRECTORIES (default: here), beside fio and other libraries.

    It writes temporary files there, and keeps the best transfer size and depth for stores on that disk.
    """

    directories: tuple[Path, ...] = option((), argument=True, shown=False)
    size: int = size_option("512MiB", "Size of the file in each directory.")
    full: bool = option(False, "Measure all block sizes, depths, patterns and backends.")
    minutes: float | None = option(None, "Total time, about (default: 1, with --full 30).")
    rounds: int = option(3, "Measurements of each job, in turns.")
    backends: tuple[IoBackendName, ...] = option(
        _BACKENDS,
        "Backends to measure, the first in most detail (default: all).",
        "--backend",
        choices=_BACKENDS,
        shown=False,
    )
    record_bytes: int = size_option("48MiB", "Size of a record in the cold reads.")
    records: int = option(4, "Records in the cold reads.")
    no_profile: bool = option(False, "Do not keep the best transfer size and depth for stores.")
    #: AUTO until ``effective`` has probed the directories.
    direct: Capability = Capability.AUTO

    def __post_init__(self) -> None:
        paths = self.places
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError("directories: expected each one once")
        for path in paths:
            if not path.is_dir():
                raise ConfigError(f"{path}: expected a directory")
        if self.size < 8 * _MIB or self.size % (4 * _MIB):
            raise ConfigError(
                f"--size: expected a multiple of 4 MiB of at least 8 MiB, got {self.size} bytes"
            )
        check_least(self, 1, "rounds", table="--")
        check_positive(self, "minutes", table="--")
        if self.record_bytes < 4096 or self.record_bytes % 4096 or self.records < 1:
            raise ConfigError("records: expected at least one, of a multiple of 4096 bytes")

    @property
    def places(self) -> tuple[Path, ...]:
        return self.directories or (Path(),)

    @property
    def measured_in(self) -> Path:
        return self.places[0]

    def job(self, kind: TransferKind, block_bytes: int, depth: int) -> Job:
        """Random transfers through the first of the backends."""
        return Job(
            kind=kind, block_bytes=block_bytes, depth=depth, backend=self.backends[0], direct=self.direct
        )

    def run(self, progress: Progress) -> Found:
        """Measure. Raises ConfigError for too little free disk, CapabilityError, OSError, FioError, PeerMismatch."""
        bench, notes = effective(self)
        fio = find_fio()
        if fio is None:
            notes.append("fio: not installed, so there is nothing to compare the engine with")
        record_bytes = bench.records * bench.record_bytes
        check_space(bench.places, bench.size)
        check_space(bench.places[:1], bench.size + _COPIES * record_bytes)
        meter = _Meter(bench, fio, progress)
        with data_files(bench.places, bench.size) as files:
            bests, tried = [], []
            for directory, alone in zip(bench.places, files.alone, strict=True):
                best, points = search(bench, alone, seconds=meter.seconds, tick=meter.tick)
                bests.append(best)
                tried.append({"best": best.figures(), "tried": [point.figures() for point in points]})
                profile = None if bench.no_profile else save_io_point(directory, best.point())
            # A part that is quickly written with checksums, which must exist before they can be compared.
            part = FileSet(files.paths, min(bench.size, _CHECKED_BYTES))
            plans = [(plan, files) for plan in (*_named(bench, bests[0], fio), *jobs(bench, fio))]
            comparisons = [
                compare(plan, chosen, seconds=meter.seconds, rounds=bench.rounds, tick=meter.tick)
                for plan, chosen in (*plans, *((plan, part) for plan in _checked(bench)))
            ]
            striped = _striped(bench, files, meter)
        peers, left_out = _peers(bench, bests[0], meter)
        meter.end()
        figures = {
            "bench": "io",
            "directories": [path.resolve() for path in bench.places],
            "file_bytes": bench.size,
            "extent": "full" if bench.full else "quick",
            "rounds_count": bench.rounds,
            "measurement_s": meter.seconds,
            "direct": bench.direct,
            "backends": bench.backends,
            "fio": None if fio is None else fio.version,
            "cpu_target_ratio": CPU_TARGET,
            "search": tried,
            "profile": profile,
            "comparisons": [one.figures() for one in comparisons],
            "striped": [one.figures() for one in striped],
            "peers": peers.figures(),
            "record_bytes": bench.record_bytes,
            "records": bench.records,
            "notes": [*notes, *left_out],
        }
        return Found(
            figures=figures,
            measurements=[m for one in (*comparisons, *striped, peers) for m in one.measurements()],
            shown=list(_shown(bench, figures, comparisons, striped, peers)),
        )


def effective(bench: IoBench) -> tuple[IoBench, list[str]]:
    """``bench`` limited to what works here, and notes on what does not. Raises CapabilityError, OSError."""
    notes: list[str] = []
    direct = Capability.ON
    for directory in bench.places:
        found = resolve("direct_io", bench.direct, lambda where=directory: probe_direct_io(where))  # type: ignore[misc]
        if not found:
            direct = Capability.OFF
            notes.append(
                f"without O_DIRECT in {directory}: {found.reason}; each pass once, pages dropped before"
            )
    backends = list(bench.backends)
    if IoBackendName.URING in backends and not (ring := probe_io_uring()):
        backends.remove(IoBackendName.URING)
        notes.append(f"without io_uring: {ring.reason}")
    if not backends:
        raise ConfigError("--backend: none of the requested backends can be used here: " + "; ".join(notes))
    if IoBackendName.PMEM in backends:
        notes += [
            f"pmem in {directory} is mapped page cache, not persistent memory: {dax.reason}"
            for directory in bench.places
            if not (dax := probe_dax(directory))
        ]
    return replace(bench, direct=direct, backends=tuple(backends)), notes


class _Meter:
    """Counts measurements, and gives each its share of the time."""

    def __init__(self, bench: IoBench, fio: Fio | None, progress: Progress) -> None:
        searched = (len(grid(bench)) + FINALISTS * (bench.rounds - 1)) * len(_BOTH) * len(bench.places)
        # The best point is not known yet; a comparison at any other point has as many programs.
        any_point = [Job(kind=kind, block_bytes=_MIB, depth=8, direct=bench.direct) for kind in _BOTH]
        named = 2 * sum(with_fio(job, fio, "").programs for job in any_point)
        programs = named + sum(plan.programs for plan in (*jobs(bench, fio), *_checked(bench)))
        alone = (len(bench.places) + 1) * len(_BOTH) if len(bench.places) > 1 else 0
        libraries = len(PEERS) - len(missing_peers()) + 1
        self._total = searched + (programs + alone + libraries) * bench.rounds
        self._done = 0
        self._progress = progress
        minutes = bench.minutes or (_FULL_MINUTES if bench.full else _MINUTES)
        self.seconds = min(max(minutes * 60 * _SHARE / self._total, _LEAST_S), _MOST_S)
        progress.update(0, self._total, {})

    def tick(self) -> None:
        self._done = min(self._done + 1, self._total - 1)
        self._progress.update(self._done, self._total, {})

    def end(self) -> None:
        self._progress.update(self._total, self._total, {})


def _named(bench: IoBench, best: GridPoint, fio: Fio | None) -> list[JobPlan]:
    """The points that have targets."""
    return [
        with_fio(bench.job(kind, block, depth), fio, title)
        for title, block, depth in (("1 MiB", _MIB, 8), ("best point", best.block_bytes, best.depth))
        for kind in _BOTH
    ]


def _checked(bench: IoBench) -> list[JobPlan]:
    blocks = (_MIB,) if not bench.full else (_MIB, 4 * _MIB, 16 * _MIB)
    return [
        with_checksums(bench.job(kind, block, 8)) for block in blocks if block <= bench.size for kind in _BOTH
    ]


def _striped(bench: IoBench, files: FileSet, meter: _Meter) -> list[ProgramComparison]:
    """Each directory alone, and all of them together."""
    if len(files.paths) < 2:
        return []
    sets = [("all directories", files)]
    sets += [(str(path), alone) for path, alone in zip(bench.places, files.alone, strict=True)]
    return [
        compare(
            JobPlan(title=title, ours={OURS: bench.job(kind, _MIB, 8)}),
            chosen,
            seconds=meter.seconds,
            rounds=bench.rounds,
            tick=meter.tick,
        )
        for title, chosen in sets
        for kind in _BOTH
    ]


def _peers(bench: IoBench, best: GridPoint, meter: _Meter) -> tuple[ProgramComparison, list[str]]:
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-io-", dir=bench.places[0]) as directory:
        return compare_peers(
            Path(directory),
            PeerRecords(bench.records, bench.record_bytes),
            chunk_bytes=best.block_bytes,
            queue_depth=best.depth,
            rounds=bench.rounds,
            tick=meter.tick,
        )


# The jobs ---------------------------------------------------------------------------------------------------


def jobs(bench: IoBench, fio: Fio | None) -> list[JobPlan]:
    """The jobs that the bench measures, except for the best point and checksums."""
    chosen = _full(bench) if bench.full else _quick(bench)
    plans = []
    for job in chosen:
        if job.in_flight_bytes > min(IN_FLIGHT_LIMIT, bench.size):
            continue
        # In a full sweep only random jobs that bypass the page cache, or fio would take most of the time.
        worth = not bench.full or (job.pattern is Pattern.RANDOM and job.direct is Capability.ON)
        beside = fio if fio is not None and fio.can_run(job) and worth else None
        plans.append(JobPlan(title="", ours={OURS: job}, fio=beside))
    return plans


def _quick(bench: IoBench) -> Iterator[Job]:
    whole = bench.job(TransferKind.READ, _MIB, 8)
    for kind in _BOTH:
        yield replace(whole, kind=kind, pattern=Pattern.SEQUENTIAL)
    for kind in _BOTH:
        yield replace(whole, kind=kind, block_bytes=4096, depth=32)
    yield replace(whole, kind=TransferKind.MIXED, block_bytes=64 << 10, depth=16)
    for backend in bench.backends[1:]:
        direct = Capability.OFF if backend is IoBackendName.PMEM else bench.direct
        for kind in _BOTH:
            yield replace(whole, kind=kind, backend=backend, direct=direct)
    if bench.direct is Capability.ON:
        for kind in _BOTH:
            yield replace(whole, kind=kind, direct=Capability.OFF)


def _full(bench: IoBench) -> Iterator[Job]:
    for backend in bench.backends:
        both = bench.direct is Capability.ON and backend is not IoBackendName.PMEM
        directs = (Capability.ON, Capability.OFF) if both else (Capability.OFF,)
        for direct in directs:
            for pattern, kind, block, depth in product(Pattern, TransferKind, _FULL_BLOCKS, _FULL_DEPTHS):
                whole = bench.job(kind, block, depth)
                yield replace(whole, pattern=pattern, backend=backend, direct=direct)


# The best point ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GridPoint:
    """A block size and a depth, and the bytes per second that they reached in each round."""

    block_bytes: int
    depth: int
    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    @property
    def in_flight_bytes(self) -> int:
        return self.block_bytes * self.depth

    @property
    def bytes_per_s(self) -> float:
        """The combined rate of as many bytes read as written, by the medians."""
        return 2 / (1 / percentile(self.reads, 50) + 1 / percentile(self.writes, 50))

    def figures(self) -> dict[str, Any]:
        return {
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "rounds_count": len(self.reads),
            "read_bytes_per_s": percentile(self.reads, 50),
            "write_bytes_per_s": percentile(self.writes, 50),
        }

    def point(self) -> IoPoint:
        """The point in the form that stores read."""
        return IoPoint(
            chunk_bytes=self.block_bytes,
            queue_depth=self.depth,
            read_bytes_per_s=percentile(self.reads, 50),
            write_bytes_per_s=percentile(self.writes, 50),
            measured=datetime.now(UTC).date().isoformat(),
        )


def grid(bench: IoBench) -> list[GridPoint]:
    """The points to try: those whose bytes in flight a store can afford, and the file can hold."""
    return [
        GridPoint(block_bytes=block, depth=depth)
        for block in (_ALL_BLOCKS if bench.full else _BLOCKS)
        for depth in (_ALL_DEPTHS if bench.full else _DEPTHS)
        if block * depth <= min(_STORE_IN_FLIGHT, bench.size)
    ]


def choose(points: Sequence[GridPoint]) -> GridPoint:
    """Of the points near the best, the one with the fewest bytes in flight; of equals, the one with the larger blocks."""
    best = max(point.bytes_per_s for point in points)
    near = [point for point in points if point.bytes_per_s >= _NEAR * best]
    return min(near, key=lambda point: (point.in_flight_bytes, point.depth))


def search(
    bench: IoBench, files: FileSet, *, seconds: float, tick: Callable[[], None] = lambda: None
) -> tuple[GridPoint, list[GridPoint]]:
    """The best point of the grid with the first of the bench's backends, and all points. Raises OSError."""
    points = grid(bench)
    for point in points:
        _measure(bench, point, files, seconds, tick)
    deep = [point for point in points if point.depth >= _LEAST_DEPTH]
    finalists = sorted(deep, key=lambda point: -point.bytes_per_s)[:FINALISTS]
    for number in range(bench.rounds - 1):
        for point in finalists if number % 2 == 0 else reversed(finalists):
            _measure(bench, point, files, seconds, tick)
    return choose(finalists), points


def _measure(
    bench: IoBench, point: GridPoint, files: FileSet, seconds: float, tick: Callable[[], None]
) -> None:
    for kind, found in ((TransferKind.READ, point.reads), (TransferKind.WRITE, point.writes)):
        job = bench.job(kind, point.block_bytes, point.depth)
        with contextlib.closing(Load(job, files)) as load:
            found.append(load.run(seconds).bytes_per_s)
        tick()


# For people -------------------------------------------------------------------------------------------------

_COLUMNS = {
    "": "what",
    "bytes/s": "median_bytes_per_s",
    "least": "least_bytes_per_s",
    "greatest": "greatest_bytes_per_s",
    "p50": "latency.p50_s",
    "p99": "latency.p99_s",
    "p99.9": "latency.p99.9_s",
    "CPU a GB": "cpu_per_gb_s",
    "/ fio": "fio_ratio",
    "CPU / fio": "cpu_ratio",
}


def _shown(
    bench: IoBench,
    figures: Mapping[str, Any],
    comparisons: Sequence[ProgramComparison],
    striped: Sequence[ProgramComparison],
    peers: ProgramComparison,
) -> Iterator[FigureTable | str]:
    yield (
        f"{', '.join(map(str, bench.places))}: {format_bytes(bench.size)} a file, {bench.rounds} rounds of "
        f"{format_seconds(figures['measurement_s'])}, fio: {figures['fio'] or 'not installed'}"
    )
    chosen = [*_fastest(bench, comparisons), *striped]
    yield FigureTable("", _COLUMNS, [_row(one) for one in chosen])
    rows = [
        {**one.figures(), **ratio} for one, ratio in zip(peers.series, [{}, *peers.ratios()], strict=True)
    ]
    yield FigureTable(
        f"cold reads of {bench.records} records of {format_bytes(bench.record_bytes)}",
        {
            "": "program",
            "bytes/s": "median_bytes_per_s",
            "CPU a GB": "cpu_per_gb_s",
            "ours / theirs": "median_ratio",
        },
        rows,
    )
    yield from figures["notes"]
    kept = "not kept" if figures["profile"] is None else f"kept in {figures['profile']}"
    for directory, found in zip(bench.places, figures["search"], strict=True):
        best = found["best"]
        yield f"best for {directory}: {format_bytes(best['block_bytes'])}, {best['depth']} in flight; {kept}"


def _fastest(bench: IoBench, comparisons: Sequence[ProgramComparison]) -> list[ProgramComparison]:
    """The named comparisons; of a full sweep, the fastest for each kind, pattern, backend and direct flag."""
    fastest: dict[object, ProgramComparison] = {}
    for one in comparisons:
        job = one.job
        assert job is not None
        key: object = (job.kind, job.pattern, job.backend, job.direct)
        if one.title or not bench.full:
            key = (one.title, job)
        if key not in fastest or max(one.series[0].speeds) > max(fastest[key].series[0].speeds):
            fastest[key] = one
    return list(fastest.values())


def _row(comparison: ProgramComparison) -> dict[str, Any]:
    job = comparison.job
    assert job is not None
    parts = (
        comparison.title,
        f"{job.pattern.value} {job.kind.value}",
        f"{format_bytes(job.block_bytes)} x {job.depth}",
        job.backend.value,
        "" if job.past_cache else "page cache",
    )
    fio = next((ratio for ratio in comparison.ratios() if ratio["to"] == "fio"), {})
    return {
        "what": ", ".join(filter(None, parts)),
        **comparison.series[0].figures(),
        "fio_ratio": fio.get("median_ratio"),
        "cpu_ratio": fio.get("cpu_ratio"),
    }
