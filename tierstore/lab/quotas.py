"""Capacity split between layers, by marginal gain.

With layer scope each layer's misses depend on its own quota alone, so one replay at a common fraction of
every layer's footprint gives a point on every layer's curve. Frames then go, piece by piece, to the layer
whose misses fall most for a frame. Of each curve its lower convex hull is taken: a quota between two points
can be had no worse than by mixing them, and greedy choice on convex curves is the optimum (Fox 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierstore.lab.requests import Requests
from tierstore.lab.simulate import Contract, Detail, PolicySpec, Scope, Setting, replay_all

__all__ = ["greedy_split", "layer_curves", "least_quotas", "lower_hull", "split_capacity"]

_LEVELS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)

Curve = Sequence[tuple[int, float]]
"""(frames, misses), by ascending frames."""


def least_quotas(requests: Requests, headroom: int = 0) -> NDArray[np.int64]:
    """The fewest frames that each layer can work with [layers]: its largest entry, and ``headroom``."""
    least = np.zeros(requests.layer_count, np.int64)
    np.maximum.at(least, requests.entry_layers, requests.sizes)
    return np.where(least > 0, least + headroom, 0)


def layer_curves(
    requests: Requests,
    policy: PolicySpec,
    *,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    threads: int = 0,
) -> list[list[tuple[int, float]]]:
    """Of each layer its misses by quota, one point a replay; empty for layers that ask for nothing."""
    least = least_quotas(requests, headroom=1)
    frames = requests.layer_frames.astype(np.int64)
    quotas = [np.maximum(least, np.ceil(level * frames).astype(np.int64)) for level in _LEVELS]
    settings = [
        Setting(policy, int(each.sum()), Scope.LAYER, contract, tuple(each.tolist())) for each in quotas
    ]
    points: list[dict[int, float]] = [{} for _ in frames]
    replays = replay_all(requests, settings, warmup_steps=warmup_steps, detail=Detail.STEPS, threads=threads)
    for each, replayed in zip(quotas, replays, strict=True):
        for layer in np.flatnonzero(frames):
            points[layer][int(each[layer])] = float(replayed.layer_misses[layer])
    return [sorted(layer.items()) for layer in points]


def lower_hull(curve: Curve) -> list[tuple[int, float]]:
    """The points of ``curve`` on its lower convex hull, as far as misses still fall."""
    hull: list[tuple[int, float]] = []
    for x, y in curve:
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2], hull[-1]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def greedy_split(curves: Sequence[Curve], capacity_frames: int) -> tuple[int, ...]:
    """Frames of each layer, ``capacity_frames`` in all, or what the curves' ends take if that is less.

    A layer without points gets nothing, one with points at least its first. Raises ValueError if the first
    points alone are more than the capacity.
    """
    hulls = [lower_hull(curve) for curve in curves]
    quotas = [hull[0][0] if hull else 0 for hull in hulls]
    left = capacity_frames - sum(quotas)
    if left < 0:
        raise ValueError(f"{capacity_frames} frames for layers that need {sum(quotas)} at least")
    pieces = [
        ((after[1] - before[1]) / (after[0] - before[0]), layer, after[0] - before[0])
        for layer, hull in enumerate(hulls)
        for before, after in pairwise(hull)
    ]
    for _, layer, frames in sorted(pieces):
        taken = min(frames, left)
        quotas[layer] += taken
        left -= taken
    return tuple(quotas)


def split_capacity(
    requests: Requests,
    policy: PolicySpec,
    capacity_frames: int,
    *,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    threads: int = 0,
) -> tuple[int, ...]:
    """Quotas of all layers for ``policy``, by the marginal gains on ``requests``.

    Raises ValueError for a capacity that is less than one entry for each layer.
    """
    curves = layer_curves(requests, policy, contract=contract, warmup_steps=warmup_steps, threads=threads)
    return greedy_split(curves, capacity_frames)
