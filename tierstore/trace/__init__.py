"""Traces of cache decisions: reading and writing files of format versions 2 to 6. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.trace.format import (
        Coding,
        EventColumns,
        RecordTable,
        Trace,
        TraceHeader,
        TraceKind,
        TraceRecord,
    )
    from tierstore.trace.reader import TraceSummary, load_trace, read_header, read_summary
    from tierstore.trace.writer import TraceWriter
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "Coding",
    "EventColumns",
    "RecordTable",
    "Trace",
    "TraceHeader",
    "TraceKind",
    "TraceRecord",
    "TraceSummary",
    "TraceWriter",
    "load_trace",
    "read_header",
    "read_summary",
]
