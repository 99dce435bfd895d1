"""``tierstore bench pipemoe``: whether AUTO's number of chunks is the best, and whether its solver is exact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.options import FILE
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.units import format_seconds

if TYPE_CHECKING:
    from tierstore.bench.pipemoe.picture import ChunkPicture
    from tierstore.bench.pipemoe.run import PassScore, PipelineResult
    from tierstore.bench.pipemoe.search import SearchResult


@click.command()
@click.option("--cases", type=int, default=60, help="Layers to measure, spread over the 60 there are.")
@click.option("--rounds", type=int, default=5, help="Measurements of each number of chunks.")
@click.option(
    "--slowdown",
    type=float,
    default=1.0,
    help="Emulated links and devices take so many times as long: for a machine that others use.",
)
@click.option(
    "--search",
    "drawn",
    type=click.IntRange(min=1),
    help="Measure nothing: compare the exact solver with exhaustive simulation in so many drawn cases.",
)
@click.option("--svg", type=FILE, help="Only draw one layer's passes in 1, 2 and 4 chunks, from a timeline.")
@results_options()
def pipemoe(
    cases: int, rounds: int, slowdown: float, drawn: int | None, svg: Path | None, reporting: Reporting
) -> int:
    """MoE layers in chunks over limited links, on 2 and 4 ranks with emulated devices: AUTO's number against all others.

    Exit status 1: the exact solver (--search) was not exact.
    """
    if drawn is not None and svg is not None:
        raise ConfigError("--svg: expected without --search, which has no ranks to draw")
    session = reporting.begin(files={"--svg": svg})
    if drawn is not None:
        from tierstore.bench.pipemoe import search

        exact = search.search(drawn)
        _show_search(exact, session.output)
        session.end(exact, search.measurements(exact))
        return CHECK_FAILED if exact.disagreements else 0
    if svg is not None:
        from tierstore.bench.pipemoe import picture

        shown = picture.run(
            picture.ChunkPictureBench(svg=svg, rounds=rounds, slowdown=slowdown), session.output.line
        )
        _show_passes(shown, session.output)
        session.end(shown, picture.measurements(shown))
        return 0
    from tierstore.bench.pipemoe.run import PipelineBench, measurements, run

    result = run(PipelineBench(layers=cases, rounds=rounds, slowdown=slowdown), session.output.line)
    _show(result, session.output)
    session.end(result, measurements(result))
    return 0


def _show_search(result: SearchResult, output: Output) -> None:
    output.line(
        f"{result.cases:,} drawn cases: the exact solver and exhaustive simulation disagree in "
        f"{result.disagreements}; exact ties: {result.ties}; times differ by at most "
        f"{result.largest_difference_ratio:.1e}"
    )
    output.line(
        f"Algorithm 1 as printed is not as good in {result.algorithm_1_worse:,} of them, at worst "
        f"{result.algorithm_1_worst_ratio:.2f} x the best"
    )


def _show_passes(result: ChunkPicture, output: Output) -> None:
    output.table(
        f"passes drawn in {result.svg}",
        ("chunks", "forward", "backward"),
        [
            (str(one.chunks), format_seconds(one.forward_s), format_seconds(one.backward_s))
            for one in result.passes
        ],
    )


def _show(result: PipelineResult, output: Output) -> None:
    output.table(
        f"{result.layers} layers, forward and backward, {result.rounds} rounds",
        (
            *("pass", "ranks", "rows", "start", "communication / computation"),
            *("AUTO's r", "best r", "AUTO", "best", "r = 1", "/ best", "/ r = 1", "predicted"),
        ),
        [_row(score) for score in result.passes],
    )
    output.line(
        f"AUTO within 5% of the best r in {result.close_share_ratio:.1%} of {len(result.passes)} passes (wanted: 95%), "
        f"worst {result.worst_to_best_ratio:.3f}; to r = 1: median {result.median_to_one_ratio:.3f}, worst "
        f"{result.worst_to_one_ratio:.3f} (wanted: 1.05); predicted within {result.prediction_error_ratio:.1%} (median)"
    )
    output.line(f"noise floor (the same r measured twice, 90th percentile): {result.noise_ratio:.1%}")
    one = [score for score in result.passes if score.auto_degree == 1]
    little = [score for score in result.passes if score.to_one_ratio > 0.98]
    output.line(
        f"does not pay: AUTO keeps r = 1 in {len(one)} passes; less than 2% is gained in {len(little)} "
        f"({_where(little)}); the experts of a rank cap r in {sum(score.capped for score in result.passes)}"
    )
    if result.overlap_worst_ratio is not None:
        output.line(
            "overlap, where communication equals computation: at most "
            f"{result.overlap_worst_ratio:.3f} of 1.2 x the longer plus what cannot overlap"
        )


def _where(scores: list[PassScore]) -> str:
    if not scores:
        return "none"
    found = sorted(score.communication_to_computation_ratio for score in scores)
    return f"communication / computation {found[0]:.2f} to {found[-1]:.2f}"


def _row(score: PassScore) -> tuple[str, ...]:
    return (
        score.phase,
        str(score.ranks),
        str(score.rows),
        format_seconds(score.latency_s),
        f"{score.communication_to_computation_ratio:.2f}",
        f"{score.auto_degree}{' (capped)' if score.capped else ''}",
        str(score.best_degree),
        *map(format_seconds, (score.auto_s, score.best_s, score.one_s)),
        f"{score.to_best_ratio:.3f}",
        f"{score.to_one_ratio:.3f}",
        format_seconds(score.predicted_s),
    )
