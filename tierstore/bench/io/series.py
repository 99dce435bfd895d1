"""What a tier can bear, raw: jobs through the engine over files of the bench's own, beside fio and other libraries.

Programs do a job in turns, and each measurement lasts a share of the time that the whole may take (docs/BENCH.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tierstore.bench.io.fio import Fio
from tierstore.bench.io.load import (
    IN_FLIGHT_LIMIT,
    Checksums,
    FileSet,
    Job,
    Load,
    Pages,
    Pattern,
    Reuse,
    Sample,
    TransferKind,
)
from tierstore.bench.probes.latency import Latencies, LatencySummary
from tierstore.bench.results.figures import INTERNAL, Figures, ratios
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.stats import percentile, spread
from tierstore.store.config import IoBackendName

#: Bandwidth of fio that the engine is to reach, and the CPU time a byte that it may take, in fio's.
FIO_TARGET, CPU_TARGET = 0.95, 1.3
#: Throughput with checksums that must remain, of that without.
CHECKSUM_TARGET = 0.95
_MIB = 1 << 20
_WARM_S = 0.05
_FULL_BLOCKS = tuple(1 << shift for shift in range(12, 27, 2))  # 4 KiB .. 64 MiB
_FULL_DEPTHS = (1, 4, 16, 64)


class Coverage(StrEnum):
    """How much is measured."""

    QUICK = "quick"  # a few points that tell most
    FULL = "full"  # every block size and depth, both patterns, all backends, with and without O_DIRECT


@dataclass(frozen=True, kw_only=True)
class IoBench:
    """What to measure. ``size`` (bytes) is of the file in each of ``directories``. Raises ConfigError."""

    directories: tuple[Path, ...] = (Path(),)
    size: int = 512 * _MIB
    minutes: float = 1.0
    rounds: int = 3
    coverage: Coverage = Coverage.QUICK
    direct: Capability = Capability.AUTO
    backends: tuple[IoBackendName, ...] = (IoBackendName.URING, IoBackendName.THREADS, IoBackendName.PMEM)
    record_bytes: int = 48 * _MIB
    records: int = 4

    def __post_init__(self) -> None:
        if not self.directories:
            raise ConfigError("directories: expected at least one")
        if len({path.resolve() for path in self.directories}) < len(self.directories):
            raise ConfigError("directories: expected each one once")
        for path in self.directories:
            if not path.is_dir():
                raise ConfigError(f"{path}: expected a directory")
        if self.size < 8 * _MIB or self.size % (4 * _MIB):
            raise ConfigError(
                f"--size: expected a multiple of 4 MiB of at least 8 MiB, got {self.size} bytes"
            )
        if not self.minutes > 0:
            raise ConfigError(f"--minutes: expected more than 0, got {self.minutes}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds: expected at least 1, got {self.rounds}")
        if self.record_bytes < 4096 or self.record_bytes % 4096 or self.records < 1:
            raise ConfigError("records: expected at least one, of a multiple of 4096 bytes")

    def job(self, kind: TransferKind, block_bytes: int, depth: int) -> Job:
        """Random transfers through the first of the backends."""
        return Job(
            kind=kind, block_bytes=block_bytes, depth=depth, backend=self.backends[0], direct=self.direct
        )


@dataclass(frozen=True, kw_only=True)
class Series(Figures):
    """One program's rounds of a job, in their order. ``cpu_per_gb_s``: CPU seconds for 10**9 bytes."""

    program: str
    samples: tuple[Sample, ...] = field(metadata=INTERNAL)
    median_bytes_per_s: float
    least_bytes_per_s: float
    greatest_bytes_per_s: float
    operations_per_s: float
    cpu_per_gb_s: float
    latency: LatencySummary
    rounds_bytes_per_s: Sequence[float]

    @staticmethod
    def of(program: str, samples: Sequence[Sample]) -> Series:
        speeds = [sample.bytes_per_s for sample in samples]
        speed, latencies = spread(speeds), Latencies()
        for sample in samples:
            latencies.merge(sample.latencies)
        return Series(
            program=program,
            samples=tuple(samples),
            median_bytes_per_s=speed.median,
            least_bytes_per_s=speed.least,
            greatest_bytes_per_s=speed.greatest,
            operations_per_s=percentile([s.operations / s.elapsed_s for s in samples], 50),
            cpu_per_gb_s=percentile([sample.cpu_per_gb_s for sample in samples], 50),
            latency=latencies.summary(),
            rounds_bytes_per_s=speeds,
        )


@dataclass(frozen=True, kw_only=True)
class SpeedRatio(Figures):
    """One program's bandwidth to that of the program ``to``, round by round, and its CPU time a byte to the other's.

    ``cpu_ratio`` is None where the other's CPU time was too short to count. ``target_ratio``: the least median.
    """

    to: str
    rounds: Sequence[float] = field(metadata=INTERNAL)
    median_ratio: float
    least_ratio: float
    greatest_ratio: float
    cpu_ratio: float | None
    target_ratio: float | None
    met: bool | None

    @staticmethod
    def of(ours: Series, theirs: Series, target: float | None = None) -> SpeedRatio:
        rounds = ratios(ours.rounds_bytes_per_s, theirs.rounds_bytes_per_s)
        costs, others = ([sample.cpu_per_gb_s for sample in one.samples] for one in (ours, theirs))
        found = spread(rounds)
        return SpeedRatio(
            to=theirs.program,
            rounds=rounds,
            median_ratio=found.median,
            least_ratio=found.least,
            greatest_ratio=found.greatest,
            cpu_ratio=percentile(ratios(costs, others), 50) if all(others) else None,
            target_ratio=target,
            met=None if target is None else found.median >= target,
        )


@dataclass(frozen=True, kw_only=True)
class ProgramComparison(Figures):
    """Programs that did the same, in turns. The first is ours, and ``ratios`` are ours to each of the others'."""

    title: str
    job: Job | None
    series: Sequence[Series]
    ratios: Sequence[SpeedRatio]

    @staticmethod
    def of(
        title: str, series: Sequence[Series], targets: Mapping[str, float], job: Job | None = None
    ) -> ProgramComparison:
        """``targets``: the least ratio of bandwidths, by the other program's name."""
        ours, *others = series
        to_others = [SpeedRatio.of(ours, theirs, targets.get(theirs.program)) for theirs in others]
        return ProgramComparison(title=title, job=job, series=series, ratios=to_others)

    def to(self, program: str) -> SpeedRatio | None:
        """The ratio of our first program to ``program``; None where that took no part."""
        return next((ratio for ratio in self.ratios if ratio.to == program), None)

    @property
    def small_pages_to_fio(self) -> SpeedRatio | None:
        """The ratio of the engine with buffers in small pages, as fio's are; None where one of both took no part."""
        series = {one.program: one for one in self.series}
        if not {SMALL_PAGES, "fio"} <= series.keys():
            return None
        return SpeedRatio.of(series[SMALL_PAGES], series["fio"])


class Program(Protocol):
    """A program that does a job again and again."""

    @property
    def program(self) -> str: ...
    def measure(self) -> Sample: ...


def take_turns(programs: Sequence[Program], rounds: int, tick: Callable[[], None]) -> list[Series]:
    """Each program's measurements; the order turns round from one round to the next. ``tick`` after each measurement."""
    samples: dict[str, list[Sample]] = {program.program: [] for program in programs}
    for number in range(rounds):
        for program in programs if number % 2 == 0 else reversed(programs):
            samples[program.program].append(program.measure())
            tick()
    return [Series.of(program, found) for program, found in samples.items()]


class _EngineProgram:
    def __init__(self, program: str, job: Job, files: FileSet, seconds: float) -> None:
        self.program, self._seconds = program, seconds
        self.load = Load(job, files)

    def measure(self) -> Sample:
        return self.load.run(self._seconds)


class _FioProgram:
    def __init__(self, fio: Fio, job: Job, files: FileSet, seconds: float) -> None:
        self.program = "fio"
        self._fio, self._job, self._files, self._seconds = fio, job, files, seconds

    def measure(self) -> Sample:
        if not self._job.past_cache:
            self._files.forget()
        return self._fio.run(self._job, self._files.paths, self._files.nbytes, self._seconds)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """One comparison to come: ``ours`` are the engine's programs by name, ours first; with fio where ``fio`` is it."""

    title: str
    ours: Mapping[str, Job]
    fio: Fio | None = None
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def programs(self) -> int:
        return len(self.ours) + (self.fio is not None)


def compare(
    plan: JobPlan, files: FileSet, *, seconds: float, rounds: int, tick: Callable[[], None] = lambda: None
) -> ProgramComparison:
    """Carries out ``plan``. Raises OSError, FioError, ChecksumMismatch."""
    job = next(iter(plan.ours.values()))
    with contextlib.ExitStack() as stack:
        programs: list[Program] = []
        for name, own in plan.ours.items():
            program = _EngineProgram(name, own, files, seconds)
            stack.callback(program.load.close)
            program.load.run(min(_WARM_S, seconds))
            programs.append(program)
        if plan.fio is not None:
            programs.append(_FioProgram(plan.fio, job, files, seconds))
        series = take_turns(programs, rounds, tick)
    return ProgramComparison.of(plan.title, series, plan.targets, job)


# What is measured -------------------------------------------------------------------------------------------

OURS, SMALL_PAGES, CHECKED = "tierstore", "tierstore, 4 KiB pages", "tierstore, checksums"


def jobs(bench: IoBench, fio: Fio | None) -> list[JobPlan]:
    """What the bench measures, but for the best point and checksums."""
    chosen = _quick(bench) if bench.coverage is Coverage.QUICK else _full(bench)
    plans = []
    for job in chosen:
        if job.in_flight_bytes > min(IN_FLIGHT_LIMIT, bench.size):
            continue
        beside = fio if fio is not None and fio.can_run(job) and _worth_fio(bench, job) else None
        plans.append(JobPlan(title="", ours={OURS: job}, fio=beside))
    return plans


def _worth_fio(bench: IoBench, job: Job) -> bool:
    """In a full sweep only random jobs past the page cache, or fio would take the most of the time."""
    return bench.coverage is Coverage.QUICK or (job.pattern is Pattern.RANDOM and job.direct is Capability.ON)


def _quick(bench: IoBench) -> Iterator[Job]:
    whole = bench.job(TransferKind.READ, _MIB, 8)
    both = (TransferKind.READ, TransferKind.WRITE)
    for kind in both:
        yield replace(whole, kind=kind, pattern=Pattern.SEQUENTIAL)
    for kind in both:
        yield replace(whole, kind=kind, block_bytes=4096, depth=32)
    yield replace(whole, kind=TransferKind.MIXED, block_bytes=64 << 10, depth=16)
    for backend in bench.backends[1:]:
        direct = Capability.OFF if backend is IoBackendName.PMEM else bench.direct
        for kind in both:
            yield replace(whole, kind=kind, backend=backend, direct=direct)
    if bench.direct is Capability.ON:
        for kind in both:
            yield replace(whole, kind=kind, direct=Capability.OFF)


def _full(bench: IoBench) -> Iterator[Job]:
    for backend in bench.backends:
        both = bench.direct is Capability.ON and backend is not IoBackendName.PMEM
        directs = (Capability.ON, Capability.OFF) if both else (Capability.OFF,)
        for direct in directs:
            for pattern in Pattern:
                for kind in TransferKind:
                    for block in _FULL_BLOCKS:
                        for depth in _FULL_DEPTHS:
                            yield Job(
                                kind=kind,
                                block_bytes=block,
                                depth=depth,
                                pattern=pattern,
                                backend=backend,
                                direct=direct,
                            )


def with_fio(job: Job, fio: Fio | None, title: str) -> JobPlan:
    """``job`` beside fio, with a target: in huge pages, as the store's memory is, and in small ones, as fio's."""
    if fio is None or not fio.can_run(job):
        return JobPlan(title=title, ours={OURS: job})
    ours = {OURS: job, SMALL_PAGES: replace(job, pages=Pages.SMALL)}
    return JobPlan(title=title, ours=ours, fio=fio, targets={"fio": FIO_TARGET})


def with_checksums(job: Job) -> JobPlan:
    """``job`` with checksums, and without; in memory like a store's."""
    job = replace(job, reuse=Reuse.LATE)
    ours = {CHECKED: replace(job, checksums=Checksums.ON), OURS: job}
    return JobPlan(title="checksums", ours=ours, targets={OURS: CHECKSUM_TARGET})
