"""Programs of ``bench io`` that do the same job in turns: their series, their ratios, and planned comparisons.

Separate from the benchmark because its libraries (``io_peers``) take turns as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tierstore.bench.documents import Better, Measurement, derived, measured
from tierstore.bench.harness import ratios
from tierstore.bench.io_load import Checksums, FileSet, Fio, Job, Load, Pages, Reuse, Sample
from tierstore.bench.probes import latency_summary
from tierstore.stats import percentile, spread

#: The bandwidth that the engine must reach, and the CPU time a byte that it may take, relative to fio.
FIO_TARGET, CPU_TARGET = 0.95, 1.3
#: The least throughput with checksums, relative to that without.
CHECKSUM_TARGET = 0.95
OURS, SMALL_PAGES, CHECKED = "tierstore", "tierstore, 4 KiB pages", "tierstore, checksums"
_WARM_S = 0.05


@dataclass(frozen=True)
class Series:
    """One program's rounds of a job, in order."""

    program: str
    samples: Sequence[Sample]

    @property
    def speeds(self) -> list[float]:
        return [sample.bytes_per_s for sample in self.samples]

    @property
    def costs(self) -> list[float]:
        """CPU seconds per 10**9 bytes."""
        return [sample.cpu_per_gb_s for sample in self.samples]

    def figures(self) -> dict[str, Any]:
        speed = spread(self.speeds)
        return {
            "program": self.program,
            "median_bytes_per_s": speed.median,
            "least_bytes_per_s": speed.least,
            "greatest_bytes_per_s": speed.greatest,
            "operations_per_s": percentile([one.operations / one.elapsed_s for one in self.samples], 50),
            "cpu_per_gb_s": percentile(self.costs, 50),
            "latency": latency_summary(np.concatenate([one.latencies_ns for one in self.samples])),
            "rounds_bytes_per_s": self.speeds,
        }


@dataclass(frozen=True, kw_only=True)
class ProgramComparison:
    """Programs that did the same in turns; the first is ours. ``targets``: least ratios of ours to another, by name."""

    title: str
    job: Job | None = None
    series: Sequence[Series]
    targets: Mapping[str, float]

    def ratios(self) -> list[dict[str, Any]]:
        """Our bandwidth relative to that of each other program, over the rounds, and our CPU time a byte (None if the
        other's was too short to measure).
        """
        ours, *others = self.series
        found = []
        for theirs in others:
            speed, target = spread(ratios(ours.speeds, theirs.speeds)), self.targets.get(theirs.program)
            found.append(
                {
                    "to": theirs.program,
                    "median_ratio": speed.median,
                    "least_ratio": speed.least,
                    "greatest_ratio": speed.greatest,
                    "cpu_ratio": percentile(ratios(ours.costs, theirs.costs), 50)
                    if all(theirs.costs)
                    else None,
                    "target_ratio": target,
                    "met": None if target is None else speed.median >= target,
                }
            )
        return found

    def figures(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "job": self.job,
            "series": [one.figures() for one in self.series],
            "ratios": self.ratios(),
        }

    def measurements(self) -> Iterator[Measurement]:
        """Bandwidths, CPU times and latencies of each series, and ratios with their targets.

        Points with a title have their own names: two runs may find their best point in different places.
        """
        for one in self.series:
            how = self._parameters | {"program": one.program}
            yield measured(self._name("bandwidth"), one.speeds, "bytes/s", parameters=how)
            yield measured(self._name("CPU time of 1 GB"), one.costs, "s", parameters=how)
            latencies = [latency_summary(sample.latencies_ns) for sample in one.samples]
            for percent in ("p50", "p99") if all(latencies) else ():
                times = [found[f"{percent}_s"] for found in latencies]
                yield measured(self._name(f"latency {percent}"), times, "s", parameters=how)
        speeds = {one.program: one.speeds for one in self.series}
        if {SMALL_PAGES, "fio"} <= speeds.keys():  # buffers in small pages, as fio's are
            small = ratios(speeds[SMALL_PAGES], speeds["fio"])
            yield self._ratio("bandwidth in 4 KiB pages to fio", small, Better.HIGHER, None)
        ours = self.series[0].speeds
        for found in self.ratios():
            name, cpu, target = (found[key] for key in ("to", "cpu_ratio", "target_ratio"))
            yield self._ratio(f"bandwidth to {name}", ratios(ours, speeds[name]), Better.HIGHER, target)
            if name == "fio" and cpu is not None:
                limit = None if target is None else CPU_TARGET
                yield self._ratio("CPU time a byte to fio", cpu, Better.LOWER, limit)

    def _ratio(
        self, what: str, found: float | Sequence[float], better: Better, target: float | None
    ) -> Measurement:
        return derived(self._name(what), found, "ratio", better, parameters=self._parameters, target=target)

    def _name(self, what: str) -> str:
        return f"{what}, {self.title}" if self.title else what

    @property
    def _parameters(self) -> dict[str, float | str]:
        job = self.job
        if job is None:
            return {}
        if self.title == "best point":
            return {"kind": job.kind.value}
        named: dict[str, float | str] = {"kind": job.kind.value, "block_bytes": job.block_bytes}
        if self.title:
            return named
        past = "direct" if job.past_cache else "page cache"
        way = f"{job.backend.value}, {past}"
        return named | {"depth": job.depth, "pattern": job.pattern.value, "way": way}


def take_turns(
    programs: Mapping[str, Callable[[], Sample]], rounds: int, tick: Callable[[], None]
) -> list[Series]:
    """Each program's measurements; the order is reversed every round. ``tick`` is called after each measurement."""
    samples: dict[str, list[Sample]] = {name: [] for name in programs}
    for number in range(rounds):
        for name in programs if number % 2 == 0 else reversed(samples):
            samples[name].append(programs[name]())
            tick()
    return [Series(name, found) for name, found in samples.items()]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A planned comparison: ``ours`` are the engine's programs by name, ours first; with fio if ``fio`` is given."""

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
    """Run ``plan``. Raises OSError, FioError, ChecksumMismatch."""
    job = next(iter(plan.ours.values()))

    def run_fio(fio: Fio) -> Sample:
        if not job.past_cache:
            files.forget()
        return fio.run(job, files.paths, files.nbytes, seconds)

    with contextlib.ExitStack() as stack:
        programs: dict[str, Callable[[], Sample]] = {}
        for name, own in plan.ours.items():
            load = stack.enter_context(contextlib.closing(Load(own, files)))
            load.run(min(_WARM_S, seconds))
            programs[name] = partial(load.run, seconds)
        if plan.fio is not None:
            programs["fio"] = partial(run_fio, plan.fio)
        series = take_turns(programs, rounds, tick)
    return ProgramComparison(title=plan.title, job=job, series=series, targets=plan.targets)


def with_fio(job: Job, fio: Fio | None, title: str) -> JobPlan:
    """``job`` beside fio, with a target: in huge pages, like the store's memory, and in small ones, like fio's."""
    if fio is None or not fio.can_run(job):
        return JobPlan(title=title, ours={OURS: job})
    ours = {OURS: job, SMALL_PAGES: replace(job, pages=Pages.SMALL)}
    return JobPlan(title=title, ours=ours, fio=fio, targets={"fio": FIO_TARGET})


def with_checksums(job: Job) -> JobPlan:
    """``job`` with and without checksums, in memory like a store's."""
    job = replace(job, reuse=Reuse.LATE)
    ours = {CHECKED: replace(job, checksums=Checksums.ON), OURS: job}
    return JobPlan(title="checksums", ours=ours, targets={OURS: CHECKSUM_TARGET})
