"""``tierstore cache``: choose a cache policy from a trace, recorded from a run or imported from another program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli.cache.options import (
    ContractOptions,
    MachineOptions,
    ReplayOptions,
    SearchOptions,
    capacity_option,
    html_option,
    pin_option,
    policy_option,
    specs_of,
)
from tierstore.cli.cache.output import (
    NO_LOOKAHEAD,
    check_html,
    curves_json,
    outcome_json,
    show_assumptions,
    show_curves,
    show_outcomes,
    show_trace,
    show_tuning,
    trace_json,
    tuning_json,
    write_html,
)
from tierstore.cli.main import CommandGroup
from tierstore.cli.options import (
    EXISTING_FILE,
    FILE,
    PATH,
    SIZE,
    checksum_option,
    config_overrides,
    dataclass_options,
    describe_config,
    help_config_option,
    json_option,
    options_json,
    output_file,
    set_option,
)
from tierstore.cli.output import Output
from tierstore.errors import BudgetError, ConfigError
from tierstore.outputs import OutputKind, write_output
from tierstore.stats import OnProgress
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.results import Outcome, RegimeStudy
    from tierstore.lab.simulate import PolicySpec
    from tierstore.lab.tuning import TuneOptions, Tuning

_KINDS = ("npz", "vllm", "megatron", "oracle-general", "csv", "text")


@click.group(cls=CommandGroup)
def cache() -> None:
    """Record and import traces of cache requests; replay, compare and tune cache policies on them (docs/CACHE_LAB.md)."""


@cache.command()
@click.argument("trace", type=output_file(OutputKind.TRACE))
@click.argument("config", required=False, type=PATH)
@click.option("--data", multiple=True, help="Text files and directories (empty: Python's own source).")
@click.option("--store", type=PATH, help="Store directory.")
@click.option("--steps", type=int, help="Optimizer steps in all.")
@click.option("--host-budget", type=SIZE, help="Memory for experts.")
@checksum_option
@set_option()
@json_option
@help_config_option()
@click.pass_context
def record(ctx: click.Context, /, trace: Path, **options: Any) -> None:
    """Train as ``tierstore train`` does, and record the cache's requests to TRACE."""
    from tierstore.cli.train import train

    ctx.invoke(train, record_trace=trace, **options)


@cache.command("import")
@click.argument("source", nargs=-1, type=EXISTING_FILE)
@click.argument("trace", required=False, type=FILE)
@click.option("--kind", type=click.Choice(_KINDS), help="Format of SOURCE (default: detected).")
@click.option("--keys", type=output_file(OutputKind.NAMES), help="Write the records' names.")
@click.option("--list-options", is_flag=True, help="List the --set options of --kind, and exit.")
@set_option("Set an option of --kind (see --list-options).")
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
    """Convert SOURCE to a TRACE. SOURCE: expert ids (npz, JSON lines), oracleGeneral, csv, or one key per line; it may be
    compressed with gzip, xz or zstd.

    Several SOURCEs are one routing log (JSON lines), a file per layer; a field or the file name (layer_3.jsonl) gives the
    layer.
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
        output.line(f"{found.resized} requests differ in size from their key's first request, which counts")
    output.emit({"trace": str(trace), **asdict(found), "kind": found.kind.value})


@cache.command()
@click.argument("trace", type=EXISTING_FILE)
@policy_option("lru, lfu-decay and belady")
@capacity_option(multiple=True)
@click.option(
    "--lookahead",
    type=click.Choice(["none", "recorded"]),
    default="none",
    help="Replay the requests alone, or with the prefetches that train recorded.",
)
@pin_option
@dataclass_options(ReplayOptions, "replay")
@dataclass_options(MachineOptions, "figures")
@json_option
def simulate(
    trace: Path,
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    lookahead: str,
    pins: tuple[str, ...],
    replay: ReplayOptions,
    figures: MachineOptions,
    output: Output,
) -> None:
    """Replay TRACE through cache policies at given capacities, and show the costs."""
    from tierstore.lab.miss_curves import curves
    from tierstore.lab.simulate import contract_name

    machine, arguments = figures.machine(), replay.arguments()
    requests = _load(trace, output, replay.warmup, pins)
    specs = specs_of(
        requests, policies, ("lru", "lfu-decay", *(() if lookahead == "recorded" else ("belady",)))
    )
    frames = [requests.table.frames_of(capacity, name="--capacity") for capacity in capacities]
    with _progress(output, "simulate") as notify:
        if lookahead == "recorded":
            outcomes = _recorded_outcomes(trace, requests, specs, frames, arguments)
        else:
            found = curves(requests, specs, frames, machine=machine, progress=notify("replays"), **arguments)
            outcomes = [point for curve in found for point in curve.points]
    show_outcomes(outcomes, requests.table.frame_bytes, output)
    said = NO_LOOKAHEAD if lookahead == "none" else "the recorded prefetches and their share of the capacity"
    contract = contract_name(requests, arguments["contract"])
    show_assumptions(machine, f"{contract}, {said}, {replay.scope} scope", output)
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
@click.option("--points", type=click.IntRange(min=1), default=10, help="Equally spaced capacities.")
@policy_option("every policy, and belady")
@pin_option
@dataclass_options(ReplayOptions, "replay")
@dataclass_options(MachineOptions, "figures")
@html_option
@json_option
def curve(
    trace: Path,
    points: int,
    policies: tuple[str, ...],
    pins: tuple[str, ...],
    replay: ReplayOptions,
    figures: MachineOptions,
    html: Path | None,
    output: Output,
) -> None:
    """Show miss-ratio curves of TRACE over capacity, with the clairvoyant policy and the line 1 - C/N."""
    from tierstore.lab.miss_curves import REPORT_WINDOWS, curve_capacities, curves, keep_ratio
    from tierstore.lab.simulate import contract_name

    machine, arguments = figures.machine(), replay.arguments()
    check_html(html)
    requests = _load(trace, output, replay.warmup, pins)
    specs = specs_of(requests, policies, ("all",))
    capacities = curve_capacities(requests, points, scope=arguments["scope"])
    extra: dict[str, Any] = {} if html is None else {"machine": machine, "windows": REPORT_WINDOWS}
    with _progress(output, "curve") as notify:
        found = curves(requests, specs, capacities, progress=notify("replays"), **extra, **arguments)
    keep = [keep_ratio(requests, capacity) for capacity in capacities]
    show_curves(found, keep, output)
    contract = contract_name(requests, arguments["contract"])
    output.line(f"{contract}, {NO_LOOKAHEAD}, {replay.scope} scope; all numbers simulated")
    if html is not None:
        from tierstore.lab.tuning import regime_study

        regime = regime_study(
            requests,
            found,
            scope=arguments["scope"],
            contract=arguments["contract"],
            threads=replay.threads,
        )
        _write_regime(html, regime, machine, output)
    output.emit(
        {
            "trace": trace_json(requests),
            "contract": contract,
            "lookahead": "none",
            "scope": replay.scope,
            "keep_ratio": keep,
            "curves": curves_json(found, requests.table.frame_bytes),
        }
    )


@cache.command()
@click.argument("trace", type=EXISTING_FILE)
@capacity_option(multiple=False)
@click.option("--out", type=output_file(OutputKind.CONFIGURATION), help="Write the chosen configuration.")
@dataclass_options(SearchOptions, "search")
@dataclass_options(MachineOptions, "figures")
@html_option
@json_option
def tune(
    trace: Path,
    capacity: str,
    out: Path | None,
    search: SearchOptions,
    figures: MachineOptions,
    html: Path | None,
    output: Output,
) -> None:
    """Choose a policy on the first part of TRACE, and score it on the rest."""
    machine, options = figures.machine(), search.search()
    check_html(html)
    output.emit(_decide(trace, capacity, options, machine, output, html=html, out=out))


@cache.command()
@click.argument("trace", type=EXISTING_FILE)
@click.option("--html", type=output_file(OutputKind.PAGE), required=True, help="HTML file to write.")
@capacity_option(multiple=False)
@click.option("--points", type=click.IntRange(min=1), default=10, help="Points of each curve.")
@dataclass_options(ContractOptions, "replay")
@dataclass_options(MachineOptions, "figures")
@json_option
def report(
    trace: Path,
    html: Path,
    capacity: str,
    points: int,
    replay: ContractOptions,
    figures: MachineOptions,
    output: Output,
) -> None:
    """Write one HTML report about TRACE: curves, half-lives, costs, and a tuned choice."""
    machine, options = figures.machine(), SearchOptions(**vars(replay)).search()
    check_html(html)
    decided = _decide(trace, capacity, options, machine, output, html=html, points=points)
    output.emit({**decided, "html": str(html)})


def _load(trace: Path, output: Output, warmup_steps: int = 0, pins: Sequence[str] = ()) -> Requests:
    """Load the requests of a trace and show a line on them. Raises ConfigError if the warm-up takes all steps, or for
    records that cannot be pinned."""
    from tierstore.lab.requests import load_requests, parse_pins, pin

    requests = load_requests(trace)
    if pins:
        requests = pin(requests, parse_pins(pins, name="--pin"), name="--pin")
    show_trace(requests, output)
    if warmup_steps >= requests.step_count:
        raise ConfigError(f"--warmup: expected fewer than the {requests.step_count} steps of {trace}")
    return requests


@contextmanager
def _progress(output: Output, label: str) -> Iterator[Callable[[str], OnProgress]]:
    """Yield a function that makes the ``progress`` argument of a stage, by name."""
    with output.progress(label=label) as bar:
        yield lambda stage: lambda done, total: bar.update(done, total, {"stage": stage})


def _recorded_outcomes(
    trace: Path,
    requests: Requests,
    specs: Sequence[PolicySpec],
    frames: Sequence[int],
    arguments: dict[str, Any],
) -> list[Outcome]:
    """Replay with the recorded run's prefetches. Raises ConfigError that names the option, or BudgetError."""
    from tierstore.lab.simulate import Contract, ReplaySetting, recording_of, replay_recorded

    recording = recording_of(trace, requests)
    if recording is None:
        raise ConfigError(f"--lookahead recorded: {trace} has no prefetches of a training run")
    if requests.table.pins:
        raise ConfigError("--pin: expected --lookahead none: the cache of a run cannot pin records")
    if arguments["contract"] is not Contract.ATOMIC:
        raise ConfigError("--lookahead recorded: expected --contract event-atomic")
    others = [spec.name for spec in specs if not spec.runs]
    if others:
        raise ConfigError(f"--lookahead recorded: expected policies, got {others[0]}, which no run can use")
    settings = [ReplaySetting(spec, size, arguments["scope"]) for spec in specs for size in frames]
    found = []
    replays = replay_recorded(requests, recording, settings, threads=arguments["threads"])
    for setting, replayed in zip(settings, replays, strict=True):
        if replayed is None:
            raise BudgetError(
                f"--capacity: {setting.capacity_frames} frames, of which prefetches hold "
                f"{recording.lookahead_at(setting.capacity_frames)}, are too few for {setting.policy.name}"
            )
        found.append(replayed.outcome(requests, slice(arguments["warmup_steps"], None)))
    return found


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
    """Choose a policy for ``trace`` and, if the run recorded them, for its device slots. Shows the choices, writes the
    requested files, and returns the choices as JSON.

    ``points``: the number of points of the report's curves.
    """
    from tierstore.lab.miss_curves import REPORT_WINDOWS, all_policies, curve_capacities, curves
    from tierstore.lab.tuning import half_life_map, regime_study

    requests = _load(trace, output)
    found = _tune(trace, requests, capacity, options, machine, output)
    show_assumptions(machine, f"{options.contract.value}, {found.result.scored}", output)
    configuration = found.result.configuration
    devices: list[dict[str, object]] = []
    for name in requests.header.slot_traces:
        beside = trace.with_name(name)
        if not beside.exists():
            output.line(f"{beside} is missing: no policy of device slots is proposed")
            continue
        slots = _load(beside, output)
        chosen = _tune(beside, slots, None, options, machine, output)
        if not devices:  # all slots have one policy: the experts' (LoRA's pairs have a second trace)
            configuration += chosen.result.configuration.replace("[cache]\n", "")
        devices.append({"trace": trace_json(slots), **tuning_json(chosen, slots.table.frame_bytes)})
    if out is not None:
        write_output(out, OutputKind.CONFIGURATION, configuration)
    if html is not None:
        capacities = curve_capacities(requests, points)
        replay: dict[str, Any] = {"contract": options.contract, "threads": options.threads}
        with _progress(output, "report") as notify:
            lives = half_life_map(requests, capacities, progress=notify("half-lives"), **replay)
            drawn = curves(
                requests,
                all_policies(requests),
                capacities,
                machine=machine,
                windows=REPORT_WINDOWS,
                progress=notify("curves"),
                **replay,
            )
        regime = regime_study(requests, drawn, tuning=found, half_life=lives, **replay)
        _write_regime(html, regime, machine, output)
    return {
        "trace": trace_json(requests),
        "contract": options.contract.value,
        "assumptions": machine.assumptions,
        **tuning_json(found, requests.table.frame_bytes),
        "configuration": configuration,
        "device": devices,
    }


def _tune(
    trace: Path,
    requests: Requests,
    capacity: str | None,
    options: TuneOptions,
    machine: Machine,
    output: Output,
) -> Tuning:
    """Choose a policy for ``requests``, those of ``trace``, and show it. ``capacity`` None: the recorded one."""
    from tierstore.lab.simulate import recording_of
    from tierstore.lab.tuning import tune as tuned

    recording = recording_of(trace, requests)
    if capacity is None:
        assert recording is not None  # slots count steps
        frames = recording.header.capacity_frames
    else:
        frames = requests.table.frames_of(capacity, name="--capacity")
    with _progress(output, "tune") as notify:
        found = tuned(
            requests,
            frames,
            options,
            machine=machine,
            recording=recording,
            progress=lambda stage, done, total: notify(stage)(done, total),
        )
    show_tuning(found, requests.table.frame_bytes, output)
    return found


def _write_regime(html: Path, regime: RegimeStudy, machine: Machine, output: Output) -> None:
    """Write the report of one regime."""
    from tierstore import __version__
    from tierstore.lab.results import Study

    study = Study(
        title=f"Cache policies on {regime.name}",
        regimes=(regime,),
        assumptions=machine.assumptions,
        source=machine.source,
        version=__version__,
    )
    write_html(html, study, output)
