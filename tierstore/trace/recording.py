"""A residency core that writes down what it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierstore._native import EntryState, GroupOrder, Residency, Scope
from tierstore.trace.format import TraceHeader, TraceKind
from tierstore.trace.records import TraceRecord
from tierstore.trace.writer import TraceWriter

__all__ = ["RecordingResidency"]

Decisions = tuple[NDArray[np.uint8], NDArray[np.uint32]]
Records = NDArray[np.uint32]
Flags = NDArray[np.uint16]


class RecordingResidency:
    """``Residency`` with a trace: the same methods and answers, written to ``path`` as they succeed.

    All records must be added before anything else is asked. ``close()`` (or leaving it as a context manager)
    completes the trace; the core can be used afterwards, unrecorded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_frames: int,
        *,
        policy: str = "lfu-decay",
        policy_options: Mapping[str, float | str] | None = None,
        scope: Scope = Scope.GLOBAL,
        lookahead_frames: int = 0,
        layer_quotas: Sequence[int] = (),
        group_order: GroupOrder = GroupOrder.RESIDENT_FIRST,
    ) -> None:
        self._path = path
        self._core = Residency(
            capacity_frames,
            policy=policy,
            policy_options=dict(policy_options or {}),
            scope=scope,
            lookahead_frames=lookahead_frames,
            layer_quotas=list(layer_quotas),
            group_order=group_order,
        )
        self._records: list[TraceRecord] = []
        self._settings = TraceHeader(
            capacity_frames=capacity_frames,
            lookahead_frames=lookahead_frames,
            scope="layer" if scope is Scope.LAYER else "global",
            layer_quotas=tuple(layer_quotas),
            group_order="key" if group_order is GroupOrder.KEY else "resident-first",
            policy=policy,
            policy_options=dict(policy_options or {}),
        )
        self._writer: TraceWriter | None = None
        self._closed = False
        self._step = 0
        self._groups_begun = 0
        self._ended: list[int] = []  # units of the open group that ended, not yet in the trace

    def _write(
        self,
        kind: TraceKind,
        records: Records | None = None,
        flags: Flags | None = None,
        *,
        phase: int = 0,
        layer: int = 0,
    ) -> None:
        if self._closed:
            return
        writer = self._start()
        at = 0
        if self._core.access_open and kind is not TraceKind.ACCESS:
            at = 2 * self._groups_begun + (0 if self._core.group_open else 1)
        if self._ended and kind is not TraceKind.END_UNIT:
            ended = np.array(self._ended, np.uint32)
            self._ended = []
            writer.event(TraceKind.END_UNIT, step=self._step, at=at, records=ended)
        writer.event(kind, step=self._step, phase=phase, layer=layer, at=at, records=records, flags=flags)

    def _start(self) -> TraceWriter:
        if self._writer is None:
            header = TraceHeader(**{**vars(self._settings), "records": tuple(self._records)})
            self._writer = TraceWriter(self._path, header)
        return self._writer

    def close(self) -> None:
        """Completes the trace."""
        if not self._closed:
            self._start().close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_record(
        self, layer: int, group_frames: Sequence[int], group_bytes: Sequence[int], stored_mask: int
    ) -> int:
        if self._writer is not None:
            raise ValueError("a recorded run must add its records before anything else")
        record = self._core.add_record(layer, group_frames, group_bytes, stored_mask)
        weights, moments, gradients = group_frames
        sizes = (group_bytes[0], group_bytes[1], group_bytes[2])
        self._records.append(TraceRecord(layer, (weights, moments, gradients), sizes, stored_mask))
        return record

    def set_stored(self, record: int, mask: int) -> None:
        self._core.set_stored(record, mask)
        if self._writer is None and not self._closed:
            known = self._records[record]
            self._records[record] = TraceRecord(known.layer, known.frames, known.bytes, mask)
        else:
            self._write(TraceKind.SET_STORED, np.array([record], np.uint32), np.array([mask], np.uint16))

    def begin_access(
        self, step: int, phase: int, layer: int, records: Records, flags: Flags
    ) -> tuple[int, NDArray[np.uint32]]:
        split = self._core.begin_access(step, phase, layer, records, flags)
        self._step, self._groups_begun, self._ended = step, 0, []
        self._write(TraceKind.ACCESS, records, flags, phase=phase, layer=layer)
        return split

    def next_group(self) -> tuple[NDArray[np.uint32], Decisions, Decisions]:
        group = self._core.next_group()
        self._groups_begun += 1
        return group

    def end_unit(self, unit: int) -> Decisions:
        decided = self._core.end_unit(unit)
        self._ended.append(unit)
        return decided

    def end_group(self) -> Decisions:
        decided = self._core.end_group()
        self._ended = []
        return decided

    def prefetch(
        self, step: int, phase: int, layer: int, records: Records, flags: Flags
    ) -> tuple[int, Decisions]:
        taken = self._core.prefetch(step, phase, layer, records, flags)
        self._write(TraceKind.PREFETCH, records, flags, phase=phase, layer=layer)
        return taken

    def cancel_prefetch(self) -> None:
        self._core.cancel_prefetch()
        self._write(TraceKind.CANCEL)

    def pin(self, records: Records, flags: Flags) -> None:
        self._core.pin(records, flags)
        self._write(TraceKind.PIN, records, flags)

    def unpin(self, records: Records, flags: Flags) -> Decisions:
        decided = self._core.unpin(records, flags)
        self._write(TraceKind.UNPIN, records, flags)
        return decided

    def clean(self, records: Records | None = None) -> Decisions:
        decided = self._core.clean(records)
        self._write(TraceKind.CLEAN_ALL if records is None else TraceKind.CLEAN, records)
        return decided

    def drop(self, entries: NDArray[np.uint32]) -> Decisions:
        decided = self._core.drop(entries)
        self._write(TraceKind.DROP, entries)
        return decided

    def end_step(self, step: int) -> None:
        self._core.end_step(step)
        self._step = step
        self._write(TraceKind.END_STEP)

    def stats(self) -> dict[str, object]:
        return self._core.stats()

    def state(self, entry: int) -> EntryState:
        return self._core.state(entry)

    def resident_entries(self) -> NDArray[np.uint32]:
        return self._core.resident_entries()

    def dirty_entries(self) -> NDArray[np.uint32]:
        return self._core.dirty_entries()

    @property
    def policy_failed(self) -> bool:
        return self._core.policy_failed

    @property
    def used_frames(self) -> int:
        return self._core.used_frames

    @property
    def capacity_frames(self) -> int:
        return self._core.capacity_frames

    @property
    def record_count(self) -> int:
        return self._core.record_count

    @property
    def access_open(self) -> bool:
        return self._core.access_open

    @property
    def group_open(self) -> bool:
        return self._core.group_open
