"""``tierstore bench overlap``: a stack of layers over limited links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import (
    WORK_DIRECTORY,
    Reporting,
    namespace_option,
    results_options,
    work_directory_option,
)
from tierstore.cli.options import (
    PATH,
    config_overrides,
    help_config_option,
    output_file,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.outputs import OutputKind
from tierstore.units import format_seconds

if TYPE_CHECKING:
    from tierstore.bench.overlap.run import OverlapResult


@click.command()
@click.argument("config", required=False, type=PATH)
@click.option(
    "--stack",
    type=click.Choice(["synthetic", "trainer"]),
    default="synthetic",
    help="Layers that only take time, or the trainer as CONFIG and --set say.",
)
@click.option("--layers", type=int, default=16, help="Of the synthetic stack.")
@click.option("--steps", type=int, default=4, help="Steps measured of each run.")
@click.option("--warmup", type=int, default=6, help="Steps before them.")
@click.option("--forward-ms", type=float, default=40.0, help="Computation of a layer's forward pass.")
@click.option(
    "--computation",
    type=click.Choice(["matmul", "device"]),
    default="matmul",
    help="On the processor, or as a device would: a time in which the processor is free.",
)
@work_directory_option
@click.option(
    "--timeline", type=output_file(OutputKind.TIMELINE), help="Rank 0's Chrome trace of the balanced run."
)
@click.option("--svg", type=output_file(OutputKind.PICTURE), help="A picture of one of its steps.")
@namespace_option
@set_option()
@results_options()
@help_config_option()
def overlap(
    config: Path | None,
    stack: str,
    layers: int,
    forward_ms: float,
    computation: str,
    store: Path | None,
    timeline: Path | None,
    svg: Path | None,
    settings: tuple[str, ...],
    reporting: Reporting,
    **sizes: int,
) -> None:
    """Two ranks over limited links: how much of gathers and expert fetches is hidden, and by which queue."""
    from tierstore.bench.overlap.device import Computation
    from tierstore.bench.overlap.rank import Stack
    from tierstore.bench.overlap.run import OverlapBench, measurements, run
    from tierstore.bench.overlap.stack import StackShape
    from tierstore.train.config import TrainConfig

    shape = StackShape(
        layers=layers,
        cached_layers=layers / 2,
        vertical_depth=max(1, layers * 3 // 4),
        forward_s=forward_ms / 1e3,
        computation=Computation(computation),
    )
    directory = store or WORK_DIRECTORY
    plan = OverlapBench(
        directory=directory,
        timeline=timeline,
        svg=svg,
        stack=Stack(stack),
        shape=shape,
        train=load(TrainConfig, config, config_overrides(settings, {"threads": 1})),
        **sizes,
    )
    session = reporting.begin(directory=directory)
    result = run(plan, session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))


def _show(result: OverlapResult, output: Output) -> None:
    output.table(
        f"{result.ranks} ranks, {result.stack.value} layers, links limited",
        (
            *("", "prefetch", "computation", "gathers", "fetches", "step", "/ longest", "/ unlimited"),
            *("stalled: horizontal", "vertical"),
        ),
        [
            (
                one.balance,
                one.prefetch,
                *map(format_seconds, (one.computation_s, one.gathers_s, one.fetches_s, one.step_s)),
                f"{one.longest_ratio:.3f}",
                f"{one.unlimited_ratio:.3f}",
                *(format_seconds(one.stalled_s(way)) for way in ("horizontal", "vertical")),
            )
            for one in result.runs
        ],
    )
