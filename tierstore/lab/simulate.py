"""Replays of requests through policies: many settings in parallel, results in the order of the settings.

The native simulator runs the policy objects of the live store and releases the interpreter lock, so threads are
enough; all of them read the same columns. Every result names its contract:

- *event-atomic* (the default, and what the live cache does): the requests of one event are one set, and none of
  them evicts another; a set that does not fit is split into the largest groups that do.
- *sequential*: each request on its own, as caches are usually compared.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore._native import Detail
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError, ConfigError
from tierstore.lab.requests import Requests
from tierstore.lab.results import LayerOutcome, Outcome, ReplayWindow, Role
from tierstore.machine import cores
from tierstore.stats import OnProgress
from tierstore.trace.format import TraceHeader, TraceKind
from tierstore.trace.replay import STEP_COUNTS, quotas_by_layer, replay_steps

Reduced = TypeVar("Reduced")


class Contract(enum.Enum):
    """Whether an event's requests are one set or a sequence."""

    ATOMIC = "event-atomic"
    SEQUENTIAL = "sequential"


BOUNDS = tuple(_native.bound_names())
"""Clairvoyant choices: bounds of all policies' misses if ``ReplaySetting.role`` says so."""

_MOST_LOOKED_AT = 100  # entries for each request

#: Expected time of a replay, relative to FIFO's.
_SLOW = {"learned-use": 60.0, "next-use": 8.0, "lfu-decay": 2.0, "w-tinylfu": 2.0, "lirs": 2.0, "lfu": 1.5}
_OWN = 100.0  # a policy of the user's, in Python


def known_policies(*, bounds: bool = True) -> list[str]:
    """Names of all policies that can be simulated. The simplest come first, the clairvoyant ones last."""
    return [*_native.policy_names(), *(BOUNDS if bounds else ())]


def suits(requests: Requests, policy: str) -> bool:
    """Whether a policy suits the requests.

    next-use and learned-use look at all entries of a layer in each of its passes: they need passes through several
    layers that request a good part of them. On plain keys they would take hours and learn nothing.
    """
    if policy not in ("next-use", "learned-use"):
        return True
    layers = len(requests.table.present_layers)
    looked_at = requests.events * len(requests.table) / max(layers, 1)
    return layers > 1 and looked_at <= _MOST_LOOKED_AT * len(requests.entries)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy with its options, the rest at their defaults. ``name`` may be a class of your own, ``package.module:Class``
    (see ``tierstore.cache.policy``).
    """

    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.own and self.name not in known_policies():
            raise ConfigError(f"policy {self.name!r}: expected one of {', '.join(known_policies())}")
        if self.name in BOUNDS:
            if self.options:
                raise ConfigError(
                    f"policy {self.name!r}: a clairvoyant choice has no options, got {', '.join(self.options)}"
                )
            return
        try:
            _native.check_policy(self.name, dict(self.options))
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error

    @property
    def own(self) -> bool:
        """Whether the policy is the user's own class."""
        return ":" in self.name

    @property
    def runs(self) -> bool:
        """Whether a live cache could run the policy: it does not know the future."""
        return self.name not in BOUNDS

    @staticmethod
    def parse(text: str) -> PolicySpec:
        """``lru``, ``lfu-decay:half_life=8,threshold=1`` or ``module:Class:option=1``. Raises ConfigError."""
        name, _, rest = text.partition(":")
        if rest and name.strip() not in known_policies():
            own, _, rest = rest.partition(":")
            name = f"{name}:{own}"
        options: dict[str, float | str] = {}
        for item in rest.split(",") if rest else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not key or not value:
                raise ConfigError(f"policy {text!r}: expected NAME or NAME:OPTION=VALUE,..., got {item!r}")
            if key in options:
                raise ConfigError(f"policy {text!r}: option {key} is given twice")
            options[key] = _value(value)
        return PolicySpec(name.strip(), options)


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class ReplaySetting:
    """One thing to replay. ``layer_quotas`` (frames) with layer scope; empty means equal shares."""

    policy: PolicySpec
    capacity_frames: int
    scope: Scope = Scope.GLOBAL
    contract: Contract = Contract.ATOMIC
    layer_quotas: tuple[int, ...] = ()

    def quotas(self, requests: Requests) -> tuple[int, ...]:
        """Frames of each layer; empty with global scope. Raises ConfigError if their number or sum does not fit."""
        if self.scope is Scope.GLOBAL:
            return ()
        if self.layer_quotas:
            layers = requests.table.layer_count
            if len(self.layer_quotas) < layers or sum(self.layer_quotas) > self.capacity_frames:
                raise ConfigError(
                    f"layer quotas: expected {layers} of at most {self.capacity_frames} frames "
                    f"in all, got {len(self.layer_quotas)} of {sum(self.layer_quotas)}"
                )
            return self.layer_quotas
        return tuple(quotas_by_layer(requests.table.present_layers, self.capacity_frames))

    def role(self, requests: Requests) -> Role:
        """Whether this setting is a policy, a bound of all policies on ``requests``, or just clairvoyant.

        Belady's choice has the fewest misses with entries of one size. With forced admission that holds while no set
        is split: where residents come first, what is kept decides how a set is split.
        """
        if self.policy.runs:
            return Role.POLICY
        bound = requests.table.one_size and (
            self.policy.name != "belady" or self.contract is Contract.SEQUENTIAL or self._holds_sets(requests)
        )
        return Role.BOUND if bound or self.policy.name == "unbounded" else Role.CLAIRVOYANT

    def _holds_sets(self, requests: Requests) -> bool:
        """Whether every event fits at once beside all pinned entries."""
        table, quotas = requests.table, self.quotas(requests)
        pinned = int(table.frames[np.flatnonzero(table.pinned)].sum(dtype=np.uint64))
        largest = requests.layer_event_frames.tolist() if quotas else [requests.largest_event_frames]
        limits = quotas or (self.capacity_frames,)
        return all(frames + pinned <= limit for frames, limit in zip(largest, limits, strict=False))

    def outcome(self, requests: Requests, /, **counts: Any) -> Outcome:
        """The outcome of this setting on ``requests``: ``counts`` are the other fields of ``Outcome``."""
        return Outcome(
            policy=self.policy.name,
            policy_options=self.policy.options,
            role=self.role(requests),
            capacity_frames=self.capacity_frames,
            capacity_fraction=self.capacity_frames / requests.table.total_frames,
            scope=self.scope.value,
            contract=contract_name(requests, self.contract),
            **counts,
        )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Replayed:
    """One replay: its outcome, and columns over steps, events and layers. They cover the warm-up as zeros.

    A creation is the first request of an entry that had no backing copy: neither a hit nor a miss. Columns of events are
    empty without that detail.
    """

    outcome: Outcome  # without windows, and without the costs that need a model of the machine
    step_requests: NDArray[np.uint64]  # [steps]
    step_misses: NDArray[np.int64]  # [steps]
    step_creations: NDArray[np.int64]  # [steps]
    event_read_bytes: NDArray[np.uint64]  # [events]
    event_written_bytes: NDArray[np.uint64]  # [events]
    event_reads: NDArray[np.uint32]  # [events]: entries
    event_writes: NDArray[np.uint32]  # [events]: entries
    layer_misses: NDArray[np.int64]  # [layers]


def in_parallel(
    jobs: Sequence[tuple[float, Callable[[], Reduced]]],
    *,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[Reduced]:
    """The result of each of ``jobs``, in their order, computed on ``threads`` threads (0: one for each core).

    A job is its expected time, in any unit, and a function that computes it. The longest start first, so that none is left
    alone at the end. If a job raises, jobs that have not started are cancelled.
    """
    order = sorted(range(len(jobs)), key=lambda job: -jobs[job][0])
    results: dict[int, Reduced] = {}
    with ThreadPoolExecutor(threads or cores()) as pool:
        started = {job: pool.submit(jobs[job][1]) for job in order}
        try:
            for done, (job, future) in enumerate(started.items(), 1):
                results[job] = future.result()
                if progress is not None:
                    progress(done, len(jobs))
        finally:
            for future in started.values():
                future.cancel()
    return [results[job] for job in range(len(jobs))]


def replay_each(
    requests: Requests,
    settings: Sequence[ReplaySetting],
    reduce: Callable[[Replayed], Reduced],
    *,
    warmup_steps: int = 0,
    detail: Detail = Detail.EVENTS,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[Reduced]:
    """Replays each setting on ``threads`` threads (0: one for each core) and returns the results of ``reduce``.

    The first ``warmup_steps`` steps are replayed and not counted. Without the detail of events a replay is faster,
    but its stalls cannot be estimated. ``reduce`` runs on the replay's thread, so that no columns wait in memory.
    Raises ConfigError (an option that the policy does not have) or BudgetError (a capacity that does not hold what is
    pinned, or without ``Oversized.BYPASS`` the largest request).
    """
    warmup = requests.events_before(warmup_steps)

    def one(setting: ReplaySetting) -> Reduced:
        return reduce(replay_one(requests, setting, warmup, detail))

    return in_parallel(
        [(expected_time(requests, setting), partial(one, setting)) for setting in settings],
        threads=threads,
        progress=progress,
    )


def expected_time(requests: Requests, setting: ReplaySetting) -> float:
    """About how long a replay takes, without a unit: a smaller cache misses and evicts more."""
    policy = setting.policy
    each = _OWN if policy.own else _SLOW.get(policy.name, 1.0)
    return each * (2.0 - min(1.0, setting.capacity_frames / requests.table.total_frames))


def replay_one(requests: Requests, setting: ReplaySetting, warmup_events: int, detail: Detail) -> Replayed:
    """One replay, of which the first ``warmup_events`` events are not counted. Raises as ``replay_each`` does."""
    table = requests.table
    began = time.thread_time()
    try:
        found = _native.simulate(
            requests.offsets,
            requests.entries,
            requests.writes,
            requests.layers,
            requests.phases,
            requests.steps,
            table.frames,
            table.layers,
            table.records,
            table.groups,
            table.nbytes,
            pinned=table.pinned if len(table.pinned) else None,
            requesters=requests.requesters if len(requests.requesters) else None,
            policy=setting.policy.name,
            options=dict(setting.policy.options),
            capacity_frames=setting.capacity_frames,
            scope=_native.Scope[setting.scope.name],
            layer_quotas=list(setting.quotas(requests)),
            contract=_native.Contract[setting.contract.name],
            warmup_events=warmup_events,
            detail=detail,
            oversized=requests.oversized,
        )
    except _native.CapacityError as error:
        raise BudgetError(
            f"capacity: {setting.capacity_frames} frames of {table.frame_bytes} bytes are too small for "
            f"{setting.policy.name} with {setting.scope.value} scope: {error}"
        ) from error
    except (ValueError, TypeError) as error:
        if setting.policy.own:  # the error comes from the user's own class
            raise
        raise ConfigError(str(error)) from error
    elapsed_s = time.thread_time() - began
    # The native loop counts creations as misses.
    created_in, created_entries = requests.creations(since=warmup_events)
    created_bytes = table.nbytes[created_entries]
    event_read_bytes, event_reads = found["event_missed_bytes"], found["event_misses"]
    if len(event_read_bytes):
        np.subtract.at(event_read_bytes, created_in, created_bytes)
        np.subtract.at(event_reads, created_in, 1)
    layer_requests = found["layer_hits"] + found["layer_misses"]
    layer_misses = found["layer_misses"].astype(np.int64)
    np.subtract.at(layer_misses, requests.layers[created_in], 1)
    step_creations = np.bincount(requests.steps[created_in], minlength=requests.step_count)
    return Replayed(
        outcome=setting.outcome(
            requests,
            steps=int(np.count_nonzero(found["step_requests"])),
            requests=found["requests"],
            hits=found["hits"],
            misses=found["misses"] - len(created_in),
            creates=len(created_in),
            evictions=found["evictions"],
            starved=found["starved"],
            not_admitted=found["not_admitted"],
            write_backs=found["write_backs"],
            read_bytes=found["missed_bytes"] - int(created_bytes.sum()),
            written_bytes=found["written_bytes"],
            policy_s=elapsed_s,
            layers=tuple(
                LayerOutcome(layer, int(asked), int(layer_misses[layer]))
                for layer, asked in enumerate(layer_requests)
                if asked
            ),
        ),
        step_requests=found["step_requests"],
        step_misses=found["step_misses"].astype(np.int64) - step_creations,
        step_creations=step_creations,
        event_read_bytes=event_read_bytes,
        event_written_bytes=found["event_written_bytes"],
        event_reads=event_reads,
        event_writes=found["event_write_backs"],
        layer_misses=layer_misses,
    )


def contract_name(requests: Requests, contract: Contract) -> str:
    """The contract as reports name it, with the pins."""
    return ", ".join(filter(None, (contract.value, requests.table.pins)))


def replay_windows(replayed: Replayed, count: int) -> tuple[ReplayWindow, ...]:
    """Hits over ``count`` windows of equal steps after the warm-up; creations do not count as hits."""
    asked = replayed.step_requests.astype(np.int64)
    first = int(np.flatnonzero(asked)[0]) if asked.any() else 0
    edges = np.unique(np.linspace(first, len(asked), count + 1).astype(np.int64)[:-1])
    hits = asked - replayed.step_misses - replayed.step_creations
    return tuple(
        ReplayWindow(int(edge), int(requested), int(hit))
        for edge, requested, hit in zip(
            edges, np.add.reduceat(asked, edges), np.add.reduceat(hits, edges), strict=True
        )
    )


# A recorded run as it was -----------------------------------------------------------------------------------
#
# A run reserves a part of its frames for prefetches, splits sets by the rest, and requests entries before they are needed.
# This can change which policy is better, so a recorded run is tuned on replays through the live cache's own core, with the
# prefetches of the run. A prefetched entry is a hit when it is requested, and its read counts as the miss. So a miss here
# is a read, ahead or on demand.


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace of a run, with its header. Its prefetches could fill ``lookahead_frames`` of ``capacity_frames``."""

    path: Path
    header: TraceHeader

    def lookahead_at(self, capacity_frames: int) -> int:
        """Frames for prefetches at another capacity, in the same proportion."""
        lookahead, recorded = self.header.lookahead_frames, self.header.capacity_frames
        return min(capacity_frames, round(lookahead * capacity_frames / recorded))


def recording_of(path: str | os.PathLike[str], requests: Requests) -> Recording | None:
    """The trace at ``path``, from which ``requests`` were read. None if its run had no steps, or neither prefetches nor
    copies that steps make stale (of device slots).
    """
    header = requests.header
    prefetched = header.lookahead_frames and requests.left_out.get(TraceKind.PREFETCH.name.lower())
    if header.clock != "steps" or not (prefetched or header.of_slots):
        return None
    return Recording(Path(path), header)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LiveReplay:
    """One replay: ``counts`` [steps, STEP_COUNTS]."""

    setting: ReplaySetting
    lookahead_frames: int
    counts: NDArray[np.int64]

    def column(self, name: str) -> NDArray[np.int64]:
        """One of ``STEP_COUNTS``, by step."""
        return self.counts[:, STEP_COUNTS.index(name)]

    @property
    def step_requests(self) -> NDArray[np.int64]:
        return self.column("hits") + self.column("misses") + self.column("creates")

    @property
    def step_misses(self) -> NDArray[np.int64]:
        """Reads by step, ahead or on demand."""
        return self.column("misses") + self.column("prefetch_reads")

    def outcome(self, requests: Requests, steps: slice) -> Outcome:
        """The outcome over ``steps``."""
        total = dict(zip(STEP_COUNTS, self.counts[steps].sum(axis=0).tolist(), strict=True))
        asked = total["hits"] + total["misses"] + total["creates"]
        misses = min(total["misses"] + total.pop("prefetch_reads"), asked - total["creates"])
        return self.setting.outcome(
            requests,
            lookahead_frames=self.lookahead_frames,
            steps=len(self.counts[steps]),
            requests=asked,
            hits=asked - total["creates"] - misses,
            misses=misses,
            **{name: count for name, count in total.items() if name not in ("hits", "misses")},
        )


def replay_recorded(
    requests: Requests,
    recording: Recording,
    settings: Sequence[ReplaySetting],
    *,
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[LiveReplay | None]:
    """Each setting's replay, in the order given; None if the lookahead leaves too few frames for an access.

    Raises ConfigError, or DataError for a malformed trace.
    """

    layers = 1 + int(recording.header.table.layers.max(initial=0))

    def one(setting: ReplaySetting) -> LiveReplay | None:
        lookahead = recording.lookahead_at(setting.capacity_frames)
        quotas = setting.quotas(requests)
        header = replace(
            recording.header,
            policy=setting.policy.name,
            policy_options=setting.policy.options,
            capacity_frames=setting.capacity_frames,
            lookahead_frames=lookahead,
            scope=setting.scope.value,
            layer_quotas=(*quotas, *[0] * (layers - len(quotas))) if quotas else (),
        )
        try:
            counts = replay_steps(recording.path, header)
        except BudgetError:
            return None
        return LiveReplay(setting=setting, lookahead_frames=lookahead, counts=counts)

    return in_parallel(
        [(expected_time(requests, setting), partial(one, setting)) for setting in settings],
        threads=threads,
        progress=progress,
    )
