"""One HTML file with everything in it: what all reports share. Needs matplotlib and Jinja2 (``tierstore[report]``).

``page.html`` has the frame and the style, ``macros.html`` tables, figures and marks; a report's template extends them.
"""

from __future__ import annotations

import enum
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from tierstore.errors import CapabilityError
from tierstore.units import printable

_NEEDED = ("matplotlib", "jinja2")
_SHARED = ("page.html", "macros.html")


def check_report() -> None:
    """Before the work that a report is to show. Raises CapabilityError if the extra is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CapabilityError(
            f"the HTML report needs {' and '.join(missing)}: pip install 'tierstore[report]'"
        )


def render_page(package: str, template: str, **values: object) -> str:
    """The page that ``template``, a file of ``package``, makes of ``values``. ``title`` is among them."""
    import jinja2  # an extra, like matplotlib in tierstore.lab.reports.drawing

    sources = {name: _source("tierstore.lab.reports", name) for name in _SHARED}
    sources[template] = _source(package, template)
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return printable(environment.get_template(template).render(**values))  # names of files may be in it


def _source(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of a table, as shown."""

    text: str
    style: str = ""  # a class of the page: best (the least of its column), text


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    evidence: enum.Enum | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def own_ids(svg: str, prefix: str) -> str:
    """``svg`` with its ids made its own: all plots share one page."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return svg.replace("url(#", f"url(#{prefix}")
