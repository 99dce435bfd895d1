"""``tierstore bench embedding``: a large and a small table, gathered and with its rows partitioned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.embedding import EmbeddingResult, TableResult


@click.command()
@click.option("--ranks", type=int, default=4)
@click.option("--vocab", type=int, default=151_936, help="Rows of the large table.")
@click.option("--d-model", type=int, default=512, help="Width of both.")
@click.option("--tokens", type=int, default=64, help="Tokens of a step on each rank, with the large table.")
@click.option("--small-vocab", type=int, default=256, help="Rows of the small table.")
@click.option("--small-tokens", type=int, default=256, help="Tokens with it.")
@click.option("--rounds", type=int, default=3, help="Rounds; the two ways take turns.")
@results_options()
def embedding(reporting: Reporting, **sizes: int) -> int:
    """Bytes, memory and time of a step with a table that is gathered, and with one whose rows stay partitioned.

    Exit status 1: bytes or memory are not as calculated, or AUTO chooses what sends more.
    """
    from tierstore.bench.embedding import EmbeddingBench, measurements, run

    bench = EmbeddingBench(**sizes)
    session = reporting.begin()
    result = run(bench, session.output.line)
    show_embedding(result, session.output)
    session.end(result, measurements(result))
    return CHECK_FAILED if result.failures else 0


def show_embedding(result: EmbeddingResult, output: Output) -> None:
    """A table for each vocabulary, and what is not as it should be."""
    for table in (result.large, result.small):
        _show(result, table, output)
    for failure in result.failures:
        output.line(f"not as expected: {failure}")


def _show(result: EmbeddingResult, table: TableResult, output: Output) -> None:
    ways = (table.gathered, table.partitioned)
    output.table(
        f"{table.vocab:,} rows of {result.asked.d_model}, tied, {result.asked.ranks} ranks on {result.backend}",
        ("", "gathered", "partitioned"),
        [
            ("sent a step by a rank", *(format_bytes(way.sent_bytes) for way in ways)),
            ("calculated", *(format_bytes(way.calculated_sent_bytes) for way in ways)),
            ("resident memory rises by", *(format_bytes(way.risen_bytes) for way in ways)),
            ("calculated", *(format_bytes(way.calculated_bytes) for way in ways)),
            ("step, median", *(format_seconds(way.step_s) for way in ways)),
        ],
    )
    output.line(
        f"partitioned rows send {table.sent_ratio:.3f} x the bytes and save {format_bytes(table.saved_bytes)} a rank "
        f"(calculated {format_bytes(table.calculated_saved_bytes)}); a step takes {table.step_ratio:.2f} x as long (noise "
        f"{table.noise_ratio:.0%}); AUTO: {table.auto} ({table.auto_reason})"
    )
