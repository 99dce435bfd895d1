"""Capacity split between layers, by marginal gain.

With layer scope each layer's misses depend on its own quota alone, so one replay at a common fraction of
every layer's footprint gives a point on every layer's curve. Frames then go, piece by piece, to the layer
whose misses (or whatever else the objective counts) fall most for a frame. Of each curve its lower convex hull
is taken: a quota between two points can be had no worse than by mixing them, and greedy choice on convex curves
is the optimum (Fox 1966).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierstore._native import Detail
from tierstore.cache.config import Scope
from tierstore.lab.costs import Machine, Objective, cost_by_layer
from tierstore.lab.requests import Requests
from tierstore.lab.simulate import Contract, PolicySpec, Replayed, ReplaySetting, replay_each
from tierstore.trace.quotas import quotas_by_layer

_LEVELS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)

Curve = Sequence[tuple[int, float]]
"""(frames, cost), by ascending frames."""


def least_quotas(requests: Requests, headroom: int = 0) -> NDArray[np.int64]:
    """The fewest frames that ``tierstore train`` takes for each layer [layers]: the largest record of any layer
    with all of its groups, and ``headroom``."""
    return np.where(requests.table.layer_frames > 0, requests.table.largest_record_frames + headroom, 0)


def layer_shares(quotas: Sequence[int]) -> tuple[float, ...]:
    """``quotas`` as ``cache.layer_shares`` takes them: a share for each layer that has one."""
    return tuple(round(quota / sum(quotas), 9) for quota in quotas if quota)


def layer_curves(
    requests: Requests,
    policy: PolicySpec,
    *,
    objective: Objective = Objective.MISSES,
    machine: Machine | None = None,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    threads: int = 0,
) -> list[list[tuple[int, float]]]:
    """Of each layer its cost by quota, one point a replay; empty for layers that ask for nothing."""
    least = least_quotas(requests, headroom=1)
    frames = requests.table.layer_frames.astype(np.int64)
    quotas = [np.maximum(least, np.ceil(level * frames).astype(np.int64)) for level in _LEVELS]
    settings = [
        ReplaySetting(policy, int(each.sum()), Scope.LAYER, contract, tuple(each.tolist())) for each in quotas
    ]
    points: list[dict[int, float]] = [{} for _ in frames]
    detail = Detail.STEPS if objective is Objective.MISSES else Detail.EVENTS

    def reduce(replayed: Replayed) -> NDArray[np.float64]:
        return cost_by_layer(requests, replayed, objective, machine or Machine())

    replays = replay_each(
        requests, settings, reduce, warmup_steps=warmup_steps, detail=detail, threads=threads
    )
    for each, costs in zip(quotas, replays, strict=True):
        for layer in requests.table.present_layers:
            points[layer][int(each[layer])] = float(costs[layer])
    return [sorted(layer.items()) for layer in points]


def lower_hull(curve: Curve) -> list[tuple[int, float]]:
    """The points of ``curve`` on its lower convex hull, as far as the cost still falls."""
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
    """Frames of each layer, ``capacity_frames`` in all: what no curve gains by is shared out equally.

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
    present = [layer for layer, hull in enumerate(hulls) if hull]
    for layer, rest in enumerate(quotas_by_layer(present, left) if present else ()):
        quotas[layer] += rest
    return tuple(quotas)


def split_capacity(
    requests: Requests,
    policy: PolicySpec,
    capacity_frames: int,
    *,
    objective: Objective = Objective.MISSES,
    machine: Machine | None = None,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    threads: int = 0,
) -> tuple[int, ...]:
    """Quotas of all layers for ``policy``, by the marginal gains on ``requests``: those that a live store gives
    to layers whose shares are written in a configuration.

    Raises ValueError for a capacity that is less than ``least_quotas`` with a frame of headroom.
    """
    curves = layer_curves(
        requests,
        policy,
        objective=objective,
        machine=machine,
        contract=contract,
        warmup_steps=warmup_steps,
        threads=threads,
    )
    shares = layer_shares(greedy_split(curves, capacity_frames))
    return tuple(quotas_by_layer(requests.table.present_layers, capacity_frames, shares))
