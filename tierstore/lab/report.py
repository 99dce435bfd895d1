"""A study as one HTML file with its plots and tables, without network or script.

Every number is marked measured, simulated or estimated; the foot has hashes, contracts and the
assumptions of estimates. Needs matplotlib and Jinja2 (``pip install tierstore[report]``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tierstore import __version__
from tierstore.lab.results import Outcome, OutcomeEvidence, RegimeStudy, Role, Study, TuneResult, marked
from tierstore.outputs import OutputKind, write_output
from tierstore.reports.page import (
    Cell,
    Column,
    PageSection,
    Plot,
    Table,
    check_report,
    named_values,
    render_page,
)
from tierstore.units import format_bytes, format_seconds

_LAYER_COLUMNS = 6  # policies of the table by layer
_MARKS = {
    OutcomeEvidence.MEASURED: "by a clock or in a live run",
    OutcomeEvidence.SIMULATED: "counted by replaying the trace through the policy",
    OutcomeEvidence.ESTIMATED: "from a model whose assumptions are listed at the foot",
}
_CONTRACTS = (
    "Event-atomic: the entries that a layer needs at one moment are one set, and none evicts another. "
    "Sequential: one request after another."
)


def write_report(study: Study, path: str | os.PathLike[str]) -> None:
    """Writes ``study`` to ``path``. Raises CapabilityError if the extra is not installed, or OSError."""
    write_output(path, OutputKind.PAGE, render_report(study))


def render_report(study: Study) -> str:
    """The page. Raises CapabilityError if the extra is not installed."""
    check_report()
    anchors = [f"regime-{number}" for number in range(len(study.regimes))]
    regimes = list(zip(study.regimes, anchors, strict=True))
    traces = [(one.name, f"{one.trace.name}, {one.trace.sha256}. {_replayed(one)}") for one in study.regimes]
    return render_page(
        study.title,
        [
            PageSection(tables=[_summaries(regimes)]),
            *(_section(regime, anchor, study.source) for regime, anchor in regimes),
        ],
        marks=_MARKS.items(),
        foot=PageSection(
            texts=[f"{_CONTRACTS} Made by tierstore {study.version or __version__}."],
            tables=[
                named_values("Assumptions of the estimates", study.assumptions.items()),
                named_values("Traces, by the SHA-256 of their records and events", traces),
            ],
        ),
    )


def _replayed(regime: RegimeStudy) -> str:
    return f"Contract: {regime.contract}, no lookahead; scope: {regime.scope}"


def _capacity(first: Outcome) -> str:
    return f"{first.capacity_fraction:.0%} ({first.capacity_frames:,} frames)"


def _summaries(regimes: Sequence[tuple[RegimeStudy, str]]) -> Table:
    """A row for each regime, with a link to its section."""
    first = regimes[0][0]
    counted = first.focused()[0].evidence
    columns = [
        *map(Column, ("regime", "capacity", "best policy")),
        *(Column(name, counted) for name in ("its miss ratio", "LRU's", "the clairvoyant choice's")),
        Column("tuned, against the default", counted if first.tuned is None else first.tuned.gain_evidence),
    ]
    rows = [
        [Cell(regime.name, link=anchor), *map(Cell, _summary(regime.focused(), regime.tuned))]
        for regime, anchor in regimes
    ]
    return Table(caption="All regimes", columns=columns, rows=rows, words=True)


def _summary(outcomes: Sequence[Outcome], tuned: TuneResult | None) -> Iterator[str]:
    policies = [one for one in outcomes if one.role is Role.POLICY]
    best = min(policies, key=lambda one: one.miss_ratio)
    lru = next((one for one in policies if one.policy == "lru"), None)
    least = next((one for one in outcomes if one.role is not Role.POLICY), None)
    yield from (_capacity(outcomes[0]), best.label, _ratio(best.miss_ratio))
    yield "-" if lru is None else _ratio(lru.miss_ratio)
    yield "-" if least is None else f"{_ratio(least.miss_ratio)} ({least.role.value})"
    yield "-" if tuned is None else tuned.verdict.value


def _section(regime: RegimeStudy, anchor: str, source: str) -> PageSection:
    outcomes = regime.focused()
    trace = regime.trace
    texts = [
        f"{trace.requests:,} requests in {trace.steps:,} steps for {trace.records:,} records in {trace.layers} "
        f"layer{'' if trace.layers == 1 else 's'}; an access requests {regime.active_per_layer:.1f} of "
        f"{regime.records_per_layer:.0f} in its layer. {_replayed(regime)}."
    ]
    if not _writes(outcomes):
        texts.append("Nothing is written in this regime, so there is no trade-off between stalls and writes.")
    at = f"at a capacity of {_capacity(outcomes[0])}"
    estimates = f"; estimates: {source}" if source else ""
    tables = [_outcome_table(f"All policies {at}{estimates}", outcomes)]
    if regime.layered:
        caption = f"The same with a quota for each layer, equal ones{estimates}"
        tables.append(_outcome_table(caption, regime.layered))
    tables += [_tuned_table("The tuner's choice", tuned) for tuned in regime.tunings]
    if regime.against_lru is not None:
        tables.append(_tuned_table("LFU-decay alone, against LRU", regime.against_lru))
    return PageSection(
        title=regime.name,
        anchor=anchor,
        texts=texts,
        notes=[(f"{regime.advice} ", outcomes[0].evidence)] if regime.advice else [],
        plots=list(_plots(regime, outcomes, at)),
        tables=[*tables, *_layer_tables(f"Miss ratio by layer, {at}", outcomes)],
    )


def _writes(outcomes: Sequence[Outcome]) -> bool:
    return any(one.written_bytes for one in outcomes)


def _plots(regime: RegimeStudy, outcomes: Sequence[Outcome], at: str) -> Iterator[Plot]:
    from tierstore.lab import plots  # matplotlib: an extra, and half a second to import

    named = [(one.label, one.role) for one in regime.curves] + [(one.label, one.role) for one in outcomes]
    styles = plots.styles_of(named)
    counted = outcomes[0].evidence.value
    text = f"{counted}; 1 - C/N is what any policy misses of requests that are all alike"
    yield Plot("Miss-ratio curves", text, plots.curves_plot(regime.curves, styles))
    if _writes(outcomes):
        text = f"{at}; nearer the lower left corner is better"
        yield Plot("Stall against writes", text, plots.pareto_plot(outcomes, styles))
    if (found := regime.half_lives) is not None:
        text = f"{found.evidence.value} miss ratios"
        yield Plot("Half-life of LFU-decay", text, plots.half_life_plot(found))
    if timed := [one for one in outcomes if len(one.windows) > 1]:
        drawn = plots.windows_plot(_readable(timed), styles)
        yield Plot("Hit ratio over time", f"{counted}, {at}", drawn)


def _readable(outcomes: Sequence[Outcome], most: int = 7) -> list[Outcome]:
    """The clairvoyant choices, LRU, LFU-decay and the best of the others: more lines would hide each other."""
    kept = [one for one in outcomes if one.role is not Role.POLICY or one.policy in ("lru", "lfu-decay")]
    others = sorted((one for one in outcomes if one not in kept), key=lambda one: one.miss_ratio)
    shown = [*kept, *others[: max(0, most - len(kept))]]
    return [one for one in outcomes if one in shown]


def _outcome_table(caption: str, outcomes: Sequence[Outcome]) -> Table:
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
    return _without_empty(Table(caption=caption, columns=columns, rows=rows))


def _without_empty(table: Table) -> Table:
    """The table without empty columns."""
    kept = [n for n in range(len(table.columns)) if any(row[n].text != "-" for row in table.rows)]
    columns = [table.columns[n] for n in kept]
    return replace(table, columns=columns, rows=[[row[n] for n in kept] for row in table.rows])


def _layer_tables(caption: str, outcomes: Sequence[Outcome]) -> Iterator[Table]:
    """One folded table, if there are layers to compare."""
    shown = [one for one in _readable(outcomes, _LAYER_COLUMNS) if one.layers]
    if not shown or len(shown[0].layers) < 2:
        return
    ratios = [
        {part.layer: part.misses / part.requests for part in one.layers if part.requests} for one in shown
    ]
    layers = sorted(set().union(*ratios))
    columns = [Column("layer"), *(Column(one.label, one.evidence) for one in shown)]
    rows = [
        [Cell(str(layer)), *(Cell(_ratio(by[layer]) if layer in by else "-") for by in ratios)]
        for layer in layers
    ]
    yield Table(caption=caption, columns=columns, rows=rows, summary="By layer")


def _tuned_table(title: str, tuned: TuneResult) -> Table:
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
        *(Column(name, counted) for name in ("miss ratio", "read a step", "written a step")),
        Column("stall a step", OutcomeEvidence.ESTIMATED),
    ]
    warning = f" Warning: {tuned.warning}." if tuned.warning else ""
    table = Table(
        heading=f"{title}, capacity {tuned.chosen.capacity_fraction:.0%}",
        caption=f"Chosen on the first {tuned.tuned_steps:,} steps, scored on the rest: {tuned.scored}",
        columns=columns,
        rows=rows,
        note=(
            f"Against the baseline: {tuned.verdict.value}, {tuned.gain_text} (block bootstrap over steps) ",
            tuned.gain_evidence,
            f"; {tuned.regret:.2%} above {tuned.best_of}.{warning}",
        ),
        code=tuned.configuration,
    )
    return _without_empty(table)


def _stall(one: Outcome) -> Cell:
    return Cell("-" if one.stall_s_per_step is None else format_seconds(one.stall_s_per_step))


def _ratio(value: float) -> str:
    return f"{value:.4f}"


def _years(value: float | None) -> str:
    if value is None:
        return "-"
    return "no writes" if math.isinf(value) else f"{value:.3g} years"
