"""The whole of ``tierstore bench io``: what is possible here, the search, the comparisons, the libraries, the result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tierstore.bench.io.fio import Fio, find_fio
from tierstore.bench.io.load import DataFiles, FileSet, Job, TransferKind, check_space
from tierstore.bench.io.peers import PEERS, PeerRecords, compare_peers, missing_peers
from tierstore.bench.io.search import FINALISTS, Found, grid, search
from tierstore.bench.io.series import (
    CPU_TARGET,
    OURS,
    Coverage,
    IoBench,
    JobPlan,
    ProgramComparison,
    Series,
    compare,
    jobs,
    with_checksums,
    with_fio,
)
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import Figures, named
from tierstore.capabilities import Capability, probe_dax, probe_direct_io, probe_io_uring, resolve
from tierstore.errors import ConfigError
from tierstore.io_profile import save_io_point
from tierstore.store.config import IoBackendName

_LEAST_S, _MOST_S = 0.02, 5.0
_SHARE = 0.5  # of the time for measuring; the rest is for files, buffers, fio's start, and the libraries
_MIB = 1 << 20
_BOTH = (TransferKind.READ, TransferKind.WRITE)
_CHECKED_BYTES = 256 * _MIB
_COPIES = 4  # of the records at most, in the libraries' forms

Tick = Callable[[int, int], None]


class KeepProfile(Enum):
    """Whether the best point is kept for stores to use."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class IoResult(Figures):
    """What a run of the bench found. ``search``: by directory, in their order; ``fio``: its version; ``notes``: what was
    left out, and why.
    """

    bench: str = "io"
    directories: Sequence[Path]
    file_bytes: int
    coverage: Coverage = field(metadata=named("extent"))
    rounds_count: int
    measurement_s: float
    direct: Capability
    backends: Sequence[IoBackendName]
    fio: str | None
    cpu_target_ratio: float = CPU_TARGET
    search: Sequence[Found]
    profile: Path | None
    comparisons: Sequence[ProgramComparison]
    striped: Sequence[ProgramComparison]
    peers: ProgramComparison
    record_bytes: int
    records: int
    notes: Sequence[str]


def effective(bench: IoBench) -> tuple[IoBench, list[str]]:
    """``bench`` with what can be done here, and what cannot with the reason. Raises CapabilityError, OSError."""
    notes: list[str] = []
    direct = Capability.ON
    for directory in bench.directories:
        found = resolve("direct_io", bench.direct, lambda where=directory: probe_direct_io(where))  # type: ignore[misc]
        if not found:
            direct = Capability.OFF
            notes.append(
                f"without O_DIRECT in {directory}: {found.reason}; each pass once, pages dropped before"
            )
    backends = list(bench.backends)
    if IoBackendName.URING in backends and not (ring := probe_io_uring()).available:
        backends.remove(IoBackendName.URING)
        notes.append(f"without io_uring: {ring.reason}")
    if not backends:
        raise ConfigError("--backend: none of those asked for can be used here: " + "; ".join(notes))
    if IoBackendName.PMEM in backends:
        notes += [
            f"pmem in {directory} is mapped page cache, not persistent memory: {dax.reason}"
            for directory in bench.directories
            if not (dax := probe_dax(directory)).available
        ]
    return replace(bench, direct=direct, backends=tuple(backends)), notes


def run(bench: IoBench, *, keep: KeepProfile, tick: Tick = lambda done, total: None) -> IoResult:
    """Measures. ``tick(done, total)`` is called after each measurement.

    Raises ConfigError, also for too little free disk, naming the bytes; CapabilityError, OSError, FioError, PeerMismatch.
    """
    bench, notes = effective(bench)
    fio = find_fio()
    if fio is None:
        notes.append("fio: not installed, so there is nothing to compare the engine with")
    record_bytes = bench.records * bench.record_bytes
    check_space(bench.directories, bench.size)
    check_space(bench.directories[:1], bench.size + _COPIES * record_bytes)
    meter = _Meter(bench, fio, tick)
    with closing(DataFiles(bench.directories, bench.size)) as files:
        found = [search(bench, alone, seconds=meter.seconds, tick=meter.tick) for alone in files.alone]
        profile = None
        if keep is KeepProfile.YES:
            for directory, best in zip(bench.directories, found, strict=True):
                profile = save_io_point(directory, best.point())
        # A part that is quickly written with checksums, before they can be compared.
        part = FileSet(files.striped.paths, min(bench.size, _CHECKED_BYTES))
        plans = [(plan, files.striped) for plan in (*_named(bench, found[0], fio), *jobs(bench, fio))]
        comparisons = [
            compare(plan, chosen, seconds=meter.seconds, rounds=bench.rounds, tick=meter.tick)
            for plan, chosen in (*plans, *((plan, part) for plan in _checked(bench)))
        ]
        striped = _striped(bench, files, meter)
    peers, left_out = _peers(bench, found[0], meter)
    meter.end()
    return IoResult(
        directories=[path.resolve() for path in bench.directories],
        file_bytes=bench.size,
        coverage=bench.coverage,
        rounds_count=bench.rounds,
        measurement_s=meter.seconds,
        direct=bench.direct,
        backends=bench.backends,
        fio=None if fio is None else fio.version,
        search=found,
        profile=profile,
        comparisons=comparisons,
        striped=striped,
        peers=peers,
        record_bytes=bench.record_bytes,
        records=bench.records,
        notes=[*notes, *left_out],
    )


class _Meter:
    """Counts measurements, and gives each its share of the time."""

    def __init__(self, bench: IoBench, fio: Fio | None, tick: Tick) -> None:
        searched = (len(grid(bench)) + FINALISTS * (bench.rounds - 1)) * len(_BOTH) * len(bench.directories)
        # The best point is not known yet; a comparison at any other has as many programs.
        any_point = [Job(kind=kind, block_bytes=_MIB, depth=8, direct=bench.direct) for kind in _BOTH]
        named = 2 * sum(with_fio(job, fio, "").programs for job in any_point)
        programs = named + sum(plan.programs for plan in (*jobs(bench, fio), *_checked(bench)))
        alone = (len(bench.directories) + 1) * len(_BOTH) if len(bench.directories) > 1 else 0
        libraries = len(PEERS) - len(missing_peers()) + 1
        self._total = searched + (programs + alone + libraries) * bench.rounds
        self._done = 0
        self._tick = tick
        self.seconds = min(max(bench.minutes * 60 * _SHARE / self._total, _LEAST_S), _MOST_S)
        tick(0, self._total)

    def tick(self) -> None:
        self._done = min(self._done + 1, self._total - 1)
        self._tick(self._done, self._total)

    def end(self) -> None:
        self._tick(self._total, self._total)


def _named(bench: IoBench, found: Found, fio: Fio | None) -> list[JobPlan]:
    """The points that the targets speak of."""
    best = found.best
    return [
        with_fio(bench.job(kind, block, depth), fio, title)
        for title, block, depth in (("1 MiB", _MIB, 8), ("best point", best.block_bytes, best.depth))
        for kind in _BOTH
    ]


def _checked(bench: IoBench) -> list[JobPlan]:
    blocks = (_MIB,) if bench.coverage is Coverage.QUICK else (_MIB, 4 * _MIB, 16 * _MIB)
    return [
        with_checksums(bench.job(kind, block, 8)) for block in blocks if block <= bench.size for kind in _BOTH
    ]


def _striped(bench: IoBench, files: DataFiles, meter: _Meter) -> list[ProgramComparison]:
    """Each directory alone and all of them together, one after another."""
    if len(files.alone) < 2:
        return []
    sets = [("all directories", files.striped)]
    sets += [(str(path), alone) for path, alone in zip(bench.directories, files.alone, strict=True)]
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


def _peers(bench: IoBench, found: Found, meter: _Meter) -> tuple[ProgramComparison, list[str]]:
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-io-", dir=bench.directories[0]) as directory:
        return compare_peers(
            Path(directory),
            PeerRecords(bench.records, bench.record_bytes),
            chunk_bytes=found.best.block_bytes,
            queue_depth=found.best.depth,
            rounds=bench.rounds,
            tick=meter.tick,
        )


def measurements(result: IoResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document: bandwidths, CPU times and latencies of each series, ratios with their targets.

    The points that have a title have names of their own: two runs may find their best point in different places.
    """
    for comparison in (*result.comparisons, *result.striped, result.peers):
        for series in comparison.series:
            yield from _of_series(comparison, series)
        yield from _ratios(comparison)


def _name(comparison: ProgramComparison, what: str) -> str:
    return f"{what}, {comparison.title}" if comparison.title else what


def _parameters(comparison: ProgramComparison) -> dict[str, float | str]:
    job = comparison.job
    if job is None:
        return {}
    if comparison.title == "best point":
        return {"kind": job.kind.value}
    named: dict[str, float | str] = {"kind": job.kind.value, "block_bytes": job.block_bytes}
    if comparison.title:
        return named
    past = "direct" if job.past_cache else "page cache"
    return named | {"depth": job.depth, "pattern": job.pattern.value, "way": f"{job.backend.value}, {past}"}


def _of_series(comparison: ProgramComparison, series: Series) -> Iterator[Measurement]:
    how = _parameters(comparison) | {"program": series.program}
    speeds, samples = series.rounds_bytes_per_s, series.samples
    costs = [sample.cpu_per_gb_s for sample in samples]
    yield measured(_name(comparison, "bandwidth"), speeds, "bytes/s", Better.HIGHER, parameters=how)
    yield measured(_name(comparison, "CPU time of 1 GB"), costs, "s", Better.LOWER, parameters=how)
    for percent in (50.0, 99.0) if series.latency.p50_s is not None else ():
        times = [sample.latencies.percentile_ns(percent) / 1e9 for sample in samples]
        name = _name(comparison, f"latency p{percent:g}")
        yield measured(name, times, "s", Better.LOWER, parameters=how)


def _ratios(comparison: ProgramComparison) -> Iterator[Measurement]:
    parameters = _parameters(comparison)
    if (small := comparison.small_pages_to_fio) is not None:
        name = _name(comparison, "bandwidth in 4 KiB pages to fio")
        yield derived(name, small.rounds, "ratio", Better.HIGHER, parameters=parameters)
    for ratio in comparison.ratios:
        name, target = _name(comparison, f"bandwidth to {ratio.to}"), ratio.target_ratio
        yield derived(name, ratio.rounds, "ratio", Better.HIGHER, parameters=parameters, target=target)
        if ratio.to == "fio" and ratio.cpu_ratio is not None:
            limit = None if target is None else CPU_TARGET
            name = _name(comparison, "CPU time a byte to fio")
            yield derived(name, ratio.cpu_ratio, "ratio", Better.LOWER, parameters=parameters, target=limit)
