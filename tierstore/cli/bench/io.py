"""``tierstore bench io``: what a disk can bear, raw, and the best transfer size and depth for stores on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.options import SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.io.run import IoResult
    from tierstore.bench.io.series import ProgramComparison, Series

_BACKENDS = ("uring", "threads", "pmem")
_FULL_MINUTES = 30.0


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--size", type=SIZE, default="512MiB", show_default=True, help="Of the file in each directory.")
@click.option("--full", is_flag=True, help="Every block size, depth, pattern and backend, not a few points.")
@click.option("--minutes", type=float, help="About how long it may take (default: 1, with --full 30).")
@click.option("--rounds", type=int, default=3, show_default=True, help="Measurements of each, in turns.")
@click.option(
    "--backend",
    "backends",
    type=click.Choice(_BACKENDS),
    multiple=True,
    help="Measure these, the first in most detail (default: all).",
)
@click.option(
    "--record-bytes", type=SIZE, default="48MiB", show_default=True, help="Of the cold reads of records."
)
@click.option("--records", type=int, default=4, show_default=True, help="Of those.")
@click.option("--no-profile", is_flag=True, help="Do not keep the best point for stores to use.")
@results_options()
def io(
    directories: tuple[Path, ...],
    size: int,
    full: bool,
    minutes: float | None,
    rounds: int,
    backends: tuple[str, ...],
    record_bytes: int,
    records: int,
    no_profile: bool,
    reporting: Reporting,
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
        size=size,
        rounds=rounds,
        record_bytes=record_bytes,
        records=records,
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
    session.end(result.figures(), measurements(result))


def _show(result: IoResult, output: Output) -> None:
    from tierstore.bench.io.series import SMALL_PAGES

    bench = result.bench
    places = ", ".join(str(path.resolve()) for path in bench.directories)
    output.line(
        f"{places}: {format_bytes(bench.size)} a file, {bench.rounds} rounds of {format_seconds(result.seconds)}, "
        f"fio: {result.fio or 'not installed'}"
    )
    columns = ("", "GB/s", "least", "greatest", "p50", "p99", "p99.9", "CPU s/GB", "/ fio", "CPU / fio")
    output.table("", columns, [_row(comparison) for comparison in _shown_to_people(result)])
    for comparison in result.comparisons:
        if any(series.program == SMALL_PAGES for series in comparison.series):
            assert comparison.job is not None
            output.line(
                f"{comparison.title}, {comparison.job.kind.value}, with buffers in 4 KiB pages as fio's are: "
                f"{comparison.ratio('fio', ours=SMALL_PAGES):.2f} of fio"
            )
        if comparison.title == "checksums":
            job, ratio = comparison.job, comparison.ratio(comparison.series[1].program)
            assert job is not None
            output.line(
                f"checksums, {format_bytes(job.block_bytes)} {job.kind.value}: {ratio:.3f} of the speed without"
            )
    output.table(
        f"cold reads of {bench.records} records of {format_bytes(bench.record_bytes)}",
        ("", "GB/s", "CPU s/GB", "ours / theirs"),
        [
            (
                series.program,
                _speed(series.bytes_per_s),
                f"{series.cpu_per_gb_s:.3f}",
                "" if series is result.peers.series[0] else f"{result.peers.ratio(series.program):.2f}",
            )
            for series in result.peers.series
        ],
    )
    for note in result.notes:
        output.line(note)
    for directory, found in zip(bench.directories, result.found, strict=True):
        output.line(
            f"best for {directory.resolve()}: {format_bytes(found.best.block_bytes)}, {found.best.depth} in flight"
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
        if result.bench.coverage.value == "quick":
            key = job
        if key not in fastest or comparison.series[0].bytes_per_s > fastest[key].series[0].bytes_per_s:
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
    beside = any(series.program == "fio" for series in comparison.series)
    cpu = comparison.cpu_ratio("fio") if beside else None
    return (
        title,
        *_figures(ours),
        f"{comparison.ratio('fio'):.2f}" if beside else "-",
        "-" if cpu is None else f"{cpu:.2f}",
    )


def _figures(series: Series) -> tuple[str, ...]:
    speeds = [sample.bytes_per_s for sample in series.samples]
    latencies = series.latencies
    return (
        _speed(series.bytes_per_s),
        _speed(min(speeds)),
        _speed(max(speeds)),
        *(format_seconds(latencies.percentile_ns(percent) / 1e9) for percent in (50, 99, 99.9)),
        f"{series.cpu_per_gb_s:.3f}",
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"
