"""The speed of simulated cache policies: requests a second of each, and the time of a whole set of curves.

Two kinds of requests: single keys with Zipf popularity, and the experts of layer passes, each pass one atomic event. Times
are CPU time of one thread, the median of the repeats, which take turns. The curves are timed by wall clock, on all cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.bench.documents import measured
from tierstore.bench.harness import Benchmark, FigureTable, Found, Progress, prefixed
from tierstore.config import check_least, option
from tierstore.lab.costs import policy_time
from tierstore.lab.miss_curves import all_policies, curve_capacities, curves
from tierstore.lab.requests import Requests
from tierstore.lab.simulate import PolicySpec, ReplaySetting, suits
from tierstore.machine import cores
from tierstore.units import format_seconds

_LAYERS, _EXPERTS, _ACTIVE = 26, 64, 20
_PASSES_AT_ONCE = 1 << 14
_CAPACITY = 0.2  # of the footprint


@dataclass(frozen=True, kw_only=True)
class CacheBench(Benchmark):
    """Requests a second of every cache policy in the simulator."""

    requests: int = option(2_000_000, "Requests in each trace.")
    keys: int = option(100_000, "Keys in the trace of single keys.")
    repeats: int = option(3, "Rounds.")
    curve_points: int = option(0, "Also time every policy's curve of N points.", least=0)

    def __post_init__(self) -> None:
        check_least(self, 1, "requests", "keys", "repeats", table="--")

    def run(self, progress: Progress) -> Found:
        """The rates of every policy that suits the requests; with ``curve_points`` also the time of all curves."""
        traces = (key_requests(self.requests, self.keys), pass_requests(self.requests))
        policies: dict[str, dict[str, object]] = {}
        measurements = []
        for trace in traces:
            progress.say(f"{trace.name}: {len(trace.entries)} requests, {trace.table.total_frames} entries")
            for name, samples_s in _times(trace, all_policies(trace), self.repeats).items():
                request_s = statistics.median(samples_s)
                rate = {
                    "request_s": request_s,
                    "requests_per_s": 1 / request_s,
                    "request_samples_s": samples_s,
                }
                policies.setdefault(name, {}).update(prefixed(f"{trace.name}_", rate))
                speeds = [1 / spent for spent in samples_s]
                how = {"policy": name, "trace": trace.name}
                measurements.append(measured("replay", speeds, "requests/s", parameters=how))
        figures: dict[str, object] = {
            "requests": self.requests,
            "keys": self.keys,
            "repeats": self.repeats,
            "cores": cores(),
            "capacity_ratio": _CAPACITY,
            "policies": policies,
        }
        columns = {
            "policy": "policy",
            "single keys": "keys_requests_per_s",
            "layer passes, event-atomic": "passes_requests_per_s",
        }
        rows = [{"policy": name, **rates} for name, rates in policies.items()]
        title = f"requests a second and thread, {_CAPACITY:.0%} of the footprint"
        shown: list[FigureTable | str] = [FigureTable(title, columns, rows)]
        if self.curve_points:
            figures["curves"] = timed = _time_curves(traces[0], self.curve_points, progress)
            measurements.append(measured("all curves", timed["elapsed_s"], "s"))
            shown.append(f"all curves: {format_seconds(timed['elapsed_s'])}")
        return Found(figures=figures, measurements=measurements, shown=shown)


def key_requests(count: int, keys: int, *, seed: int = 0) -> Requests:
    """``count`` single requests for ``keys`` keys; the r-th key has a popularity proportional to 1/r."""
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
    for begin in range(0, events, _PASSES_AT_ONCE):  # weights of all passes would take most of the memory
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


def _times(requests: Requests, policies: Sequence[PolicySpec], repeats: int) -> dict[str, list[float]]:
    """CPU seconds per request of each policy, in each repeat."""
    capacity = requests.table.frames_of(_CAPACITY)
    settings = [ReplaySetting(policy, capacity) for policy in policies if suits(requests, policy.name)]
    times = policy_time(requests, settings, repeats=repeats)
    return {setting.policy.name: each for setting, each in zip(settings, times, strict=True)}


def _time_curves(requests: Requests, points: int, progress: Progress) -> dict[str, float]:
    policies = all_policies(requests)
    capacities = curve_capacities(requests, points)
    progress.say(f"curves: {len(policies)} policies, {len(capacities)} capacities")
    began = time.monotonic()
    found = curves(requests, policies, capacities)
    elapsed = time.monotonic() - began
    return {
        "elapsed_s": elapsed,
        "policies_count": len(found),
        "points": len(capacities),
        "replayed_requests_per_s": len(found) * len(capacities) * len(requests.entries) / elapsed,
    }
