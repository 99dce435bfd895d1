"""``tierstore bench io``: what a disk can bear, raw, and the best transfer size and depth for stores on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.options import PATH, SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.io.run import IoResult
    from tierstore.bench.io.series import ProgramComparison

_BACKENDS = ("uring", "threads", "pmem")
_FULL_MINUTES = 30.0


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=PATH)
@click.option("--size", type=SIZE, default="512MiB", help="Of the file in each directory.")
@click.option("--full", is_flag=True, help="Every block size, depth, pattern and backend, not a few points.")
@click.option("--minutes", type=float, help="About how long it may take (default: 1, with --full 30).")
@click.option("--rounds", type=int, default=3, help="Measurements of each, in turns.")
@click.option(
    "--backend",
    "backends",
    type=click.Choice(_BACKENDS),
    multiple=True,
    help="Measure these, the first in most detail (default: all).",
)
@click.option("--record-bytes", type=SIZE, default="48MiB", help="Of the cold reads of records.")
@click.option("--records", type=int, default=4, help="Of those.")
@click.option("--no-profile", is_flag=True, help="Do not keep the best point for stores to use.")
@results_options()
def io(
    directories: tuple[Path, ...],
    full: bool,
    minutes: float | None,
    backends: tuple[str, ...],
    no_profile: bool,
    reporting: Reporting,
    **sizes: Any,
) -> None:
    """Bandwidth, latency and CPU time of the disks under DIR (default: here), beside fio and other libraries.

    Several directories are measured alone and striped. It writes files of its own there and removes them; the best
    transfer size and depth are kept for stores on that disk, and shown by `tierstore doctor`.
    """
    from tierstore.bench.io.run import KeepProfile, measurements, run
    from tierstore.bench.io.series import Coverage, IoBench
    from tierstore.store.config import IoBackendName

    bench = IoBench(
        directories=directories or (Path(),),
        minutes=minutes if minutes is not None else _FULL_MINUTES if full else 1.0,
        coverage=Coverage.FULL if full else Coverage.QUICK,
        backends=tuple(IoBackendName(name) for name in dict.fromkeys(backends or _BACKENDS)),
        **sizes,
    )
    session = reporting.begin(directory=bench.directories[0])
    output = session.output
    with output.progress(1, label="bench io") as progress:
        result = run(
            bench,
            keep=KeepProfile.NO if no_profile else KeepProfile.YES,
            tick=lambda done, total: progress.update(done, total, {}),
        )
    _show(result, output)
    session.end(result, measurements(result))


def _show(result: IoResult, output: Output) -> None:
    places = ", ".join(map(str, result.directories))
    output.line(
        f"{places}: {format_bytes(result.file_bytes)} a file, {result.rounds_count} rounds of "
        f"{format_seconds(result.measurement_s)}, fio: {result.fio or 'not installed'}"
    )
    columns = ("", "GB/s", "least", "greatest", "p50", "p99", "p99.9", "CPU s/GB", "/ fio", "CPU / fio")
    output.table("", columns, [_row(comparison) for comparison in _shown_to_people(result)])
    for comparison in result.comparisons:
        job = comparison.job
        assert job is not None
        if (small := comparison.small_pages_to_fio) is not None:
            output.line(
                f"{comparison.title}, {job.kind.value}, with buffers in 4 KiB pages as fio's are: "
                f"{small.median_ratio:.2f} of fio"
            )
        if comparison.title == "checksums":
            output.line(
                f"checksums, {format_bytes(job.block_bytes)} {job.kind.value}: "
                f"{comparison.ratios[0].median_ratio:.3f} of the speed without"
            )
    to_theirs = ["", *(f"{ratio.median_ratio:.2f}" for ratio in result.peers.ratios)]
    output.table(
        f"cold reads of {result.records} records of {format_bytes(result.record_bytes)}",
        ("", "GB/s", "CPU s/GB", "ours / theirs"),
        [
            (series.program, _speed(series.median_bytes_per_s), f"{series.cpu_per_gb_s:.3f}", ratio)
            for series, ratio in zip(result.peers.series, to_theirs, strict=True)
        ],
    )
    for note in result.notes:
        output.line(note)
    for directory, found in zip(result.directories, result.search, strict=True):
        output.line(
            f"best for {directory}: {format_bytes(found.best.block_bytes)}, {found.best.depth} in flight"
            + (f"; kept in {result.profile}" if result.profile is not None else "; not kept")
        )


def _shown_to_people(result: IoResult) -> list[ProgramComparison]:
    """The comparisons for people: of a full sweep, by kind, pattern, backend and direct flag, the fastest."""
    fastest: dict[object, ProgramComparison] = {}
    named = [comparison for comparison in result.comparisons if comparison.title not in ("", "checksums")]
    for comparison in result.comparisons:
        job = comparison.job
        if comparison.title or job is None:
            continue
        key: object = (job.kind, job.pattern, job.backend, job.direct)
        if result.coverage.value == "quick":
            key = job
        speed = comparison.series[0].median_bytes_per_s
        if key not in fastest or speed > fastest[key].series[0].median_bytes_per_s:
            fastest[key] = comparison
    return [*named, *fastest.values(), *result.striped]


def _row(comparison: ProgramComparison) -> tuple[str, ...]:
    job, ours = comparison.job, comparison.series[0]
    assert job is not None
    title = ", ".join(
        part
        for part in (
            comparison.title,
            f"{job.pattern.value} {job.kind.value}",
            f"{format_bytes(job.block_bytes)} x {job.depth}",
            job.backend.value,
            "" if job.past_cache else "page cache",
        )
        if part
    )
    to_fio, latency = comparison.to("fio"), ours.latency
    cpu = None if to_fio is None else to_fio.cpu_ratio
    times = (latency.p50_s, latency.p99_s, latency.p99_9_s)
    return (
        title,
        *map(_speed, (ours.median_bytes_per_s, ours.least_bytes_per_s, ours.greatest_bytes_per_s)),
        *("-" if seconds is None else format_seconds(seconds) for seconds in times),
        f"{ours.cpu_per_gb_s:.3f}",
        "-" if to_fio is None else f"{to_fio.median_ratio:.2f}",
        "-" if cpu is None else f"{cpu:.2f}",
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"
