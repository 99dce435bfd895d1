"""Records the trace of a residency core: an observer in the core buffers its events, the writer takes them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tierstore._native import EventBuffer, GroupOrder, Residency, Scope
from tierstore.errors import naming
from tierstore.trace.format import EventColumns, TraceHeader
from tierstore.trace.records import RecordTable
from tierstore.trace.writer import TraceWriter

_BUFFER_ROWS = 1 << 15  # events or units that are written at once: half of the writer's chunk


class TraceRecorder:
    """Records what ``residency`` is asked in a trace at ``path`` (a context manager).

    It comes before the core's first record. ``close()`` completes the trace; the core goes on unrecorded. A file that
    cannot be written fails nothing that the core is asked: no more is recorded (``failure``), no trace is left, and
    ``close()`` raises the OSError.
    """

    def __init__(self, path: str | os.PathLike[str], residency: Residency) -> None:
        if residency.record_count:
            raise ValueError("a trace is recorded from the first record on")
        self._residency = residency
        self._path = path
        self._writer = TraceWriter(path, _header(residency))
        self._events = EventBuffer(_BUFFER_ROWS, self._write)
        #: Why there will be no trace.
        self.failure: OSError | None = None
        residency.observe(self._events)
        self._notes: list[str] = []
        self._closed = False

    def _write(self, *columns: Any) -> None:
        if self.failure is not None:
            return
        try:
            with naming(self._path):
                self._writer.extend(EventColumns(*columns))
        except OSError as error:
            self.failure = error
            with suppress(OSError):  # of what is still buffered
                self._writer.__exit__(OSError, error, None)

    def note(self, text: str) -> None:
        """Adds a note to the header."""
        self._notes.append(text)

    def close(self) -> None:
        """Completes the trace."""
        if self._closed:
            return
        self._closed = True
        self._residency.observe(None)
        with naming(self._path), self._writer as writer:
            self._events.flush()
            if self.failure is not None:
                raise self.failure
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
    """The core as it is made, without its records."""
    return TraceHeader(
        capacity_frames=residency.capacity_frames,
        lookahead_frames=residency.lookahead_frames,
        scope="layer" if residency.scope is Scope.LAYER else "global",
        layer_quotas=tuple(residency.layer_quotas),
        group_order="key" if residency.group_order is GroupOrder.KEY else "resident-first",
        policy=residency.policy,
        policy_options=residency.policy_options,
    )
