"""Writes traces, event by event or by columns."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tierstore.outputs import OutputKind, replacing
from tierstore.trace.format import (
    DESCRIPTION,
    MAGIC,
    PREAMBLE,
    VERSIONS,
    Coding,
    EventColumns,
    EventDigest,
    TraceHeader,
    TraceKind,
    encode_chunk,
)

_CHUNK_ROWS = 1 << 16  # a chunk is written when it has this many units or events


class TraceWriter:
    """Writes a trace as its events happen, a chunk at a time (a context manager).

    The trace appears at ``path`` when it is closed; what was not completed does not. ``header`` is written last: it may be
    replaced up to then by assigning it, as an importer does that meets records as it reads. Raises as
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
            self._output.__exit__(kind, error, trace)  # half a trace is none
