"""Confidence in a difference between two replays of one trace, by the moving-block bootstrap over steps.

Neighbouring steps are correlated (the same tokens, the same experts), so single steps are no independent sample.
Blocks of consecutive steps are drawn instead (Kunsch 1989), longer than the correlation of the differences.
With few blocks a resample varies too little: its deviation is that of b - 1 blocks in b. So the interval is
widened by sqrt(b / (b - 1)), and by Student's quantile of b - 1 degrees of freedom in place of the normal one.
The two replays see the same requests, so their difference is taken step by step (paired).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LEAST_BLOCKS = 8  # with fewer, an interval is meaningless
_MOST_BINS = 4096  # longer series are summed in bins of consecutive steps first
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval. ``blocks``: the number of independent blocks behind it."""

    estimate: float
    low: float
    high: float
    confidence: float
    blocks: int

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


def paired_interval(
    differences: ArrayLike,
    weights: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Interval:
    """``sum(differences) / sum(weights)`` over steps, with a percentile interval, widened for few blocks.

    ``differences`` [steps] are one replay's cost less the other's; ``weights`` [steps] are the denominators (requests
    for a miss ratio). With fewer than 8 blocks the interval is infinite.
    Raises ValueError for arrays of different lengths, no steps, or a confidence outside (0, 1).
    """
    values, scale = np.asarray(differences, np.float64), np.asarray(weights, np.float64)
    if values.shape != scale.shape or values.ndim != 1 or not len(values):
        raise ValueError(f"differences of shape {values.shape} and weights of shape {scale.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence}")
    total = float(scale.sum())
    estimate = float(values.sum()) / total if total else 0.0
    if len(values) < _LEAST_BLOCKS:
        return Interval(estimate, -np.inf, np.inf, confidence, 0)
    if not values.any() or not total:
        return Interval(estimate, estimate, estimate, confidence, len(values))
    values, scale = _binned(values), _binned(scale)
    block = block_length(values)
    blocks = len(values) // block
    if blocks < _LEAST_BLOCKS:
        return Interval(estimate, -np.inf, np.inf, confidence, blocks)
    drawn = _resample(np.stack((values, scale)), block, resamples, np.random.default_rng(seed))
    ratios = drawn[0] / np.maximum(drawn[1], np.finfo(float).tiny)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    upper = (1 + confidence) / 2
    wider = (
        student_quantile(upper, blocks - 1) / NormalDist().inv_cdf(upper) * math.sqrt(blocks / (blocks - 1))
    )
    ends = [estimate + wider * (float(end) - estimate) for end in (low, high)]
    return Interval(estimate, ends[0], ends[1], confidence, blocks)


def student_quantile(probability: float, freedom: int) -> float:
    """Student's t by its expansion in 1 / ``freedom`` (Abramowitz and Stegun 26.7.5), for 7 degrees and more."""
    z, n = NormalDist().inv_cdf(probability), freedom
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / n**power for power, term in enumerate(terms))


def block_length(values: ArrayLike) -> int:
    """Steps of a block: the cube root of their number, or three times their correlation time.

    That time is ``1 + 2 * sum(autocorrelations)``, summed until they fall below the noise of white noise.
    At least four blocks remain.
    """
    series = np.asarray(values, np.float64)
    steps = len(series)
    centred = series - series.mean()
    variance = float(centred @ centred)
    correlated = 1.0
    if variance > 0:
        size = 1 << (2 * steps - 1).bit_length()
        spectrum = np.abs(np.fft.rfft(centred, size)) ** 2
        correlations = np.fft.irfft(spectrum, size)[1 : steps // 2 + 1] / variance
        below = np.flatnonzero(correlations < 2 / np.sqrt(steps))
        correlated += 2 * float(correlations[: below[0] if len(below) else None].sum())
    return max(1, min(int(np.ceil(max(steps ** (1 / 3), 3 * correlated))), steps // 4))


def _binned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(values) <= _MOST_BINS:
        return values
    edges = np.linspace(0, len(values), _MOST_BINS, endpoint=False).astype(np.int64)
    return np.add.reduceat(values, edges)


def _resample(
    series: NDArray[np.float64], block: int, resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Sums of each resample, [series, resamples]: every block of ``block`` steps is equally likely."""
    steps = series.shape[1]
    sums = np.concatenate((np.zeros((len(series), 1)), np.cumsum(series, axis=1)), axis=1)
    blocks = sums[:, block:] - sums[:, :-block]
    starts = rng.integers(0, steps - block + 1, size=(resamples, -(-steps // block)))
    return np.stack([row[starts].sum(axis=1) for row in blocks])
