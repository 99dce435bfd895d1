"""``tierstore bench tasks``: several tasks on real ranks, one a card and in pieces of equal cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.output import Output
from tierstore.units import format_seconds

if TYPE_CHECKING:
    from tierstore.bench.tasks import TasksResult


@click.command()
@click.option("--time-scale", type=float, default=5.0, help="How many times faster than the paper's cards.")
@click.option("--rounds", type=int, default=5, help="Rounds; the modes take turns.")
@click.option("--steps", type=int, default=4, help="Steps of one round of a mode.")
@results_options()
def tasks(time_scale: float, rounds: int, steps: int, reporting: Reporting) -> int:
    """Four unequal tasks on eight emulated cards: samples a second and card, with a card for each task and balanced.

    The cards' times are a + c max(samples), fitted to table 3 of SE-MoE. Exit status 1: the gain is more than three
    points from what these give, or an example was lost or taken twice.
    """
    from tierstore.bench.tasks import TasksBench, measurements, run

    session = reporting.begin()
    result = run(TasksBench(time_scale=time_scale, rounds=rounds, steps=steps))
    _show(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.as_predicted else CHECK_FAILED


def _show(result: TasksResult, output: Output) -> None:
    bench = result.asked
    output.table(
        f"{bench.ranks} ranks, {bench.rounds} rounds of {bench.steps} steps, {bench.time_scale:g} x the paper's speed",
        ("", "cards", "samples", "most a card", "step", "by the formula", "samples/s and card"),
        [
            (
                mode.mode,
                str(mode.cards_count),
                str(mode.samples_count),
                str(mode.most_samples_count),
                format_seconds(mode.step_s),
                format_seconds(mode.predicted_step_s),
                f"{mode.speed:.1f}",
            )
            for mode in result.modes
        ],
    )
    output.line(
        f"balanced against one task a card: {result.gain_ratio:+.1%} a card (by the formula "
        f"{result.predicted_gain_ratio:+.1%}; noise {result.noise_ratio:.1%}); every example once: "
        f"{'yes' if result.every_example_once else 'NO'}"
    )
