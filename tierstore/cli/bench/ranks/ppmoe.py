"""``tierstore bench ppmoe``: experts over tensor-parallel ranks against experts over data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.ppmoe import PpmoeResult


@click.command()
@click.option("--tokens", type=int, default=1024, help="Of all ranks of a group.")
@click.option("--width", type=int, default=128, help="Elements of a token, in fp32.")
@click.option("--rounds", type=int, default=5, help="Of each speed; the ways take turns.")
@click.option("--pass-ms", type=float, default=100.0, help="What two all-to-alls take on their limited link.")
@results_options()
def ppmoe(reporting: Reporting, tokens: int, width: int, rounds: int, pass_ms: float) -> int:
    """Bytes by link, and how fast links within a tensor-parallel group must be for its experts to pay.

    Over 2 and 4 real ranks with limited links. Exit status 1: bytes are not those of the formulas.
    """
    from tierstore.bench.ppmoe import PpmoeBench, measurements, run

    bench = PpmoeBench(tokens=tokens, width=width, rounds=rounds, pass_s=pass_ms / 1000)
    session = reporting.begin()
    result = run(bench, session.output.line)
    show_ppmoe(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.same_bytes else CHECK_FAILED


def show_ppmoe(result: PpmoeResult, output: Output) -> None:
    """Two tables and the verdict, for people."""
    from tierstore.bench.ppmoe import TOLERANCE

    asked = result.asked
    output.table(
        f"bytes of all ranks, {asked.tokens} tokens of {asked.width} elements, {result.backend}",
        ("ranks", "experts a token", "way", "a forward pass", "by formula", "both passes", "by formula"),
        [
            (
                case.ranks,
                case.top_k,
                way.way,
                format_bytes(way.sent_bytes),
                "equal" if way.sent_bytes == way.formula_bytes else format_bytes(way.formula_bytes),
                "-" if way.passes_bytes is None else format_bytes(way.passes_bytes),
                "-"
                if way.passes_formula_bytes is None
                else "equal"
                if way.passes_bytes == way.passes_formula_bytes
                else format_bytes(way.passes_formula_bytes),
            )
            for case in result.cases
            for way in case.sent
        ],
    )
    output.table(
        f"the speed of links within the group, in times of those between, at which both take as long "
        f"({format_seconds(asked.pass_s)} a pass, {asked.rounds} rounds)",
        ("ranks", "experts a token", "way", "expected", "found", "off by", "noise floor"),
        [
            (
                case.ranks,
                case.top_k,
                crossover.way,
                f"{crossover.expected_ratio:.3g}",
                "-" if crossover.found_ratio is None else f"{crossover.found_ratio:.3g}",
                "-" if crossover.found_ratio is None else f"{crossover.error:.1%}",
                f"{case.noise_ratio:.1%}",
            )
            for case in result.cases
            for crossover in case.crossovers
        ],
    )
    worst = "a crossover was not found" if result.worst_ratio is None else f"worst {result.worst_ratio:.1%}"
    within = result.worst_ratio is not None and result.worst_ratio <= TOLERANCE
    output.line(
        f"bytes as the formulas say: {'yes' if result.same_bytes else 'NO'}; crossovers within {TOLERANCE:.0%}: "
        f"{'yes' if within else 'NO'} ({worst})"
    )
