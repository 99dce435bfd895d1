"""Miss-ratio curves (the misses of each policy at each capacity), and whether tuning a policy is worth anything.

LRU has the inclusion property (a larger cache holds what a smaller one does), so one pass over the trace gives every
capacity at once (Mattson et al. 1970): ``lru_curve``. That holds with one cache for all layers, entries of one size,
nothing pinned, and capacities that no event exceeds. Everything else is replayed in parallel.

``survey`` determines the regime before any policy is tuned. Where a pass requests most of a layer's records, every sensible
policy keeps a part and misses the rest: the miss ratio is close to 1 - C/N and to the clairvoyant choice (on real
routing of 64 experts a layer, from about 512 tokens a step). There, only fewer write-backs, earlier fetches or more
memory save time. The survey measures this: sensible policies and Belady's choice replay a part of the trace.
If Belady's choice is no bound (``ReplaySetting.role``), the possible gain is unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore._native import Detail, Oversized
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError
from tierstore.lab.costs import Machine, with_costs
from tierstore.lab.requests import Capacity, Requests
from tierstore.lab.results import Curve, Outcome, Role
from tierstore.lab.simulate import (
    Contract,
    PolicySpec,
    ReplaySetting,
    expected_time,
    in_parallel,
    known_policies,
    replay_one,
    replay_windows,
    suits,
)
from tierstore.stats import OnProgress

_ONE_PASS = 10.0  # expected time, relative to a replay of FIFO
REPORT_WINDOWS = 50
"""Windows of the hits over time that a report draws."""


def all_policies(requests: Requests) -> list[PolicySpec]:
    """Every policy that suits ``requests``, with its defaults, and ``belady`` with a live cache's admission."""
    names = [name for name in known_policies(bounds=False) if suits(requests, name)]
    return [PolicySpec(name) for name in (*names, "belady")]


def keep_ratio(requests: Requests, capacity_frames: int) -> float:
    """``1 - C/N``: the miss ratio of any policy on requests that are all alike."""
    return max(0.0, 1.0 - capacity_frames / requests.table.total_frames)


def curve_capacities(requests: Requests, points: int, *, scope: Scope = Scope.GLOBAL) -> list[int]:
    """``points`` equally spaced capacities up to the footprint, in frames; for a live store's trace only those that hold
    its largest record. Raises ValueError for no points.
    """
    if points < 1:
        raise ValueError(f"points: expected at least 1, got {points}")
    if requests.oversized is Oversized.BYPASS:
        least = len(requests.table.present_layers) if scope is Scope.LAYER else 1
    elif scope is Scope.GLOBAL:
        least = requests.table.largest_record_frames + 1
    else:
        least = int(requests.table.least_quotas.sum())
    wanted = {max(1, round(requests.table.total_frames * point / points)) for point in range(1, points + 1)}
    return sorted(frames for frames in wanted if frames >= least) or [requests.table.total_frames]


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

    Raises ConfigError for an invalid capacity, BudgetError for one below the largest event.
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
        contract=_native.Contract[contract.name],
        warmup_events=warmup,
    )
    # Misses at c entries: first requests, and requests with a reuse distance above c.
    deeper = np.concatenate((np.cumsum(found["depths"][::-1], dtype=np.int64)[::-1], [0]))
    created = len(requests.creations(since=warmup)[0])
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

    ``machine``: with its costs; ``windows`` > 0: with the hits over time, in that many windows of equal steps. Without both,
    LRU at several capacities is computed in one pass where that is exact. Raises ConfigError or BudgetError.
    """
    specs = [PolicySpec.parse(policy) if isinstance(policy, str) else policy for policy in policies]
    frames = sorted({requests.table.frames_of(capacity) for capacity in capacities})
    one_pass = (
        machine is None
        and not windows
        and len(frames) > 1  # one pass takes as long as some replays
        and has_one_pass(requests, frames[0], scope=scope, contract=contract)
    )

    def replayed(setting: ReplaySetting) -> list[Outcome]:
        detail = Detail.STEPS if machine is None else Detail.EVENTS
        found = replay_one(requests, setting, requests.events_before(warmup_steps), detail)
        point = found.outcome if machine is None else with_costs(requests, found, machine)
        return [replace(point, windows=replay_windows(found, windows)) if windows else point]

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
    points = chain.from_iterable(in_parallel(jobs, threads=threads, progress=progress))
    return [Curve(tuple(islice(points, len(frames)))) for _ in specs]


def _distinct(entries: NDArray[np.uint32]) -> int:
    return int(np.count_nonzero(np.bincount(entries)))


#: In the order of preference among equals.
SENSIBLE = ("lru", "lfu-decay")
_AT_BOUND = 1e-3  # of miss ratio: a policy this close to the bound has nothing left to gain
_MOST_REQUESTS = 2_000_000


class Worth(enum.Enum):
    """The possible gain of a better policy."""

    FITS = "fits"  # nothing is ever evicted
    AT_BOUND = "at bound"  # every sensible policy is at the bound
    CHOICE = "choice"  # some sensible policies are at the bound, not all
    TUNE = "tune"  # the best sensible policy is above the bound, or no bound is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Requested frames against capacity, and simulated miss ratios of a part of the trace."""

    active_frames: float  # requested by one event, the mean
    layer_frames: float  # of a layer's entries, the mean
    capacity_frames: float  # an equal share for each layer
    active_records: float
    layer_records: float
    miss_ratios: dict[str, float]  # of the sensible policies
    bound: float  # Belady's miss ratio; ``role`` says whether it is a bound
    role: Role
    worth: Worth

    @property
    def advice(self) -> str:
        """A recommendation, in a sentence or two."""
        asked = (
            f"A pass requests {self.active_frames:.1f} of a layer's {self.layer_frames:.1f} frames, "
            f"{self.capacity_frames:.1f} fit"
        )
        if self.worth is Worth.FITS:
            return f"{asked}: everything fits, so the policy does not matter."
        best = min(self.miss_ratios, key=lambda name: self.miss_ratios[name])
        worst = max(self.miss_ratios, key=lambda name: self.miss_ratios[name])
        said = f"{asked}; misses: {self.role.value} {self.bound:.4f}, " + ", ".join(
            f"{name} {ratio:.4f}" for name, ratio in self.miss_ratios.items()
        )
        if self.worth is Worth.AT_BOUND:
            return (
                f"{said}. Tuning gains nothing here: every sensible policy is within {_AT_BOUND:g} of "
                "the bound. Fewer write-backs, prefetch or more memory can still gain."
            )
        if self.worth is Worth.CHOICE:
            return f"{said}. Choose {best} over {worst}; further tuning gains nothing."
        if self.role is not Role.BOUND:
            return (
                f"{said}. Tuning may be worth it: the clairvoyant choice is no bound here (entries differ in size, or an "
                "access is split), so the possible gain is unknown."
            )
        gap = self.miss_ratios[best] - self.bound
        return (
            f"{said}. Tuning may be worth it: at most {gap:.4f} of the requests "
            f"({gap / self.miss_ratios[best]:.0%} of the misses) lie between {best} and the bound."
        )


def survey(
    requests: Requests, capacity_frames: int, *, contract: Contract = Contract.ATOMIC, threads: int = 0
) -> Regime:
    """The regime of ``requests`` at ``capacity_frames`` (global scope), from at most two million of them.

    Raises BudgetError for a capacity that does not hold an entry.
    """
    part = requests.head(_MOST_REQUESTS)
    found = curves(
        part,
        (*SENSIBLE, "belady"),
        [capacity_frames],
        contract=contract,
        warmup_steps=part.step_count // 4,
        threads=threads,
    )
    *sensible, belady = (curve.points[0] for curve in found)
    ratios = {point.policy: point.miss_ratio for point in sensible}
    least = belady.miss_ratio if belady.role is Role.BOUND else 0.0
    if capacity_frames >= requests.table.total_frames:
        worth = Worth.FITS
    elif max(ratios.values()) - least <= _AT_BOUND:
        worth = Worth.AT_BOUND
    else:
        worth = Worth.CHOICE if min(ratios.values()) - least <= _AT_BOUND else Worth.TUNE
    layers = max(len(requests.table.present_layers), 1)
    info = requests.info
    return Regime(
        active_frames=float(requests.table.frames[part.entries].sum(dtype=np.uint64)) / part.events,
        layer_frames=requests.table.total_frames / layers,
        capacity_frames=capacity_frames / layers,
        active_records=part.records_per_event,
        layer_records=info.records / layers,
        miss_ratios=ratios,
        bound=belady.miss_ratio,
        role=belady.role,
        worth=worth,
    )
