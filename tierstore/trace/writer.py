"""Writes traces: event by event, by columns, or as a residency core records them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierstore._native import EventBuffer, Residency, Scope
from tierstore.errors import naming
from tierstore.outputs import OutputKind, replacing
from tierstore.trace.format import (
    DESCRIPTION,
    MAGIC,
    PREAMBLE,
    SLOTS_NOTE,
    VERSIONS,
    Coding,
    EventColumns,
    EventDigest,
    RecordTable,
    TraceHeader,
    TraceKind,
    encode_chunk,
)

_CHUNK_ROWS = 1 << 16  # a chunk is written when it has this many units or events


class TraceWriter:
    """Writes a trace as its events happen, a chunk at a time (a context manager).

    The trace appears at ``path`` when it is closed, and only if it is complete. ``header`` is written last and may be
    assigned until then: importers find records as they read. Raises as
    ``tierstore.outputs.check_output`` does, which is passed ``sources``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: TraceHeader,
        *,
        coding: Coding = Coding.ZLIB,
        sources: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.header = header
        self._coding = coding
        self._output = ExitStack()
        self._file = self._output.enter_context(replacing(path, OutputKind.TRACE, sources=sources))
        self._file.write(PREAMBLE.pack(MAGIC, VERSIONS[0], 0, 0))
        self._digest = EventDigest()
        self._events: list[tuple[int, int, int, int, int, int]] = []
        self._records: list[NDArray[np.uint32]] = []
        self._flags: list[NDArray[np.uint16]] = []
        self._units = 0

    def event(
        self,
        kind: TraceKind,
        *,
        step: int = 0,
        phase: int = 0,
        layer: int = 0,
        at: int = 0,
        records: NDArray[np.uint32] | None = None,
        flags: NDArray[np.uint16] | None = None,
    ) -> None:
        """Appends one event; ``flags`` missing means zeros. The arrays are copied."""
        units = 0 if records is None else len(records)
        self._events.append((units, int(kind), phase, layer, at, step))
        if records is not None and units:
            self._records.append(records.astype(np.uint32))
            self._flags.append(np.zeros(units, np.uint16) if flags is None else flags.astype(np.uint16))
            self._units += units
        if self._units >= _CHUNK_ROWS or len(self._events) >= _CHUNK_ROWS:
            self._flush()

    def extend(self, columns: EventColumns) -> None:
        """Appends many events at once. Raises ValueError for a layer that 16 bits cannot hold."""
        if len(columns) and int(columns.layers.max()) >= 1 << 16:
            raise ValueError(f"layer {int(columns.layers.max())}: expected at most 65535")
        self._flush()
        for part in columns.parts(_CHUNK_ROWS):
            self._write(part)

    def _write(self, columns: EventColumns) -> None:
        self._digest.update(columns)
        self._file.write(encode_chunk(columns, self._coding))

    def _flush(self) -> None:
        if not self._events:
            return
        rows = np.array(self._events, np.int64)
        none_r, none_f = np.zeros(0, np.uint32), np.zeros(0, np.uint16)
        self._write(
            EventColumns.build(
                rows[:, 0],
                np.concatenate((none_r, *self._records)),
                kinds=rows[:, 1],
                phases=rows[:, 2],
                layers=rows[:, 3],
                at=rows[:, 4],
                steps=rows[:, 5],
                flags=np.concatenate((none_f, *self._flags)),
            )
        )
        self._events, self._records, self._flags, self._units = [], [], [], 0

    def close(self) -> None:
        """Writes what is buffered and the description, which completes the trace."""
        if self._file.closed:
            return
        with self._output:
            self._flush()
            start = self._file.tell()
            text, table = self.header.to_json().encode(), self.header.table
            runs = table.encode()
            self._file.write(
                DESCRIPTION.pack(
                    b"DESC",
                    len(text),
                    len(runs),
                    zlib.crc32(text + runs),
                    self._digest.events,
                    self._digest.units,
                    self._digest.digest(table),
                )
            )
            self._file.write(text + runs)
            self._file.seek(0)
            self._file.write(PREAMBLE.pack(MAGIC, self.header.version, 0, start))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._output.__exit__(kind, error, trace)  # an incomplete trace is dropped


_BUFFER_ROWS = 1 << 15  # events or units that are written at once: half of the writer's chunk


class TraceRecorder:
    """Records the requests to ``residency`` in a trace at ``path`` (a context manager).

    Make it before the core's first record. ``close()`` completes the trace; the core continues unrecorded. If the file
    cannot be written, the core's requests still succeed: recording stops (``failure``), no trace is left, and ``close()``
    raises the OSError.
    """

    def __init__(self, path: str | os.PathLike[str], residency: Residency) -> None:
        if residency.record_count:
            raise ValueError("a trace must be recorded from the first record on")
        self._residency = residency
        self._path = path
        self._writer = TraceWriter(path, _header(residency))
        self._events = EventBuffer(_BUFFER_ROWS, self._write)
        self._failure: OSError | None = None
        residency.observe(self._events)
        self._notes: list[str] = []
        self._slots: list[TraceRecorder] = []
        self._closed = False

    def _write(self, *columns: Any) -> None:
        if self._failure is not None:
            return
        try:
            with naming(self._path):
                self._writer.extend(EventColumns(*columns))
        except OSError as error:
            self._failure = error
            with suppress(OSError):  # of the events still buffered
                self._writer.__exit__(OSError, error, None)

    @property
    def failure(self) -> OSError | None:
        """The error that stopped the recording, of the core or of slots; there will be no trace of it."""
        return next(
            (each for each in (self._failure, *(slots.failure for slots in self._slots)) if each), None
        )

    def note(self, text: str) -> None:
        """Adds a note to the header."""
        self._notes.append(text)

    def record_slots(self, residency: Residency) -> None:
        """Records ``residency``, the core of a device's slots, in a trace of its own, which ``close`` completes, too:
        ``run.device-1.trace`` beside ``run.trace``, whose header names it (``slot_traces``). Nothing is recorded
        beside a pipe, or after ``close``.
        """
        path = Path(self._path)
        if self._closed or (path.exists() and not path.is_file()):
            return
        beside = path.with_name(f"{path.stem}.device-{len(self._slots) + 1}{path.suffix}")
        self._slots.append(TraceRecorder(beside, residency))
        self.note(SLOTS_NOTE + beside.name)

    def close(self) -> None:
        """Completes the trace, and those of slots."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as slots:
            for recorder in self._slots:
                slots.callback(recorder.close)
            self._complete()

    def _complete(self) -> None:
        self._residency.observe(None)
        with naming(self._path), self._writer as writer:
            self._events.flush()
            if self._failure is not None:
                raise self._failure
            # Frames and sizes lie one after another, three a record.
            layers, frames, sizes, stored = self._events.records()
            triples = frames.reshape(-1, 3), sizes.reshape(-1, 3)
            writer.header = replace(
                writer.header,
                records=RecordTable.of_columns(layers, *triples, stored, count=len(layers)),
                late_records=self._events.late_records,
                notes=tuple(self._notes),
                clock=self._residency.recorded_clock.name.lower(),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _header(residency: Residency) -> TraceHeader:
    """The header of a new core, without its records."""
    return TraceHeader(
        capacity_frames=residency.capacity_frames,
        lookahead_frames=residency.lookahead_frames,
        scope="layer" if residency.scope is Scope.LAYER else "global",
        layer_quotas=tuple(residency.layer_quotas),
        group_order=residency.group_order.name.lower().replace("_", "-"),
        policy=residency.policy,
        policy_options=residency.policy_options,
    )
