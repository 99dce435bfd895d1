"""Benchmarks as one HTML file: targets first, then each document with its plots, tables, machine and options.

Every number is marked measured, counted or derived. Needs matplotlib and Jinja2 (``pip install tierstore[report]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tierstore import __version__
from tierstore.bench.comparing import Comparison
from tierstore.bench.comparing import table as comparison_rows
from tierstore.bench.documents import Document, Measurement, Origin
from tierstore.outputs import OutputKind, write_output
from tierstore.reports.page import Cell, Column, PageSection, Table, check_report, named_values, render_page
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


def write_report(
    documents: Sequence[Document], path: Path, *, comparisons: Sequence[Comparison] = ()
) -> None:
    """Write the page of ``documents`` to ``path``. Raises CapabilityError if the extra is not installed, or OSError."""
    write_output(path, OutputKind.PAGE, render_report(documents, comparisons=comparisons))


def render_report(documents: Sequence[Document], *, comparisons: Sequence[Comparison] = ()) -> str:
    """The page. Raises CapabilityError if the extra is not installed."""
    check_report()
    return render_page(
        "tierstore bench: " + ", ".join(dict.fromkeys(one.bench for one in documents)),
        [PageSection(tables=[_targets(documents)]), *map(_compared, comparisons), *map(_section, documents)],
        marks=_MARKS.items(),
        foot=PageSection(texts=[_FOOT]),
    )


def _section(document: Document) -> PageSection:
    from tierstore.bench.plots import plots_of  # matplotlib: an extra, and half a second to import

    plots = plots_of(document.measurements)
    machine = [
        (name.removesuffix("_bytes"), format_bytes(value) if name.endswith("_bytes") else value)
        for name, value in asdict(document.machine).items()
    ]
    tables = [
        _rows(document, folded=bool(plots) and len(document.measurements) > _OPEN_ROWS),
        named_values("Machine", machine, summary="Machine"),
        named_values("Options", document.options.items(), summary="Options"),
    ]
    said = f"{document.started} to {document.ended}, by tierstore {document.tool_version}."
    return PageSection(title=document.bench, texts=[said], plots=plots, tables=tables)


def _rows(document: Document, folded: bool) -> Table:
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
