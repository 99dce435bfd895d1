"""The plots of a study's report. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from tierstore.lab.results import Curve, HalfLifeMap, Outcome, Role, marked
from tierstore.reports.drawing import INK, SETTINGS, PlotStyle, line, new_figure, set_legend, style, svg_of


def styles_of(labels: Sequence[tuple[str, Role]]) -> dict[str, PlotStyle]:
    """A style for each label, in the order given; clairvoyant choices in the page's ink, without a marker."""
    numbers = count()
    return {
        label: style(next(numbers)) if role is Role.POLICY else PlotStyle(INK, "", "-", 2.0)
        for label, role in dict(labels).items()
    }


def curves_plot(curves: Sequence[Curve], styles: dict[str, PlotStyle]) -> str:
    """Miss ratio over capacity, with the line 1 - C/N of requests that are all alike."""
    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for curve in curves:
            xs = [point.capacity_fraction for point in curve.points]
            ys = [point.miss_ratio for point in curve.points]
            line(axes, xs, ys, marked(curve.label, curve.role), styles[curve.label])
        axes.plot([0, 1], [1, 0], color="#888888", linestyle=(0, (2, 2)), linewidth=1.2, label="1 - C/N")
        axes.set(xlim=(0, 1), ylim=(0, 1.03), xlabel="capacity (of the footprint)", ylabel="miss ratio")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        set_legend(figure, axes)
        return svg_of(figure)


def pareto_plot(outcomes: Sequence[Outcome], styles: dict[str, PlotStyle]) -> str:
    """Stalled time a step (or bytes read, if no stall is estimated) against bytes written a step.

    The front joins the points that no other beats in both.
    """
    timed = all(one.stall_s_per_step is not None for one in outcomes)
    points = [
        (
            1e3 * (one.stall_s_per_step or 0.0) if timed else one.read_per_step / 1e6,
            one.written_per_step / 1e6,
        )
        for one in outcomes
    ]
    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for one, (x, y) in zip(outcomes, points, strict=True):
            look = styles[one.label]
            axes.plot(
                [x],
                [y],
                linestyle="",
                marker=look.marker or "o",
                markersize=8,
                color=look.colour,
                markerfacecolor=look.colour if one.role is Role.POLICY else "none",
                label=marked(one.label, one.role),
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
        set_legend(figure, axes)
        return svg_of(figure)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front: points that no other equals or beats in both, sorted by the first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _zoom(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Axes around the points; at least 2% wide, so that equal values look equal."""
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
    with rc_context({**SETTINGS, "axes.grid": False}):
        figure, axes = new_figure(0.9 + 0.3 * rows)
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
        named = ["never" if np.isinf(value) else f"{value:g}" for value in found.half_lives]
        axes.set_yticks(np.arange(rows) + 0.5, named)
        axes.set(xlabel="capacity", ylabel="half-life, steps")
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, label="miss ratio", fraction=0.05, pad=0.02)
        return svg_of(figure)


def windows_plot(outcomes: Sequence[Outcome], styles: dict[str, PlotStyle]) -> str:
    """Hit ratio over time, a point a window."""
    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for one in outcomes:
            shown = [window for window in one.windows if window.requests]
            xs = [window.first_step for window in shown]
            ys = [window.hits / window.requests for window in shown]
            line(axes, xs, ys, marked(one.label, one.role), styles[one.label])
        axes.set(xlabel="step", ylabel="hit ratio")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        set_legend(figure, axes)
        return svg_of(figure)
