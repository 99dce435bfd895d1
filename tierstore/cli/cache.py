"""``tierstore cache``: from a trace of a run, or of somebody else's, to a decision about the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.cache_options import (
    TRACE,
    capacity_option,
    contract_option,
    html_option,
    machine_options,
    policy_option,
    replay_options,
    specs_of,
    threads_option,
)
from tierstore.cli.cache_output import (
    COUNTS,
    curves_json,
    outcome_json,
    show_assumptions,
    show_curves,
    show_outcomes,
    show_trace,
    show_tuning,
    trace_json,
    tuning_json,
)
from tierstore.cli.cache_study import study
from tierstore.cli.options import SIZE, config_overrides, describe_config, json_option, set_option
from tierstore.cli.output import Output
from tierstore.errors import ConfigError
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.results import RegimeStudy
    from tierstore.lab.tune import TuneOptions, Tuning

__all__ = ["cache"]

_KINDS = ("npz", "vllm", "megatron", "oracle-general", "csv", "text")


@click.group()
def cache() -> None:
    """Record, import, replay, bound and tune cache policies. A trace is a file; see docs/CACHE_LAB.md."""


cache.add_command(study)


@cache.command()
@click.argument("trace", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--data", multiple=True, help="Text file or directory (any number).")
@click.option("--store", type=click.Path(path_type=Path), help="Store directory.")
@click.option("--steps", type=int, help="Optimizer steps in all.")
@click.option("--host-budget", type=SIZE, help="Memory for experts.")
@set_option
@json_option
@click.pass_context
def record(ctx: click.Context, /, trace: Path, **options: Any) -> None:
    """Train as ``tierstore train`` does, and record to TRACE what its cache is asked for."""
    from tierstore.cli.train import train

    ctx.invoke(train, record_trace=trace, **options)


@cache.command("import")
@click.argument("source", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--kind", type=click.Choice(_KINDS), help="What SOURCE is (default: what it looks like).")
@click.option(
    "--keys", type=click.Path(dir_okay=False, path_type=Path), help="Write each record's name here."
)
@click.option("--list-options", is_flag=True, help="List what --set takes for --kind, and exit.")
@set_option
@json_option
def import_(
    source: Path | None,
    trace: Path | None,
    kind: str | None,
    keys: Path | None,
    list_options: bool,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a TRACE of SOURCE: expert ids (npz, JSON lines), oracleGeneral, csv, or one key a line."""
    from tierstore.lab.importing import SourceKind, import_trace, options_of

    output = Output.for_option(as_json, counts=COUNTS)
    if list_options:
        for each in [kind] if kind else _KINDS:
            output.line(f"{each}:")
            output.line(describe_config(options_of(SourceKind(each))))
        return
    if source is None or trace is None:
        raise click.UsageError("SOURCE and TRACE: expected two files")
    found = import_trace(
        source,
        trace,
        kind=None if kind is None else SourceKind(kind),
        options=config_overrides(settings, {}),
        keys=keys,
    )
    output.line(
        f"{trace}: {found.steps} steps, {found.events} events, {found.requests} requests for {found.records} "
        f"records of {found.layers} layers, {format_bytes(found.total_bytes)}; sha256 {found.sha256[:16]}"
    )
    output.emit(
        {
            "trace": str(trace),
            "kind": found.kind.value,
            "sha256": found.sha256,
            "steps": found.steps,
            "events": found.events,
            "requests": found.requests,
            "records": found.records,
            "layers": found.layers,
            "total_bytes": found.total_bytes,
        }
    )


@cache.command()
@click.argument("trace", type=TRACE)
@policy_option("lru, lfu-decay and the bound belady")
@capacity_option(multiple=True)
@replay_options
@machine_options
@json_option
def simulate(
    trace: Path,
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    replay: dict[str, Any],
    machine: Machine,
    as_json: bool,
) -> None:
    """Replay TRACE through policies at capacities, with what it costs."""
    from tierstore.lab.curves import curves

    output = Output.for_option(as_json, counts=COUNTS)
    specs = specs_of(policies, ("lru", "lfu-decay", "belady"))
    requests = _load(trace, output, replay["warmup_steps"])
    with _progress(output, "simulate") as heard:
        found = curves(
            requests,
            specs,
            [requests.frames_of(capacity, name="--capacity") for capacity in capacities],
            machine=machine,
            progress=lambda done, total: heard("replays", done, total),
            **replay,
        )
    outcomes = [point for curve in found for point in curve.points]
    show_outcomes(outcomes, requests.frame_bytes, output)
    show_assumptions(machine, f"{replay['contract'].value}, {replay['scope'].value} scope", output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": replay["contract"].value,
            "assumptions": machine.assumptions,
            "outcomes": [outcome_json(outcome, requests.frame_bytes) for outcome in outcomes],
        }
    )


@cache.command()
@click.argument("trace", type=TRACE)
@click.option(
    "--points", type=click.IntRange(min=1), default=10, show_default=True, help="Capacities, equally spaced."
)
@policy_option("every policy, and the bound belady")
@replay_options
@machine_options
@html_option
@json_option
def curve(
    trace: Path,
    points: int,
    policies: tuple[str, ...],
    replay: dict[str, Any],
    machine: Machine,
    html: Path | None,
    as_json: bool,
) -> None:
    """Miss-ratio curves of TRACE over capacity, with the bound and the line 1 - C/N."""
    from tierstore.lab.curves import curve_capacities, curves, keep_ratio

    output = Output.for_option(as_json, counts=COUNTS)
    specs = specs_of(policies, ("all",))
    _check_html(html)
    requests = _load(trace, output, replay["warmup_steps"])
    capacities = curve_capacities(requests, points, scope=replay["scope"])
    extra: dict[str, Any] = {} if html is None else {"machine": machine, "windows": 50}
    with _progress(output, "curve") as heard:
        found = curves(
            requests,
            specs,
            capacities,
            progress=lambda done, total: heard("replays", done, total),
            **extra,
            **replay,
        )
    keep = [keep_ratio(requests, capacity) for capacity in capacities]
    show_curves(found, keep, output)
    output.line(f"{replay['contract'].value}, {replay['scope'].value} scope; all numbers simulated")
    if html is not None:
        _write_html(html, _studied(requests, capacities, replay, machine, found=found), machine, output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": replay["contract"].value,
            "scope": replay["scope"].value,
            "keep_ratio": keep,
            "curves": curves_json(found, requests.frame_bytes),
        }
    )


@cache.command()
@click.argument("trace", type=TRACE)
@capacity_option(multiple=False)
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="What to try; default: what train runs."
)
@click.option(
    "--scope",
    type=click.Choice(["global", "layer", "both"]),
    default="both",
    show_default=True,
    help="One cache, a quota for each layer, or whichever is better.",
)
@click.option(
    "--objective",
    type=click.Choice(["misses", "bytes", "stall"]),
    default="misses",
    show_default=True,
    help="What is to be small: misses, bytes read and written, or stalled time.",
)
@click.option("--prefix", type=float, default=0.5, show_default=True, help="Part of the steps to tune on.")
@click.option(
    "--confidence", type=float, default=0.95, show_default=True, help="Of the interval of the gain."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the bootstrap.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the configuration to this file."
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
    as_json: bool,
    **search: Any,
) -> None:
    """Choose a policy for TRACE on its first part, and score it on the rest."""
    output = Output.for_option(as_json, counts=COUNTS)
    options = _tune_options(search)
    _check_html(html)
    requests = _load(trace, output)
    found = _tuned(requests, capacity, options, machine, output)
    show_tuning(found, requests.frame_bytes, output)
    show_assumptions(machine, options.contract.value, output)
    if out is not None:
        out.write_text(found.result.configuration)
    if html is not None:
        _report(requests, 10, options, machine, found, html, output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": options.contract.value,
            "assumptions": machine.assumptions,
            **tuning_json(found, requests.frame_bytes),
        }
    )


@cache.command()
@click.argument("trace", type=TRACE)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write."
)
@capacity_option(multiple=False)
@click.option("--points", type=click.IntRange(min=1), default=10, show_default=True, help="Of the curves.")
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
    as_json: bool,
) -> None:
    """Everything about TRACE in one HTML file: curves, half-lives, costs, and a tuned choice."""
    output = Output.for_option(as_json, counts=COUNTS)
    options = _tune_options({"contract": contract, "threads": threads})
    _check_html(html)
    requests = _load(trace, output)
    found = _tuned(requests, capacity, options, machine, output)
    show_tuning(found, requests.frame_bytes, output)
    _report(requests, points, options, machine, found, html, output)
    output.emit(
        {"trace": trace_json(requests), "html": str(html), **tuning_json(found, requests.frame_bytes)}
    )


# Shared ------------------------------------------------------------------------------------------------------


def _load(trace: Path, output: Output, warmup_steps: int = 0) -> Requests:
    from tierstore.lab.requests import load_requests

    requests = load_requests(trace)
    show_trace(requests, output)
    if warmup_steps >= requests.step_count:
        raise ConfigError(f"--warmup: expected less than the {requests.step_count} steps of {trace}")
    return requests


@contextmanager
def _progress(output: Output, label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function that hears of each stage how much of it is done."""
    with output.progress(1, label=label) as progress:
        yield lambda stage, done, total: progress.update(done, total, {"stage": stage})


def _tune_options(search: Mapping[str, Any]) -> TuneOptions:
    from tierstore.lab.costs import Objective
    from tierstore.lab.simulate import Contract, PolicySpec, Scope
    from tierstore.lab.tune import TuneOptions

    values = dict(search)
    scope = values.pop("scope", "both")
    for name in values.get("policies", ()):
        if ":" in name or PolicySpec(name).role.value == "bound":
            raise ConfigError(f"--policy: expected the name of a policy, without options, got {name!r}")
    return TuneOptions(
        **{
            **values,
            "scopes": tuple(Scope) if scope == "both" else (Scope(scope),),
            "objective": Objective(values.get("objective", "misses")),
            "contract": Contract(values["contract"]),
        }
    )


def _tuned(
    requests: Requests, capacity: str, options: TuneOptions, machine: Machine, output: Output
) -> Tuning:
    from tierstore.lab.tune import tune as search

    frames = requests.frames_of(capacity, name="--capacity")
    with _progress(output, "tune") as heard:
        return search(requests, frames, options, machine=machine, progress=heard)


def _check_html(html: Path | None) -> None:
    """Before the work: a report that cannot be written is refused."""
    if html is None:
        return
    from tierstore.lab.report import check_report

    check_report()
    if not html.absolute().parent.is_dir():
        raise ConfigError(f"--html: {html.absolute().parent} is no directory")


def _studied(
    requests: Requests, capacities: list[int], replay: Mapping[str, Any], machine: Machine, **known: Any
) -> RegimeStudy:
    from tierstore.lab.assemble import regime_study

    return regime_study(requests, capacities, machine=machine, **known, **replay)


def _report(
    requests: Requests,
    points: int,
    options: TuneOptions,
    machine: Machine,
    tuning: Tuning,
    html: Path,
    output: Output,
) -> None:
    from tierstore.lab.assemble import half_life_map
    from tierstore.lab.curves import curve_capacities

    capacities = curve_capacities(requests, points)
    replay: dict[str, Any] = {"contract": options.contract, "threads": options.threads}
    with _progress(output, "report") as heard:
        lives = half_life_map(
            requests,
            capacities,
            progress=lambda done, total: heard("half-lives", done, total),
            **replay,
        )
        study = _studied(
            requests,
            capacities,
            replay,
            machine,
            tuning=tuning,
            half_life=lives,
            progress=lambda done, total: heard("curves", done, total),
        )
    _write_html(html, study, machine, output)


def _write_html(html: Path, regime: RegimeStudy, machine: Machine, output: Output) -> None:
    from tierstore import __version__
    from tierstore.lab.report import write_report
    from tierstore.lab.results import Study

    study = Study(
        title=f"Cache policies on {regime.name}",
        regimes=(regime,),
        assumptions=machine.assumptions,
        version=__version__,
    )
    write_report(study, html)
    output.line(f"report: {html}")
