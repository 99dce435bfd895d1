"""A study as one HTML file: plots and tables in themselves, no network, no script.

Every number is marked measured, simulated or estimated; the foot has hashes, contracts and what estimates
rest on. Needs matplotlib and Jinja2 (``pip install tierstore[report]``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import count

from tierstore import __version__
from tierstore.lab.reports.page import Cell, Column, Table, check_report, own_ids, render_page
from tierstore.lab.results import Outcome, OutcomeEvidence, RegimeStudy, Role, Study, TuneResult, marked
from tierstore.outputs import OutputKind, write_output
from tierstore.units import format_bytes, format_seconds

_LAYER_COLUMNS = 6  # policies of the table by layer


def write_report(study: Study, path: str | os.PathLike[str]) -> None:
    """Writes ``study`` to ``path``. Raises CapabilityError if the extra is not installed, or OSError."""
    write_output(path, OutputKind.PAGE, render_report(study))


def render_report(study: Study) -> str:
    """The page. Raises CapabilityError if the extra is not installed."""
    check_report()
    numbers = count()
    return render_page(
        "tierstore.lab.reports",
        "report.html",
        title=study.title,
        study=study,
        version=study.version or __version__,
        regimes=[_regime(regime, numbers) for regime in study.regimes],
        Evidence=OutcomeEvidence,
    )


def _regime(regime: RegimeStudy, numbers: count[int]) -> dict[str, object]:
    """One regime as the template takes it."""
    outcomes = regime.focused()
    first = outcomes[0]
    return {
        "study": regime,
        "anchor": f"regime-{next(numbers)}",
        "capacity": f"{first.capacity_fraction:.0%} ({first.capacity_frames:,} frames)",
        "summary": _summary(outcomes, regime.tuned),
        "plots": _plots(regime, outcomes, numbers),
        "outcomes": _outcome_table(outcomes),
        "layered": _outcome_table(regime.layered) if regime.layered else None,
        "layers": _layer_table(outcomes),
        "tunings": [(title, tuned, _tuned_table(tuned)) for title, tuned in _tunings(regime)],
        "evidence": first.evidence,
        "tuned_evidence": first.evidence if regime.tuned is None else regime.tuned.gain_evidence,
    }


def _summary(outcomes: Sequence[Outcome], tuned: TuneResult | None) -> dict[str, str]:
    policies = [one for one in outcomes if one.role is Role.POLICY]
    best = min(policies, key=lambda one: one.miss_ratio)
    lru = next((one for one in policies if one.policy == "lru"), None)
    least = next((one for one in outcomes if one.role is not Role.POLICY), None)
    return {
        "best": best.label,
        "best_ratio": _ratio(best.miss_ratio),
        "lru": "" if lru is None else _ratio(lru.miss_ratio),
        "least": "" if least is None else f"{_ratio(least.miss_ratio)} ({least.role.value})",
        "tuned": "" if tuned is None else tuned.verdict.value,
    }


def _plots(regime: RegimeStudy, outcomes: Sequence[Outcome], numbers: count[int]) -> dict[str, str]:
    from tierstore.lab.reports import plots  # matplotlib: an extra, and half a second to import

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
    return {name: own_ids(svg, f"s{next(numbers)}-") for name, svg in drawn.items()}


def _readable(outcomes: Sequence[Outcome], most: int = 7) -> list[Outcome]:
    """What knows the future, LRU, LFU-decay and the best of the others: more lines than that hide each other."""
    kept = [one for one in outcomes if one.role is not Role.POLICY or one.policy in ("lru", "lfu-decay")]
    others = sorted((one for one in outcomes if one not in kept), key=lambda one: one.miss_ratio)
    shown = [*kept, *others[: max(0, most - len(kept))]]
    return [one for one in outcomes if one in shown]


def _outcome_table(outcomes: Sequence[Outcome]) -> Table:
    counted = outcomes[0].evidence
    least = [one for one in outcomes if one.role is not Role.POLICY]
    bounded = all(one.role is Role.BOUND for one in least)
    columns = [
        Column("policy"),
        Column("miss ratio", counted),
        Column("above the bound" if bounded else "above the clairvoyant", counted),
        Column("not admitted", counted),
        Column("read a step", counted),
        Column("write-backs", counted),
        Column("written a step", counted),
        Column("stall a step", OutcomeEvidence.ESTIMATED),
        Column("drive writes a day", OutcomeEvidence.ESTIMATED),
        Column("drive life", OutcomeEvidence.ESTIMATED),
        Column("own time a request", OutcomeEvidence.MEASURED),
    ]
    policies = [one.miss_ratio for one in outcomes if one.role is Role.POLICY]
    rows = []
    for one in sorted(outcomes, key=lambda one: (one.role is Role.POLICY, one.miss_ratio)):
        best = one.role is Role.POLICY and one.miss_ratio == min(policies)
        rows.append(
            [
                Cell(marked(one.label, one.role)),
                Cell(_ratio(one.miss_ratio), "best" if best else ""),
                Cell(f"{one.miss_ratio - min(each.miss_ratio for each in least):+.4f}" if least else "-"),
                Cell(f"{one.not_admitted:,}" if one.not_admitted else "-"),
                Cell(format_bytes(one.read_per_step)),
                Cell(f"{one.write_backs:,}"),
                Cell(format_bytes(one.written_per_step)),
                _stall(one),
                Cell("-" if one.drive_writes_per_day is None else f"{one.drive_writes_per_day:.3g}"),
                Cell(_years(one.drive_life_years)),
                Cell("-" if one.policy_s is None else f"{one.policy_s / max(one.requests, 1) * 1e9:.0f} ns"),
            ]
        )
    return _without_empty(Table(columns, rows))


def _without_empty(table: Table) -> Table:
    """Without columns that say nothing in any row."""
    kept = [n for n in range(len(table.columns)) if any(row[n].text != "-" for row in table.rows)]
    return Table([table.columns[n] for n in kept], [[row[n] for n in kept] for row in table.rows])


def _layer_table(outcomes: Sequence[Outcome]) -> Table | None:
    shown = [one for one in _readable(outcomes, _LAYER_COLUMNS) if one.layers]
    if not shown or len(shown[0].layers) < 2:
        return None
    ratios = [
        {part.layer: part.misses / part.requests for part in one.layers if part.requests} for one in shown
    ]
    layers = sorted(set().union(*ratios))
    columns = [Column("layer"), *(Column(one.label, one.evidence) for one in shown)]
    rows = [
        [Cell(str(layer)), *(Cell(_ratio(by[layer]) if layer in by else "-") for by in ratios)]
        for layer in layers
    ]
    return Table(columns, rows)


def _tunings(regime: RegimeStudy) -> list[tuple[str, TuneResult]]:
    found = [("The tuner's choice", tuned) for tuned in regime.tunings]
    if regime.against_lru is not None:
        found.append(("LFU-decay alone, against LRU", regime.against_lru))
    return [(f"{title}, capacity {tuned.chosen.capacity_fraction:.0%}", tuned) for title, tuned in found]


def _tuned_table(tuned: TuneResult) -> Table:
    counted = tuned.chosen.evidence
    rows = [
        [
            Cell(name),
            Cell(f"{one.label}, {one.scope}", "text"),
            Cell(_ratio(one.miss_ratio)),
            Cell(format_bytes(one.read_per_step)),
            Cell(format_bytes(one.written_per_step)),
            _stall(one),
        ]
        for name, one in (
            ("chosen on the first part", tuned.chosen),
            ("baseline", tuned.baseline),
            (tuned.best_of, tuned.best),
        )
    ]
    columns = [
        Column("held-out rest"),
        Column("policy, scope", style="text"),
        Column("miss ratio", counted),
        Column("read a step", counted),
        Column("written a step", counted),
        Column("stall a step", OutcomeEvidence.ESTIMATED),
    ]
    return _without_empty(Table(columns, rows))


def _stall(one: Outcome) -> Cell:
    return Cell("-" if one.stall_s_per_step is None else format_seconds(one.stall_s_per_step))


def _ratio(value: float) -> str:
    return f"{value:.4f}"


def _years(value: float | None) -> str:
    if value is None:
        return "-"
    return "no writes" if math.isinf(value) else f"{value:.3g} years"
