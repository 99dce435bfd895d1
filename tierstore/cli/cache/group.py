"""``tierstore cache``: from a trace of a run, or of another program's, to a decision about the cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.cache.options import (
    capacity_option,
    html_option,
    machine_options,
    pin_option,
    policy_option,
    replay_options,
    specs_of,
)
from tierstore.cli.cache.output import (
    NO_LOOKAHEAD,
    curves_json,
    outcome_json,
    show_assumptions,
    show_curves,
    show_outcomes,
    trace_json,
)
from tierstore.cli.cache.shared import (
    check_html,
    load_trace_requests,
    recorded_outcomes,
    stage_progress,
    study_of,
    write_html,
)
from tierstore.cli.cache.tune import report, study, tune
from tierstore.cli.groups import CommandGroup
from tierstore.cli.options import (
    EXISTING_FILE,
    FILE,
    PATH,
    SIZE,
    checksum_option,
    config_overrides,
    describe_config,
    help_config_option,
    json_option,
    options_json,
    output_file,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.outputs import OutputKind
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine

_KINDS = ("npz", "vllm", "megatron", "oracle-general", "csv", "text")


@click.group(cls=CommandGroup)
def cache() -> None:
    """Record, import, replay, bound and tune cache policies. A trace is a file; see docs/CACHE_LAB.md."""


@cache.command()
@click.argument("trace", type=output_file(OutputKind.TRACE))
@click.argument("config", required=False, type=PATH)
@click.option("--data", multiple=True, help="Text file or directory (any number).")
@click.option("--store", type=PATH, help="Store directory.")
@click.option("--steps", type=int, help="Optimizer steps in all.")
@click.option("--host-budget", type=SIZE, help="Memory for experts.")
@checksum_option
@set_option()
@json_option
@help_config_option()
@click.pass_context
def record(ctx: click.Context, /, trace: Path, **options: Any) -> None:
    """Train as ``tierstore train`` does, and record to TRACE what its cache is asked for."""
    from tierstore.cli.train import train

    ctx.invoke(train, record_trace=trace, **options)


@cache.command("import")
@click.argument("source", nargs=-1, type=EXISTING_FILE)
@click.argument("trace", required=False, type=FILE)
@click.option("--kind", type=click.Choice(_KINDS), help="What SOURCE is (default: what it looks like).")
@click.option("--keys", type=output_file(OutputKind.NAMES), help="Write each record's name here.")
@click.option("--list-options", is_flag=True, help="List what --set takes for --kind, and exit.")
@set_option("Set an option of the kind (see --list-options).")
@json_option
def import_(
    source: tuple[Path, ...],
    trace: Path | None,
    kind: str | None,
    keys: Path | None,
    list_options: bool,
    settings: tuple[str, ...],
    output: Output,
) -> None:
    """Make a TRACE of SOURCE: expert ids (npz, JSON lines), oracleGeneral, csv, or one key a line; each plain, or packed
    by gzip, xz or zstd.

    Several SOURCEs are files of one routing log (JSON lines) that have a layer each, as a field or the file's name
    (layer_3.jsonl) says. Their steps are merged.
    """
    from tierstore.lab.importing import SourceKind, import_trace, options_of

    if list_options:
        kinds = [kind] if kind else _KINDS
        for each in kinds:
            output.line(f"{each}:")
            output.line(describe_config(options_of(SourceKind(each))))
        output.emit({"options": {each: options_json(options_of(SourceKind(each))) for each in kinds}})
        return
    if not source or trace is None:
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
    read = ", ".join(f"{what} {where}" for what, where in found.columns.items())
    output.line(f"read as {found.kind.value}: {read}")
    if found.resized:
        output.line(f"{found.resized} requests had another size than the first of their key, which counts")
    output.emit({"trace": str(trace), **asdict(found), "kind": found.kind.value})


@cache.command()
@click.argument("trace", type=EXISTING_FILE)
@policy_option("lru, lfu-decay and belady")
@capacity_option(multiple=True)
@click.option(
    "--lookahead",
    type=click.Choice(["none", "recorded"]),
    default="none",
    help="Requests alone, or with the prefetches that a run of tierstore train recorded.",
)
@pin_option
@replay_options
@machine_options
@json_option
def simulate(
    trace: Path,
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    lookahead: str,
    pins: tuple[str, ...],
    replay: dict[str, Any],
    machine: Machine,
    output: Output,
) -> None:
    """Replay TRACE through policies at capacities, with what it costs."""
    from tierstore.lab.miss_curves import curves
    from tierstore.lab.simulate import contract_name

    requests = load_trace_requests(trace, output, replay["warmup_steps"], pins)
    specs = specs_of(
        requests, policies, ("lru", "lfu-decay", *(() if lookahead == "recorded" else ("belady",)))
    )
    frames = [requests.table.frames_of(capacity, name="--capacity") for capacity in capacities]
    with stage_progress(output, "simulate") as heard:
        if lookahead == "recorded":
            outcomes = recorded_outcomes(trace, requests, specs, frames, replay)
        else:
            found = curves(
                requests,
                specs,
                frames,
                machine=machine,
                progress=lambda done, total: heard("replays", done, total),
                **replay,
            )
            outcomes = [point for curve in found for point in curve.points]
    show_outcomes(outcomes, requests.table.frame_bytes, output)
    said = NO_LOOKAHEAD if lookahead == "none" else "the recorded prefetches and their share of the capacity"
    contract = contract_name(requests, replay["contract"])
    show_assumptions(machine, f"{contract}, {said}, {replay['scope'].value} scope", output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": contract,
            "lookahead": lookahead,
            "assumptions": machine.assumptions,
            "outcomes": [outcome_json(outcome, requests.table.frame_bytes) for outcome in outcomes],
        }
    )


@cache.command()
@click.argument("trace", type=EXISTING_FILE)
@click.option("--points", type=click.IntRange(min=1), default=10, help="Capacities, equally spaced.")
@policy_option("every policy, and belady")
@pin_option
@replay_options
@machine_options
@html_option
@json_option
def curve(
    trace: Path,
    points: int,
    policies: tuple[str, ...],
    pins: tuple[str, ...],
    replay: dict[str, Any],
    machine: Machine,
    html: Path | None,
    output: Output,
) -> None:
    """Miss-ratio curves of TRACE over capacity, with the clairvoyant choice (a bound, where entries are of one size) and the
    line 1 - C/N."""
    from tierstore.lab.miss_curves import curve_capacities, curves, keep_ratio
    from tierstore.lab.simulate import contract_name

    check_html(html)
    requests = load_trace_requests(trace, output, replay["warmup_steps"], pins)
    specs = specs_of(requests, policies, ("all",))
    capacities = curve_capacities(requests, points, scope=replay["scope"])
    extra: dict[str, Any] = {} if html is None else {"machine": machine, "windows": 50}
    with stage_progress(output, "curve") as heard:
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
    contract = contract_name(requests, replay["contract"])
    output.line(f"{contract}, {NO_LOOKAHEAD}, {replay['scope'].value} scope; all numbers simulated")
    if html is not None:
        from tierstore.lab.study import regime_study

        regime = regime_study(requests, capacities, machine=machine, found=found, **replay)
        write_html(html, study_of(regime, machine), output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": contract,
            "lookahead": "none",
            "scope": replay["scope"].value,
            "keep_ratio": keep,
            "curves": curves_json(found, requests.table.frame_bytes),
        }
    )


for command in (tune, report, study):
    cache.add_command(command)
