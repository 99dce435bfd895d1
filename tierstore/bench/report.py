"""Benchmarks as one HTML file: targets first, then each document with its plots, tables, machine and options.

Every number is marked measured, counted or derived. Needs matplotlib and Jinja2 (``tierstore.reports.page.check_report``).

Plots: if a parameter has three or more numeric values, medians over it, with a line for each combination of the others; else
a row for each measurement, with its samples. Quartiles are drawn if there are several samples; targets are dotted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tierstore import __version__
from tierstore.bench.comparing import Comparison
from tierstore.bench.comparing import table as comparison_rows
from tierstore.bench.documents import Document, Measurement, Origin, shown
from tierstore.outputs import OutputKind, write_output
from tierstore.reports.drawing import INK, SETTINGS, line, new_figure, set_legend, style, svg_of
from tierstore.reports.page import Cell, Column, PageSection, Plot, Table, named_values, render_page
from tierstore.units import format_bytes

_MARKS = {
    Origin.MEASURED: "by a clock",
    Origin.COUNTED: "exactly, without noise",
    Origin.DERIVED: "computed from measurements. Quartiles and medians are over the samples of one run",
}
_FOOT = (
    "The spread is that within a run: it does not include differences between runs on the same machine. "
    f"Made by tierstore {__version__}."
)
_OPEN_ROWS = 40  # longer tables are folded if there are plots
_MOST_LINES = 7  # more would hide each other
_MOST_ROWS = 40
_LEAST_POINTS = 3
_LOGARITHMIC = 16.0  # largest over least value from which an axis is logarithmic ...
_WIDE = 300.0  # ... and from which only powers of ten are labelled
_TARGET: dict[str, Any] = {"color": "#888888", "linestyle": (0, (2, 2)), "linewidth": 1.2}

_Family = Sequence[Measurement]


def write_report(
    documents: Sequence[Document], path: Path, *, comparisons: Sequence[Comparison] = ()
) -> None:
    """Write the page of ``documents`` to ``path``. Raises OSError."""
    write_output(path, OutputKind.PAGE, render_report(documents, comparisons=comparisons))


def render_report(documents: Sequence[Document], *, comparisons: Sequence[Comparison] = ()) -> str:
    """The page."""
    return render_page(
        "tierstore bench: " + ", ".join(dict.fromkeys(one.bench for one in documents)),
        [PageSection(tables=[_targets(documents)]), *map(_compared, comparisons), *map(_section, documents)],
        marks=_MARKS.items(),
        foot=PageSection(texts=[_FOOT]),
    )


def _section(document: Document) -> PageSection:
    plots = plots_of(document.measurements)
    machine = [
        (name.removesuffix("_bytes"), format_bytes(value) if name.endswith("_bytes") else value)
        for name, value in asdict(document.machine).items()
    ]
    tables = [
        _table(document, folded=bool(plots) and len(document.measurements) > _OPEN_ROWS),
        named_values("Machine", machine, summary="Machine"),
        named_values("Options", document.options.items(), summary="Options"),
    ]
    said = f"{document.started} to {document.ended}, by tierstore {document.tool_version}."
    return PageSection(title=document.bench, texts=[said], plots=plots, tables=tables)


def _table(document: Document, folded: bool) -> Table:
    columns = dict.fromkeys(name for one in document.measurements for name in one.texts)
    return Table(
        caption=f"Measurements of bench {document.bench}",
        columns=list(map(Column, columns)),
        rows=[[_cell(one, name) for name in columns] for one in document.measurements],
        summary=f"All {len(document.measurements)} measurements" if folded else "",
    )


def _cell(one: Measurement, column: str) -> Cell:
    styles = {"from": one.evidence.value, "target": {None: "", True: "met", False: "missed"}[one.met]}
    return Cell(one.texts[column], styles.get(column, ""))


def _targets(documents: Sequence[Document]) -> Table:
    rows = [
        [Cell(document.bench), Cell(one.label, "text"), _cell(one, "median"), _cell(one, "target")]
        for document in documents
        for one in document.measurements
        if one.target is not None
    ]
    columns = [Column("bench"), Column("measurement", style="text"), Column("median"), Column("target")]
    return Table(caption="Targets", columns=columns, rows=rows)


def _compared(comparison: Comparison) -> PageSection:
    columns, rows = comparison_rows(comparison)
    styles = {row.word: row.change.value for row in comparison.rows}
    only = (("earlier", comparison.only_old), ("later", comparison.only_new))
    table = Table(
        caption="New over old, with the interval that the spread within the two runs leaves",
        columns=[Column(name, style="text" if name == "verdict" else "") for name in columns],
        rows=[[Cell(row[0]), Cell(row[1], f"text {styles[row[1]]}"), *map(Cell, row[2:])] for row in rows],
    )
    return PageSection(
        title=f"{comparison.bench}: against an earlier run",
        texts=[f"Only in the {run} run: {'; '.join(labels)}." for run, labels in only if labels],
        notes=comparison.warnings,
        tables=[table],
    )


# Plots ----------------------------------------------------------------------------------------------------


def plots_of(measurements: Sequence[Measurement]) -> list[Plot]:
    """The plots of one document, one for each name and unit of its measurements. Measurements whose name is unique share a
    plot by unit; a single value is shown only in the table.
    """
    families: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        families.setdefault((one.name, one.unit), []).append(one)
    plots: list[Plot] = []
    alone: dict[str, list[Measurement]] = {}
    for (name, unit), family in families.items():
        across = _across(family)
        if across is not None:
            parts = _apart(family, [key for key in _varying(family) if key != across])
            plots += [Plot(f"{name}{said}", f"by {across}", _curves(part, across)) for said, part in parts]
        elif len(family) > 1:
            plots += _row_plots(name, family)
        elif family[0].count > 1:
            alone.setdefault(unit, []).extend(family)
    for unit, family in alone.items():
        plots += _row_plots("Others in " + unit if plots else "In " + unit, family)
    return plots


def _row_plots(title: str, family: _Family) -> list[Plot]:
    sampled = "samples, quartiles and median" if any(one.count > 1 for one in family) else "one value each"
    return [
        Plot(title, sampled, _rows(family[first : first + _MOST_ROWS]))
        for first in range(0, len(family), _MOST_ROWS)
    ]


def _varying(family: _Family) -> list[str]:
    """The parameters that differ within ``family``, most values first."""
    names = dict.fromkeys(key for one in family for key in one.parameters)
    values = {name: {one.parameters.get(name) for one in family} for name in names}
    return sorted((name for name in names if len(values[name]) > 1), key=lambda name: -len(values[name]))


def _across(family: _Family) -> str | None:
    """The parameter for the horizontal axis."""
    for name in _varying(family):
        values = {one.parameters.get(name) for one in family}
        numbers = all(isinstance(value, int | float) for value in values)
        if numbers and len(values) >= _LEAST_POINTS:
            return name
    return None


def _apart(family: _Family, others: Sequence[str]) -> Iterator[tuple[str, _Family]]:
    """Split ``family`` by as few of ``others`` as needed so that each plot can show its lines."""
    lines = {tuple(one.parameters.get(name) for name in others) for one in family}
    if len(lines) <= _MOST_LINES or not others:
        yield "", family
        return
    by = others[-1]  # the one with the fewest values: few and full plots
    for value in dict.fromkeys(one.parameters.get(by) for one in family):
        part = [one for one in family if one.parameters.get(by) == value]
        for said, smaller in _apart(part, others[:-1]):
            yield f", {by} {_plain(by, value)}{said}", smaller


def _plain(name: str, value: object) -> str:
    if name.endswith("bytes") and isinstance(value, int | float):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(one: Measurement, without: Sequence[str] = ()) -> str:
    given: Mapping[str, object] = {key: value for key, value in one.parameters.items() if key not in without}
    words = [
        value if isinstance(value, str) else f"{key} {_plain(key, value)}" for key, value in given.items()
    ]
    return ", ".join(words) or one.name


def _curves(family: _Family, across: str) -> str:
    constant = [key for key in family[0].parameters if len({one.parameters.get(key) for one in family}) == 1]
    lines: dict[str, list[Measurement]] = {}
    for one in family:
        lines.setdefault(_named(one, [across, *constant]), []).append(one)
    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for number, (label, points) in enumerate(lines.items()):
            points.sort(key=lambda one: float(one.parameters[across]))
            xs = [float(one.parameters[across]) for one in points]
            look = style(number)
            line(axes, xs, [one.median for one in points], label, look)
            axes.fill_between(
                xs,
                [one.low for one in points],
                [one.high for one in points],
                color=look.colour,
                alpha=0.15,
                linewidth=0,
            )
        for target in sorted({one.target for one in family if one.target is not None}):
            axes.axhline(target, label=f"target {shown(target, family[0].unit)}", **_TARGET)
        axes.set(xlabel=across.removesuffix("_bytes").replace("_", " "), ylabel=family[0].unit)
        numbers = sorted({float(one.parameters[across]) for one in family})
        _scale(axes, "x", numbers, across)
        axes.set_xticks(numbers[:: -(-len(numbers) // 6)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(across, value)))
        _scale(axes, "y", [one.median for one in family], family[0].unit)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, family[0].unit)))
        set_legend(figure, axes)
        return svg_of(figure)


def _rows(family: _Family) -> str:
    with rc_context(SETTINGS):
        figure, axes = new_figure(0.8 + 0.27 * len(family))
        for row, one in enumerate(family):
            look = style(0)
            if one.count > 1:
                axes.plot([one.low, one.high], [row, row], color=look.colour, linewidth=5, alpha=0.3)
                axes.plot(
                    one.samples, [row] * len(one.samples), ".", color=look.colour, alpha=0.6, markersize=4
                )
            axes.plot([one.median], [row], "|", color=INK, markersize=11, markeredgewidth=2)
            if one.target is not None:
                axes.plot([one.target] * 2, [row - 0.45, row + 0.45], **_TARGET)
        together = len({one.name for one in family}) == 1
        axes.set_yticks(range(len(family)), [_named(one) if together else one.label for one in family])
        axes.set_ylim(len(family) - 0.4, -0.6)
        _scale(axes, "x", [one.median for one in family], family[0].unit)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, family[0].unit)))
        axes.grid(visible=False, axis="y")
        return svg_of(figure)


def _scale(axes: Axes, which: str, values: Sequence[float], unit: str) -> None:
    """A logarithmic axis if the values spread far, else one that begins at 0 if they are positive; ticks for ``unit``."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(5))
    if min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        if "bytes" in unit:
            axis.set_major_locator(LogLocator(base=2, numticks=6))
        else:
            wide = max(values) / min(values) >= _WIDE
            axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 3.0), numticks=6))
        axis.set_minor_locator(NullLocator())
    elif min(values) >= 0 and which == "y":
        axes.set_ylim(bottom=0)
    elif min(values) >= 0:
        axes.set_xlim(left=0)
