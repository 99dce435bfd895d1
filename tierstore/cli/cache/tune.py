"""``tierstore cache tune``, ``report`` and ``study``: a decision about the cache, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.cache.options import (
    capacity_option,
    contract_option,
    html_option,
    machine_options,
    threads_option,
)
from tierstore.cli.cache.output import (
    NO_LOOKAHEAD,
    show_assumptions,
    show_tuning,
    trace_json,
    tuning_json,
)
from tierstore.cli.cache.shared import (
    check_html,
    load_trace_requests,
    stage_progress,
    study_of,
    write_html,
)
from tierstore.cli.cache.study import regimes_json
from tierstore.cli.options import EXISTING_FILE, json_option, output_file
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.outputs import OutputKind, write_output

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.tuning import TuneOptions, Tuning


@click.command()
@click.argument("trace", type=EXISTING_FILE)
@capacity_option(multiple=False)
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="What to try; default: what train runs."
)
@click.option(
    "--scope",
    type=click.Choice(["global", "layer", "both"]),
    default="both",
    help="One cache, a quota for each layer, or whichever is better.",
)
@click.option(
    "--objective",
    type=click.Choice(["misses", "bytes", "stall"]),
    default="misses",
    help="What is to be small: misses, bytes read and written, or stalled time.",
)
@click.option("--prefix", type=float, default=0.5, help="Part of the steps to tune on.")
@click.option("--confidence", type=float, default=0.95, help="Of the interval of the gain.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the bootstrap.")
@click.option(
    "--out", type=output_file(OutputKind.CONFIGURATION), help="Write the configuration to this file."
)
@contract_option
@threads_option
@machine_options
@html_option
@json_option
def tune(
    trace: Path,
    capacity: str,
    machine: Machine,
    html: Path | None,
    out: Path | None,
    output: Output,
    **search: Any,
) -> None:
    """Choose a policy for TRACE on its first part, and score it on the rest."""
    options = _tune_options(search)
    check_html(html)
    output.emit(_decide(trace, capacity, options, machine, output, html=html, out=out))


@click.command()
@click.argument("trace", type=EXISTING_FILE)
@click.option("--html", type=output_file(OutputKind.PAGE), required=True, help="The file to write.")
@capacity_option(multiple=False)
@click.option("--points", type=click.IntRange(min=1), default=10, help="Of the curves.")
@contract_option
@threads_option
@machine_options
@json_option
def report(
    trace: Path,
    html: Path,
    capacity: str,
    points: int,
    contract: str,
    threads: int,
    machine: Machine,
    output: Output,
) -> None:
    """Everything about TRACE in one HTML file: curves, half-lives, costs, and a tuned choice."""
    options = _tune_options({"contract": contract, "threads": threads})
    check_html(html)
    decided = _decide(trace, capacity, options, machine, output, html=html, points=points)
    output.emit({**decided, "html": str(html)})


@click.command()
@click.argument("sources", nargs=-1, required=True, type=EXISTING_FILE)
@click.option("--markdown", type=output_file(OutputKind.TABLES), help="Write the tables here.")
@contract_option
@threads_option
@machine_options
@html_option
@json_option
def study(
    sources: tuple[Path, ...],
    markdown: Path | None,
    contract: str,
    threads: int,
    machine: Machine,
    html: Path | None,
    output: Output,
) -> None:
    """Study SOURCES, traces or an npz of expert ids in nine regimes: which policy to use when."""
    from tierstore.lab.reports.study_tables import study_markdown
    from tierstore.lab.simulate import Contract
    from tierstore.lab.study import StudyOptions, run_study

    check_html(html)
    options = StudyOptions(contract=Contract(contract), threads=threads, machine=machine)
    found = run_study(sources, options, progress=lambda regime, what: output.line(f"{regime}: {what}"))
    tables = study_markdown(found)
    output.line(tables)
    output.line(f"{contract}, {NO_LOOKAHEAD}")
    if markdown is not None:
        write_output(markdown, OutputKind.TABLES, tables)
    if html is not None:
        write_html(html, found, output)
    output.emit({"title": found.title, "assumptions": found.assumptions, "regimes": regimes_json(found)})


def _tune_options(search: Mapping[str, Any]) -> TuneOptions:
    from tierstore.cache.config import Scope
    from tierstore.lab.costs import Objective
    from tierstore.lab.simulate import Contract, PolicySpec, known_policies
    from tierstore.lab.tuning import TuneOptions

    values = dict(search)
    scope = values.pop("scope", "both")
    known = known_policies(bounds=False)
    for name in values.get("policies", ()):
        if ":" not in name and name not in known:
            raise ConfigError(f"--policy: expected one of {', '.join(known)}, got {name!r}")
        try:
            spec = PolicySpec.parse(name)
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from error
        if spec.options:
            raise ConfigError(f"--policy: expected the name of a policy, without options, got {name!r}")
    try:
        return TuneOptions(
            **{
                **values,
                "scopes": tuple(Scope) if scope == "both" else (Scope(scope),),
                "objective": Objective(values.get("objective", "misses")),
                "contract": Contract(values["contract"]),
            }
        )
    except ConfigError as error:  # --prefix or --confidence
        raise ConfigError(f"--{error}") from error


def _decide(
    trace: Path,
    capacity: str,
    options: TuneOptions,
    machine: Machine,
    output: Output,
    *,
    html: Path | None,
    points: int = 10,
    out: Path | None = None,
) -> dict[str, object]:
    """Chooses a policy for ``trace``, shows it, and writes the files that are asked for; the choice for programs.

    ``points``: of the report's curves.
    """
    from tierstore.lab.live import recording_of
    from tierstore.lab.tuning import tune as search

    requests = load_trace_requests(trace, output)
    frames = requests.table.frames_of(capacity, name="--capacity")
    recording = recording_of(trace, requests)
    with stage_progress(output, "tune") as heard:
        found = search(requests, frames, options, machine=machine, recording=recording, progress=heard)
    show_tuning(found, requests.table.frame_bytes, output)
    show_assumptions(machine, f"{options.contract.value}, {found.result.scored}", output)
    if out is not None:
        write_output(out, OutputKind.CONFIGURATION, found.result.configuration)
    if html is not None:
        _report(requests, points, options, machine, found, html, output)
    return {
        "trace": trace_json(requests),
        "contract": options.contract.value,
        "assumptions": machine.assumptions,
        **tuning_json(found, requests.table.frame_bytes),
    }


def _report(
    requests: Requests,
    points: int,
    options: TuneOptions,
    machine: Machine,
    tuning: Tuning,
    html: Path,
    output: Output,
) -> None:
    from tierstore.lab.miss_curves import curve_capacities
    from tierstore.lab.study import half_life_map, regime_study

    capacities = curve_capacities(requests, points)
    replay: dict[str, Any] = {"contract": options.contract, "threads": options.threads}
    with stage_progress(output, "report") as heard:
        lives = half_life_map(
            requests,
            capacities,
            progress=lambda done, total: heard("half-lives", done, total),
            **replay,
        )
        regime = regime_study(
            requests,
            capacities,
            machine=machine,
            tuning=tuning,
            half_life=lives,
            progress=lambda done, total: heard("curves", done, total),
            **replay,
        )
    write_html(html, study_of(regime, machine), output)
