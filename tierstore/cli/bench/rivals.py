"""``tierstore bench rivals``: the same training by other libraries and by tierstore, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.bench.rivals.registry import RIVALS
from tierstore.cli.bench.results import (
    CHECK_FAILED,
    WORK_DIRECTORY,
    Reporting,
    results_options,
    work_directory_option,
)
from tierstore.cli.options import FILE, PATH, SIZE, config_overrides, help_config_option, set_option
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.rivals.run import BoundFigures, RivalFigures, RivalsResult


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option(
    "--rival",
    "names",
    multiple=True,
    type=click.Choice([*RIVALS]),
    help="Who takes part; may be given several times (default: all).",
)
@click.option(
    "--model",
    type=click.Choice(["built-in", "mixtral"]),
    default="built-in",
    help="The built-in model, or a Mixtral of transformers of its sizes, which tierstore wraps.",
)
@click.option("--steps", type=int, default=2, help="Steps of each in a round.")
@click.option("--warmup", type=int, default=2, help="Steps of each before the first round.")
@click.option("--rounds", type=int, default=5, help="Rounds; each begins with another one.")
@click.option("--host-budget", type=SIZE, help="Memory for experts in tierstore.")
@click.option(
    "--memory-limit",
    type=SIZE,
    default="0",
    help="Memory of each process: a cgroup, or RLIMIT_DATA without the right to make one (0: no limit).",
)
@click.option("--timeout", type=float, default=900.0, help="Seconds within which each must answer.")
@click.option(
    "--deepspeed",
    "overlay",
    type=FILE,
    metavar="FILE.json",
    help="Laid over DeepSpeed's configuration, key by key.",
)
@work_directory_option
@set_option()
@results_options()
@help_config_option()
def rivals(
    config: Path | None,
    names: tuple[str, ...],
    model: str,
    steps: int,
    warmup: int,
    rounds: int,
    host_budget: int | None,
    memory_limit: int,
    timeout: float,
    overlay: Path | None,
    store: Path | None,
    settings: tuple[str, ...],
    reporting: Reporting,
) -> int:
    """The same training by plain torch, FSDP2, DeepSpeed ZeRO-3 and tierstore, in turns, each in its own process.

    Who is not installed (pip install tierstore[rivals]), does not open or dies is left out with a reason. Exit status 1: one
    computed other losses.
    """
    from tierstore.bench.rivals.run import RivalsBench, TrainedModel, measurements, run
    from tierstore.train.config import TrainConfig

    directory = store or WORK_DIRECTORY
    overrides = config_overrides(settings, {"host_budget": host_budget, "store": directory})
    loaded = load(TrainConfig, config, overrides)
    plan = RivalsBench(
        rivals=names or tuple(RIVALS),
        model=TrainedModel(model),
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        memory_limit=memory_limit,
        timeout_s=timeout,
        settings=overlay,
    )
    session = reporting.begin(directory=directory)
    result = run(loaded, plan, session.output.line)
    show_rivals(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.agreed else CHECK_FAILED


def show_rivals(result: RivalsResult, output: Output) -> None:
    """A table and the ratios, for people."""
    limit = f", {format_bytes(result.memory_limit_bytes)} each" if result.memory_limit_bytes else ""
    output.table(
        f"{result.model.value} model, {result.parameters / 1e6:.0f} M parameters, "
        f"{result.tokens_per_step_count} tokens a step, {result.rounds} rounds of {result.steps} steps{limit}",
        (
            "",
            "tokens/s",
            "least to greatest",
            "CPU a step",
            "peak resident",
            "read, written a step",
            "loss apart",
        ),
        [_row(one) for one in result.rivals],
    )
    for one in result.rivals:
        if one.reason is not None:
            output.line(f"{one.title}: {one.outcome.value}: {one.reason}")
        for line in one.description if one.rival not in ("tierstore", "tierstore-ram") else ():
            output.line(f"{one.title}: {line}")
        if result.memory_limit_bytes and one.times is not None:
            output.line(f"{one.title}: memory: {one.memory}")
    output.line(
        f"losses of the first {result.compared_steps_count} steps are compared with {result.reference}'s; within "
        f"{result.loss_tolerance:g} nats they agree"
    )
    for against in result.against:
        output.line(
            f"tierstore / {against.rival}: tokens/s {against.tokens_ratio:.2f}, CPU time {against.cpu_ratio:.2f}, "
            f"resident {against.resident_ratio:.2f}"
        )
    if result.bound is not None:
        _show_bound(result.bound, output)


def _row(one: RivalFigures) -> tuple[str, ...]:
    times = one.times
    apart = "-" if one.loss_difference is None else f"{one.loss_difference:.1e}"
    if times is None:
        return (one.title, one.outcome.value, *["-"] * 4, apart)
    return (
        one.title,
        f"{times.tokens_per_s:.0f}" + ("" if one.reason is None else f" ({one.outcome.value})"),
        f"{times.tokens_low_per_s:.0f} to {times.tokens_high_per_s:.0f}",
        format_seconds(times.step_cpu_s),
        format_bytes(times.peak_resident_bytes),
        f"{format_bytes(times.step_read_bytes)}, {format_bytes(times.step_written_bytes)}",
        apart,
    )


def _show_bound(bound: BoundFigures, output: Output) -> None:
    speed = bound.disk_bytes_per_s
    output.line(
        f"tierstore's compulsory bytes: {format_bytes(bound.compulsory_read_bytes)} read and "
        f"{format_bytes(bound.compulsory_written_bytes)} written a step ({bound.compulsory_policy})"
        + (f" at {format_bytes(int(speed))}/s take {format_seconds(bound.compulsory_s)}" if speed else "")
    )
    in_ram = "" if bound.in_ram_step_s is None else f", in RAM {format_seconds(bound.in_ram_step_s)}"
    output.line(
        f"step / bound {bound.step_to_bound_ratio:.3f}, bound {format_seconds(bound.bound_s)}{in_ram}"
    )
    if bound.aim_s is not None and bound.step_to_aim_ratio is not None:
        output.line(
            f"step / aim {bound.step_to_aim_ratio:.3f}: at most {format_seconds(bound.aim_s)}, the slower of 1.10 x the "
            "bound and a quarter of DeepSpeed's step"
        )
