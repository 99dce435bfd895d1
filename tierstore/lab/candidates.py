"""The candidates of the tuner: cache settings of ``tierstore train``, their form in a configuration, and the split of a
capacity between layers.

Of LFU-decay's K and beta only the half-life matters (they act through it alone), so the half-life is searched: whole
half-lives as ``decay = 0.5`` every N steps, shorter ones as a decay at every step.

The capacity is split by marginal gain. With layer scope each layer's misses depend on its own quota alone, so one replay
at a common fraction of every layer's footprint gives a point on every layer's curve. Frames then go, piece by piece, to
the layer whose misses (or other cost) fall most for a frame. Each curve is replaced by its lower convex hull: a quota
between two points costs no more than a mixture of the two, and greedy choice on convex curves is optimal (Fox 1966).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierstore._native import Detail
from tierstore.cache.config import CacheConfig, Scope
from tierstore.lab.costs import Machine, Objective, cost_by_layer
from tierstore.lab.requests import Requests
from tierstore.lab.simulate import (
    Contract,
    PolicySpec,
    Replayed,
    ReplaySetting,
    known_policies,
    replay_each,
    suits,
)
from tierstore.trace.replay import quotas_by_layer
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes

SIMPLEST_FIRST = (
    *("fifo", "clock", "sieve", "lru", "lfu", "slru", "s3-fifo", "2q", "w-tinylfu", "arc", "lirs"),
    *("lfu-decay", "next-use", "learned-use"),
)
"""Policies by their cost to run and to understand: among equals the tuner takes the first; unlisted policies come
last. For one policy, one cache comes before a quota for each layer, equal quotas before tuned ones, and fewer options before
more."""

_COARSE = 4.0  # between half-lives of the grid
_FINE = tuple(2.0 ** (power / 2) for power in (-3, -2, -1, 1, 2, 3))  # within a grid step, either way
_THRESHOLDS = (1.0, 2.0)
_NEVER = math.inf
_LEVELS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # of each layer's footprint
_BETWEEN = (0.5, 2.0)  # half-lives of next-use, half-way to the grid's neighbours
_PASSES = (2.0, 8.0, 32.0, 128.0)  # half-lives of next-use


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with its options, scope and, with layer scope, quotas (empty: equal)."""

    policy: PolicySpec
    scope: Scope = Scope.GLOBAL
    layer_quotas: tuple[int, ...] = ()

    def setting(self, capacity_frames: int, contract: Contract) -> ReplaySetting:
        """This candidate at a capacity."""
        return ReplaySetting(self.policy, capacity_frames, self.scope, contract, self.layer_quotas)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for equivalent candidates."""
        return (self.policy.name, tuple(sorted(self.policy.options.items())), self.scope, self.layer_quotas)

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Less is simpler."""
        layered = int(self.scope is Scope.LAYER)
        return (_rank(self.policy.name), layered, int(bool(self.layer_quotas)), len(self.policy.options))


def live_policies() -> tuple[str, ...]:
    """Policies that ``tierstore train`` runs, in the order of ``SIMPLEST_FIRST``."""
    return tuple(sorted(known_policies(bounds=False), key=_rank))


def _rank(policy: str) -> int:
    return SIMPLEST_FIRST.index(policy) if policy in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def lfu_decay(half_life: float, threshold: float = 0.0, *, remember: bool = False) -> PolicySpec:
    """LFU-decay (corrected) with a half-life in steps; infinite: hits never decay. ``remember``: hits outlive eviction."""
    options: dict[str, float | str] = {}
    if math.isinf(half_life):
        options = {"beta": 1.0, "interval": 1.0}
    else:
        options = {"half_life": half_life, "interval": max(1.0, math.floor(half_life))}
    if threshold:
        options["threshold"] = threshold
    if remember:
        options["remember"] = 1.0
    return PolicySpec("lfu-decay", options)


def default_candidate(requests: Requests) -> Candidate:
    """The default of ``tierstore train``, or that of a store for plain keys, which training never requests."""
    config = TrainConfig().cache
    if not suits(requests, config.policy):
        config = CacheConfig()
    if config.half_life is not None:  # in the grid's form, so that it is not tried twice
        return Candidate(lfu_decay(config.half_life), config.scope)
    return Candidate(PolicySpec(config.policy, config.options), config.scope)


def half_lives(steps: int) -> list[float]:
    """The half-lives of the grid: from one step up to the length of the trace, and infinity."""
    grid = [1.0]
    while grid[-1] * _COARSE <= max(steps, 1):
        grid.append(grid[-1] * _COARSE)
    return [*grid, _NEVER]


def starting_grid(
    requests: Requests, capacity_frames: int, policies: Sequence[str], scopes: Sequence[Scope]
) -> list[Candidate]:
    """Every policy with its defaults, LFU-decay and next-use over half-lives.

    Layer scope is tried only if each layer's share holds the largest record.
    """
    specs: list[PolicySpec] = []
    for name in policies:
        if name == "lfu-decay":
            specs += [lfu_decay(half_life) for half_life in half_lives(requests.step_count)]
        elif name == "next-use":
            specs += [PolicySpec(name, {"half_life": half_life}) for half_life in _PASSES]
        else:
            specs.append(PolicySpec(name))
    table = requests.table
    shares = np.array(quotas_by_layer(table.present_layers, capacity_frames))
    layered = len(table.present_layers) > 1 and bool((shares >= table.least_quotas).all())
    return [Candidate(spec, scope) for scope in scopes if scope is Scope.GLOBAL or layered for spec in specs]


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Settings near ``candidate`` that the grid lacks: half-lives between its points, thresholds, hits that outlive
    eviction.
    """
    policy, half_life = candidate.policy.name, float(candidate.policy.options.get("half_life", _NEVER))
    if policy == "next-use" and math.isfinite(half_life):
        for factor in _BETWEEN:
            yield Candidate(PolicySpec(policy, {"half_life": half_life * factor}), candidate.scope)
    if policy == "lfu-decay":
        if math.isfinite(half_life):
            for factor in _FINE:
                yield Candidate(lfu_decay(half_life * factor), candidate.scope)
        for threshold in _THRESHOLDS:
            yield Candidate(lfu_decay(half_life, threshold), candidate.scope)
        for factor in (1.0, *(_BETWEEN if math.isfinite(half_life) else ())):
            yield Candidate(lfu_decay(half_life * factor, remember=True), candidate.scope)


def cache_configuration(candidate: Candidate) -> CacheConfig | None:
    """The candidate as ``tierstore train`` accepts it; None if its policy cannot run there."""
    if not candidate.policy.runs:
        return None
    return CacheConfig(
        policy=candidate.policy.name,
        options=candidate.policy.options,
        scope=candidate.scope,
        layer_shares=layer_shares(candidate.layer_quotas),
    )


def configuration_text(requests: Requests, candidate: Candidate, capacity_frames: int) -> str:
    """The ``[cache]`` table to paste into a configuration of ``tierstore train``: of a trace of device slots, the keys of
    their policy.
    """
    capacity = format_bytes(capacity_frames * requests.table.frame_bytes)
    share = capacity_frames / requests.table.total_frames
    head = f"# for a cache of {capacity}, {share:.1%} of the footprint of {requests.name}\n"
    config = cache_configuration(candidate)
    if config is None:
        return head + f"# {candidate.policy.name} is not a policy of tierstore train: nothing to configure\n"
    device = "device_" if requests.header.of_slots else ""
    lines = [f'{device}policy = "{config.policy}"']
    if not requests.header.of_slots:
        lines.append(f'scope = "{config.scope.value}"')
    if config.layer_shares:
        lines.append(f"layer_shares = {list(config.layer_shares)}")
    if config.options:
        shown = (
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}"
            for key, value in config.options.items()
        )
        lines.append(f"{device}options = {{ " + ", ".join(shown) + " }")
    return head + "[cache]\n" + "\n".join(lines) + "\n"


CostCurve = Sequence[tuple[int, float]]
"""(frames, cost), by ascending frames."""


def layer_shares(quotas: Sequence[int]) -> tuple[float, ...]:
    """``quotas`` as ``cache.layer_shares`` of a configuration: a share for each layer that has frames."""
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
    """Each layer's cost by quota, one point a replay; empty for layers without requests."""
    least = requests.table.least_quotas
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


def lower_hull(curve: CostCurve) -> list[tuple[int, float]]:
    """The points of ``curve`` on its lower convex hull, up to its minimum."""
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


def greedy_split(curves: Sequence[CostCurve], capacity_frames: int) -> tuple[int, ...]:
    """Frames of each layer, ``capacity_frames`` in all; frames that improve no curve are shared equally.

    A layer without points gets none; one with points gets at least its first point. Raises ValueError if the first
    points alone are more than the capacity.
    """
    hulls = [lower_hull(curve) for curve in curves]
    quotas = [hull[0][0] if hull else 0 for hull in hulls]
    left = capacity_frames - sum(quotas)
    if left < 0:
        raise ValueError(f"{capacity_frames} frames are too few: the layers need at least {sum(quotas)}")
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


def split_capacity(requests: Requests, curves: Sequence[CostCurve], capacity_frames: int) -> tuple[int, ...]:
    """Quotas of all layers by the marginal gains on ``curves`` (``layer_curves``), as a live store computes them from the
    shares of a configuration.

    Raises ValueError for a capacity that is less than ``EntryTable.least_quotas``.
    """
    shares = layer_shares(greedy_split(curves, capacity_frames))
    return tuple(quotas_by_layer(requests.table.present_layers, capacity_frames, shares))
