"""``tierstore bench machine``: the costs that ``tierstore plan --profile`` predicts with."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import click

from tierstore.cli.bench.results import Reporting, results_options
from tierstore.cli.options import EXISTING_DIRECTORY, SIZE, config_overrides, output_file, set_option
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind
from tierstore.units import format_bytes, format_seconds

#: Ends of the names of costs whose amounts are operations.
_COMPUTING = ("flops", "forward", "backward")


@click.command()
@click.argument("profile", type=output_file(OutputKind.PROFILE))
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
@set_option()
@results_options()
def machine(
    profile: Path, directory: Path, settings: tuple[str, ...], reporting: Reporting, **sizes: int
) -> None:
    """Measure disk, copies, AdamW, computation and collectives into PROFILE, a JSON file for `plan --profile`.

    --set links.gather... and links.exchange... limit the collectives.
    """
    from tierstore.bench.machine.run import MachineBench, measurements, result_of, rows, run
    from tierstore.machine_profile import save_profile
    from tierstore.train.config import TrainConfig

    for name in (setting.partition("=")[0] for setting in settings):
        if not name.startswith(("links.gather.", "links.exchange.")):
            raise ConfigError(f"--set {name}: expected links.gather or links.exchange, nothing else is used")
    links = load(TrainConfig, None, config_overrides(settings, {})).links

    session = reporting.begin(directory=directory)
    found = run(MachineBench(directory=directory, links=links, **sizes), session.output.line)
    measured = found.profile
    save_profile(measured, profile)
    session.output.table(
        f"{measured.machine}; written to {profile}",
        ("", "latency", "rate", "off the line: median", "at most", "assumed without a profile"),
        [
            (
                name,
                format_seconds(cost.latency_s),
                _rate(name, cost.per_s),
                f"{statistics.median(errors):.1%}",
                f"{max(errors):.1%}",
                _rate(name, assumed.per_s),
            )
            for name, cost, assumed in rows(found)
            for errors in [found.error_ratios(name)]
        ],
    )
    session.end(result_of(found, profile), measurements(found))


def _rate(name: str, per_s: float) -> str:
    if math.isinf(per_s):
        return "any"
    return f"{per_s / 1e9:.3g} GFLOP/s" if name.endswith(_COMPUTING) else f"{format_bytes(per_s)}/s"
