"""How many requests a second the simulator carries out, for every policy and bound, under both contracts.

The trace is synthetic: independent draws from a Zipf distribution, in events of ``SET`` distinct keys. Atomically an
event is one set; sequentially the very same requests come one after another. Each round measures every contestant
once, in turn, so that a machine whose speed drifts treats them alike; figures are medians over the rounds with
their spread. One thread, the columns made beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore.bench.adamw import Lines
from tierstore.errors import ConfigError

__all__ = ["SET", "render", "run", "zipf_columns"]

SET = 8  # keys of an event
_CONTRACTS = (_native.Contract.SEQUENTIAL, _native.Contract.ATOMIC)


@dataclass
class _Row:
    policy: str
    contract: _native.Contract
    miss_ratio: float = 0.0
    seconds: list[float] = field(default_factory=list)


def run(
    requests: int = 4_000_000,
    keys: int = 400_000,
    *,
    skew: float = 1.0,
    capacity: float = 0.1,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure, and return figures ready for JSON; keys name their units.

    About ``requests`` requests for ``keys`` keys of one frame each, popularity falling with rank as
    ``rank ** -skew``; the cache holds the part ``capacity`` of the keys. Raises ConfigError.
    """
    for name, value, least in (("requests", requests, SET), ("keys", keys, 2 * SET), ("repeats", repeats, 1)):
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
    if not 0 < capacity <= 1:
        raise ConfigError(f"capacity: expected a part of the keys in (0, 1], got {capacity}")
    offsets, entries = zipf_columns(requests, keys, skew)
    frames = max(2 * SET, int(keys * capacity))
    rows = [
        _Row(policy, contract)
        for policy in (*_native.policy_names(), *_native.bound_names())
        for contract in _CONTRACTS
    ]
    for _ in range(repeats):
        for row in rows:
            began = time.perf_counter()
            result = _native.simulate(
                offsets, entries, policy=row.policy, capacity_frames=frames, contract=row.contract
            )
            row.seconds.append(time.perf_counter() - began)
            row.miss_ratio = result["misses"] / result["requests"]
    return {
        "bench": "cache",
        "requests": len(entries),
        "events": len(offsets) - 1,
        "keys": keys,
        "skew": skew,
        "capacity_frames": frames,
        "repeats": repeats,
        "policies": [_figures(row, len(entries)) for row in rows],
    }


def zipf_columns(requests: int, keys: int, skew: float) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """``offsets`` and ``entries`` of about ``requests`` requests in events of up to ``SET`` distinct keys."""
    random = np.random.default_rng(0)
    share = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -skew)
    drawn = np.searchsorted(share, random.random((-(-requests // SET), SET)) * share[-1])
    drawn.sort(axis=1)
    fresh = np.ones(drawn.shape, bool)
    fresh[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    offsets = np.zeros(len(drawn) + 1, np.uint64)
    np.cumsum(fresh.sum(axis=1), out=offsets[1:])
    # Popular keys are anywhere among the numbers, as experts are.
    return offsets, random.permutation(keys).astype(np.uint32)[drawn[fresh]]


def _figures(row: _Row, requests: int) -> dict[str, Any]:
    rates = [requests / seconds for seconds in row.seconds]
    return {
        "policy": row.policy,
        "contract": row.contract.name.lower(),
        "miss_ratio": row.miss_ratio,
        "median_requests_per_s": statistics.median(rates),
        "min_requests_per_s": min(rates),
        "max_requests_per_s": max(rates),
    }


def render(result: dict[str, Any], output: Lines) -> None:
    """The trace and a table, for people."""
    output.table(
        f"Cache policies, {result['requests']:,} requests in {result['events']:,} events for "
        f"{result['keys']:,} keys (Zipf {result['skew']:g}), {result['capacity_frames']:,} frames, "
        f"{result['repeats']} rounds; million requests a second",
        ("policy", "sequential", "min", "max", "miss ratio", "atomic", "min", "max", "miss ratio"),
        list(_lines(result["policies"])),
    )


def _lines(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for sequential, atomic in zip(rows[::2], rows[1::2], strict=True):
        cells = [sequential["policy"]]
        for row in (sequential, atomic):
            cells += [f"{row[f'{key}_requests_per_s'] / 1e6:.1f}" for key in ("median", "min", "max")]
            cells.append(f"{row['miss_ratio']:.4f}")
        yield tuple(cells)
