"""Columns for the simulator, from a trace: what was asked for, without how it was held.

Only accesses count. Speculation (PREFETCH, CANCEL), pins, write-backs asked for from outside (CLEAN) and
DROP are left out: they depend on how the recorded run was configured, and a study asks what a policy does
with the program's own requests. ``tierstore.trace.format.replay`` repeats all of them, exactly. Entries that
a run discards (gradients, made and dropped within a step) are left out, too: they are never read again.
``Requests.left_out`` says how many of each there were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierstore._native import Oversized
from tierstore.cache.access import Phase
from tierstore.errors import DataError
from tierstore.lab.entries import SECTION_GROUPS, EntryTable
from tierstore.lab.results import TraceInfo
from tierstore.trace.format import Trace, TraceHeader, TraceKind
from tierstore.trace.reader import read_chunks, read_summary
from tierstore.units import printable

Scalar = TypeVar("Scalar", bound=np.generic)

_DIRTY, _DROP, _ASKERS = 3, 6, 9  # shifts of a unit's flags


@dataclass(frozen=True, eq=False, slots=True)
class Creations:
    """First requests of entries without a backing copy: nothing is read, whatever the policy. In event order."""

    events: NDArray[np.int64]
    entries: NDArray[np.uint32]

    def since(self, event: int) -> Creations:
        """Those of ``event`` and later."""
        first = int(np.searchsorted(self.events, event))
        return Creations(self.events[first:], self.entries[first:])


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """A trace's requests as columns. Event i asks for ``entries[offsets[i]:offsets[i + 1]]`` at once.

    Entries are numbered as in ``table``. ``writes`` is 1 where the request leaves its entry dirty. ``steps`` counts
    from 0 without gaps.
    """

    name: str
    sha256: str
    offsets: NDArray[np.uint64]  # [events + 1]
    entries: NDArray[np.uint32]  # [requests]
    writes: NDArray[np.uint8]  # [requests]
    layers: NDArray[np.uint32]  # [events]
    phases: NDArray[np.uint8]  # [events]
    steps: NDArray[np.uint32]  # [events]
    table: EntryTable
    left_out: Mapping[str, int] = field(default_factory=dict)
    #: [requests]: which sequences of a batch ask, a bit each; or empty, where nobody says.
    askers: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    #: What becomes of an entry that a cache cannot hold. A live store refuses it, and so does what one recorded.
    oversized: Oversized = Oversized.REFUSE
    #: What a step was to the policy of the run (``tierstore.trace.format.CLOCKS``).
    clock: str = "steps"

    def __post_init__(self) -> None:
        events = len(self.layers)
        if len(self.offsets) != events + 1 or len(self.phases) != events or len(self.steps) != events:
            raise ValueError(f"{events} events with columns of other lengths")
        if len(self.entries) != len(self.writes) or int(self.offsets[-1]) != len(self.entries):
            raise ValueError(f"{len(self.entries)} requests with columns of other lengths")
        if len(self.askers) not in (0, len(self.entries)):
            raise ValueError(f"{len(self.entries)} requests with askers of {len(self.askers)}")

    @classmethod
    def of_columns(
        cls,
        offsets: ArrayLike,
        entries: ArrayLike,
        *,
        steps: ArrayLike | None = None,
        layers: ArrayLike | None = None,
        phases: ArrayLike | None = None,
        writes: ArrayLike | None = None,
        sizes: ArrayLike | None = None,
        entry_layers: ArrayLike | None = None,
        frame_bytes: int = 1,
        name: str = "columns",
    ) -> Requests:
        """Requests from arrays, without a trace. Entries are numbered from 0; all have a backing copy.

        What is not given: a step for each event, layer 0, forward, no writes, a frame each; an entry's layer
        is that of the first event that asks for it. Raises ValueError for columns that do not fit together.
        """
        bounds, asked = np.asarray(offsets, np.uint64), np.asarray(entries, np.uint32)
        events, known = len(bounds) - 1, int(asked.max()) + 1 if len(asked) else 0
        frames = np.ones(known, np.uint32) if sizes is None else np.asarray(sizes, np.uint32)
        by_event = np.zeros(events, np.uint32) if layers is None else np.asarray(layers, np.uint32)
        if len(by_event) != events or not events or int(bounds[-1]) != len(asked):
            raise ValueError(f"{events} events and {len(asked)} requests with columns of other lengths")
        if entry_layers is None:
            of_entry = np.zeros(len(frames), np.uint32)
            of_entry[asked[::-1]] = np.repeat(by_event, np.diff(bounds).astype(np.int64))[::-1]
        else:
            of_entry = np.asarray(entry_layers, np.uint32)
        return cls(
            name=name,
            sha256="",
            offsets=bounds,
            entries=asked,
            writes=np.zeros(len(asked), np.uint8) if writes is None else np.asarray(writes, np.uint8),
            layers=by_event,
            phases=np.ones(events, np.uint8) if phases is None else np.asarray(phases, np.uint8),
            steps=np.arange(events, dtype=np.uint32) if steps is None else _numbered(np.asarray(steps)),
            table=EntryTable(
                keys=np.arange(len(frames), dtype=np.uint32) * np.uint32(SECTION_GROUPS),
                layers=of_entry,
                frames=frames,
                nbytes=frames.astype(np.uint64) * np.uint64(frame_bytes),
                stored=np.ones(len(frames), np.bool_),
                record_frames=frames,
                record_indices=_record_indices(of_entry),
            ),
        )

    @property
    def events(self) -> int:
        return len(self.layers)

    @property
    def step_count(self) -> int:
        return int(self.steps[-1]) + 1 if len(self.steps) else 0

    @property
    def largest_event_frames(self) -> int:
        """Frames of the largest event: below this capacity an event is split."""
        return int(self.layer_event_frames.max(initial=0))

    @cached_property
    def layer_event_frames(self) -> NDArray[np.uint64]:
        """Frames of the largest event of each layer [layers]: below this quota one of its events is split."""
        asked = np.diff(self.offsets) > 0
        largest = np.zeros(int(self.layers.max(initial=0)) + 1, np.uint64)
        if asked.any():
            starts = self.offsets[:-1][asked].astype(np.int64)
            frames = np.add.reduceat(self.table.frames[self.entries].astype(np.uint64), starts)
            np.maximum.at(largest, self.layers[asked], frames)
        return largest

    @cached_property
    def creations(self) -> Creations:
        """The requests that make their entry."""
        if self.table.stored.all():
            return Creations(np.zeros(0, np.int64), np.zeros(0, np.uint32))
        positions = np.flatnonzero(~self.table.stored[self.entries])
        entries, first = np.unique(self.entries[positions], return_index=True)
        order = np.argsort(first, kind="stable")
        asked = positions[first[order]].astype(np.uint64)
        events = np.searchsorted(self.offsets, asked, side="right").astype(np.int64) - 1
        return Creations(events, entries[order])

    @property
    def info(self) -> TraceInfo:
        """What is replayed, for a report."""
        return TraceInfo(
            name=self.name,
            sha256=self.sha256,
            steps=self.step_count,
            events=self.events,
            requests=len(self.entries),
            records=len(np.unique(self.table.records)),
            layers=len(np.unique(self.table.layers)),
            total_frames=self.table.total_frames,
            total_bytes=self.table.total_bytes,
            clock=self.clock,
        )

    @cached_property
    def records_per_event(self) -> float:
        """Records that an event asks for, the mean: the groups of one record count once."""
        records = self.table.records[self.entries]
        new = np.ones(len(records), np.bool_)
        new[1:] = records[1:] != records[:-1]
        new[self.offsets[:-1].astype(np.int64)] = True
        return float(new.sum()) / max(self.events, 1)

    def events_before(self, step: int) -> int:
        """How many events come before ``step`` (counted from 0)."""
        return int(np.searchsorted(self.steps, step))

    def head(self, most_requests: int) -> Requests:
        """The first steps, as many as have at most ``most_requests``; one at least."""
        if len(self.entries) <= most_requests:
            return self
        events = int(np.searchsorted(self.offsets, most_requests, side="right")) - 1
        return self.between(0, max(1, int(self.steps[min(events, self.events - 1)])))

    def tail(self, most_requests: int) -> Requests:
        """The last steps, as many as have at most ``most_requests``; one at least."""
        if len(self.entries) <= most_requests:
            return self
        skipped = len(self.entries) - most_requests
        event = min(int(np.searchsorted(self.offsets, skipped)), self.events - 1)
        first = int(self.steps[event]) + (1 if event and self.steps[event] == self.steps[event - 1] else 0)
        return self.between(min(first, self.step_count - 1), self.step_count)

    def between(self, first_step: int, end_step: int) -> Requests:
        """The requests of steps ``first_step`` up to ``end_step``, which is not among them; all entries stay."""
        begin, end = self.events_before(first_step), self.events_before(end_step)
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        stored = self.table.stored.copy()
        stored[self.entries[:first]] = True
        return replace(
            self,
            table=replace(self.table, stored=stored),
            offsets=self.offsets[begin : end + 1] - self.offsets[begin],
            entries=self.entries[first:last],
            writes=self.writes[first:last],
            askers=self.askers[first:last],
            layers=self.layers[begin:end],
            phases=self.phases[begin:end],
            steps=self.steps[begin:end] - np.uint32(first_step),
        )


def load_requests(path: str | os.PathLike[str], *, name: str | None = None) -> Requests:
    """The requests of the trace at ``path``, read a chunk at a time: about 6 bytes a request, 20 an event.

    Raises DataError (a malformed trace, or one without a request) or OSError.
    """
    shown = os.fspath(path)
    with Path(path).open("rb") as file:
        summary = read_summary(file)
        reader = _Reader(summary.header)
        for chunk in read_chunks(file, summary):
            reader.add(chunk, shown)
    called = printable(name if name is not None else Path(path).name)
    return reader.finish(name=called, sha256=summary.sha256, path=shown)


def trace_requests(trace: Trace, *, name: str = "trace") -> Requests:
    """The requests of a trace in memory, such as a generator makes. Raises DataError if it has none."""
    reader = _Reader(trace.header)
    reader.add(trace, name)
    return reader.finish(name=name, sha256="", path=name)


class _Reader:
    """Gathers the columns of one trace."""

    def __init__(self, header: TraceHeader) -> None:
        self._table = header.table
        self._oversized = Oversized.BYPASS if header.origin else Oversized.REFUSE
        self._clock = header.clock
        self._counting = header.clock != "steps"  # until the first step ends
        self._present = len(header.records) - header.late_records
        self._accesses = self._counted = 0  # that may have been steps, and that were
        self._dropped = np.zeros(len(self._table) * SECTION_GROUPS, np.bool_)
        self._keys: list[NDArray[np.uint32]] = []
        self._writes: list[NDArray[np.uint8]] = []
        self._askers: list[NDArray[np.uint8]] = []
        self._counts: list[NDArray[np.uint32]] = []
        self._layers: list[NDArray[np.uint32]] = []
        self._phases: list[NDArray[np.uint8]] = []
        self._steps: list[NDArray[np.uint32]] = []
        self._kinds = np.zeros(len(TraceKind), np.int64)

    def add(self, chunk: Trace, path: str) -> None:
        """Takes the accesses of ``chunk``. Raises DataError for a record that the header does not have."""
        self._kinds += np.bincount(chunk.kinds, minlength=len(TraceKind))
        accesses = chunk.kinds == TraceKind.ACCESS
        per_event = np.diff(chunk.offsets).astype(np.int64)
        units = np.repeat(accesses, per_event)
        records, flags = chunk.records[units], chunk.flags[units]
        if len(records) and int(records.max()) >= len(self._table):
            raise DataError(
                f"{path}: expected records up to {len(self._table) - 1}, found {int(records.max())}"
            )
        needed = (flags[:, None] >> np.arange(SECTION_GROUPS, dtype=np.uint16) & 1).astype(np.bool_)
        bits = np.arange(SECTION_GROUPS, dtype=np.uint16)
        keys = records[:, None] * np.uint32(SECTION_GROUPS) + bits.astype(np.uint32)
        self._keys.append(keys[needed])
        self._writes.append((flags[:, None] >> (bits + _DIRTY) & 1)[needed].astype(np.uint8))
        asked = np.repeat((flags >> _ASKERS).astype(np.uint8), needed.sum(axis=1))
        self._askers.append(asked)
        self._dropped[keys[(flags[:, None] >> (bits + _DROP) & 1).astype(np.bool_)]] = True
        ends = np.concatenate(([0], np.cumsum(needed.sum(axis=1), dtype=np.int64)))
        bounds = np.concatenate(([0], np.cumsum(per_event[accesses])))
        self._counts.append(np.diff(ends[bounds]).astype(np.uint32))
        self._layers.append(chunk.layers[accesses])
        self._phases.append(chunk.phases[accesses])
        self._steps.append((chunk.steps + self._steps_before(chunk))[accesses])

    def _steps_before(self, chunk: Trace) -> NDArray[np.uint32]:
        """How many accesses were steps before each event of ``chunk`` [events]."""
        counted = (chunk.kinds == TraceKind.ACCESS) & (chunk.counts > 0) & self._counting
        counted &= ~np.isin(chunk.phases, (Phase.INIT, Phase.OPTIMIZER))
        ends = chunk.kinds == TraceKind.END_STEP
        if ends.any():
            counted[int(np.argmax(ends)) :] = False
            self._counting = False
        if self._clock == "late_accesses":
            present = self._present + np.cumsum(np.where(chunk.kinds == TraceKind.ADD, chunk.counts, 0))
            self._present = int(present[-1]) if len(present) else self._present
            earlier = self._accesses + np.cumsum(counted) - counted
            self._accesses += int(counted.sum())
            counted &= earlier >= present
        before = np.cumsum(counted, dtype=np.uint32)
        before += np.uint32(self._counted) - counted
        self._counted += int(counted.sum())
        return before

    def finish(self, *, name: str, sha256: str, path: str) -> Requests:
        """The whole, with entries numbered densely. Raises DataError if nothing was asked for."""
        keys = _joined(self._keys, np.uint32)
        writes = _joined(self._writes, np.uint8)
        askers = _joined(self._askers, np.uint8)
        counts = _joined(self._counts, np.uint32)
        discarded = 0
        if self._dropped.any():
            keep = ~self._dropped[keys]
            discarded = len(keys) - int(keep.sum())
            kept_before = np.concatenate(([0], np.cumsum(keep, dtype=np.int64)))
            counts = np.diff(kept_before[_offsets(counts).astype(np.int64)]).astype(np.uint32)
            keys, writes, askers = keys[keep], writes[keep], askers[keep]
        if not len(keys):
            raise DataError(f"{path}: expected a trace with accesses, found none")
        used = np.zeros(len(self._table) * SECTION_GROUPS, np.bool_)
        used[keys] = True
        number = np.cumsum(used, dtype=np.uint32) - np.uint32(1)
        used_keys = np.flatnonzero(used).astype(np.uint32)
        sizes = self._table.frames.reshape(-1)[used_keys]
        if (sizes == 0).any():
            key = int(used_keys[np.argmin(sizes)])
            raise DataError(
                f"{path}: record {key // SECTION_GROUPS}: group {key % SECTION_GROUPS} is asked for and has no frames"
            )
        np.take(number, keys, out=keys)
        records = used_keys // SECTION_GROUPS
        keep_events = counts > 0
        return Requests(
            name=name,
            sha256=sha256,
            offsets=_offsets(counts[keep_events]),
            entries=keys,
            writes=writes,
            askers=askers if askers.any() else np.zeros(0, np.uint8),
            layers=_joined(self._layers, np.uint32)[keep_events],
            phases=_joined(self._phases, np.uint8)[keep_events],
            steps=_numbered(_joined(self._steps, np.uint32)[keep_events]),
            table=EntryTable(
                keys=used_keys,
                layers=self._table.layers[records],
                frames=sizes,
                nbytes=self._table.bytes.reshape(-1)[used_keys],
                stored=self._stored(used_keys),
                record_frames=self._table.frames.sum(axis=1, dtype=np.uint32)[records],
                record_indices=_record_indices(self._table.layers)[records],
            ),
            left_out=self._left_out(discarded),
            oversized=self._oversized,
            clock=self._clock,
        )

    def _stored(self, keys: NDArray[np.uint32]) -> NDArray[np.bool_]:
        masks = self._table.stored[keys // SECTION_GROUPS]
        return (masks >> (keys % SECTION_GROUPS).astype(np.uint16) & 1).astype(np.bool_)

    def _left_out(self, discarded: int) -> dict[str, int]:
        events = {
            kind.name.lower().replace("_", "-"): int(self._kinds[kind])
            for kind in (
                TraceKind.PREFETCH,
                TraceKind.CLEAN,
                TraceKind.CLEAN_ALL,
                TraceKind.DROP,
                TraceKind.PIN,
            )
        }
        return {name: count for name, count in {**events, "discarded requests": discarded}.items() if count}


def _record_indices(layers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The index of each record among those of its layer."""
    order = np.argsort(layers, kind="stable")
    ordered = layers[order]
    indices = np.empty(len(layers), np.uint32)
    indices[order] = np.arange(len(layers)) - np.searchsorted(ordered, ordered)
    return indices


def _joined(parts: list[NDArray[Scalar]], kind: type[Scalar]) -> NDArray[Scalar]:
    whole = np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)
    parts.clear()
    return whole


def _offsets(counts: NDArray[np.uint32]) -> NDArray[np.uint64]:
    offsets = np.zeros(len(counts) + 1, np.uint64)
    np.cumsum(counts, out=offsets[1:], dtype=np.uint64)
    return offsets


def _numbered(steps: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Steps from 0 without gaps: a new one begins where the number changes."""
    changed = np.zeros(len(steps), np.uint32)
    changed[1:] = steps[1:] != steps[:-1]
    return np.cumsum(changed, dtype=np.uint32)
