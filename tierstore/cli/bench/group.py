"""``tierstore bench``: how fast this machine runs what tierstore does, in ratios measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.generate import generate
from tierstore.cli.bench.io import io
from tierstore.cli.bench.machine import machine
from tierstore.cli.bench.order import order
from tierstore.cli.bench.overlap import overlap
from tierstore.cli.bench.report import compare, report
from tierstore.cli.bench.results import (
    WORK_DIRECTORY,
    Reporting,
    results_options,
    work_directory_option,
)
from tierstore.cli.bench.rivals import rivals
from tierstore.cli.bench.scale import scale
from tierstore.cli.bench.tiers import tiers
from tierstore.cli.bench.train import train
from tierstore.cli.groups import CommandGroup
from tierstore.cli.interrupts import ended_by_sigterm
from tierstore.cli.options import EXISTING_DIRECTORY, SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.adamw import AdamWResult
    from tierstore.bench.cache import CacheResult, ReplayRate


@click.group(cls=CommandGroup)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Stress tests and benchmarks. Each prints a table; with --json the last line is one object.

    With --save FILE.json all that was measured is kept, for `bench report` and --compare.
    """
    ctx.with_resource(ended_by_sigterm())


for _command in (
    io,
    tiers,
    train,
    order,
    rivals,
    generate,
    overlap,
    machine,
    scale,
    report,
    compare,
):
    bench.add_command(_command)


@bench.command()
@click.option("--parameters", type=int, default=100_000_000, help="fp32 parameters.")
@click.option("--threads", type=int, default=2)
@click.option("--repeats", type=int, default=7, help="Rounds.")
@click.option(
    "--store", type=EXISTING_DIRECTORY, default=Path("."), help="Where to measure the read of a record."
)
@results_options()
def adamw(parameters: int, threads: int, repeats: int, store: Path, reporting: Reporting) -> None:
    """The native AdamW against torch's fused AdamW, the machine's copy bandwidth, and a read from disk."""
    from tierstore.bench.adamw import measurements, run

    session = reporting.begin(directory=store)
    result = run(parameters, threads, repeats, directory=store)
    show_adamw(result, session.output)
    session.end(result, measurements(result))


def show_adamw(result: AdamWResult, output: Output) -> None:
    """The environment, a table and the ratios, for people."""
    labels = {
        "copy": "copy",
        "torch": "torch fused AdamW",
        "step": "tierstore AdamW",
        "replay": f"{result.replayed_steps} missed steps in one pass",
        "subnormal": "the same, subnormal moments",
        "bf16": "tierstore AdamW, bf16 moments",
        "bf16_replay": f"{result.replayed_steps} missed steps, bf16 moments",
        "int8": "tierstore AdamW, int8 moments",
        "int8_replay": f"{result.replayed_steps} missed steps, int8 moments",
    }
    output.table(
        f"AdamW, {result.parameters:,} fp32 parameters, {result.threads} threads, "
        f"{result.instruction_set}, torch {result.torch_version}, "
        f"OMP_WAIT_POLICY {result.omp_wait_policy}, {result.repeats} rounds",
        ("", "median", "min", "max", "ns/parameter", "bytes/s"),
        [
            (
                labels[name],
                *map(format_seconds, (times.median_s, times.min_s, times.max_s)),
                f"{times.s_per_parameter * 1e9:.3f}",
                f"{format_bytes(times.median_bytes_per_s)}/s",
            )
            for name, times in result.programs.items()
        ],
    )
    output.line(
        f"of torch's speed {result.speed_to_torch_ratio:.2f}, of copy bandwidth "
        f"{result.speed_to_copy_ratio:.2f}; replay / step {result.replay_to_step_ratio:.2f}, "
        f"subnormal / replay {result.subnormal_to_replay_ratio:.2f}"
    )
    output.line(
        f"bf16 moments: of copy bandwidth {result.bf16_speed_to_copy_ratio:.2f}, of the fp32 step's time "
        f"{result.bf16_to_step_ratio:.2f}, of its replay's {result.bf16_replay_to_replay_ratio:.2f}; int8: "
        f"{result.int8_speed_to_copy_ratio:.2f}, {result.int8_to_step_ratio:.2f}, "
        f"{result.int8_replay_to_replay_ratio:.2f}"
    )
    if (record := result.record) is not None:
        output.line(
            f"a record of {format_bytes(record.bytes)}: replay in the engine "
            f"{format_seconds(record.replay_s)}, read {format_seconds(record.read_s)}; "
            f"replay / read {record.replay_to_read_ratio:.2f}"
        )


@bench.command()
@click.option("--records", type=int, default=32)
@click.option("--record-bytes", type=SIZE, default="24MiB")
@click.option("--rounds", type=int, default=5)
@work_directory_option
@results_options()
def commit(records: int, record_bytes: int, rounds: int, store: Path | None, reporting: Reporting) -> None:
    """A commit of a cache full of dirty records against durable writes of the same bytes."""
    from tierstore.bench.commit import measurements, run

    directory = store or WORK_DIRECTORY
    session = reporting.begin(directory=directory)
    result = run(directory, records=records, record_bytes=record_bytes, rounds=rounds)
    session.output.table(
        f"{records} records, {format_bytes(result.dirty_bytes)} dirty, {rounds} rounds",
        ("", "median", "least", "greatest"),
        [
            (title, *map(format_seconds, (times.median_s, times.least_s, times.greatest_s)))
            for title, times in (
                ("commit", result.commit),
                ("durable write of the same bytes", result.write),
                ("a heartbeat comes late, commit awaited", result.heartbeat_late),
                ("a heartbeat comes late, idle loop", result.heartbeat_late_idle),
            )
        ],
    )
    session.output.line(f"commit / write {result.commit_to_write_ratio:.3f}")
    session.end(result, measurements(result))


@bench.command()
@click.option("--requests", type=int, default=2_000_000, help="Of each trace.")
@click.option("--keys", type=int, default=100_000, help="Of the trace of single keys.")
@click.option("--repeats", type=int, default=3, help="Rounds.")
@click.option(
    "--curve-points",
    type=click.IntRange(min=0),
    default=0,
    help="Also time every policy's curve of so many points.",
)
@results_options()
def cache(reporting: Reporting, **sizes: int) -> None:
    """Requests a second of every cache policy in the simulator.

    --requests 20000000 --repeats 1 --curve-points 10 shows how long all curves of a large trace take.
    """
    from tierstore.bench.cache import measurements, run

    session = reporting.begin()
    result = run(**sizes, announce=session.output.line)
    _show_cache(result, session.output)
    session.end(result, measurements(result))


def _show_cache(result: CacheResult, output: Output) -> None:
    output.table(
        f"requests a second and thread with {result.capacity_ratio:.0%} of the footprint (measured)",
        ("policy", "single keys", "layer passes, event-atomic"),
        [(name, _rate(rates.keys), _rate(rates.passes)) for name, rates in result.policies.items()],
    )
    if (timed := result.curves) is not None:
        output.line(
            f"{timed.policies_count} curves of {timed.points} points over {result.requests} requests: "
            f"{format_seconds(timed.elapsed_s)} on {result.cores} cores"
        )


def _rate(rate: ReplayRate | None) -> str:
    return "-" if rate is None else f"{rate.requests_per_s / 1e6:.1f} M/s"
