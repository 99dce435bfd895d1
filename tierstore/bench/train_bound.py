"""The best possible time of a training step: its computation, or its compulsory bytes over the disk's bandwidth.

Compulsory bytes come from the trace of a run, its capacity and its sections, not from what the run happened to move: the
trace is replayed without its speculation, through every native policy (with its default options, or as recorded), and the
least is taken. ``clairvoyant`` is what an eviction that knows the whole future would move (Belady's rule, a heuristic for
entries of several sizes; demanded entries are admitted, one record is pinned at a time): usually less. It is shown beside
the bound but is not part of it, since no policy can know the future.
"""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tierstore._native import policy_names
from tierstore.bench.probes import Bytes
from tierstore.cache.access import GROUP_STRIDE
from tierstore.errors import BudgetError, DataError
from tierstore.trace.files import load_trace
from tierstore.trace.format import Trace, TraceKind
from tierstore.trace.replay import STEP_COUNTS, replay_steps

_GROUPS = 3
_NEED, _DIRTY, _DROP = 0, 3, 6  # bit shifts of a unit's flags


@dataclass(frozen=True, slots=True)
class Compulsory:
    """The least bytes that a policy moved in the requested steps, and which policy it was."""

    policy: str
    least: Bytes
    by_policy: dict[str, Bytes]
    clairvoyant: Bytes


def bound_s(in_ram_s: float, moved: Bytes, bytes_per_s: float) -> float:
    """The best step in seconds: ``max(the same in RAM, compulsory bytes / bandwidth)``."""
    if bytes_per_s <= 0:
        raise ValueError(f"bandwidth: expected more than 0 bytes per second, got {bytes_per_s}")
    return max(in_ram_s, moved.total / bytes_per_s)


def compulsory(path: str | os.PathLike[str], *, first_step: int, steps: int) -> Compulsory:
    """Bytes of the ``steps`` training steps after the first ``first_step`` ones, in the trace at ``path``.

    Raises DataError for a trace that is malformed or has fewer steps.
    """
    trace = load_trace(path)
    ends = np.flatnonzero(trace.kinds == TraceKind.END_STEP)
    if len(ends) < first_step + steps:
        raise DataError(f"{os.fspath(path)}: {len(ends)} steps, expected at least {first_step + steps}")
    header, by_policy = trace.header, {}
    for policy in policy_names():
        try:
            options = header.policy_options if policy == header.policy else {}
            counts = replay_steps(
                path, replace(header, policy=policy, policy_options=options, lookahead_frames=0)
            )
        except BudgetError:  # a policy that needs more frames than the one that ran
            continue
        moved = dict(zip(STEP_COUNTS, counts[first_step : first_step + steps].sum(0).tolist(), strict=True))
        by_policy[policy] = Bytes(moved["read_bytes"], moved["written_bytes"])
    best = min(by_policy, key=lambda name: by_policy[name].total)
    begin = int(ends[first_step - 1]) + 1 if first_step else 0
    optimal = clairvoyant(trace, begin, int(ends[first_step + steps - 1]) + 1)
    return Compulsory(best, by_policy[best], by_policy, optimal)


#: One use of one entry: the number of its unit among those of all accesses, the entry, and whether it dirties the entry,
#: drops it, and is counted.
_Use = tuple[int, int, bool, bool, bool]


def clairvoyant(trace: Trace, begin: int, end: int) -> Bytes:
    """Bytes moved in events ``begin`` to ``end`` if the evicted entry is always the one needed last.

    The last training step is assumed to repeat after the end, so that entries kept for a next step are kept
    here too.
    """
    records, free = trace.header.records, trace.header.capacity_frames
    stored = {
        number * GROUP_STRIDE + group
        for number, record in enumerate(records)
        for group in range(_GROUPS)
        if record.stored >> group & 1
    }
    dirty: dict[int, bool] = {}  # of resident entries
    ahead: dict[int, int] = {}  # the unit of the next use
    heap: list[tuple[int, int]] = []  # the entry needed last first
    read = written = 0

    def evict(entry: int, counted: bool) -> None:
        nonlocal free, written
        record, group = records[entry // GROUP_STRIDE], entry % GROUP_STRIDE
        if dirty.pop(entry):
            stored.add(entry)
            written += record.bytes[group] * counted
        free += record.frames[group]

    uses = list(_uses(trace, begin, end))
    for (_, entry, changes, drops, counted), following in zip(uses, _next_uses(uses), strict=True):
        record, group = records[entry // GROUP_STRIDE], entry % GROUP_STRIDE
        if entry not in dirty:
            held = []
            while free < record.frames[group]:
                last, victim = heapq.heappop(heap)
                if victim not in dirty or ahead[victim] != -last:
                    continue  # used again or evicted since it was pushed
                if victim // GROUP_STRIDE == entry // GROUP_STRIDE:  # the record in use
                    held.append((last, victim))
                    continue
                evict(victim, counted)
            for item in held:
                heapq.heappush(heap, item)
            free -= record.frames[group]
            dirty[entry] = False
            read += record.bytes[group] * (counted and entry in stored)
        dirty[entry] |= changes
        ahead[entry] = following
        heapq.heappush(heap, (-following, entry))
        if drops:
            dirty[entry] = False
            stored.discard(entry)
            evict(entry, counted)
    return Bytes(read, written)


def _uses(trace: Trace, begin: int, end: int) -> Iterator[_Use]:
    ends = np.flatnonzero(trace.kinds[:end] == TraceKind.END_STEP)
    last_step = int(ends[-2]) + 1 if len(ends) > 1 else begin
    unit = 0
    spans: Iterable[tuple[range, bool]] = ((range(end), True), (range(last_step, end), False))
    for events, inside in spans:
        for event in events:
            if trace.kinds[event] != TraceKind.ACCESS:
                continue
            span = slice(int(trace.offsets[event]), int(trace.offsets[event + 1]))
            counted = inside and event >= begin
            for record, flags in zip(trace.records[span].tolist(), trace.flags[span].tolist(), strict=True):
                for group in range(_GROUPS):
                    if flags >> (_NEED + group) & 1:
                        dirty, drop = flags >> (_DIRTY + group) & 1, flags >> (_DROP + group) & 1
                        yield unit, record * GROUP_STRIDE + group, bool(dirty), bool(drop), counted
                unit += 1


def _next_uses(uses: list[_Use]) -> list[int]:
    """For each use, the unit of the entry's next use; a number beyond all units if there is none."""
    following: list[int] = []
    seen: dict[int, int] = {}
    for unit, entry, *_ in reversed(uses):
        following.append(seen.get(entry, sys.maxsize))
        seen[entry] = unit
    return following[::-1]
