"""Reports as one HTML file, without network or script. Needs matplotlib and Jinja2 (``tierstore[report]``).

A page is sections of paragraphs, plots and tables. Marks, members of an enum, show where numbers come from.
"""

from __future__ import annotations

import enum
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count

from tierstore.errors import CapabilityError
from tierstore.units import printable

_NEEDED = ("matplotlib", "jinja2")

#: Text, with marks between its pieces.
Text = str | Sequence[str | enum.Enum]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell, as shown."""

    text: str
    style: str = ""  # a class of the page: best (the least of its column), text
    link: str = ""  # the anchor of a section


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    evidence: enum.Enum | None = None
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under ``columns``, or, without columns, names and their values. ``summary``: the table is folded behind it."""

    caption: str
    columns: Sequence[Column] = ()
    rows: Sequence[Sequence[Cell]]
    words: bool = False  # text, not numbers
    heading: str = ""
    note: Text = ""
    code: str = ""
    summary: str = ""


def named_values(caption: str, values: Iterable[tuple[str, object]], summary: str = "") -> Table:
    """A table of names and values."""
    rows = [[Cell(name), Cell(str(value))] for name, value in values]
    return Table(caption=caption, rows=rows, words=True, summary=summary)


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing, an SVG element, with its caption."""

    title: str
    text: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """Fields are shown in their order; ``notes`` are highlighted."""

    title: str = ""
    anchor: str = ""
    texts: Sequence[Text] = ()
    notes: Sequence[Text] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()


def check_report() -> None:
    """Call before the work that a report is to show. Raises CapabilityError if the extra is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CapabilityError(
            f"the HTML report needs {' and '.join(missing)}: pip install 'tierstore[report]'"
        )


def render_page(
    title: str, sections: Sequence[PageSection], *, marks: Iterable[tuple[enum.Enum, str]], foot: PageSection
) -> str:
    """Render the page. ``marks``: each with its meaning. The extra must be installed (``check_report``)."""
    import jinja2  # an extra, like matplotlib in tierstore.reports.drawing

    numbers = count()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    # All plots share the ids of one page.
    environment.filters["own_ids"] = lambda svg: own_ids(svg, f"s{next(numbers)}-")
    template = environment.from_string(
        resources.files("tierstore.reports").joinpath("page.html").read_text("utf-8")
    )
    page = template.render(title=title, sections=sections, marks=list(marks), foot=foot)
    return printable(page)  # it may contain file names


def own_ids(svg: str, prefix: str) -> str:
    """``svg`` with ``prefix`` added to its ids."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return svg.replace("url(#", f"url(#{prefix}")
