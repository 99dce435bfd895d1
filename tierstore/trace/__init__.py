"""Reads and writes traces of cache decisions, format versions 2 to 6. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.trace.files import TraceSummary as TraceSummary
    from tierstore.trace.files import TraceWriter as TraceWriter
    from tierstore.trace.files import load_trace as load_trace
    from tierstore.trace.files import read_header as read_header
    from tierstore.trace.files import read_summary as read_summary
    from tierstore.trace.format import Coding as Coding
    from tierstore.trace.format import EventColumns as EventColumns
    from tierstore.trace.format import RecordTable as RecordTable
    from tierstore.trace.format import Trace as Trace
    from tierstore.trace.format import TraceHeader as TraceHeader
    from tierstore.trace.format import TraceKind as TraceKind
    from tierstore.trace.format import TraceRecord as TraceRecord
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
