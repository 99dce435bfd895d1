"""``tierstore bench stages``: 1F1B through pipeline stages, on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.options import FILE, SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.stages import StagesResult


@click.command()
@click.option("--stages", type=int, multiple=True, default=(2, 4), help="Of a pipeline; once for each.")
@click.option(
    "--micro-batches",
    type=int,
    multiple=True,
    default=(1, 2, 4),
    help="Of a step, in times of the stages; once for each.",
)
@click.option("--forward", type=float, default=0.05, help="Seconds of a stage's forward pass.")
@click.option("--backward", type=float, default=0.1, help="Seconds of its backward pass.")
@click.option("--rounds", type=int, default=5, help="Steps of each pipeline.")
@click.option(
    "--host-budget",
    type=SIZE,
    default="768MiB",
    help="Memory for experts of the stage whose traffic is counted.",
)
@click.option("--svg", type=FILE, help="A picture of one step of the longest pipeline, from its timelines.")
@results_options()
def stages(
    stages: tuple[int, ...],
    micro_batches: tuple[int, ...],
    forward: float,
    backward: float,
    rounds: int,
    host_budget: int,
    svg: Path | None,
    reporting: Reporting,
) -> int:
    """1F1B's time on an emulated device, what each stage holds, and a stage's disk traffic by the order of its passes.

    Exit status 1: passes came in another order, a stage held more micro-batches than it should, or a step took more than
    1.1 x (M + p - 1)(t_f + t_b).
    """
    from tierstore.bench.stages import StagesBench, measurements, run

    bench = StagesBench(
        stages=stages,
        micro_batches=micro_batches,
        forward_s=forward,
        backward_s=backward,
        rounds=rounds,
        host_budget=host_budget,
        svg=svg,
    )
    session = reporting.begin(files={"--svg": svg})
    result = run(bench)
    _show(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.passed else CHECK_FAILED


def _show(result: StagesResult, output: Output) -> None:
    output.table(
        f"1F1B, passes of {format_seconds(result.asked.forward_s)} and {format_seconds(result.asked.backward_s)}",
        ("stages", "micro-batches", "step, median", "model", "ratio", "held by stage", "order"),
        [
            (
                each.stages_count,
                each.micro_batches_count,
                format_seconds(each.step_s),
                format_seconds(each.model_s),
                f"{each.ratio:.3f}",
                ", ".join(map(str, each.held_count)),
                "as derived" if each.in_order else "ANOTHER",
            )
            for each in result.pipelines
        ],
    )
    output.table(
        f"disk traffic of stage 0 a step, in units of its records, host budget {format_bytes(result.host_budget_bytes)}",
        ("stages", "micro-batches", "order", "read", "written"),
        [
            (
                each.stages_count,
                each.micro_batches_count,
                each.order,
                f"{each.read_ratio:.2f}",
                f"{each.written_ratio:.2f}",
            )
            for each in result.traffic
        ],
    )
