"""Drawing of a page's plots: inline SVG that uses the page's fonts and, as its ink, the page's text colour.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; every line also has its own marker. Needs matplotlib.
Figures are made, drawn on and converted to SVG within ``rc_context(SETTINGS)``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"  # becomes currentColor
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C7A00")
_MARKERS = "osD^vPX<>*hpd8H"
_LINES = ("-", "--", "-.", ":")
_SIZE = (4.7, 3.1)  # inches: small, so that text is readable at the width of a phone
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierstore",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#888888",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.3,
}


@dataclass(frozen=True, slots=True)
class PlotStyle:
    """The style of one line, the same in every plot."""

    colour: str
    marker: str
    line: str
    width: float


def style(number: int) -> PlotStyle:
    """The style of line ``number`` of a plot."""
    colour = _PALETTE[number % len(_PALETTE)]
    return PlotStyle(
        colour, _MARKERS[number % len(_MARKERS)], _LINES[number // len(_PALETTE) % len(_LINES)], 1.3
    )


def new_figure(height: float = _SIZE[1]) -> tuple[Figure, Axes]:
    """A figure of the common width with one set of axes; ``height`` in inches."""
    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
    return figure, figure.add_subplot()


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, look: PlotStyle) -> None:
    """One line of a plot; at most a dozen of its points are marked."""
    axes.plot(
        xs,
        ys,
        label=label,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line,
        linewidth=look.width,
        markevery=max(1, len(xs) // 12),
    )


def set_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below the plot and enlarge the figure: inside it would hide lines, beside it would shrink them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 16 else 3
    rows = -(-len(labels) // columns)
    figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.19 * rows + 0.05)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.6)


def svg_of(figure: Figure) -> str:
    """The drawing as an SVG element that takes the width of its page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # The page sets the width; the view box keeps the proportions.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
