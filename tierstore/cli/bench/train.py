"""``tierstore bench train``: the same steps with everything in RAM and with experts on disk."""

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
    from tierstore.bench.training.run import TrainResult


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option("--steps", type=int, default=5, help="Steps of one round.")
@click.option("--warmup", type=int, default=5, help="Steps before the first round.")
@click.option("--rounds", type=int, default=3, help="Rounds; the runs take turns.")
@click.option("--host-budget", type=SIZE, help="Memory for experts in the tiered run.")
@work_directory_option
@click.option(
    "--baseline",
    type=click.Choice(["in-ram", "none"]),
    default="in-ram",
    help="What to compare with; none for models that do not fit in RAM.",
)
@click.option("--cgroup-limit", type=SIZE, default="0", help="Confine the tiered run to a memory cgroup.")
@set_option()
@results_options()
@help_config_option()
def train(
    config: Path | None,
    steps: int,
    warmup: int,
    rounds: int,
    host_budget: int | None,
    store: Path | None,
    baseline: str,
    cgroup_limit: int,
    settings: tuple[str, ...],
    reporting: Reporting,
) -> int:
    """The same steps with everything in RAM and with experts on disk, in turns.

    The bound of a step is max(the same step in RAM, compulsory bytes / bandwidth), the bandwidth that of the
    same mix of reads and writes. Exit status 1: the two runs computed different losses.
    """
    from tierstore.bench.training.run import Baseline, TrainBench, measurements, run
    from tierstore.train.config import TrainConfig

    directory = store or WORK_DIRECTORY
    overrides = config_overrides(settings, {"host_budget": host_budget, "store": directory})
    loaded = load(TrainConfig, config, overrides)
    plan = TrainBench(
        steps=steps, warmup=warmup, rounds=rounds, baseline=Baseline(baseline), cgroup_limit=cgroup_limit
    )
    session = reporting.begin(directory=directory)
    result = run(loaded, plan, session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))
    return CHECK_FAILED if result.same_losses is False else 0


#: How the mean step divides (tierstore.train.step_time), by the part's name there.
_PARTS = {
    "computing_s": "the driving thread computes",
    "torch_cpu_s": "torch's other threads compute",
    "engine_cpu_s": "the engine's threads compute",
    "run_queue_s": "the driving thread waits for a processor",
    "stolen_s": "the hypervisor took it",
    "threads_s": "the driving thread waits for others",
    "unaccounted_s": "unaccounted",
}


def _show(result: TrainResult, output: Output) -> None:
    runs = {"in RAM": result.in_ram, "tiered": result.tiered}
    given = {title: run for title, run in runs.items() if run is not None}
    found = given.values()
    rows: list[tuple[str, ...]] = [
        ("step, median", *(format_seconds(run.step_median_s) for run in found)),
        (
            "step, 10% to 90%",
            *(f"{format_seconds(run.step_p10_s)} to {format_seconds(run.step_p90_s)}" for run in found),
        ),
        ("CPU time a step, all threads", *(format_seconds(run.step_cpu_s) for run in found)),
        ("read a step", *(format_bytes(run.step_read_bytes) for run in found)),
        ("written a step", *(format_bytes(run.step_written_bytes) for run in found)),
        ("hits", *(f"{run.hit_ratio:.1%}" for run in found)),
        ("stalled a step", *(format_seconds(run.step_stall_s) for run in found)),
        ("peak resident memory", *(format_bytes(run.peak_resident_bytes) for run in found)),
    ]
    of_parts = {"in RAM": result.in_ram_parts, "tiered": result.tiered_parts}
    parts = [{part.part: part.step_part_s for part in of_parts[title]} for title in given]
    rows += [
        (f"  {title}", *(format_seconds(of[name]) if name in of else "not counted" for of in parts))
        for name, title in _PARTS.items()
    ]
    output.line(
        f"{result.parameters / 1e6:.0f} M parameters, {format_bytes(result.record_bytes)} of expert "
        f"records, host budget {format_bytes(result.host_budget_bytes)}"
    )
    output.table("", ("", *given), rows)
    for line in result.effective:
        output.line(line)
    speed = result.disk_bytes_per_s
    output.line(
        f"{result.tokens_per_s:.0f} tokens/s; compulsory "
        f"{format_bytes(result.compulsory_read_bytes)} read "
        f"and {format_bytes(result.compulsory_written_bytes)} written a step "
        f"({result.compulsory_policy}; clairvoyant {format_bytes(result.clairvoyant_bytes)} in all)"
        + (f" at {format_bytes(int(speed))}/s take {format_seconds(result.compulsory_s)}" if speed else "")
    )
    if result.step_to_in_ram_ratio is not None:
        output.line(
            f"step / bound {result.step_to_bound_ratio:.3f}, bound {format_seconds(result.bound_s)}; "
            f"step / step in RAM {result.step_to_in_ram_ratio:.3f}; "
            f"processor time / that in RAM {result.cpu_to_in_ram_ratio:.3f}; "
            f"same losses: {'yes' if result.same_losses else 'NO'}"
        )
    else:
        output.line(f"step / time of compulsory bytes {result.step_to_bound_ratio:.3f}")
    if result.page_cache_bytes is not None:
        output.line(
            f"in the page cache: {format_bytes(result.page_cache_bytes)} of "
            f"{format_bytes(result.extent_bytes)} of extents"
        )
    if (cgroup := result.cgroup) is not None:
        output.line(
            f"memory cgroup of {format_bytes(cgroup.limit_bytes)}: peak "
            f"{format_bytes(cgroup.peak_bytes)}, {cgroup.kills_count} kills"
        )
