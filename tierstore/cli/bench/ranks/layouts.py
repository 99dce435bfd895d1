"""``tierstore bench layouts``: the plan of layouts against steps of real ranks."""

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
from tierstore.cli.output import Output
from tierstore.units import format_seconds

if TYPE_CHECKING:
    from tierstore.bench.layouts.run import LayoutsResult


@click.command()
@click.option("--ranks", type=int, multiple=True, default=(1, 2, 4), help="Of a layout; once for each.")
@click.option("--rounds", type=int, default=3, help="Rounds; the layouts take turns.")
@click.option("--steps", type=int, default=2, help="Steps of each layout in a round.")
@work_directory_option
@results_options()
def layouts(ranks: tuple[int, ...], rounds: int, steps: int, store: Path | None, reporting: Reporting) -> int:
    """Predicted against measured steps of 24 layouts of 1, 2 and 4 ranks, on an emulated device and limited links.

    Costs are fitted on ten other layouts. Exit status 1: fewer than 20 of 24 are within 15%, or as large a part of those
    that --ranks chooses.
    """
    from tierstore.bench.layouts.run import LayoutsBench, measurements, run

    bench = LayoutsBench(
        directory=WORK_DIRECTORY if store is None else store, ranks=ranks, rounds=rounds, steps=steps
    )
    session = reporting.begin(directory=bench.directory)
    result = run(bench, session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.passed else CHECK_FAILED


def _show(result: LayoutsResult, output: Output) -> None:
    output.table(
        f"step, medians of {result.asked.rounds} rounds of {result.asked.steps}",
        ("layout", "kind", "", "measured", "predicted", "ratio"),
        [
            (
                each.layout,
                each.kind,
                "judged" if each.judged else "fitted",
                format_seconds(each.step_s),
                format_seconds(each.predicted_step_s),
                f"{each.predicted_to_measured_ratio:.3f}" + ("" if each.within else " OFF"),
            )
            for each in result.layouts
        ],
    )
    for fitted in result.overheads:
        found = fitted.overheads
        output.line(
            f"fitted with {fitted.ranks} rank(s): {format_seconds(found.unit_s)} a pass over a unit, "
            f"{format_seconds(found.expert_s)} over an expert, {format_seconds(found.message_s)} a message"
        )
    output.line(
        f"within 15%: {result.within_count} of {result.judged_count}; worst {result.worst_error_ratio:.1%}; "
        f"noise {result.noise_ratio:.1%}"
    )
