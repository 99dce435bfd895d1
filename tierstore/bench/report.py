"""Benchmarks as one HTML file: targets first, then each document with its plots, tables, machine and options.

Every number is marked measured, counted or derived. Needs matplotlib and Jinja2 (``pip install tierstore[report]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore import __version__
from tierstore.bench.comparing import Comparison
from tierstore.bench.comparing import table as comparison_rows
from tierstore.bench.documents import Document, Measurement, Origin, shown
from tierstore.lab.reports.page import Cell, Column, Table, check_report, own_ids, render_page
from tierstore.outputs import OutputKind, write_output
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.bench.plots import Plot


def write_report(
    documents: Sequence[Document], path: Path, *, comparisons: Sequence[Comparison] = ()
) -> None:
    """Writes the page of ``documents`` to ``path``. Raises CapabilityError if the extra is not installed, or OSError."""
    write_output(path, OutputKind.PAGE, render_report(documents, comparisons=comparisons))


def render_report(documents: Sequence[Document], *, comparisons: Sequence[Comparison] = ()) -> str:
    """The page. Raises CapabilityError if the extra is not installed."""
    check_report()
    numbers = count()
    return render_page(
        "tierstore.bench",
        "report.html",
        title="tierstore bench: " + ", ".join(dict.fromkeys(one.bench for one in documents)),
        version=__version__,
        sections=[_section(one, numbers) for one in documents],
        targets=_targets(documents),
        comparisons=[(one, _compared(one)) for one in comparisons],
        Origin=Origin,
    )


@dataclass(frozen=True, slots=True)
class _Section:
    """One document as the template takes it."""

    document: Document
    anchor: str
    machine: dict[str, str]
    figures: Sequence[Plot]
    rows: Table


def _section(document: Document, numbers: count[int]) -> _Section:
    from tierstore.bench.plots import plots_of  # matplotlib: an extra, and half a second to import

    return _Section(
        document=document,
        anchor=f"bench-{next(numbers)}",
        machine={
            name.removesuffix("_bytes"): format_bytes(value) if name.endswith("_bytes") else str(value)
            for name, value in asdict(document.machine).items()
        },
        figures=[
            replace(plot, svg=own_ids(plot.svg, f"s{next(numbers)}-"))
            for plot in plots_of(document.measurements)
        ],
        rows=_rows(document.measurements),
    )


def _rows(measurements: Sequence[Measurement]) -> Table:
    columns = [
        Column("measurement"),
        *map(Column, ("median", "quartiles", "samples", "better", "target", "from")),
    ]
    return Table(
        columns,
        [
            [
                Cell(one.label),
                Cell(_amount(one, one.median)),
                Cell("-" if one.count == 1 else f"{_amount(one, one.low)} to {_amount(one, one.high)}"),
                Cell(str(one.count)),
                Cell("-" if one.better.value == "neither" else one.better.value),
                _target(one),
                Cell(one.evidence.value, one.evidence.value),
            ]
            for one in measurements
        ],
    )


def _amount(one: Measurement, value: float) -> str:
    own = one.unit in ("s", "bytes", "bytes/s", "ratio")  # which say it themselves
    return shown(value, one.unit) + ("" if own else f" {one.unit}")


def _target(one: Measurement) -> Cell:
    if one.target is None:
        return Cell("-")
    sign = "≥" if one.better.value == "higher" else "≤"
    met = "met" if one.met else "missed"
    return Cell(f"{sign} {_amount(one, one.target)}: {met}", met)


def _targets(documents: Sequence[Document]) -> Table | None:
    rows = [
        [Cell(document.bench), Cell(one.label, "text"), Cell(_amount(one, one.median)), _target(one)]
        for document in documents
        for one in document.measurements
        if one.target is not None
    ]
    columns = [Column("bench"), Column("measurement", style="text"), Column("median"), Column("target")]
    return Table(columns, rows) if rows else None


def _compared(comparison: Comparison) -> Table:
    columns, rows = comparison_rows(comparison)
    styles = {row.word: row.change.value for row in comparison.rows}
    return Table(
        [Column(name, style="text" if name == "verdict" else "") for name in columns],
        [[Cell(row[0]), Cell(row[1], f"text {styles[row[1]]}"), *map(Cell, row[2:])] for row in rows],
    )
