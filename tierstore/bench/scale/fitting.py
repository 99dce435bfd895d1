"""The exponent of a cost that grows as a power of n: least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.bench.results.figures import Figures, named


@dataclass(frozen=True, kw_only=True)
class Exponent(Figures):
    """``value`` of n ** value, and the ``spread``: its standard error (0 where two points leave nothing to compare)."""

    value: float = field(metadata=named("exponent_ratio"))
    spread: float = field(metadata=named("exponent_spread_ratio"))


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> Exponent:
    """The slope of log(cost) over log(size), ordinary least squares. Raises ValueError for fewer than two sizes, or what has
    no logarithm.
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 2:
        raise ValueError(f"expected costs of two sizes or more, got {len(costs)} of {len(set(sizes))}")
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / across
    if len(xs) == 2:
        return Exponent(value=slope, spread=0.0)
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Exponent(value=slope, spread=math.sqrt(rest / (len(xs) - 2) / across))


def n_log_n_exponent(sizes: Sequence[float]) -> float:
    """What ``fit_exponent`` makes of n log n over ``sizes``, a little above 1."""
    return fit_exponent(sizes, [size * math.log(size) for size in sizes]).value
