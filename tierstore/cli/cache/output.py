"""The output of the cache commands: outcomes, curves and a tuned choice as tables, JSON and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.output import Output
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.lab.costs import Machine
    from tierstore.lab.requests import Requests
    from tierstore.lab.results import Curve, Outcome, Study, TuneResult
    from tierstore.lab.tuning import Tuning

NO_LOOKAHEAD = "no lookahead"
"""The label of replays of requests alone: nothing is prefetched, and the whole capacity is cache."""


def trace_json(requests: Requests) -> dict[str, object]:
    """The trace that was replayed."""
    left_out = [f"{name}: {count}" for name, count in requests.left_out.items()]
    return {**asdict(requests.info), "left_out": left_out}


def show_trace(requests: Requests, output: Output) -> None:
    """Show a line on the trace, and one on the events that the replay leaves out."""
    info = requests.info
    output.line(
        f"{info.name}: {info.steps} steps, {info.events} events, {info.requests} requests for {info.records} "
        f"records of {info.layers} layers, {format_bytes(info.total_bytes)} in {info.total_frames} frames; "
        f"sha256 {info.sha256[:16] or '-'}"
    )
    if info.clock != "steps":
        output.line(f"clock: {info.clock} (until the run's first step, the policy counts accesses)")
    if requests.left_out:
        said = ", ".join(f"{count} {name}" for name, count in requests.left_out.items())
        output.line(f"left out: {said}")


_COUNTED = (
    *("hits", "misses", "creates", "miss_ratio", "not_admitted", "evictions", "starved", "write_backs"),
    *("read_bytes", "written_bytes"),
)
_ESTIMATED = ("step_stall_s", "drive_writes_per_day", "drive_life_years")
#: Fields of an outcome that are copied to the JSON under their own names.
_AS_THEY_ARE = (
    *("policy", "capacity_frames", "scope", "contract", "lookahead_frames", "steps", "requests"),
    *(*_COUNTED, "drive_writes_per_day", "drive_life_years", "policy_s"),
)


def outcome_json(outcome: Outcome, frame_bytes: int) -> dict[str, object]:
    """One outcome; policy options are text, since their units differ. ``evidence`` gives the origin of each number."""
    return {
        **{name: getattr(outcome, name) for name in _AS_THEY_ARE},
        "policy_options": [f"{key}={value}" for key, value in sorted(outcome.policy_options.items())],
        "role": outcome.role.value,
        "capacity_bytes": outcome.capacity_frames * frame_bytes,
        "capacity_ratio": outcome.capacity_fraction,
        "step_stall_s": outcome.stall_s_per_step,
        "evidence": {
            **dict.fromkeys(_COUNTED, outcome.evidence.value),
            **dict.fromkeys(_ESTIMATED, "estimated"),
            "policy_s": "measured",
        },
    }


_COSTS = ("misses", "read", "written", "stall/step", "drive/day", "life", "CPU")


def show_outcomes(outcomes: Sequence[Outcome], frame_bytes: int, output: Output) -> None:
    """Show a table with a row for each outcome."""
    rows = [
        (
            _label(outcome),
            f"{outcome.capacity_fraction:.1%}, {format_bytes(outcome.capacity_frames * frame_bytes)}",
            *_costs(outcome),
        )
        for outcome in outcomes
    ]
    output.table("", ("policy", "capacity", *_COSTS), rows)
    _show_remarks(outcomes, output)


def _show_remarks(outcomes: Sequence[Outcome], output: Output) -> None:
    """Warn about requests too large to be admitted, and about each outcome whose policy found no victim in a full cache."""
    most: dict[float, int] = {}
    for one in outcomes:
        if one.not_admitted:
            most[one.capacity_fraction] = max(one.not_admitted, most.get(one.capacity_fraction, 0))
    if most:
        said = ", ".join(f"{count} at {fraction:.1%}" for fraction, count in sorted(most.items()))
        output.line(
            "warning: requests for entries larger than the cache (or its quota for a layer) are misses and are not "
            f"admitted: {said}"
        )
    for one in outcomes:
        if one.starved:
            output.line(
                f"warning: {_label(one)} at {one.capacity_fraction:.1%} was starved {one.starved} times: no "
                "entry was above its threshold, so the fallback chose the victim"
            )


def _costs(outcome: Outcome) -> tuple[str, ...]:
    policy_s, requests = outcome.policy_s, outcome.requests
    return (
        f"{outcome.miss_ratio:.4f}"
        + (f", {outcome.not_admitted} not admitted" if outcome.not_admitted else ""),
        format_bytes(outcome.read_bytes),
        format_bytes(outcome.written_bytes),
        "-" if outcome.stall_s_per_step is None else format_seconds(outcome.stall_s_per_step),
        "-" if outcome.drive_writes_per_day is None else f"{outcome.drive_writes_per_day:.3g}",
        _years(outcome.drive_life_years),
        "-" if policy_s is None or not requests else f"{policy_s / requests * 1e9:.0f} ns",
    )


def _years(years: float | None) -> str:
    if years is None or math.isinf(years):
        return "-"
    return f"{years:.3g} y"


def show_assumptions(machine: Machine, replayed: str, output: Output) -> None:
    """Show what was ``replayed`` (contract, scope), and which numbers are simulated, measured or estimated."""
    said = "; ".join(f"{name} {value}" for name, value in machine.assumptions.items())
    output.line(
        f"{replayed}; counts and bytes: simulated; CPU time per request (cache core and policy): measured; stalls, "
        f"drive writes (drive sizes per day) and life: estimated with {said}"
    )


def curves_json(found: Sequence[Curve], frame_bytes: int) -> list[dict[str, Any]]:
    """Each curve with its points, as JSON."""
    return [
        {
            "policy": curve.label,
            "role": curve.role.value,
            "points": [outcome_json(point, frame_bytes) for point in curve.points],
        }
        for curve in found
    ]


def show_curves(found: Sequence[Curve], keep: Sequence[float], output: Output) -> None:
    """Show miss ratios: a column per capacity, a row per policy, and the line 1 - C/N (``keep``)."""
    columns = ("miss ratio at", *(f"{point.capacity_fraction:.0%}" for point in found[0].points))
    rows = [("1 - C/N", *(f"{line:.4f}" for line in keep))]
    rows += [
        (
            _label(replace(curve.points[0], role=curve.role)),
            *(f"{point.miss_ratio:.4f}" for point in curve.points),
        )
        for curve in found
    ]
    output.table("", columns, rows)
    _show_remarks([point for curve in found for point in curve.points], output)


def _label(outcome: Outcome) -> str:
    """The policy with its options; ``interval`` is omitted if the half-life, which includes it, is shown."""
    options = dict(outcome.policy_options)
    if "half_life" in options:
        options.pop("interval", None)
    from tierstore.lab.results import marked

    return marked(replace(outcome, policy_options=options).label, outcome.role)


def gain_json(result: TuneResult) -> dict[str, object]:
    """The gain of tuning. Its key names the unit: a miss ratio, or bytes or seconds per step."""
    unit = {"misses": "miss_ratio", "bytes": "step_bytes", "stall": "step_stall_s"}[result.objective]
    kind, _, rest = unit.partition("_")
    return {
        "objective": result.objective,
        "verdict": result.verdict.value,
        f"{kind}_gain_{rest}": result.gain,
        f"{kind}_gain_low_{rest}": result.gain_low,
        f"{kind}_gain_high_{rest}": result.gain_high,
        "confidence_ratio": result.confidence,
        "regret_ratio": result.regret,
        "tuned_steps": result.tuned_steps,
        "scored": result.scored,
        "hindsight": result.hindsight,
    }


def tuning_json(tuning: Tuning, frame_bytes: int) -> dict[str, object]:
    """A tuned choice: its gain, the advice, the configuration, and the outcomes on the rest of the trace, best first."""
    result = tuning.result
    return {
        **gain_json(result),
        "regime": tuning.regime.worth.value,
        "advice": result.advice,
        "warning": result.warning,
        "configuration": result.configuration,
        "layer_quotas": list(tuning.chosen.layer_quotas),
        "chosen": outcome_json(result.chosen, frame_bytes),
        "baseline": outcome_json(result.baseline, frame_bytes),
        "best": outcome_json(result.best, frame_bytes),
        "ranked": [
            {**outcome_json(outcome, frame_bytes), "layer_quotas": list(candidate.layer_quotas)}
            for candidate, outcome in tuning.ranked
        ],
    }


def show_tuning(tuning: Tuning, frame_bytes: int, output: Output) -> None:
    """Show the advice, the outcomes on the rest of the trace, the verdict and the configuration."""
    result = tuning.result
    output.line(result.advice)
    rows = [
        (
            _label(outcome),
            "layer, tuned" if candidate.layer_quotas else outcome.scope,
            *_costs(outcome),
            "chosen" if candidate == tuning.chosen else "baseline" if outcome is result.baseline else "",
        )
        for candidate, outcome in tuning.ranked
    ]
    size = format_bytes(result.chosen.capacity_frames * frame_bytes)
    replayed = result.scored if result.scored == NO_LOOKAHEAD else f"with {result.scored}"
    title = (
        f"with {size}, {result.chosen.capacity_fraction:.1%}, on the {result.chosen.steps} steps after the first "
        f"{result.tuned_steps}, {replayed}; best first"
    )
    output.table(title, ("policy", "scope", *_COSTS, ""), rows)
    _show_remarks([outcome for _, outcome in tuning.ranked], output)
    said = {
        "better": "better than the baseline",
        "tie": "a tie with the baseline",
        "worse": "worse than the baseline, which is kept",
    }[result.verdict.value]
    output.line(
        f"chosen on the first {result.tuned_steps} steps: {_label(result.chosen)}, {result.chosen.scope} scope; "
        f"{said} ({_label(result.baseline)}, {result.baseline.scope}): gain {result.gain_text}; "
        f"{result.regret:.2%} behind {result.best_of}"
    )
    output.line("add to the configuration of tierstore train:")
    output.line(result.configuration.rstrip("\n"))
    if result.warning is not None:
        output.line(f"warning: {result.warning}")


def check_html(html: Path | None) -> None:
    """Check before the work that a requested report can be written. Raises CapabilityError."""
    if html is not None:
        from tierstore.reports.page import check_report

        check_report()


def write_html(html: Path, study: Study, output: Output) -> None:
    """Write a report and print its path."""
    from tierstore.lab.report import write_report

    write_report(study, html)
    output.line(f"report: {html}")
