"""The report's plots: inline SVG that takes the page's fonts and, for its ink, the page's text colour.

Colours are Okabe and Ito's, which colour-blind readers tell apart; every line has a marker of its own too.
Needs matplotlib, which is imported here and nowhere else.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from tierstore.lab.results import Curve, HalfLifeMap, Outcome, Role

__all__ = ["Style", "curves_plot", "half_life_plot", "pareto_plot", "styles_of", "windows_plot"]

_INK = "#010203"  # becomes currentColor
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C7A00")
_MARKERS = "osD^vPX<>*hpd8H"
_LINES = ("-", "--", "-.", ":")
_SIZE = (4.7, 3.1)  # inches: small, so that text is readable at the width of a telephone
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierstore",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#888888",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.3,
}


@dataclass(frozen=True, slots=True)
class Style:
    """How one policy is drawn, in every plot alike."""

    colour: str
    marker: str
    line: str
    width: float


def styles_of(labels: Sequence[tuple[str, Role]]) -> dict[str, Style]:
    """A style for each label, in the order given; bounds in the page's ink, without a marker."""
    styles: dict[str, Style] = {}
    number = 0
    for label, role in labels:
        if label in styles:
            continue
        if role is Role.BOUND:
            styles[label] = Style(_INK, "", "-", 2.0)
            continue
        colour = _PALETTE[number % len(_PALETTE)]
        line = _LINES[number // len(_PALETTE) % len(_LINES)]
        styles[label] = Style(colour, _MARKERS[number % len(_MARKERS)], line, 1.3)
        number += 1
    return styles


def curves_plot(curves: Sequence[Curve], styles: dict[str, Style]) -> str:
    """Miss ratio over capacity, with the line 1 - C/N of requests that are all alike."""
    with rc_context(_SETTINGS):
        figure, axes = _figure()
        for curve in curves:
            xs = [point.capacity_fraction for point in curve.points]
            ys = [point.miss_ratio for point in curve.points]
            _line(axes, xs, ys, curve.label, styles[curve.label])
        axes.plot([0, 1], [1, 0], color="#888888", linestyle=(0, (2, 2)), linewidth=1.2, label="1 - C/N")
        axes.set(
            xlim=(0, 1), ylim=(0, 1.03), xlabel="capacity (of all that is asked for)", ylabel="miss ratio"
        )
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        _legend(figure, axes)
        return _svg(figure)


def pareto_plot(outcomes: Sequence[Outcome], styles: dict[str, Style]) -> str:
    """Stalled time a step (or bytes read, where none is estimated) against bytes written a step.

    The front joins what nothing else beats in both.
    """
    timed = all(one.stall_s_per_step is not None for one in outcomes)
    points = [(_stall_ms(one) if timed else _read_mb(one), _written_mb(one)) for one in outcomes]
    with rc_context(_SETTINGS):
        figure, axes = _figure()
        for one, (x, y) in zip(outcomes, points, strict=True):
            style = styles[one.label]
            axes.plot(
                [x],
                [y],
                linestyle="",
                marker=style.marker or "o",
                markersize=8,
                color=style.colour,
                markerfacecolor="none" if one.role is Role.BOUND else style.colour,
                label=one.label,
            )
        front = _front(
            [point for one, point in zip(outcomes, points, strict=True) if one.role is Role.POLICY]
        )
        axes.step(
            [x for x, _ in front],
            [y for _, y in front],
            where="post",
            color="#888888",
            linewidth=1,
            zorder=0,
            label="best of both",
        )
        _zoom(axes, points)
        axes.set(
            xlabel="stall, ms a step (estimated)" if timed else "read, MB a step (simulated)",
            ylabel="written, MB a step (simulated)",
        )
        _legend(figure, axes)
        return _svg(figure)


def _stall_ms(one: Outcome) -> float:
    return 1e3 * (one.stall_s_per_step or 0.0)


def _read_mb(one: Outcome) -> float:
    return one.read_bytes / max(one.steps, 1) / 1e6


def _written_mb(one: Outcome) -> float:
    return one.written_bytes / max(one.steps, 1) / 1e6


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is at least as low as in both, by the first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _zoom(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Axes around the points; at least 2% wide, so that what is equal looks equal."""
    for values, set_limits in (
        ([x for x, _ in points], axes.set_xlim),
        ([y for _, y in points], axes.set_ylim),
    ):
        low, high = min(values), max(values)
        margin = max(0.08 * (high - low), 0.01 * high, 1e-9)
        set_limits(max(0.0, low - margin), high + margin)


def half_life_plot(found: HalfLifeMap) -> str:
    """Miss ratios of LFU-decay, half-life down and capacity across, each cell with its number."""
    values = np.array(found.miss_ratios)
    rows, columns = values.shape
    with rc_context({**_SETTINGS, "axes.grid": False}):
        figure = Figure(figsize=(_SIZE[0], 0.9 + 0.3 * rows), layout="constrained")
        axes = figure.add_subplot()
        image = axes.pcolormesh(values, cmap="cividis", edgecolors="none")
        middle = (values.min() + values.max()) / 2
        for row in range(rows):
            for column in range(columns):
                light = values[row, column] > middle
                text = f"{values[row, column]:.3f}".lstrip("0") or "0"
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#000000" if light else "#ffffff",
                )
        axes.set_xticks(
            np.arange(columns) + 0.5, [f"{fraction:.0%}" for fraction in found.capacity_fractions]
        )
        axes.set_yticks(np.arange(rows) + 0.5, [_half_life(value) for value in found.half_lives])
        axes.set(xlabel="capacity", ylabel="half-life, steps")
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, label="miss ratio", fraction=0.05, pad=0.02)
        return _svg(figure)


def _half_life(value: float) -> str:
    return "never" if np.isinf(value) else f"{value:g}"


def windows_plot(outcomes: Sequence[Outcome], styles: dict[str, Style]) -> str:
    """Hit ratio over time, a point a window."""
    with rc_context(_SETTINGS):
        figure, axes = _figure()
        for one in outcomes:
            shown = [window for window in one.windows if window.requests]
            xs = [window.first_step for window in shown]
            ys = [window.hits / window.requests for window in shown]
            _line(axes, xs, ys, one.label, styles[one.label])
        axes.set(xlabel="step", ylabel="hit ratio")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _legend(figure, axes)
        return _svg(figure)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, style: Style) -> None:
    axes.plot(
        xs,
        ys,
        label=label,
        color=style.colour,
        marker=style.marker,
        linestyle=style.line,
        linewidth=style.width,
        markevery=max(1, len(xs) // 12),
    )


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, and the figure grows by it: a legend inside hides lines, one beside shrinks them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 16 else 3
    rows = -(-len(labels) // columns)
    figure.set_size_inches(_SIZE[0], _SIZE[1] + 0.19 * rows + 0.05)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.6)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # The page gives the width; the view box keeps the proportions.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
