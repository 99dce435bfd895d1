"""How fast cache policies are simulated: requests a second of each, and the time of a whole set of curves.

Two kinds of requests: single keys with Zipf popularity, and the experts of layer passes, each pass one atomic
event. Times are CPU time of one thread; the median of the repeats, which take turns. The curves are timed by
the clock, on all cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore.bench.checks import at_least
from tierstore.bench.results.document import Better, Measurement, measured
from tierstore.bench.results.figures import IF_ANY, Figures, prefixed
from tierstore.lab.costs import policy_time
from tierstore.lab.miss_curves import all_policies, curve_capacities, curves
from tierstore.lab.requests import Requests
from tierstore.lab.simulate import PolicySpec, ReplaySetting, suits
from tierstore.machine import cores

_LAYERS, _EXPERTS, _ACTIVE = 26, 64, 20
_PASSES_AT_ONCE = 1 << 14
_CAPACITY = 0.2  # of the footprint


@dataclass(frozen=True, kw_only=True)
class ReplayRate(Figures):
    """How fast one policy replays one kind of requests: CPU time of one thread, median and repeats."""

    request_s: float
    requests_per_s: float
    request_samples_s: Sequence[float]

    @staticmethod
    def of(samples_s: Sequence[float]) -> ReplayRate:
        median_s = statistics.median(samples_s)
        return ReplayRate(request_s=median_s, requests_per_s=1 / median_s, request_samples_s=samples_s)


@dataclass(frozen=True, kw_only=True)
class PolicyRates(Figures):
    """Of one policy; None for requests that do not suit it."""

    keys: ReplayRate | None = field(metadata=prefixed("keys_"))
    passes: ReplayRate | None = field(metadata=prefixed("passes_"))


@dataclass(frozen=True, kw_only=True)
class CurveTimes(Figures):
    """How long the curves of all policies take."""

    elapsed_s: float
    policies_count: int
    points: int
    replayed_requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class CacheResult(Figures):
    """What ``run`` found."""

    requests: int
    keys: int
    repeats: int
    cores: int
    capacity_ratio: float = _CAPACITY
    policies: Mapping[str, PolicyRates]
    curves: CurveTimes | None = field(metadata=IF_ANY)


def key_requests(count: int, keys: int, *, seed: int = 0) -> Requests:
    """``count`` single requests for ``keys`` keys, the r-th key in proportion to 1/r."""
    rng = np.random.default_rng(seed)
    popularity = np.cumsum(1 / np.arange(1, keys + 1))
    rank = np.searchsorted(popularity, rng.random(count) * popularity[-1])
    asked = rng.permutation(keys)[np.minimum(rank, keys - 1)]
    return Requests.of_columns(np.arange(count + 1), asked, steps=np.arange(count) // 1000, name="keys")


def pass_requests(count: int, *, seed: int = 0) -> Requests:
    """About ``count`` requests of passes through 26 layers, each for 20 of 64 experts."""
    rng = np.random.default_rng(seed)
    events = max(count // _ACTIVE, 1)
    chosen = np.empty((events, _ACTIVE), np.uint32)
    for begin in range(0, events, _PASSES_AT_ONCE):  # weights of all would be most of the memory
        part = chosen[begin : begin + _PASSES_AT_ONCE]
        weights = rng.random((len(part), _EXPERTS)) * np.arange(1, _EXPERTS + 1)
        part[:] = np.sort(np.argpartition(weights, -_ACTIVE, axis=1)[:, -_ACTIVE:], axis=1)
    layers = np.arange(events, dtype=np.uint32) % np.uint32(_LAYERS)
    return Requests.of_columns(
        np.arange(events + 1) * _ACTIVE,
        (chosen + layers[:, None] * np.uint32(_EXPERTS)).reshape(-1),
        layers=layers,
        steps=np.arange(events) // _LAYERS,
        name="passes",
    )


def run(
    *,
    requests: int,
    keys: int,
    repeats: int,
    curve_points: int = 0,
    announce: Callable[[str], None] = lambda line: None,
) -> CacheResult:
    """Rates of every policy; with ``curve_points``, the time of all curves with so many points, too.

    Raises ConfigError for counts below 1.
    """
    at_least(1, **{"--requests": requests, "--keys": keys, "--repeats": repeats})
    kinds = (key_requests(requests, keys), pass_requests(requests))
    rates = []
    for kind in kinds:
        announce(f"{kind.name}: {len(kind.entries)} requests, {kind.table.total_frames} entries")
        times = _times(kind, all_policies(kind), repeats)
        rates.append({name: ReplayRate.of(seconds) for name, seconds in times.items()})
    of_keys, of_passes = rates
    return CacheResult(
        requests=requests,
        keys=keys,
        repeats=repeats,
        cores=cores(),
        policies={
            name: PolicyRates(keys=of_keys.get(name), passes=of_passes.get(name))
            for name in of_keys | of_passes
        },
        curves=_time_curves(kinds[0], curve_points, announce) if curve_points else None,
    )


def _times(requests: Requests, policies: Sequence[PolicySpec], repeats: int) -> dict[str, list[float]]:
    """CPU seconds a request of each policy, in each repeat."""
    capacity = requests.table.frames_of(_CAPACITY)
    settings = [ReplaySetting(policy, capacity) for policy in policies if suits(requests, policy.name)]
    times = policy_time(requests, settings, repeats=repeats)
    return {setting.policy.name: each for setting, each in zip(settings, times, strict=True)}


def _time_curves(requests: Requests, points: int, announce: Callable[[str], None]) -> CurveTimes:
    policies = all_policies(requests)
    capacities = curve_capacities(requests, points)
    announce(f"curves: {len(policies)} policies, {len(capacities)} capacities")
    began = time.monotonic()
    found = curves(requests, policies, capacities)
    elapsed = time.monotonic() - began
    return CurveTimes(
        elapsed_s=elapsed,
        policies_count=len(found),
        points=len(capacities),
        replayed_requests_per_s=len(found) * len(capacities) * len(requests.entries) / elapsed,
    )


def measurements(result: CacheResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for kind in ("keys", "passes"):
        for name, rates in result.policies.items():
            rate: ReplayRate | None = getattr(rates, kind)
            if rate is not None:
                speeds = [1 / spent for spent in rate.request_samples_s]
                how = {"policy": name, "trace": kind}
                yield measured("replay", speeds, "requests/s", Better.HIGHER, parameters=how)
    if result.curves is not None:
        yield measured("all curves", result.curves.elapsed_s, "s", Better.LOWER)
