"""``tierstore deploy``: six stages from a store to a directory that is served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.capabilities import Capability
from tierstore.cli.interrupts import Interrupts
from tierstore.cli.options import EXISTING_FILE, PATH, SIZE, bundled, json_option, options
from tierstore.cli.output import Output
from tierstore.deploy.config import (
    CompressionConfig,
    DeployConfig,
    DistillationConfig,
    ExpertWeights,
    Method,
    PlacementConfig,
    StageName,
)
from tierstore.errors import ConfigError
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.deploy.records import StageRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What the options below the store and the target say."""

    experts: int | None
    method: str
    weights: str | None
    text: tuple[Path, ...]
    minutes: float
    steps: int
    rate: float
    rows: int
    length: int
    memory: int | None
    ranks: int
    segments: str | None
    graphs: str
    host_budget: int
    threads: int

    def config(self, store: Path, target: Path) -> DeployConfig:
        """Raises ConfigError."""
        return DeployConfig(
            store=store,
            target=target,
            compression=CompressionConfig(
                experts=self.experts,
                method=Method(self.method),
                weights=None if self.weights is None else ExpertWeights(self.weights),
            ),
            distillation=DistillationConfig(
                text=self.text,
                minutes=self.minutes,
                steps=self.steps,
                rate=self.rate,
                rows=self.rows,
                length=self.length,
            ),
            placement=PlacementConfig(
                memory=self.memory, ranks=self.ranks, segments=_segments(self.segments)
            ),
            graphs=Capability(self.graphs),
            host_budget=self.host_budget,
            threads=self.threads,
        )


def _segments(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(
            f"--segments: expected the first block of each segment, such as 0,8,16, got {text!r}"
        ) from error


_EXPERTS = options(
    click.option(
        "--experts", type=int, help="Experts of a layer after compression (default: as many as there are)."
    ),
    click.option(
        "--method",
        type=click.Choice([each.value for each in Method]),
        default=Method.MERGE.value,
        help="Merge experts that are alike, or leave out those that are used least.",
    ),
    click.option(
        "--weights",
        type=click.Choice([each.value for each in ExpertWeights]),
        help="How experts' weights are kept (default: as they are).",
    ),
    click.option(
        "--text",
        type=EXISTING_FILE,
        multiple=True,
        help="Text to calibrate, distil and judge with; again for more.",
    ),
    click.option("--minutes", type=float, default=30.0, help="Time for distillation (0: none)."),
    click.option(
        "--steps", type=int, default=0, help="Steps of distillation (0: as many as the time allows)."
    ),
    click.option("--rate", type=float, default=3e-4, help="Largest learning rate of distillation."),
    click.option("--rows", type=int, default=4, help="Windows of text in a step."),
    click.option("--length", type=int, default=256, help="Tokens of a window."),
)
_PLACEMENT = options(
    click.option("--memory", type=SIZE, help="Memory of a rank (default: what this machine has)."),
    click.option("--ranks", type=int, default=1, help="Ranks that share the experts."),
    click.option("--segments", help="First block of each segment, such as 0,8,16 (default: by the memory)."),
    click.option(
        "--graphs",
        type=click.Choice([each.value for each in Capability]),
        default=Capability.AUTO.value,
        help="Compile the dense segments to graphs.",
    ),
    click.option(
        "--host-budget", type=SIZE, default="1GiB", help="Memory for experts of a model while stages run."
    ),
    click.option("--threads", type=int, default=0, help="torch's threads (0: one for each core)."),
)


@click.command()
@click.argument("store", type=PATH, required=False)
@click.option("--to", "target", type=PATH, help="The new directory; its stages go on where they were.")
@_EXPERTS
@_PLACEMENT
@click.option(
    "--until",
    type=click.Choice([each.value for each in StageName]),
    default=StageName.DEPLOYMENT.value,
    help="Stop when this stage has ended, to look at what it made.",
)
@click.option("--show", type=PATH, metavar="DIR", help="Print the stages of a deployment and exit.")
@json_option
@bundled(_Options, "given")
def deploy(
    store: Path | None, target: Path | None, given: _Options, until: str, show: Path | None, output: Output
) -> None:
    """Make of STORE, trained or imported, a directory to serve: fused, compressed, placed and measured.

    Its stages are fusion, distillation, conversion, segmentation, optimisation and deployment. Each checks what the one
    before it has left. The same command goes on with a deployment that was stopped or killed.
    """
    from tierstore.deploy.pipeline import deploy as run
    from tierstore.deploy.pipeline import stage_records

    if show is not None:
        records = stage_records(show)
        _table(output, f"{show}", records)
        output.emit({"directory": str(show), "stages": [record.as_json() for record in records]})
        return
    if store is None or target is None:
        raise ConfigError("expected a STORE and --to DIR, or --show DIR")
    config = given.config(store, target)
    with Interrupts.heard() as interrupts:
        done = run(config, until=StageName(until), say=output.line, asked_to_stop=lambda: interrupts.asked)
    _table(output, f"{done.directory}", done.records)
    output.emit(
        {
            "directory": str(done.directory),
            "complete": done.complete,
            "stages": [record.as_json() for record in done.records],
        }
    )


def _table(output: Output, title: str, records: tuple[StageRecord, ...]) -> None:
    rows = [
        (record.number, record.stage.value, format_seconds(record.elapsed_s), _figures(record))
        for record in records
    ]
    output.table(title, ("", "stage", "time", "found"), rows)


def _figures(record: StageRecord) -> str:
    """The figures that are single numbers or words, on one line, and the notes below."""
    shown = []
    for name, value in record.figures.items():
        if isinstance(value, float):
            shown.append(f"{name} {value:.4g}")
        elif name.startswith("bytes_") and isinstance(value, int):
            shown.append(f"{name.removeprefix('bytes_')} {format_bytes(value)}")
        elif isinstance(value, int | str):
            shown.append(f"{name} {value}")
    return "\n".join([", ".join(shown), *record.notes])
