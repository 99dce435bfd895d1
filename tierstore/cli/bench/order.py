"""``tierstore bench order``: steps of several micro-batches in micro order and in layer order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import (
    CHECK_FAILED,
    WORK_DIRECTORY,
    Reporting,
    results_options,
    work_directory_option,
)
from tierstore.cli.options import PATH, SIZE, config_overrides, help_config_option, set_option
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.training.order import OrderResult


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option("--micro-batches", type=int, help="Of a step (default: data.micro_batches, or 4).")
@click.option("--steps", type=int, default=2, help="Steps of one round.")
@click.option("--warmup", type=int, default=2, help="Steps before the first round.")
@click.option("--rounds", type=int, default=3, help="Rounds; the orders take turns.")
@click.option("--host-budget", type=SIZE, help="Memory for experts of each run.")
@click.option("--boundary-budget", type=SIZE, help="Memory for block inputs (default: all of them).")
@click.option("--disk-bandwidth", type=SIZE, help="Limits the disk to so many bytes a second.")
@click.option(
    "--also",
    type=click.Choice(["one", "larger"]),
    multiple=True,
    help="Also one micro-batch, or one of the size of all with checkpointed blocks; once for each.",
)
@work_directory_option
@set_option()
@results_options()
@help_config_option()
def order(
    config: Path | None,
    micro_batches: int | None,
    steps: int,
    warmup: int,
    rounds: int,
    host_budget: int | None,
    boundary_budget: int | None,
    disk_bandwidth: int | None,
    also: tuple[str, ...],
    store: Path | None,
    settings: tuple[str, ...],
    reporting: Reporting,
) -> int:
    """The same steps of several micro-batches in micro order and in layer order, in turns.

    The speed-up stands beside the ratio of bytes moved, which bounds it where the disk is all that counts
    (--disk-bandwidth makes it so). Exit status 1: the two orders computed different losses.
    """
    from tierstore.bench.training.order import OrderBench, Way, measurements, run
    from tierstore.train.config import TrainConfig

    directory = store or WORK_DIRECTORY
    chosen = {
        "host_budget": host_budget,
        "boundary_budget": boundary_budget,
        "links.disk.bandwidth": disk_bandwidth,
        "data.micro_batches": micro_batches,
        "store": directory,
    }
    overrides = config_overrides(settings, chosen)
    loaded = load(TrainConfig, config, overrides)
    if micro_batches is None and loaded.data.micro_batches == 1:
        loaded = load(TrainConfig, config, overrides | {"data.micro_batches": 4})
    bench = OrderBench(steps=steps, warmup=warmup, rounds=rounds, also=tuple(map(Way, also)))
    session = reporting.begin(directory=directory)
    result = run(loaded, bench, session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.same_losses else CHECK_FAILED


def _show(result: OrderResult, output: Output) -> None:
    titles = {
        "micro order": result.micro,
        "layer order": result.layer,
        "one micro-batch": result.one,
        "one larger, checkpointed": result.larger,
    }
    given = {title: way for title, way in titles.items() if way is not None}
    ways = given.values()
    output.table(
        f"{result.micro_batches} micro-batches a step, host budget {format_bytes(result.host_budget_bytes)}",
        ("", *given),
        [
            ("step, median", *(format_seconds(way.step_median_s) for way in ways)),
            ("moved a step", *(format_bytes(way.step_moved_bytes) for way in ways)),
            ("of it block inputs", *(format_bytes(way.step_spilled_bytes) for way in ways)),
            ("CPU time a step, all threads", *(format_seconds(way.step_cpu_s) for way in ways)),
            ("stalled a step", *(format_seconds(way.step_stall_s) for way in ways)),
            ("peak resident memory", *(format_bytes(way.peak_resident_bytes) for way in ways)),
            ("of the plan", *(f"{way.peak_to_plan_ratio:.3f}" for way in ways)),
        ],
    )
    output.line(
        f"layer order moves {result.moved_bytes_ratio:.2f} x fewer bytes and is {result.speed_up_ratio:.2f} x as fast: "
        f"{result.of_bytes_ratio:.2f} of it; same losses: {'yes' if result.same_losses else 'NO'}"
    )
