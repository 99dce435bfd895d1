"""Files of traces: read whole or a chunk at a time; written event by event, by columns, or as a residency core records
them. An error for malformed data names file and byte.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tierstore._native import EventBuffer, Residency, Scope
from tierstore.errors import DataError, naming
from tierstore.outputs import OutputKind, replacing
from tierstore.trace.format import (
    CHUNK,
    DESCRIPTION,
    MAGIC,
    MAX_CHUNK,
    PREAMBLE,
    SLOTS_NOTE,
    VERSIONS,
    Coding,
    EventColumns,
    EventDigest,
    RecordTable,
    Trace,
    TraceHeader,
    TraceKind,
    decode_chunk,
    encode_chunk,
)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace's description, read without its events. ``sha256`` is hexadecimal."""

    header: TraceHeader
    events: int
    units: int
    sha256: str


def _read(file: BinaryIO, count: int, what: str) -> bytes:
    offset = file.tell()
    data = file.read(count)
    if len(data) != count:
        raise DataError(
            f"{file.name}: at byte {offset}: expected {what} ({count} bytes), found {len(data)} bytes"
        )
    return data


def _refuse(file: BinaryIO, offset: int, expected: str, found: object) -> DataError:
    return DataError(f"{file.name}: at byte {offset}: expected {expected}, found {found}")


def _read_preamble(file: BinaryIO) -> tuple[int, int]:
    """Checks the preamble; returns the version and the byte of the description."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise _refuse(file, 0, f"a trace (it starts with {MAGIC!r})", repr(magic))
    rest = _read(file, PREAMBLE.size - len(MAGIC), "the rest of the preamble")
    _, version, _, start = PREAMBLE.unpack(MAGIC + rest)
    if version not in VERSIONS:
        raise _refuse(file, 8, "version " + " or ".join(map(str, VERSIONS)), version)
    if start == 0:
        raise _refuse(file, 16, "where the description is", "none: the trace was not completed")
    return int(version), int(start)


def read_summary(file: BinaryIO) -> TraceSummary:
    """Reads the description of the trace in ``file``, from its start. Leaves ``file`` at the first chunk.

    Raises DataError.
    """
    version, start = _read_preamble(file)
    file.seek(start)
    head = _read(file, DESCRIPTION.size, "the description of the trace")
    tag, text_bytes, table_bytes, crc, events, units, sha256 = DESCRIPTION.unpack(head)
    if tag != b"DESC":
        raise _refuse(file, start, "the tag DESC", repr(tag))
    text = _read(file, text_bytes, "the header")
    table = _read(file, table_bytes, "the table of records")
    if file.read(1):
        raise _refuse(file, file.tell() - 1, "nothing after the description", "more")
    if crc != zlib.crc32(text + table):
        raise _refuse(file, start, "a description with its crc32", "another one")
    try:
        records = RecordTable.decode(table)
    except ValueError as error:
        raise _refuse(file, start + DESCRIPTION.size + text_bytes, "a table of records", error) from error
    try:
        header = TraceHeader.from_json(text.decode(), records)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refuse(file, start + DESCRIPTION.size, "a header", f"malformed JSON ({error})") from error
    if header.version != version:
        raise _refuse(
            file, 8, f"version {header.version} (by its parts, clock, notes and records added late)", version
        )
    file.seek(PREAMBLE.size)
    return TraceSummary(header, events, units, sha256.hex())


def read_header(file: BinaryIO) -> TraceHeader:
    """The header alone, as in ``read_summary``."""
    return read_summary(file).header


def read_chunks(file: BinaryIO, summary: TraceSummary) -> Iterator[Trace]:
    """Yields the chunks of ``file``, which is at the first of them, each as columns.

    After the last it checks that they are the events that ``summary`` counts and hashes. Raises DataError.
    """
    digest = EventDigest()
    while True:
        start = file.tell()
        head = _read(file, CHUNK.size, "a chunk or the description")
        tag, events, units, size, crc, coding, constant, _ = CHUNK.unpack(head)
        if tag == b"DESC":
            return _verify(file, start, digest, summary)
        if tag != b"CHNK":
            raise _refuse(file, start, "the tag CHNK or DESC", repr(tag))
        if max(events, units) > MAX_CHUNK:
            raise _refuse(
                file, start + 4, f"at most {MAX_CHUNK} events or units in a chunk", f"{events} and {units}"
            )
        payload = _read(file, size, f"a chunk of {events} events and {units} units")
        if zlib.crc32(payload) != crc:
            raise _refuse(file, start, "a chunk with its crc32", "another one")
        try:
            columns = decode_chunk(payload, events=events, units=units, coding=coding, constant=constant)
        except ValueError as error:
            raise _refuse(file, start, f"a chunk of {events} events and {units} units", error) from error
        digest.update(columns)
        yield Trace(header=summary.header, **vars(columns))


def _verify(file: BinaryIO, start: int, digest: EventDigest, summary: TraceSummary) -> None:
    """Raises DataError if chunks do not match the description: one is missing, repeated, or of another trace."""
    if (digest.events, digest.units) != (summary.events, summary.units):
        raise _refuse(
            file,
            start,
            f"{summary.events} events and {summary.units} units in all",
            f"{digest.events} and {digest.units}",
        )
    found = digest.digest(summary.header.table).hex()
    if found != summary.sha256:
        raise _refuse(file, start, f"events with the sha256 {summary.sha256[:16]}...", f"{found[:16]}...")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """The whole trace in memory. Raises DataError naming file, byte and what was expected, or OSError."""
    with Path(path).open("rb") as file:
        summary = read_summary(file)
        chunks = list(read_chunks(file, summary))
    if len(chunks) == 1:
        return chunks[0]
    return Trace(header=summary.header, **vars(EventColumns.joined(chunks)))


# Writing ----------------------------------------------------------------------------------------------------

_CHUNK_ROWS = 1 << 16  # a chunk is written when it has this many units or events


class TraceWriter:
    """Writes a trace as its events happen, a chunk at a time. A context manager.

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
        parts=residency.parts,
    )
