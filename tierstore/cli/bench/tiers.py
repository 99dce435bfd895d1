"""``tierstore bench tiers``: the store under load, and its soak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierstore.cli.bench.results import (
    CHECK_FAILED,
    WORK_DIRECTORY,
    Reporting,
    Session,
    results_options,
    work_directory_option,
)
from tierstore.cli.interrupts import Interrupts
from tierstore.cli.options import EXISTING_FILE, PATH, SIZE, bundled
from tierstore.cli.output import Output
from tierstore.endurance import DAY_S
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.probes.usage import Trend
    from tierstore.bench.results.document import Measurement
    from tierstore.bench.soak.run import SoakResult
    from tierstore.bench.tiers.run import PointFigures, TiersResult

_FULL_RECORD_BYTES = tuple(size << 10 for size in (1024, 64, 256, 4096, 16384, 65536, 262144))
_FULL_SECONDS = 10.0
_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, kw_only=True)
class _LoadOptions:
    """Options of the load, as they were given."""

    record_bytes: tuple[int, ...]
    budget: tuple[float, ...]
    dirty: tuple[float, ...]
    store_bytes: int | None
    seconds: float | None
    trace: Path | None
    endurance: int
    full: bool
    retain: int | None
    seed: int


@click.command()
@work_directory_option
@click.option(
    "--record-bytes", type=SIZE, multiple=True, help="Size of a record; may be repeated. [default: 1MiB, ..]"
)
@click.option(
    "--budget",
    type=float,
    multiple=True,
    help="Host budget as a fraction of the store; may be repeated. [default: 0.25, ..]",
)
@click.option(
    "--dirty",
    type=float,
    multiple=True,
    help="Part of what a step touches that it changes; may be repeated. [default: 1.0, ..]",
)
@click.option("--store-bytes", type=SIZE, help="Bytes of the records of one store.")
@click.option("--seconds", type=float, help="Time of one point.")
@click.option("--trace", type=EXISTING_FILE, help="Load of a trace.")
@click.option("--endurance", type=SIZE, default="600TB", help="Bytes that the drive may be written.")
@click.option("--full", is_flag=True, help="Every combination, with records from 64 KiB to 256 MiB.")
@click.option(
    "--minutes", type=float, help="Soak instead: full load, kills, every byte that is read compared."
)
@click.option(
    "--kill-every", type=float, default=10.0, help="Soak: seconds between kills, the mean (0: no kills)."
)
@click.option(
    "--drive",
    "drives",
    type=PATH,
    multiple=True,
    help="Soak: a directory to make and remove on another drive, which the store is spread over, too.",
)
@click.option("--retain", type=int, help="Snapshots that are kept.")
@click.option("--seed", type=int, default=0)
@results_options()
@bundled(_LoadOptions, "load")
def tiers(
    store: Path | None,
    minutes: float | None,
    kill_every: float,
    drives: tuple[Path, ...],
    load: _LoadOptions,
    reporting: Reporting,
) -> int:
    """The store under load: throughput, latencies, write and space amplification, wear.

    A sweep of about a minute, from the first record size, budget and dirty ratio along each of them; --full for all
    combinations. With --minutes a soak: a worker that is killed at random moments, and an independent model of every
    byte.
    """
    directory = store or WORK_DIRECTORY
    session = reporting.begin(directory=directory)
    if minutes is not None:
        return _soak(session, (directory, *drives), minutes, kill_every, load)
    if drives:
        raise click.UsageError("--drive: expected --minutes with it")
    return _sweep(session, directory, load)


def _only(option: str, values: tuple[_Value, ...]) -> _Value | None:
    """The one value of an option that may be repeated elsewhere; None without it."""
    if len(values) > 1:
        raise click.UsageError(f"{option}: expected one with --minutes, got {len(values)}")
    return values[0] if values else None


def _given(**options: object) -> dict[str, Any]:
    """The options that were given, by the names of a benchmark's fields."""
    return {name: value for name, value in options.items() if value is not None}


def _sweep(session: Session, directory: Path, load: _LoadOptions) -> int:
    from tierstore.bench.tiers.run import Sweep, TiersBench, measurements, run

    output = session.output
    bench = TiersBench(
        directory=directory,
        sweep=Sweep.FULL if load.full else Sweep.STAR,
        endurance_bytes=float(load.endurance),
        seed=load.seed,
        **_given(
            record_bytes=load.record_bytes or (_FULL_RECORD_BYTES if load.full else None),
            budgets=load.budget or None,
            dirty=load.dirty or None,
            store_bytes=load.store_bytes,
            seconds=_FULL_SECONDS if load.full and load.seconds is None else load.seconds,
            trace=load.trace,
            retain=load.retain,
        ),
    )
    result = run(bench, output.line)
    for line in result.effective:
        output.line(line)
    what = ("record", "budget", "dirty")
    output.table(
        f"{result.traffic}, {result.fetches_at_once_count} fetches at once",
        (*what, "hits", "fetched/s", "changed/s", "fetch p50", "p99", "p99.9", "commit p50", "p99"),
        [(*_point(point), *_speed(point)) for point in result.points],
    )
    output.table(
        f"A commit every {result.commit_every_steps_count} steps, {result.retained_snapshots_count} snapshots",
        (*what, "written / changed", "/ dirty", "disk / records", "allowed", "needed", "wear a step", "days"),
        [(*_point(point), *_wear(point)) for point in result.points],
    )
    output.line(
        f"days: until {result.endurance_bytes / 1e12:g} TB are written, at the speed of this load; needed: copies "
        "of records that cannot be shared"
    )
    return _end(session, result, measurements(result))


def _point(point: PointFigures) -> tuple[str, ...]:
    budget = point.host_budget_bytes / (point.records * point.record_bytes)
    return format_bytes(point.record_bytes), f"{budget:.0%}", f"{point.dirty_ratio:.0%}"


def _speed(point: PointFigures) -> tuple[str, ...]:
    fetch, commit = point.fetch, point.commit
    times = (fetch.p50_s, fetch.p99_s, fetch.p99_9_s, commit.p50_s, commit.p99_s)
    return (
        f"{point.hit_ratio:.1%}",
        format_bytes(point.rates.fetched_bytes_per_s),
        format_bytes(point.rates.changed_bytes_per_s),
        *("-" if seconds is None else format_seconds(seconds) for seconds in times),
    )


def _wear(point: PointFigures) -> tuple[str, ...]:
    space = (point.space_amplification_ratio, point.space_target_ratio, point.space_needed_ratio)
    return (
        _ratio(point.write_amplification_ratio),
        _ratio(point.write_to_dirty_ratio),
        *(f"{ratio:.2f}" for ratio in space),
        format_bytes(point.wear_per_step_bytes),
        f"{point.drive_life_s / DAY_S:.4g}" if point.written_bytes else "-",
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _soak(
    session: Session, directories: tuple[Path, ...], minutes: float, kill_every: float, load: _LoadOptions
) -> int:
    from tierstore.bench.soak.plan import SoakShape
    from tierstore.bench.soak.run import SoakBench, measurements, run

    refused = {"--dirty": load.dirty, "--trace": load.trace, "--seconds": load.seconds, "--full": load.full}
    for name, value in refused.items():
        if value:
            raise click.UsageError(f"{name} does not go with --minutes")
    given = _given(
        store_bytes=load.store_bytes,
        record_bytes=_only("--record-bytes", load.record_bytes),
        retain=load.retain,
    )
    ratio = _only("--budget", load.budget)
    shape = SoakShape(seed=load.seed, **given)
    if ratio is not None:
        shape = replace(shape, host_budget_bytes=int(shape.store_bytes * ratio))
    bench = SoakBench(
        directory=directories[0],
        further=directories[1:],
        seconds=minutes * 60,
        shape=shape,
        kill_every_s=kill_every,
    )
    total = max(round(bench.seconds), 1)
    with Interrupts.heard() as interrupts, session.output.progress(total, label="soak") as progress:

        def announce(seconds: float, done: Mapping[str, int]) -> None:
            shown = {name: n if name == "kills" else format_bytes(n) for name, n in done.items()}
            progress.update(min(round(seconds), total), total, shown)

        result = run(bench, announce, lambda: interrupts.asked)
    _show_soak(result, session.output)
    return _end(session, result, measurements(result))


def _show_soak(result: SoakResult, output: Output) -> None:
    if result.interrupted:
        output.line("interrupted; what follows is what was done until then")
    counts = asdict(result.operations).items()
    operations = ", ".join(f"{count} {name.removesuffix('_count')}" for name, count in counts)
    output.line(f"{result.records} records, {format_bytes(result.stored_bytes)} of disk: {operations}")
    reopen = result.reopen
    rows: list[tuple[str, object]] = [
        ("read", format_bytes(result.read_bytes)),
        ("written", format_bytes(result.written_bytes)),
        ("verified", format_bytes(result.verified_bytes)),
        ("of these from the files of closed stores", format_bytes(result.audited_bytes)),
        ("wrong bytes", result.wrong_bytes),
        ("kills", result.kills_count),
        ("reopened at a commit not acknowledged yet", result.commits_found_unacknowledged_count),
        (
            "reopening, median and longest",
            "-"
            if reopen.median_s is None or reopen.greatest_s is None
            else f"{format_seconds(reopen.median_s)}, {format_seconds(reopen.greatest_s)}",
        ),
        *((f"{name} at start, middle, end", _trend(trend)) for name, trend in result.trends.items()),
    ]
    output.table("", ("", ""), rows)
    if result.faults:
        output.table(
            "",
            ("fault", "surfaced as", "times"),
            [(fault.fault, fault.error, fault.times_count) for fault in result.faults],
        )


def _trend(trend: Trend) -> str:
    values = (trend.first, trend.middle, trend.last)
    shown = [format_bytes(value) if trend.unit == "bytes" else f"{value:g}" for value in values]
    verdict = "GROWS" if trend.grows else "flat" if trend.judged else "too short to judge"
    return f"{', '.join(shown)} ({verdict})"


def _end(session: Session, result: TiersResult | SoakResult, measurements: Iterable[Measurement]) -> int:
    for failure in result.failures:
        session.output.line(f"FAILED: {failure}")
    session.end(result, measurements)
    return CHECK_FAILED if result.failures else 0
