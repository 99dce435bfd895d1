"""``tierstore bench exchange``: rows exchanged at once and in two steps, over emulated nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tierstore.cli.bench.results import CHECK_FAILED, Reporting, results_options
from tierstore.cli.options import SIZE
from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.bench.exchange.run import ExchangeResult


@click.command()
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    default=("2x2", "2x3", "3x2"),
    metavar="NODESxRANKS",
    help="Nodes and ranks on each; may be given several times.",
)
@click.option(
    "--latency-ms",
    "latencies_ms",
    type=float,
    multiple=True,
    default=(0.2, 10.0, 50.0),
    help="What a message between nodes costs; may be given several times.",
)
@click.option(
    "--bandwidth",
    "bandwidths",
    type=SIZE,
    multiple=True,
    default=("20MB", "80MB"),
    help="Bytes a second that a node sends; may be given several times.",
)
@click.option(
    "--message-bytes",
    type=SIZE,
    multiple=True,
    default=("2KiB", "64KiB", "384KiB"),
    help="From each rank to each other; may be given several times.",
)
@click.option("--rounds", type=int, default=7, help="Of each case.")
@click.option(
    "--network",
    type=click.Choice(["auto", "namespaces", "process"]),
    default="auto",
    help="Who limits what goes between nodes; auto: the kernel where it has netem.",
)
@results_options()
def exchange(
    layouts: tuple[str, ...],
    latencies_ms: tuple[float, ...],
    bandwidths: tuple[int, ...],
    message_bytes: tuple[int, ...],
    rounds: int,
    network: str,
    reporting: Reporting,
) -> int:
    """Rows exchanged at once and in two steps over emulated nodes: which is faster where, and what AUTO chooses.

    Exit status 1: AUTO chose the slower way in a case, beyond the noise floor.
    """
    from tierstore.bench.exchange.network import Network
    from tierstore.bench.exchange.run import ExchangeBench, measurements, run

    session = reporting.begin()
    bench = ExchangeBench(
        layouts=layouts,
        latencies_s=tuple(latency / 1e3 for latency in latencies_ms),
        bandwidths_bytes_per_s=bandwidths,
        message_bytes=message_bytes,
        rounds=rounds,
        network=Network(network),
    )
    result = run(bench, session.output.line)
    show_exchange(result, session.output)
    session.end(result, measurements(result))
    return 0 if result.auto_right_count == len(result.cases) else CHECK_FAILED


def show_exchange(result: ExchangeResult, output: Output) -> None:
    """A row a case, and what AUTO made of them."""
    noise = result.noise_ratio
    output.table(
        f"{len(result.cases)} cases, median of {result.asked.rounds} rounds; noise floor {noise:.1%}",
        (
            *("nodes x ranks", "a message costs", "a node sends", "messages of"),
            *("flat", "hierarchical", "ratio", "faster", "auto", "right"),
        ),
        [
            (
                case.layout,
                format_seconds(case.latency_s),
                f"{format_bytes(case.bandwidth_bytes_per_s)}/s",
                format_bytes(case.message_bytes),
                *map(format_seconds, (case.flat_s, case.hierarchical_s)),
                f"{case.hierarchical_to_flat_ratio:.3f}",
                case.faster(noise).value,
                case.auto.value,
                "yes" if case.auto_right(noise) else "NO",
            )
            for case in result.cases
        ],
    )
    output.line(
        f"hierarchical is faster in {result.hierarchical_faster_count} cases, flat in {result.flat_faster_count}, "
        f"{result.ties_count} are ties; auto is right in {result.auto_right_count} of {len(result.cases)}"
    )
