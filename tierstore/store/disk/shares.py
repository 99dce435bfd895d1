"""How new slots are spread over drives: weighted round robin, with weights from measured bandwidth.

Nothing here changes what is computed or decided, only where bytes lie. Weights change at commits and at no other
time, so between two commits placement is a function of the weights and of the order of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A drive is measured anew once so much was moved to or from it: less is latency and noise.
LEAST_BYTES = 4 << 20
#: An estimate moves by the root of what was measured over it, which counts as at most so much: one hiccup cannot
#: halve a drive's share twice, and a drive that stays slow is known in a few commits.
_MOST_CHANGE = 4.0
#: No share falls below this part of an equal one: a drive that gets nothing could never be seen to recover.
_LEAST_SHARE = 1 / 16
#: Shares are left alone while none is off by more than this: space follows them, and need not for noise.
_DEAD_BAND = 0.1


class WeightedRoundRobin:
    """Smooth weighted round robin: in any run of turns each number has about its share, spread out and not in a row.

    Each turn credits every number with its weight, picks the one with the highest credit (the first of equals), and
    charges it the sum of the weights.
    """

    def __init__(self, count: int) -> None:
        self._credits = [0.0] * count

    def next(self, weights: Sequence[float], among: Sequence[int]) -> int:
        """The number whose turn it is among ``among`` (not empty); the others are neither credited nor charged."""
        for number in among:
            self._credits[number] += weights[number]
        chosen = max(among, key=lambda number: (self._credits[number], -number))
        self._credits[chosen] -= sum(weights[number] for number in among)
        return chosen


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts by weight, by largest remainder (the first of equals); they add up to it."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


class BandwidthEstimator:
    """Estimates the drives' bandwidths, and their ``shares`` of new slots, which add up to 1.

    ``fixed`` weights, if given, are the shares for good. Otherwise shares follow ``bandwidths`` (bytes a second; 0 is
    unknown and counts as the mean of the others), which ``observe`` updates with what moved since the last commit.
    """

    def __init__(self, bandwidths: Sequence[float], fixed: Sequence[float] = ()) -> None:
        self.bandwidths = list(bandwidths)
        self._fixed = bool(fixed)
        self._pending = [(0, 0.0) for _ in bandwidths]
        self.shares = _normalized(fixed or self._known())

    def observe(self, moved: Sequence[tuple[int, float]]) -> None:
        """``moved``: for each drive bytes since the last call, and the seconds in which any were under way."""
        for number, (nbytes, seconds) in enumerate(moved):
            before = self._pending[number]
            self._pending[number] = pending = (before[0] + nbytes, before[1] + seconds)
            if pending[0] >= LEAST_BYTES and pending[1] > 0:
                self.bandwidths[number] = _estimate(self.bandwidths[number], pending[0] / pending[1])
                self._pending[number] = (0, 0.0)
        if self._fixed:
            return
        shares = _normalized(self._known())
        if any(abs(new - old) > _DEAD_BAND * old for new, old in zip(shares, self.shares, strict=True)):
            self.shares = shares

    def _known(self) -> list[float]:
        known = [bandwidth for bandwidth in self.bandwidths if bandwidth]
        mean = sum(known) / len(known) if known else 1.0
        return [bandwidth or mean for bandwidth in self.bandwidths]


def _estimate(before: float, measured: float) -> float:
    if not before:
        return measured
    ratio = min(max(measured / before, 1 / _MOST_CHANGE), _MOST_CHANGE)
    return before * math.sqrt(ratio)


def _normalized(weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    least = _LEAST_SHARE / len(weights)
    raised = [max(weight / whole, least) for weight in weights]
    return [weight / sum(raised) for weight in raised]
