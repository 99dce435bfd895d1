"""The program's requests in a trace, as columns for the simulator, without the recorded cache's decisions.

Only accesses count. Prefetches, cancellations, pins, explicit write-backs (CLEAN) and DROP depend on the
configuration of the recorded run, so they are left out; ``tierstore.trace.replay`` repeats all of them exactly.
Entries that a run discards (gradients, made and dropped within a step) are never read again and are left out too.
``Requests.left_out`` counts each.

Records can be pinned: a pinned record stays in the simulated cache after its first request. Pins show the value of
reserving a part of the capacity for known records; a live cache has no such setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierstore._native import Oversized
from tierstore.cache.access import Phase
from tierstore.errors import ConfigError, DataError
from tierstore.lab.results import TraceInfo
from tierstore.trace.files import read_chunks, read_summary
from tierstore.trace.format import Trace, TraceHeader, TraceKind
from tierstore.units import parse_size, printable

SECTION_GROUPS = 3
_DIRTY, _DROP, _SEQUENCES = 3, 6, 9  # shifts of a unit's flags
_LEFT_OUT = (TraceKind.PREFETCH, TraceKind.CLEAN, TraceKind.CLEAN_ALL, TraceKind.DROP, TraceKind.PIN)

Capacity: TypeAlias = int | float | str
"""Frames (an int), a fraction of the footprint (a float, at most 1), or text: ``512MiB``, ``0.4``, ``40%``,
``900f`` (frames)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EntryTable:
    """The entries that a trace requests, as columns. An entry is one section group of one record; entries are numbered
    densely in the order of their keys.
    """

    keys: NDArray[np.uint32]  # record * 3 + section group
    layers: NDArray[np.uint32]
    frames: NDArray[np.uint32]
    nbytes: NDArray[np.uint64]
    stored: NDArray[np.bool_]  # whether there is a backing copy at the start
    record_frames: NDArray[np.uint32]  # of all groups of the entry's record, requested or not
    record_indices: NDArray[np.uint32]  # of the entry's record among the records of its layer, from 0
    pinned: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # empty: none

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def one_size(self) -> bool:
        """Whether all entries take equally many frames."""
        return bool((self.frames == self.frames[:1]).all())

    @cached_property
    def records(self) -> NDArray[np.uint32]:
        """The record of each entry."""
        return self.keys // np.uint32(SECTION_GROUPS)

    @cached_property
    def groups(self) -> NDArray[np.uint8]:
        """The section group of each entry."""
        return (self.keys % np.uint32(SECTION_GROUPS)).astype(np.uint8)

    @property
    def layer_count(self) -> int:
        """One more than the highest layer."""
        return int(self.layers.max()) + 1 if len(self.layers) else 0

    @cached_property
    def total_frames(self) -> int:
        """The footprint: frames of all entries."""
        return int(self.frames.sum(dtype=np.uint64))

    @cached_property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum(dtype=np.uint64))

    @cached_property
    def frame_bytes(self) -> int:
        """Bytes of a frame: the smallest with which every entry fits its frames.

        Only capacities in bytes are converted with it; reads and writes count the entries' own bytes.
        """
        if not len(self.frames):
            return 1
        return max(1, int(np.ceil((self.nbytes / np.maximum(self.frames, 1)).max())))

    @cached_property
    def layer_frames(self) -> NDArray[np.uint64]:
        """Frames of each layer's entries [layers]."""
        return np.bincount(self.layers, weights=self.frames, minlength=self.layer_count).astype(np.uint64)

    @cached_property
    def present_layers(self) -> list[int]:
        """The layers that have requests, ascending."""
        layers: list[int] = np.unique(self.layers).tolist()
        return layers

    @cached_property
    def largest_record_frames(self) -> int:
        """Frames of the largest record with all of its groups: what a live cache must hold at once."""
        return int(self.record_frames.max(initial=0))

    @property
    def least_quotas(self) -> NDArray[np.int64]:
        """The fewest frames that ``tierstore train`` accepts for each layer [layers]: the largest record of any layer,
        and a frame of headroom."""
        return np.where(self.layer_frames > 0, self.largest_record_frames + 1, 0)

    @property
    def pins(self) -> str:
        """A description of the pins; empty without any."""
        entries = self.pinned > 0
        if not entries.any():
            return ""
        records = len(np.unique(self.records[entries]))
        frames = int(self.frames[entries].sum(dtype=np.uint64))
        return f"{records} record{'' if records == 1 else 's'} of {frames} frame{'' if frames == 1 else 's'} pinned"

    def frames_of(self, capacity: Capacity, *, name: str = "capacity") -> int:
        """``capacity`` in frames, at least 1. Raises ConfigError with ``name`` for the option."""
        if isinstance(capacity, float):
            if not 0 < capacity <= 1:
                raise ConfigError(f"{name}: expected a fraction of the footprint in (0, 1], got {capacity:g}")
            frames = int(capacity * self.total_frames)
        elif isinstance(capacity, int):
            frames = capacity
        else:
            text = capacity.strip()
            if text.endswith("f") and text[:-1].isdigit():
                frames = int(text[:-1])
            elif text.endswith("%") or (text.replace(".", "", 1).isdigit() and "." in text):
                frames = parse_size(text, whole=self.total_frames, name=name)
            else:
                frames = parse_size(text, name=name) // self.frame_bytes
        if frames < 1:
            raise ConfigError(
                f"{name}: {capacity!r} is less than a frame of {self.frame_bytes} bytes "
                f"(the footprint of the trace is {self.total_frames} frames)"
            )
        return frames


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """A trace's requests. Event i requests ``entries[offsets[i]:offsets[i + 1]]`` at once.

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
    #: [requests]: the requesting sequences of a batch, a bit each; empty if the trace has none.
    requesters: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    #: The treatment of an entry larger than the cache. A live store, and a replay of its trace, refuse it.
    oversized: Oversized = Oversized.REFUSE
    #: The core that was recorded; requests from arrays have an empty one.
    header: TraceHeader = field(default_factory=lambda: TraceHeader(0))

    def __post_init__(self) -> None:
        events = len(self.layers)
        if len(self.offsets) != events + 1 or len(self.phases) != events or len(self.steps) != events:
            raise ValueError(f"{events} events with columns of other lengths")
        if len(self.entries) != len(self.writes) or int(self.offsets[-1]) != len(self.entries):
            raise ValueError(f"{len(self.entries)} requests with columns of other lengths")
        if len(self.requesters) not in (0, len(self.entries)):
            raise ValueError(f"{len(self.entries)} requests with requesters of {len(self.requesters)}")

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

        Defaults: a step for each event, layer 0, forward, no writes, a frame each; an entry's layer is that of the
        first event that requests it. Raises ValueError for columns that do not fit together.
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
        """Frames of the largest event: a smaller cache splits it."""
        return int(self.layer_event_frames.max(initial=0))

    @cached_property
    def layer_event_frames(self) -> NDArray[np.uint64]:
        """Frames of the largest event of each layer [layers]: a smaller quota splits it."""
        asked = np.diff(self.offsets) > 0
        largest = np.zeros(int(self.layers.max(initial=0)) + 1, np.uint64)
        if asked.any():
            starts = self.offsets[:-1][asked].astype(np.int64)
            frames = np.add.reduceat(self.table.frames[self.entries].astype(np.uint64), starts)
            np.maximum.at(largest, self.layers[asked], frames)
        return largest

    def creations(self, since: int = 0) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The events from ``since`` on, and entries, of first requests of entries without a backing copy: nothing is read,
        whatever the policy.
        """
        events, entries = self._creations
        first = int(np.searchsorted(events, since))
        return events[first:], entries[first:]

    @cached_property
    def _creations(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        positions = np.flatnonzero(~self.table.stored[self.entries])
        entries, first = np.unique(self.entries[positions], return_index=True)
        order = np.argsort(first, kind="stable")
        asked = positions[first[order]].astype(np.uint64)
        events = np.searchsorted(self.offsets, asked, side="right").astype(np.int64) - 1
        return events, entries[order]

    @property
    def info(self) -> TraceInfo:
        """A description of the trace, for a report."""
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
            clock=self.header.clock,
        )

    @cached_property
    def records_per_event(self) -> float:
        """Mean number of records that an event requests: the groups of one record count once."""
        records = self.table.records[self.entries]
        new = np.ones(len(records), np.bool_)
        new[1:] = records[1:] != records[:-1]
        new[self.offsets[:-1].astype(np.int64)] = True
        return float(new.sum()) / max(self.events, 1)

    def events_before(self, step: int) -> int:
        """The number of events before ``step`` (counted from 0)."""
        return int(np.searchsorted(self.steps, step))

    def head(self, most_requests: int) -> Requests:
        """The first steps with at most ``most_requests`` requests together, at least one step."""
        if len(self.entries) <= most_requests:
            return self
        events = int(np.searchsorted(self.offsets, most_requests, side="right")) - 1
        return self.between(0, max(1, int(self.steps[min(events, self.events - 1)])))

    def tail(self, most_requests: int) -> Requests:
        """The last steps with at most ``most_requests`` requests together, at least one step."""
        if len(self.entries) <= most_requests:
            return self
        skipped = len(self.entries) - most_requests
        event = min(int(np.searchsorted(self.offsets, skipped)), self.events - 1)
        first = int(self.steps[event]) + (1 if event and self.steps[event] == self.steps[event - 1] else 0)
        return self.between(min(first, self.step_count - 1), self.step_count)

    def between(self, first_step: int, end_step: int) -> Requests:
        """The requests of steps ``first_step`` up to ``end_step`` (excluded); all entries stay."""
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
            requesters=self.requesters[first:last],
            layers=self.layers[begin:end],
            phases=self.phases[begin:end],
            steps=self.steps[begin:end] - np.uint32(first_step),
        )


def parse_pins(texts: Iterable[str], *, name: str = "pins") -> list[tuple[int, int]]:
    """``3:17,3:18`` as (layer, index) pairs, in order, each once. Raises ConfigError naming ``name``."""
    found: dict[tuple[int, int], None] = {}
    for text in texts:
        for item in text.split(","):
            layer, colon, index = item.strip().partition(":")
            if not (colon and layer.isdecimal() and index.isdecimal()):
                raise ConfigError(f"{name}: expected LAYER:EXPERT,..., got {item!r}")
            found[int(layer), int(index)] = None
    return list(found)


def pin(requests: Requests, records: Sequence[tuple[int, int]], *, name: str = "pins") -> Requests:
    """``requests`` with ``records`` pinned, all groups of each, in addition to existing pins.

    ``records`` are (layer, index) pairs; the index counts the records of a layer from 0 in the order of the trace.
    Raises ConfigError, naming ``name``, for a record that the trace does not request.
    """
    table = requests.table
    pinned = table.pinned.copy() if len(table.pinned) else np.zeros(len(table), np.uint8)
    for layer, index in records:
        entries = (table.layers == layer) & (table.record_indices == index)
        if not entries.any():
            raise ConfigError(f"{name}: {requests.name} does not request record {layer}:{index}")
        pinned[entries] = 1
    return replace(requests, table=replace(table, pinned=pinned))


def load_requests(path: str | os.PathLike[str], *, name: str | None = None) -> Requests:
    """The requests of the trace at ``path``. Reads a chunk at a time: about 6 bytes a request, 20 an event.

    Raises DataError (a malformed trace, or one without a request) or OSError.
    """
    shown = os.fspath(path)
    with Path(path).open("rb") as file:
        summary = read_summary(file)
        gathered = _Columns(summary.header)
        for chunk in read_chunks(file, summary):
            gathered.add(chunk, shown)
    called = printable(name if name is not None else Path(path).name)
    return gathered.requests(name=called, sha256=summary.sha256, path=shown)


def trace_requests(trace: Trace, *, name: str = "trace") -> Requests:
    """The requests of a trace in memory, such as a generator makes. Raises DataError if it has none."""
    gathered = _Columns(trace.header)
    gathered.add(trace, name)
    return gathered.requests(name=name, sha256="", path=name)


class _Columns:
    """Gathers the columns of one trace, chunk by chunk."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._counting = header.clock != "steps"  # until the first step ends
        self._present = len(header.records) - header.late_records
        self._accesses = self._counted = 0  # that may have been steps, and that were
        self._dropped = np.zeros(len(header.table) * SECTION_GROUPS, np.bool_)
        self._kinds = np.zeros(len(TraceKind), np.int64)
        wide, small = np.zeros(0, np.uint32), np.zeros(0, np.uint8)
        self._parts: dict[str, list[NDArray[Any]]] = {
            **{name: [wide] for name in ("keys", "counts", "layers", "steps")},
            **{name: [small] for name in ("writes", "requesters", "phases")},
        }

    def add(self, chunk: Trace, path: str) -> None:
        """Takes the accesses of ``chunk``. Raises DataError for a record that the header does not have."""
        self._kinds += np.bincount(chunk.kinds, minlength=len(TraceKind))
        accesses = chunk.kinds == TraceKind.ACCESS
        per_event = np.diff(chunk.offsets).astype(np.int64)
        units = np.repeat(accesses, per_event)
        records, flags = chunk.records[units], chunk.flags[units]
        known = len(self._header.table)
        if len(records) and int(records.max()) >= known:
            raise DataError(f"{path}: expected records up to {known - 1}, found {int(records.max())}")
        bits = np.arange(SECTION_GROUPS, dtype=np.uint16)
        needed, dirty, drop = (
            (flags[:, None] >> (bits + shift) & 1).astype(np.bool_) for shift in (0, _DIRTY, _DROP)
        )
        keys = records[:, None] * np.uint32(SECTION_GROUPS) + bits.astype(np.uint32)
        self._dropped[keys[drop]] = True
        requests_before = np.concatenate(([0], np.cumsum(needed.sum(axis=1), dtype=np.int64)))
        bounds = np.concatenate(([0], np.cumsum(per_event[accesses])))
        for name, column in (
            ("keys", keys[needed]),
            ("writes", dirty[needed].astype(np.uint8)),
            ("requesters", np.repeat((flags >> _SEQUENCES).astype(np.uint8), needed.sum(axis=1))),
            ("counts", np.diff(requests_before[bounds]).astype(np.uint32)),
            ("layers", chunk.layers[accesses]),
            ("phases", chunk.phases[accesses]),
            ("steps", (chunk.steps + self._steps_before(chunk))[accesses]),
        ):
            self._parts[name].append(column)

    def _steps_before(self, chunk: Trace) -> NDArray[np.uint32]:
        """The number of accesses that counted as steps before each event of ``chunk`` [events]."""
        counted = (chunk.kinds == TraceKind.ACCESS) & (chunk.counts > 0) & self._counting
        counted &= ~np.isin(chunk.phases, (Phase.INIT, Phase.OPTIMIZER))
        ends = chunk.kinds == TraceKind.END_STEP
        if ends.any():
            counted[int(np.argmax(ends)) :] = False
            self._counting = False
        if self._header.clock == "late_accesses":
            present = self._present + np.cumsum(np.where(chunk.kinds == TraceKind.ADD, chunk.counts, 0))
            self._present = int(present[-1]) if len(present) else self._present
            earlier = self._accesses + np.cumsum(counted) - counted
            self._accesses += int(counted.sum())
            counted &= earlier >= present
        before = np.cumsum(counted, dtype=np.uint32)
        before += np.uint32(self._counted) - counted
        self._counted += int(counted.sum())
        return before

    def requests(self, *, name: str, sha256: str, path: str) -> Requests:
        """All requests, with entries numbered densely. Raises DataError if the trace has none."""
        # One column at a time, so that memory never holds the parts and the whole of all columns.
        whole = {column: np.concatenate(self._parts.pop(column)) for column in list(self._parts)}
        keys, writes, requesters, counts = (
            whole.pop(column) for column in ("keys", "writes", "requesters", "counts")
        )
        left_out = {kind.name.lower().replace("_", "-"): int(self._kinds[kind]) for kind in _LEFT_OUT}
        if self._dropped.any():
            keep = ~self._dropped[keys]
            left_out["discarded requests"] = len(keys) - int(keep.sum())
            kept_before = np.concatenate(([0], np.cumsum(keep, dtype=np.int64)))
            counts = np.diff(kept_before[_offsets(counts).astype(np.int64)]).astype(np.uint32)
            keys, writes, requesters = keys[keep], writes[keep], requesters[keep]
        if not len(keys):
            raise DataError(f"{path}: expected a trace with accesses, found none")
        header, table = self._header, self._header.table
        used = np.zeros(len(table) * SECTION_GROUPS, np.bool_)
        used[keys] = True
        number = np.cumsum(used, dtype=np.uint32) - np.uint32(1)
        used_keys = np.flatnonzero(used).astype(np.uint32)
        records, groups = used_keys // SECTION_GROUPS, used_keys % SECTION_GROUPS
        sizes = table.frames.reshape(-1)[used_keys]
        if (sizes == 0).any():
            empty = int(np.argmin(sizes))
            raise DataError(
                f"{path}: record {records[empty]}: group {groups[empty]} is requested but has no frames"
            )
        np.take(number, keys, out=keys)
        keep_events = counts > 0
        return Requests(
            name=name,
            sha256=sha256,
            offsets=_offsets(counts[keep_events]),
            entries=keys,
            writes=writes,
            requesters=requesters if requesters.any() else np.zeros(0, np.uint8),
            layers=whole["layers"][keep_events],
            phases=whole["phases"][keep_events],
            steps=_numbered(whole["steps"][keep_events]),
            table=EntryTable(
                keys=used_keys,
                layers=table.layers[records],
                frames=sizes,
                nbytes=table.bytes.reshape(-1)[used_keys],
                stored=(table.stored[records] >> groups.astype(np.uint16) & 1).astype(np.bool_),
                record_frames=table.frames.sum(axis=1, dtype=np.uint32)[records],
                record_indices=_record_indices(table.layers)[records],
            ),
            left_out={what: count for what, count in left_out.items() if count},
            oversized=Oversized.BYPASS if header.origin else Oversized.REFUSE,
            header=header,
        )


def _record_indices(layers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The index of each record among those of its layer."""
    order = np.argsort(layers, kind="stable")
    ordered = layers[order]
    indices = np.empty(len(layers), np.uint32)
    indices[order] = np.arange(len(layers)) - np.searchsorted(ordered, ordered)
    return indices


def _offsets(counts: NDArray[np.uint32]) -> NDArray[np.uint64]:
    offsets = np.zeros(len(counts) + 1, np.uint64)
    np.cumsum(counts, out=offsets[1:], dtype=np.uint64)
    return offsets


def _numbered(steps: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Steps from 0 without gaps: a new one begins where the number changes."""
    changed = np.zeros(len(steps), np.uint32)
    changed[1:] = steps[1:] != steps[:-1]
    return np.cumsum(changed, dtype=np.uint32)
