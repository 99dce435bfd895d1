"""Reads traces, whole or a chunk at a time. An error for malformed data names file and byte."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tierstore.errors import DataError
from tierstore.trace.format import (
    CHUNK,
    DESCRIPTION,
    MAGIC,
    MAX_CHUNK,
    PREAMBLE,
    VERSIONS,
    EventColumns,
    EventDigest,
    RecordTable,
    Trace,
    TraceHeader,
    decode_chunk,
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
    """Reads the description of the trace in ``file``, from its start; leaves ``file`` at the first chunk.

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
            file, 8, f"version {header.version} (by its clock, notes and the records added late)", version
        )
    file.seek(PREAMBLE.size)
    return TraceSummary(header, events, units, sha256.hex())


def read_header(file: BinaryIO) -> TraceHeader:
    """The header alone, as ``read_summary`` reads it."""
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
