"""Miss-ratio curves: what each policy misses at each capacity.

LRU has the inclusion property (a larger cache holds what a smaller one does), so one pass over the trace
gives every capacity at once (Mattson et al. 1970): ``lru_curve``. That holds with one cache for all layers,
entries of one size, nothing pinned, and capacities that no event exceeds. Everything else is replayed, in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore._native import Detail, Oversized
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError
from tierstore.lab.costs import Machine, with_costs
from tierstore.lab.entries import Capacity
from tierstore.lab.parallel import OnProgress, in_parallel
from tierstore.lab.quotas import least_quotas
from tierstore.lab.requests import Requests
from tierstore.lab.results import Curve, Outcome
from tierstore.lab.simulate import (
    NATIVE_CONTRACTS,
    Contract,
    PolicySpec,
    ReplaySetting,
    expected_time,
    known_policies,
    outcome,
    replay_one,
    suits,
)

_ONE_PASS = 10.0  # beside a replay of FIFO


def all_policies(requests: Requests) -> list[PolicySpec]:
    """Every policy that suits ``requests``, with its defaults, and the clairvoyant one that admits as a live cache does."""
    names = [name for name in known_policies(bounds=False) if suits(requests, name)]
    return [PolicySpec(name) for name in (*names, "belady")]


def keep_ratio(requests: Requests, capacity_frames: int) -> float:
    """``1 - C/N``: what any policy misses of requests that are all alike."""
    return max(0.0, 1.0 - capacity_frames / requests.table.total_frames)


def curve_capacities(requests: Requests, points: int, *, scope: Scope = Scope.GLOBAL) -> list[int]:
    """``points`` equally spaced capacities up to the footprint, frames; of a live store's trace without those that fit
    no record.

    Raises ValueError for no points.
    """
    if points < 1:
        raise ValueError(f"points: expected at least 1, got {points}")
    least = _least_capacity(requests, scope)
    wanted = {max(1, round(requests.table.total_frames * point / points)) for point in range(1, points + 1)}
    return sorted(frames for frames in wanted if frames >= least) or [requests.table.total_frames]


def _least_capacity(requests: Requests, scope: Scope) -> int:
    if requests.oversized is Oversized.BYPASS:
        return len(requests.table.present_layers) if scope is Scope.LAYER else 1
    if scope is Scope.GLOBAL:
        return requests.table.largest_record_frames + 1
    return int(least_quotas(requests, headroom=1).sum())


def has_one_pass(
    requests: Requests,
    capacity_frames: int,
    *,
    scope: Scope = Scope.GLOBAL,
    contract: Contract = Contract.ATOMIC,
) -> bool:
    """Whether ``lru_curve`` holds for this capacity (and larger ones)."""
    table = requests.table
    alike = table.one_size and bool((table.nbytes == table.nbytes[0]).all())
    atomic = contract is Contract.ATOMIC
    held = requests.largest_event_frames if atomic else int(table.frames.max(initial=0))
    return scope is Scope.GLOBAL and alike and capacity_frames >= held and not table.pins


def lru_curve(
    requests: Requests,
    capacities: Sequence[Capacity],
    *,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
) -> Curve:
    """LRU at all ``capacities`` from one pass, exactly as replays would count it.

    Raises ConfigError for a capacity that cannot be, BudgetError for one below the largest event.
    """
    frames = sorted({requests.table.frames_of(capacity) for capacity in capacities})
    if not has_one_pass(requests, frames[0], contract=contract):
        raise BudgetError(
            f"capacity: {frames[0]} frames are no stack of entries of one size that hold the largest event "
            f"of {requests.largest_event_frames} frames"
        )
    warmup = requests.events_before(warmup_steps)
    found = _native.stack_distances(
        requests.offsets,
        requests.entries,
        requests.writes,
        contract=NATIVE_CONTRACTS[contract],
        warmup_events=warmup,
    )
    # Misses at c entries: those asked for the first time, and those deeper than c.
    deeper = np.concatenate((np.cumsum(found["depths"][::-1], dtype=np.int64)[::-1], [0]))
    created = len(requests.creations.since(warmup).events)
    warm = _distinct(requests.entries[: int(requests.offsets[warmup])])
    distinct = _distinct(requests.entries)
    size = int(requests.table.frames[0])
    entry_bytes = int(requests.table.nbytes[0])
    points = []
    for capacity in frames:
        held = min(capacity // size, distinct)
        fetched = int(found["cold"]) + int(deeper[held + 1])
        written = int(found["write_backs"][held]) if len(found["write_backs"]) else 0
        points.append(
            ReplaySetting(PolicySpec("lru"), capacity, contract=contract).outcome(
                requests,
                steps=requests.step_count - warmup_steps,
                requests=int(found["requests"]),
                hits=int(found["requests"]) - fetched,
                misses=fetched - created,
                creates=created,
                evictions=fetched - (held - min(held, warm)),
                write_backs=written,
                read_bytes=(fetched - created) * entry_bytes,
                written_bytes=written * entry_bytes,
            )
        )
    return Curve(tuple(points))


def curves(
    requests: Requests,
    policies: Sequence[PolicySpec | str],
    capacities: Sequence[Capacity],
    *,
    scope: Scope = Scope.GLOBAL,
    contract: Contract = Contract.ATOMIC,
    warmup_steps: int = 0,
    machine: Machine | None = None,
    windows: int = 0,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[Curve]:
    """A curve for each policy, in the order given, by ascending capacity.

    Without ``machine`` and ``windows``, LRU comes from one pass where that is exact; with them, every point
    is a replay that knows what each event moved. Raises ConfigError or BudgetError.
    """
    specs = [PolicySpec.parse(policy) if isinstance(policy, str) else policy for policy in policies]
    frames = sorted({requests.table.frames_of(capacity) for capacity in capacities})
    one_pass = (
        machine is None and not windows and has_one_pass(requests, frames[0], scope=scope, contract=contract)
    )

    def replayed(setting: ReplaySetting) -> list[Outcome]:
        detail = Detail.STEPS if machine is None else Detail.EVENTS
        found = replay_one(requests, setting, requests.events_before(warmup_steps), detail)
        point = outcome(requests, found, windows=windows)
        return [point if machine is None else with_costs(requests, found, point, machine)]

    def once() -> list[Outcome]:
        return list(lru_curve(requests, frames, contract=contract, warmup_steps=warmup_steps).points)

    jobs: list[tuple[float, Callable[[], list[Outcome]]]] = []
    for spec in specs:
        if one_pass and spec == PolicySpec("lru"):
            jobs.append((_ONE_PASS, once))
            continue
        for size in frames:
            setting = ReplaySetting(spec, size, scope, contract)
            jobs.append((expected_time(requests, setting), partial(replayed, setting)))
    found = in_parallel(
        [run for _, run in jobs], weights=[weight for weight, _ in jobs], threads=threads, progress=progress
    )
    points = chain.from_iterable(found)  # as many for each policy, whatever jobs they come from
    return [Curve(tuple(islice(points, len(frames)))) for _ in specs]


def _distinct(entries: NDArray[np.uint32]) -> int:
    return int(np.count_nonzero(np.bincount(entries)))
