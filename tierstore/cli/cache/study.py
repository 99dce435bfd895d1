"""``tierstore cache study``: every policy in the regimes of several traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierstore.cli.cache.options import ContractOptions, MachineOptions, html_option
from tierstore.cli.cache.output import (
    NO_LOOKAHEAD,
    check_html,
    curves_json,
    gain_json,
    outcome_json,
    write_html,
)
from tierstore.cli.options import EXISTING_FILE, dataclass_options, json_option, output_file
from tierstore.cli.output import Output
from tierstore.outputs import OutputKind, write_output

if TYPE_CHECKING:
    from tierstore.lab.results import RegimeStudy, Study, TuneResult


@click.command()
@click.argument("sources", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--markdown", type=output_file(OutputKind.TABLES), help="Write the tables here.")
@dataclass_options(ContractOptions, "replay")
@dataclass_options(MachineOptions, "figures")
@html_option
@json_option
def study(
    sources: tuple[Path, ...],
    markdown: Path | None,
    replay: ContractOptions,
    figures: MachineOptions,
    html: Path | None,
    output: Output,
) -> None:
    """Study SOURCES, traces or an npz of expert ids in nine regimes: which policy to use when."""
    from tierstore.lab.reports.study_tables import study_markdown
    from tierstore.lab.study import StudyOptions, run_study

    machine = figures.machine()
    check_html(html)
    options = StudyOptions(**replay.arguments(), machine=machine)
    found = run_study(sources, options, progress=lambda regime, what: output.line(f"{regime}: {what}"))
    tables = study_markdown(found)
    output.line(tables)
    output.line(f"{replay.contract}, {NO_LOOKAHEAD}")
    if markdown is not None:
        write_output(markdown, OutputKind.TABLES, tables)
    if html is not None:
        write_html(html, found, output)
    output.emit({"title": found.title, "assumptions": found.assumptions, "regimes": regimes_json(found)})


def regimes_json(study: Study) -> list[dict[str, object]]:
    """Of each regime its trace, every replay (global and layer scope), and the tuner's choices."""
    return [_regime_json(regime) for regime in study.regimes]


def _regime_json(regime: RegimeStudy) -> dict[str, object]:
    trace, tuned = regime.trace, regime.tuned
    frame = max(1, math.ceil(trace.total_bytes / max(trace.total_frames, 1)))
    choices = [*regime.elsewhere, *([] if tuned is None else [tuned])]
    return {
        "name": regime.name,
        "sha256": trace.sha256,
        "steps": trace.steps,
        "requests": trace.requests,
        "records": trace.records,
        "active_records": regime.active_per_layer,
        "layer_records": regime.records_per_layer,
        "contract": regime.contract,
        "lookahead": "none",
        "advice": regime.advice,
        "chosen": None if tuned is None else tuned.chosen.label,
        "chosen_miss_ratio": None if tuned is None else tuned.chosen.miss_ratio,
        "best_miss_ratio": None if tuned is None else tuned.best.miss_ratio,
        "focus_ratio": regime.focus,
        "curves": curves_json(regime.curves, frame),
        "layered": [outcome_json(outcome, frame) for outcome in regime.layered],
        "half_lives": _half_lives_json(regime),
        "tuned": [_choice_json(choice, frame) for choice in choices],
        "against_lru": None if regime.against_lru is None else _choice_json(regime.against_lru, frame),
    }


def _half_lives_json(regime: RegimeStudy) -> list[dict[str, object]]:
    """Miss ratios of LFU-decay, a row for each half-life in steps (null: hits count for ever)."""
    lives = regime.half_lives
    if lives is None:
        return []
    return [
        {
            "half_life_steps": life,
            "capacity_ratio": list(lives.capacity_fractions),
            "miss_ratio": list(ratios),
        }
        for life, ratios in zip(lives.half_lives, lives.miss_ratios, strict=True)
    ]


def _choice_json(result: TuneResult, frame_bytes: int) -> dict[str, object]:
    return {
        **gain_json(result),
        "chosen": outcome_json(result.chosen, frame_bytes),
        "baseline": outcome_json(result.baseline, frame_bytes),
        "best": outcome_json(result.best, frame_bytes),
    }
