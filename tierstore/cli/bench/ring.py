"""``tierstore bench ring``: a ring of K of N layers' experts against all of them resident."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.cli.bench.results import WORK_DIRECTORY, Reporting, results_options, work_directory_option
from tierstore.cli.options import FILE, SIZE
from tierstore.units import format_bytes, format_seconds


@click.command()
@click.option("--layers", type=int, default=20, help="MoE layers.")
@click.option("--experts", type=int, default=8, help="Of each layer.")
@click.option("--expert-bytes", type=SIZE, default="1MiB", help="One expert's weights on the device.")
@click.option("--forward-ms", type=float, default=10.0, help="Computation of a layer.")
@click.option(
    "--load",
    "loads",
    type=float,
    multiple=True,
    default=(0.9, 1.0),
    help="Loading a layer's experts, in times of computing a layer; once for each.",
)
@click.option(
    "--share",
    "shares",
    type=float,
    multiple=True,
    default=(0.2, 0.4, 0.6, 0.8),
    help="Layers in the ring, as a part of all; once for each.",
)
@click.option("--passes", type=int, default=3, help="Passes of a round.")
@click.option("--rounds", type=int, default=7, help="Rounds; a ring and everything resident take turns.")
@click.option("--timeline", type=FILE, help="A Chrome trace of the ring of 40% of the layers.")
@work_directory_option
@results_options()
def ring(
    layers: int,
    experts: int,
    expert_bytes: int,
    forward_ms: float,
    loads: tuple[float, ...],
    shares: tuple[float, ...],
    passes: int,
    rounds: int,
    timeline: Path | None,
    store: Path | None,
    reporting: Reporting,
) -> None:
    """Ring memory on an emulated device: speed and device memory with the experts of some of the layers."""
    from tierstore.bench.ring import RingBench, measurements, run, table

    directory = store or WORK_DIRECTORY
    bench = RingBench(
        directory=directory,
        layers=layers,
        experts=experts,
        expert_bytes=expert_bytes,
        forward_s=forward_ms / 1e3,
        loads=loads,
        shares=shares,
        passes=passes,
        rounds=rounds,
        timeline=timeline,
    )
    session = reporting.begin(directory=directory)
    result = run(bench, session.output.line)
    session.output.table(
        f"{layers} layers of {experts} experts of {format_bytes(expert_bytes)}, a layer computed in "
        f"{format_seconds(result.layer_s)}, {rounds} rounds",
        ("layers in the ring", "load / compute", "device memory", "saved", "speed", "stalled a pass"),
        table(result),
    )
    session.end(result, measurements(result))
