"""Comparison of two runs of a benchmark: what changed beyond the noise within the runs (docs/BENCH.md).

The ratio is that of the medians, new over old, with a 95% interval: the percentile bootstrap of both runs' samples (or, if
only quartiles were kept, the normal approximation of a median's error), in logarithms, widened by Student's quantile for
the smaller number of samples, since as few as three samples say little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.documents import Better, Document, Measurement, Origin, shown
from tierstore.errors import DataError
from tierstore.lab.bootstrap import student_quantile

_TAIL = 0.975  # upper tail of a 95% interval
_RESAMPLES = 2000
#: Student's quantile at 0.975 for 1 to 6 degrees of freedom; an expansion is used from 7.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447)
#: The quartiles of a normal distribution are this many deviations apart; a median's error exceeds a mean's by this.
_QUARTILES_APART, _MEDIAN_ERROR = 1.349, 1.2533


class ChangeKind(StrEnum):
    """How a measurement changed, in the order of the table."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"  # beyond noise, for a measurement without a better direction
    UNKNOWN = "noise unknown"  # at least one side has only one sample
    WITHIN = "within noise"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Compared:
    """One measurement in both documents. ``low`` and ``high`` of the ratio are None if the noise is unknown; the ratio is
    None if a median is not above 0.
    """

    old: Measurement
    new: Measurement
    ratio: float | None
    low: float | None
    high: float | None
    change: ChangeKind

    @property
    def word(self) -> str:
        """The change for people: ``slower`` or ``faster`` for times and rates, and whether a target is now missed or met."""
        said = str(self.change)
        if self.new.unit == "s" or self.new.unit.endswith("/s"):
            said = {ChangeKind.BETTER: "faster", ChangeKind.WORSE: "slower"}.get(self.change, said)
        if self.old.met and self.new.met is False:
            said += ", target missed now"
        if self.old.met is False and self.new.met:
            said += ", target met now"
        return said


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of ``bench``. ``warnings``: why they may not be comparable; ``only_old`` and ``only_new``: labels of
    measurements that the other run lacks.
    """

    bench: str
    rows: tuple[Compared, ...]
    warnings: tuple[str, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "warnings": self.warnings,
            "measurements": [
                {
                    "measurement": row.new.label,
                    "unit": row.new.unit,
                    "new_to_old_ratio": row.ratio,
                    "low_ratio": row.low,
                    "high_ratio": row.high,
                    "verdict": row.word,
                }
                for row in self.rows
            ],
            "only_old": self.only_old,
            "only_new": self.only_new,
        }


def compare(old: Document, new: Document) -> Comparison:
    """Compare ``new`` with ``old``. Raises DataError if they are of different benchmarks or share no measurement."""
    if old.bench != new.bench:
        raise DataError(f"expected a document of bench {new.bench} to compare with, got one of {old.bench}")
    before = {one.key: one for one in old.measurements}
    after = {one.key: one for one in new.measurements}
    shared = [key for key in after if key in before]
    if not shared:
        raise DataError(f"the two documents of bench {new.bench} have no measurement in common")
    return Comparison(
        bench=new.bench,
        rows=tuple(_compared(before[key], after[key]) for key in shared),
        warnings=tuple(_warnings(old, new)),
        only_old=tuple(one.label for key, one in before.items() if key not in after),
        only_new=tuple(one.label for key, one in after.items() if key not in before),
    )


def _warnings(old: Document, new: Document) -> list[str]:
    was, is_ = asdict(old.machine), asdict(new.machine)
    found = [
        f"another machine: {name} was {was[name]}, is {is_[name]}" for name in was if was[name] != is_[name]
    ]
    for name in sorted({*old.options, *new.options}):
        before, after = (document.options.get(name, "not given") for document in (old, new))
        if before != after:
            found.append(f"other options: {name} was {before}, is {after}")
    if old.tool_version != new.tool_version:
        found.append(f"another version: was {old.tool_version}, is {new.tool_version}")
    return found


def _compared(old: Measurement, new: Measurement) -> Compared:
    if old.median == new.median and old.low == old.high == new.low == new.high:
        return Compared(old, new, 1.0, 1.0, 1.0, ChangeKind.SAME)
    if old.evidence is new.evidence is Origin.COUNTED:
        ratio = new.median / old.median if old.median else None
        return Compared(old, new, ratio, ratio, ratio, _direction(new.better, new.median > old.median))
    if min(old.median, new.median) <= 0:
        return Compared(old, new, None, None, None, ChangeKind.UNKNOWN)
    ratio = new.median / old.median
    half = _half_width(old, new)
    if half is None:
        return Compared(old, new, ratio, None, None, ChangeKind.UNKNOWN)
    low, high = (math.exp(math.log(ratio) + side) for side in (-half[0], half[1]))
    change = ChangeKind.WITHIN if low <= 1 <= high else _direction(new.better, ratio > 1)
    return Compared(old, new, ratio, low, high, change)


def _direction(better: Better, grew: bool) -> ChangeKind:
    if better is Better.NEITHER:
        return ChangeKind.CHANGED
    return ChangeKind.BETTER if grew is (better is Better.HIGHER) else ChangeKind.WORSE


def _half_width(old: Measurement, new: Measurement) -> tuple[float, float] | None:
    """The lower and upper half-width of the interval of the ratio's logarithm; None if the noise is unknown."""
    fewest = min(old.count, new.count)
    if fewest < 2:
        return None
    normal = NormalDist().inv_cdf(_TAIL)
    wider = student(fewest - 1) / normal * math.sqrt(fewest / (fewest - 1))
    if all(one.samples and min(one.samples) > 0 for one in (old, new)):
        rng = np.random.default_rng(0)
        ratios = np.log(_medians(new.samples, rng)) - np.log(_medians(old.samples, rng))
        low, high = np.quantile(ratios, [1 - _TAIL, _TAIL])
        middle = math.log(new.median / old.median)
        return wider * max(middle - float(low), 0.0), wider * max(float(high) - middle, 0.0)
    errors = [
        _MEDIAN_ERROR * (one.high - one.low) / _QUARTILES_APART / math.sqrt(one.count) / one.median
        for one in (old, new)
    ]
    half = wider * normal * math.hypot(*errors)
    return half, half


def _medians(samples: Sequence[float], rng: np.random.Generator) -> NDArray[np.float64]:
    """The medians of bootstrap resamples [resamples]."""
    values = np.asarray(samples, np.float64)
    medians: NDArray[np.float64] = np.median(
        values[rng.integers(0, len(values), (_RESAMPLES, len(values)))], axis=1
    )
    return medians


def student(freedom: int) -> float:
    """Student's quantile for the upper tail of a 95% interval."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else student_quantile(_TAIL, freedom)


def table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows for people: changes for the worse first, then for the better, then the rest."""
    order = list(ChangeKind)
    rows = sorted(comparison.rows, key=lambda row: order.index(row.change))
    return (
        ("measurement", "verdict", "old", "new", "new / old", "95% interval"),
        [
            (
                row.new.label,
                row.word,
                shown(row.old.median, row.old.unit),
                shown(row.new.median, row.new.unit),
                "-" if row.ratio is None else f"{row.ratio:.3f}",
                "-" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}",
            )
            for row in rows
        ],
    )
