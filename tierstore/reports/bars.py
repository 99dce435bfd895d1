"""Bars over time, in rows, as an SVG picture.

The same bars give the same bytes. Text stays text. The background is white, so that a picture looks alike on light and dark
pages; bars of one row and colour are one path, so that a picture of a thousand bars is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEFT, _WIDTH, _ALL = 116, 752, 880
_TOP, _ROW_HEIGHT, _BAR_HEIGHT, _HEADING_HEIGHT = 8, 26, 20, 24
#: Width of a character, and of the margin: a label is drawn if its bar has room for it.
_CHARACTER, _AROUND = 6.6, 1.0
_DARK, _LIGHT = "#222", "#fff"


class Bar(NamedTuple):
    """A bar from ``begin`` to ``end``, in milliseconds; ``label`` is drawn if the bar has room for it."""

    begin: float
    end: float
    colour: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class BarPanel:
    """Rows one below the other, by title. ``heading`` stands above the titles, each of ``marks`` above its time."""

    rows: Mapping[str, Sequence[Bar]]
    heading: str = ""
    marks: Sequence[tuple[float, str]] = ()


def draw_bars(panels: Sequence[BarPanel], *, length: float, caption: str) -> str:
    """An SVG of ``panels`` from 0 to ``length`` milliseconds; anything outside is not drawn."""
    scale = _WIDTH / length
    body: list[str] = []
    top = _TOP
    for panel in panels:
        if panel.heading or panel.marks:
            body += _heading(panel, top, scale)
            top += _HEADING_HEIGHT
        for title, bars in panel.rows.items():
            body += _row(title, bars, top, length, scale)
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


def _row(title: str, bars: Sequence[Bar], top: int, length: float, scale: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{title}</text>'
    shapes: dict[str, list[str]] = {}
    labels: list[str] = []
    for bar in bars:
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
    """The more readable ink on ``colour`` (#rrggbb)."""
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
    """``spans`` (begin, end), with those at most ``gap`` apart merged."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
