"""``tierstore cache study``: every policy in every regime of a routing trace, as tables and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.cache_options import contract_option, machine_options, threads_option
from tierstore.cli.options import SIZE, json_option
from tierstore.cli.output import Output

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine

__all__ = ["study"]


@click.command()
@click.argument(
    "sources", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory for study.md and study.html.",
)
@click.option("--weight-bytes", type=SIZE, default="17301504", help="Size of an expert of an npz.")
@contract_option
@threads_option
@machine_options
@json_option
def study(
    sources: tuple[Path, ...],
    out: Path,
    weight_bytes: int,
    contract: str,
    threads: int,
    machine: Machine,
    as_json: bool,
) -> None:
    """Study SOURCES: an npz of expert ids in six regimes, a recorded trace as it is. Takes minutes."""
    from tierstore.lab.report import check_report, write_report
    from tierstore.lab.simulate import Contract
    from tierstore.lab.study import StudyOptions, run_study
    from tierstore.lab.study_tables import study_markdown

    output = Output.for_option(as_json)
    check_report()
    out.mkdir(parents=True, exist_ok=True)
    options = StudyOptions(
        contract=Contract(contract), threads=threads, machine=machine, weight_bytes=weight_bytes
    )
    found = run_study(sources, options, progress=lambda regime, what: output.line(f"{regime}: {what}"))
    (out / "study.md").write_text(study_markdown(found), encoding="utf-8")
    write_report(found, out / "study.html")
    output.line(f"written: {out / 'study.md'}, {out / 'study.html'}")
    output.emit(
        {
            "tables": str(out / "study.md"),
            "report": str(out / "study.html"),
            "regimes": [
                {
                    "name": regime.name,
                    "sha256": regime.trace.sha256,
                    "chosen": regime.tuned.chosen.label,
                    "miss_ratio": regime.tuned.chosen.miss_ratio,
                    "regret_ratio": regime.tuned.regret,
                }
                for regime in found.regimes
                if regime.tuned is not None
            ],
        }
    )
