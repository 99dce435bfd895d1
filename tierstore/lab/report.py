"""A study as one HTML file: plots and tables in themselves, no network, no script.

Every number is marked measured, simulated or estimated; the foot has hashes, contracts and what estimates
rest on. Needs matplotlib and Jinja2 (``pip install tierstore[report]``).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path

from tierstore import __version__
from tierstore.errors import CapabilityError
from tierstore.lab.results import Evidence, Outcome, RegimeStudy, Role, Study, TuneResult
from tierstore.units import format_bytes, format_seconds

__all__ = ["check_report", "render_report", "write_report"]

_NEEDED = ("matplotlib", "jinja2")
_LAYER_COLUMNS = 6  # policies of the table by layer


def check_report() -> None:
    """Before the work that a report is to show. Raises CapabilityError if the extra is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CapabilityError(
            f"the HTML report needs {' and '.join(missing)}: pip install 'tierstore[report]'"
        )


def write_report(study: Study, path: str | os.PathLike[str]) -> None:
    """Writes ``study`` to ``path``. Raises CapabilityError if the extra is not installed, or OSError."""
    Path(path).write_text(render_report(study), encoding="utf-8")


def render_report(study: Study) -> str:
    """The page. Raises CapabilityError if the extra is not installed."""
    check_report()
    import jinja2  # an extra, like matplotlib in tierstore.lab.plots

    source = resources.files("tierstore.lab").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    numbers = count()
    return environment.from_string(source).render(
        study=study,
        version=study.version or __version__,
        regimes=[_regime(regime, numbers) for regime in study.regimes],
        Evidence=Evidence,
    )


@dataclass(frozen=True, slots=True)
class _Cell:
    """A number of a table, as shown."""

    text: str
    style: str = ""  # a class of the page: best (the least of its column), text


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    evidence: Evidence | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Table:
    columns: Sequence[_Column]
    rows: Sequence[Sequence[_Cell]]


@dataclass(frozen=True, slots=True)
class _Regime:
    """One regime as the template takes it."""

    study: RegimeStudy
    anchor: str
    capacity: str
    summary: Mapping[str, str]
    plots: Mapping[str, str]
    outcomes: _Table
    layered: _Table | None
    layers: _Table | None
    tunings: Sequence[tuple[str, TuneResult, _Table]]
    evidence: Evidence


def _regime(regime: RegimeStudy, numbers: count[int]) -> _Regime:
    outcomes = regime.focused()
    first = outcomes[0]
    anchor = f"regime-{next(numbers)}"
    return _Regime(
        study=regime,
        anchor=anchor,
        capacity=f"{first.capacity_fraction:.0%} ({first.capacity_frames:,} frames)",
        summary=_summary(outcomes, regime.tuned),
        plots=_plots(regime, outcomes, numbers),
        outcomes=_outcome_table(outcomes),
        layered=_outcome_table(regime.layered) if regime.layered else None,
        layers=_layer_table(outcomes),
        tunings=[(title, tuned, _tuned_table(tuned)) for title, tuned in _tunings(regime)],
        evidence=first.evidence,
    )


def _summary(outcomes: Sequence[Outcome], tuned: TuneResult | None) -> dict[str, str]:
    policies = [one for one in outcomes if one.role is Role.POLICY]
    best = min(policies, key=lambda one: one.miss_ratio)
    lru = next((one for one in policies if one.policy == "lru"), None)
    bound = next((one for one in outcomes if one.role is Role.BOUND), None)
    return {
        "best": best.label,
        "best_ratio": _ratio(best.miss_ratio),
        "lru": "" if lru is None else _ratio(lru.miss_ratio),
        "bound": "" if bound is None else _ratio(bound.miss_ratio),
        "tuned": "" if tuned is None else tuned.verdict.value,
    }


def _plots(regime: RegimeStudy, outcomes: Sequence[Outcome], numbers: count[int]) -> dict[str, str]:
    from tierstore.lab import plots  # matplotlib: an extra, and half a second to import

    named = [(curve.label, curve.role) for curve in regime.curves] + [
        (one.label, one.role) for one in outcomes
    ]
    styles = plots.styles_of(named)
    drawn = {"curves": plots.curves_plot(regime.curves, styles)}
    if any(one.written_bytes for one in outcomes):
        drawn["pareto"] = plots.pareto_plot(outcomes, styles)
    if regime.half_lives is not None:
        drawn["half_lives"] = plots.half_life_plot(regime.half_lives)
    timed = [one for one in outcomes if len(one.windows) > 1]
    if timed:
        drawn["windows"] = plots.windows_plot(_readable(timed), styles)
    return {name: _own_ids(svg, f"s{next(numbers)}-") for name, svg in drawn.items()}


def _readable(outcomes: Sequence[Outcome], most: int = 7) -> list[Outcome]:
    """The bounds, LRU, LFU-decay and the best of the others: more lines than that hide each other."""
    kept = [one for one in outcomes if one.role is Role.BOUND or one.policy in ("lru", "lfu-decay")]
    others = sorted((one for one in outcomes if one not in kept), key=lambda one: one.miss_ratio)
    shown = [*kept, *others[: max(0, most - len(kept))]]
    return [one for one in outcomes if one in shown]


def _own_ids(svg: str, prefix: str) -> str:
    """``svg`` with its ids made its own: all plots share one page."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return svg.replace("url(#", f"url(#{prefix}")


def _outcome_table(outcomes: Sequence[Outcome]) -> _Table:
    counted = outcomes[0].evidence
    columns = [
        _Column("policy"),
        _Column("miss ratio", counted),
        _Column("above the bound", counted),
        _Column("read a step", counted),
        _Column("write-backs", counted),
        _Column("written a step", counted),
        _Column("stall a step", Evidence.ESTIMATED),
        _Column("drive writes a day", Evidence.ESTIMATED),
        _Column("drive life", Evidence.ESTIMATED),
        _Column("own time a request", Evidence.MEASURED),
    ]
    bounds = [one.miss_ratio for one in outcomes if one.role is Role.BOUND]
    policies = [one.miss_ratio for one in outcomes if one.role is Role.POLICY]
    rows = []
    for one in sorted(outcomes, key=lambda one: (one.role is Role.POLICY, one.miss_ratio)):
        steps = max(one.steps, 1)
        best = one.role is Role.POLICY and one.miss_ratio == min(policies)
        rows.append(
            [
                _Cell(one.label + (" (bound)" if one.role is Role.BOUND else "")),
                _Cell(_ratio(one.miss_ratio), "best" if best else ""),
                _Cell(f"{one.miss_ratio - min(bounds):+.4f}" if bounds else "-"),
                _Cell(format_bytes(one.read_bytes / steps)),
                _Cell(f"{one.write_backs:,}"),
                _Cell(format_bytes(one.written_bytes / steps)),
                _Cell("-" if one.stall_s_per_step is None else format_seconds(one.stall_s_per_step)),
                _Cell(_optional(one.drive_writes_per_day, "{:.3g}")),
                _Cell(_years(one.drive_life_years)),
                _Cell("-" if one.policy_s is None else f"{one.policy_s / max(one.requests, 1) * 1e9:.0f} ns"),
            ]
        )
    return _without_empty(_Table(columns, rows))


def _without_empty(table: _Table) -> _Table:
    """Without columns that say nothing in any row."""
    kept = [n for n in range(len(table.columns)) if any(row[n].text != "-" for row in table.rows)]
    return _Table([table.columns[n] for n in kept], [[row[n] for n in kept] for row in table.rows])


def _layer_table(outcomes: Sequence[Outcome]) -> _Table | None:
    shown = [one for one in _readable(outcomes, _LAYER_COLUMNS) if one.layers]
    if not shown or len(shown[0].layers) < 2:
        return None
    ratios = [
        {part.layer: part.misses / part.requests for part in one.layers if part.requests} for one in shown
    ]
    layers = sorted(set().union(*ratios))
    columns = [_Column("layer"), *(_Column(one.label, one.evidence) for one in shown)]
    rows = [
        [_Cell(str(layer)), *(_Cell(_ratio(by[layer]) if layer in by else "-") for by in ratios)]
        for layer in layers
    ]
    return _Table(columns, rows)


def _tunings(regime: RegimeStudy) -> list[tuple[str, TuneResult]]:
    found = [
        ("The tuner's choice", tuned) for tuned in (regime.tuned, *regime.elsewhere) if tuned is not None
    ]
    if regime.against_lru is not None:
        found.append(("LFU-decay alone, against LRU", regime.against_lru))
    return [(f"{title}, capacity {tuned.chosen.capacity_fraction:.0%}", tuned) for title, tuned in found]


def _tuned_table(tuned: TuneResult) -> _Table:
    counted = tuned.chosen.evidence
    rows = [
        [
            _Cell(name),
            _Cell(f"{one.label}, {one.scope}", "text"),
            _Cell(_ratio(one.miss_ratio)),
            _Cell(format_bytes(one.written_bytes / max(one.steps, 1))),
        ]
        for name, one in (
            ("chosen on the first part", tuned.chosen),
            ("baseline", tuned.baseline),
            (tuned.best_of, tuned.best),
        )
    ]
    columns = [
        _Column("held-out rest"),
        _Column("policy, scope", style="text"),
        _Column("miss ratio", counted),
        _Column("written a step", counted),
    ]
    return _Table(columns, rows)


def _ratio(value: float) -> str:
    return f"{value:.4f}"


def _optional(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)


def _years(value: float | None) -> str:
    if value is None:
        return "-"
    return "no writes" if math.isinf(value) else f"{value:.3g} years"
