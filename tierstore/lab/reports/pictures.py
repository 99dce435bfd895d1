"""Pictures in the documents, in a file: panels side by side, by matplotlib; and bars over time, rows of them, by themselves.

The same content gives the same bytes. Text is text. The background of bars is white, so that they read alike on light and
dark pages; bars of one row and colour are one path, so that a picture of a thousand of them is small.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.outputs import OutputKind, write_output

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "tierstore",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
}


@contextmanager
def picture(target: Path, panels: int, size: tuple[float, float], **layout: Any) -> Iterator[Any]:
    """Gives the axes of ``panels`` panels, to be drawn on in the block; at its end the SVG is written to ``target``.

    ``size``: inches. ``layout``: more for ``Figure.subplots``. Raises OSError; nothing is written if the block raises.
    """
    from matplotlib import rc_context  # an extra, which bars do without
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(1, panels, **layout)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    # A path a line, not a point a line.
    write_output(target, OutputKind.PICTURE, drawn.getvalue().replace(" \n", " "))


# Bars over time ---------------------------------------------------------------------------------------------

_LEFT, _WIDTH, _ALL = 116, 752, 880
_TOP, _ROW_HEIGHT, _BAR_HEIGHT, _HEADING_HEIGHT = 8, 26, 20, 24
#: A label is drawn where its bar has this room for a character, and around it.
_CHARACTER, _AROUND = 6.6, 1.0
_DARK, _LIGHT = "#222", "#fff"


class Bar(NamedTuple):
    """From ``begin`` to ``end``, in milliseconds; ``label`` is drawn where the bar has room for it."""

    begin: float
    end: float
    colour: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """Bars behind one title."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class BarPanel:
    """Rows under each other. ``heading`` stands above their titles, each of ``marks`` above its time."""

    rows: Sequence[BarRow]
    heading: str = ""
    marks: Sequence[tuple[float, str]] = ()


def draw_bars(panels: Sequence[BarPanel], *, length: float, caption: str) -> str:
    """An SVG of ``panels`` from 0 to ``length`` milliseconds; what is outside is not drawn."""
    scale = _WIDTH / length
    body: list[str] = []
    top = _TOP
    for panel in panels:
        if panel.heading or panel.marks:
            body += _heading(panel, top, scale)
            top += _HEADING_HEIGHT
        for row in panel.rows:
            body += _row(row, top, length, scale)
            top += _ROW_HEIGHT
    height = top + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_ALL} {height}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{_ALL}" height="{height}" fill="#fff"/>',
            *body,
            *_axis(top, length, scale),
            f'<text x="{_LEFT + _WIDTH / 2:g}" y="{top + 36}" text-anchor="middle">{caption}</text>',
            "</svg>",
            "",
        ]
    )


def _heading(panel: BarPanel, top: int, scale: float) -> Iterator[str]:
    baseline = top + 17
    yield f'<text x="{_LEFT - 8}" y="{baseline}" text-anchor="end" font-weight="bold">{panel.heading}</text>'
    for at, text in panel.marks:
        yield f'<text x="{_LEFT + at * scale:.1f}" y="{baseline}">{text}</text>'


def _row(row: BarRow, top: int, length: float, scale: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{row.title}</text>'
    shapes: dict[str, list[str]] = {}
    labels: list[str] = []
    for bar in row.bars:
        first, last = max(0.0, bar.begin) * scale, min(length, bar.end) * scale
        if first > last:
            continue
        shape = f"M{_LEFT + first:.1f} {top}h{last - first:.1f}v{_BAR_HEIGHT}H{_LEFT + first:.1f}z"
        shapes.setdefault(bar.colour, []).append(shape)
        if bar.label and last - first >= _CHARACTER * len(bar.label) + _AROUND:
            middle = f'x="{_LEFT + (first + last) / 2:.1f}" y="{top + 14}" text-anchor="middle"'
            labels.append(f'<text {middle} font-size="11" fill="{_ink(bar.colour)}">{bar.label}</text>')
    for colour, drawn in shapes.items():
        yield f'<path fill="{colour}" stroke="#fff" stroke-width=".3" d="{" ".join(drawn)}"/>'
    yield from labels


def _ink(colour: str) -> str:
    """What is read best on ``colour`` (#rrggbb): dark on light ones, and light on dark ones."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else _LIGHT


def _axis(bottom: int, length: float, scale: float) -> Iterator[str]:
    tick = 10.0 ** math.floor(math.log10(length))
    tick /= 5 if length < 2 * tick else 2 if length < 5 * tick else 1
    marks = [number * tick for number in range(int(length / tick) + 1)]
    ticks = "".join(f"M{_LEFT + mark * scale:.1f} {bottom}v5" for mark in marks)
    yield f'<path fill="none" stroke="#000" d="M{_LEFT} {bottom}h{_WIDTH}{ticks}"/>'
    for mark in marks:
        yield f'<text x="{_LEFT + mark * scale:.1f}" y="{bottom + 18}" text-anchor="middle">{mark:g}</text>'


def joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """``spans`` (begin, end) with those made one that are no more than ``gap`` apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
