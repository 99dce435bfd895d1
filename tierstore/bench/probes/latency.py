"""Latencies in a log-linear histogram, as HDR histograms keep them: of constant size, mergeable, to within 1/128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.results.figures import IF_ANY, Figures, named

_HALF = 128  # buckets a power of two
_EXACT = 2 * _HALF  # below this each value has a bucket of its own
_SHIFTS = 64 - 8
_BUCKETS = _EXACT + _SHIFTS * _HALF


@dataclass(frozen=True, kw_only=True)
class LatencySummary(Figures):
    """Percentiles and the greatest; None, and not in the JSON, where nothing was counted."""

    p50_s: float | None = field(default=None, metadata=IF_ANY)
    p90_s: float | None = field(default=None, metadata=IF_ANY)
    p99_s: float | None = field(default=None, metadata=IF_ANY)
    p99_9_s: float | None = field(default=None, metadata={**IF_ANY, **named("p99.9_s")})
    greatest_s: float | None = field(default=None, metadata=IF_ANY)


class Latencies:
    """Durations in nanoseconds, counted by buckets of at most 1/128 of their value; the greatest one exactly."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self.greatest_ns = 0

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def add(self, values_ns: Sequence[int] | NDArray[np.int64], times: Sequence[int] | None = None) -> None:
        """Counts each of ``values_ns`` (at least 0) once, or as often as ``times`` says. Raises ValueError."""
        values = np.asarray(values_ns, np.int64)
        if not values.size:
            return
        if int(values.min()) < 0:
            raise ValueError(f"a duration of {int(values.min())} ns")
        weights = np.ones(values.size, np.int64) if times is None else np.asarray(times, np.int64)
        np.add.at(self._counts, _buckets(values), weights)
        self.greatest_ns = max(self.greatest_ns, int(values.max()))

    def merge(self, other: Latencies) -> None:
        """Counts what ``other`` has counted, too."""
        self._counts += other._counts
        self.greatest_ns = max(self.greatest_ns, other.greatest_ns)

    def percentile_ns(self, percent: float) -> int:
        """The value that ``percent`` of the durations do not exceed (nearest rank), as the top of its bucket.

        Raises ValueError where nothing was counted, or for a percent outside 0..100.
        """
        total = self.count
        if not total or not 0 <= percent <= 100:
            raise ValueError(f"percentile {percent} of {total} durations")
        # 99.9 is not a float: without the tolerance the rank of 1000 durations would be 1000.
        rank = max(int(np.ceil(percent / 100 * total - 1e-9)), 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_top(bucket), self.greatest_ns)

    def summary(self) -> LatencySummary:
        if not self.count:
            return LatencySummary()
        p50, p90, p99, p99_9 = (self.percentile_ns(percent) / 1e9 for percent in (50, 90, 99, 99.9))
        greatest_s = self.greatest_ns / 1e9
        return LatencySummary(p50_s=p50, p90_s=p90, p99_s=p99, p99_9_s=p99_9, greatest_s=greatest_s)


def _buckets(values: NDArray[np.int64]) -> NDArray[np.int64]:
    # frexp gives the bit length; of what a double rounds up to a power of two it gives one more.
    lengths = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(lengths - 8, 0)
    shift = np.where((shift > 0) & ((values >> shift) < _HALF), shift - 1, shift)
    return np.where(shift > 0, _EXACT + (shift - 1) * _HALF + (values >> shift) - _HALF, values)


def _top(bucket: int) -> int:
    """The greatest value of a bucket."""
    if bucket < _EXACT:
        return bucket
    shift, index = divmod(bucket - _EXACT, _HALF)
    return ((index + _HALF + 1) << (shift + 1)) - 1
