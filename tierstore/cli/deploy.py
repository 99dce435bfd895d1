"""``tierstore deploy``: compress and package a store for serving, in six stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.main import Interrupts
from tierstore.cli.options import EXISTING_FILE, PATH, Defaults, MemberOf, config_options, json_option
from tierstore.cli.output import Output
from tierstore.config import load
from tierstore.deploy.records import DeployConfig, StageName
from tierstore.errors import ConfigError
from tierstore.machine import MemoryAccount
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.deploy.records import StageRecord


@click.command()
@click.argument("store", type=PATH, required=False)
@click.option("--to", "target", type=PATH, help="Directory of the deployment.")
@config_options(
    DeployConfig,
    {
        "--experts": "compression.experts",
        "--method": "compression.method",
        "--weights": "compression.weights",
        "--text": ("distillation.text", {"type": EXISTING_FILE}),
        "--minutes": "distillation.minutes",
        "--steps": "distillation.steps",
        "--rate": "distillation.rate",
        "--rows": "distillation.rows",
        "--length": "distillation.length",
        "--memory": "placement.memory",
        "--ranks": "placement.ranks",
        "--segments": "placement.segments",
        "--graphs": "graphs",
        "--host-budget": "host_budget",
        "--threads": "threads",
    },
    Defaults.SHOWN,
)
@click.option(
    "--until",
    type=MemberOf(StageName),
    default=StageName.DEPLOYMENT.value,
    help="Stop after this stage.",
)
@click.option("--show", type=PATH, metavar="DIR", help="Print a deployment's completed stages.")
@json_option
def deploy(
    store: Path | None,
    target: Path | None,
    given: dict[str, object],
    until: StageName,
    show: Path | None,
    output: Output,
) -> None:
    """Compress and package STORE, trained or imported, for serving.

    Each stage (--until lists them) checks the previous one's result. The same command again resumes an interrupted
    deployment.
    """
    if show is not None:
        from tierstore.deploy.pipeline import stage_records

        _show(output, show, stage_records(show))
        return
    if store is None or target is None:
        raise ConfigError("expected a STORE and --to DIR, or --show DIR")
    output.line(f"{target}: deploying {store}")
    from tierstore.deploy.pipeline import deploy as run

    config = load(DeployConfig, None, {"store": store, "target": target, **given})
    most = MemoryAccount({})

    def announced(account: MemoryAccount) -> None:
        """Print what the process will hold, whenever it is more than before."""
        nonlocal most
        if account.nbytes > most.nbytes:
            most = account
            output.announce(account)

    with Interrupts.install() as interrupts:
        done = run(
            config,
            until=until,
            say=output.line,
            show=output.passing,
            announced=announced,
            asked_to_stop=lambda: interrupts.requested,
        )
    held = output.compare(most) if most.parts else {}
    _show(output, done.directory, done.records, complete=done.complete, **held)


def _show(output: Output, directory: Path, records: tuple[StageRecord, ...], **further: object) -> None:
    """Show the completed stages, as a table and as JSON."""
    rows = [
        (record.stage.number, record.stage.value, format_seconds(record.elapsed_s), _figures(record))
        for record in records
    ]
    output.table(f"{directory}", ("", "stage", "time", "found"), rows)
    output.emit({"directory": directory, **further, "stages": records})


def _figures(record: StageRecord) -> str:
    """The scalar figures on one line, followed by the notes."""
    shown = []
    for name, value in record.figures.items():
        if isinstance(value, float):
            shown.append(f"{name} {value:.4g}")
        elif name.startswith("bytes_") and isinstance(value, int):
            shown.append(f"{name.removeprefix('bytes_')} {format_bytes(value)}")
        elif isinstance(value, int | str):
            shown.append(f"{name} {value}")
    return "\n".join([", ".join(shown), *record.notes])
