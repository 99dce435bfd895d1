"""``tierstore bench machine``: the costs that ``tierstore plan --profile`` predicts with."""

from __future__ import annotations

import math
from pathlib import Path

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.options import EXISTING_DIRECTORY, FILE, SIZE
from tierstore.units import format_bytes, format_seconds


@click.command()
@click.argument("profile", type=FILE)
@click.option("--ranks", type=int, default=2, help="Local ranks for the collectives.")
@click.option("--repeats", type=int, default=5, help="Measurements of each point.")
@click.option("--threads", type=int, default=0, help="torch's threads (0: as they are).")
@click.option("--disk-bytes", type=SIZE, default="64MiB", help="Bytes of one transfer stream.")
@click.option(
    "--dir",
    "directory",
    type=EXISTING_DIRECTORY,
    default=Path(),
    help="Measure the disk under this directory.",
)
@results_options()
def machine(profile: Path, directory: Path, reporting: Reporting, **sizes: int) -> None:
    """Measure disk, copies, AdamW, computation and collectives into PROFILE, a JSON file for `plan --profile`."""
    from tierstore.bench.machine.run import MachineBench, measurements, result_of, rows, run
    from tierstore.plan.costs import save_profile

    session = reporting.begin(directory=directory, files={"PROFILE": profile})
    found = run(MachineBench(directory=directory, **sizes), session.output.line)
    measured = found.profile
    save_profile(measured, profile)
    session.output.table(
        f"{measured.machine}; written to {profile}",
        ("", "latency", "rate", "assumed without a profile"),
        [
            (name, format_seconds(cost.latency_s), _rate(name, cost.per_s), _rate(name, assumed.per_s))
            for name, cost, assumed in rows(measured)
        ],
    )
    session.end(result_of(measured, profile), measurements(found))


def _rate(name: str, per_s: float) -> str:
    if math.isinf(per_s):
        return "any"
    return f"{per_s / 1e9:.3g} GFLOP/s" if name.endswith("flops") else f"{format_bytes(per_s)}/s"
