"""``tierstore bench prediction``: simulated step times against measured ones, over limited links."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.cli.options import json_option
from tierstore.cli.output import Output

__all__ = ["prediction"]


@click.command()
@click.option("--steps", type=int, default=4, show_default=True, help="Steps measured in each case.")
@click.option("--warmup", type=int, default=6, show_default=True, help="Steps before them.")
@click.option(
    "--forward-ms", type=float, default=20.0, show_default=True, help="Computation of a layer's forward pass."
)
@click.option(
    "--computation",
    type=click.Choice(["device", "matmul"]),
    default="device",
    show_default=True,
    help="A device that leaves the processor free, or matrix products on it.",
)
@click.option("--store", type=click.Path(path_type=Path), help="A directory to make, measure in, and remove.")
@json_option
def prediction(
    steps: int, warmup: int, forward_ms: float, computation: str, store: Path | None, as_json: bool
) -> None:
    """Predict the step time of schedules over limited links, then measure them; calibration takes turns with both."""
    from tierstore.bench.overlap_rig import Computation
    from tierstore.bench.prediction import PredictionBench, run, table

    output = Output.for_option(as_json)
    bench = PredictionBench(
        place=store or Path("tierstore-bench"),
        steps=steps,
        warmup=warmup,
        forward_s=forward_ms / 1e3,
        computation=Computation(computation),
    )
    result = run(bench, output.line)
    output.table(
        "Predicted and measured",
        ("case (none was fitted on)", "predicted", "measured", "ratio", "disk bytes ratio", "bottleneck"),
        table(result),
    )
    output.line(
        f"largest error {result['largest_error_ratio']:.1%}, median {result['median_error_ratio']:.1%}; fitted on "
        f"{len(result['calibrations'])} calibrations over unlimited links"
    )
    output.emit(result)
