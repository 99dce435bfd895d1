"""Sources to import from: opened, unpacked where they are compressed, and read in blocks of lines."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from tierstore.errors import DataError
from tierstore.trace.format import EventColumns
from tierstore.trace.records import RecordTable

__all__ = ["Importer", "LineBlock", "line_blocks", "open_source", "refuse_line"]

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 1 << 22


class Importer(Protocol):
    """One source being read. The records are all known once the chunks have been read to their end."""

    def chunks(self) -> Iterator[EventColumns]:
        """The events. Raises DataError naming the file, line or byte, and what is wrong."""

    def table(self) -> RecordTable:
        """The records that the chunks refer to."""

    def names(self) -> Iterator[str]:
        """What the source calls each record, in order of their numbers."""


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """``path`` for reading, through gzip if it starts as gzip does. Raises OSError; DataError for bad gzip."""
    with path.open("rb") as file:
        start = file.read(len(_ZSTD))
        file.seek(0)
        if start == _ZSTD:
            raise DataError(f"{path}: zstd-compressed, which is not read here; unpack it first (zstd -d)")
        if start[: len(_GZIP)] != _GZIP:
            yield file
            return
        try:
            # Buffered, because a read of GzipFile ends wherever the decompressor stopped.
            with gzip.GzipFile(fileobj=file) as unpacked, io.BufferedReader(unpacked, 1 << 20) as buffered:
                yield buffered
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip at byte {file.tell()}: {error}") from error


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Lines without their ends; the first of them is number ``first`` (from 1)."""

    first: int
    lines: list[bytes]


def line_blocks(file: BinaryIO, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[LineBlock]:
    """The lines of ``file``, ended by ``\\n`` or ``\\r\\n``; the last need not be ended."""
    first, rest = 1, b""
    while True:
        block = file.read(block_bytes)
        whole = rest + block
        lines = whole.split(b"\n")
        rest = lines.pop() if block else b""
        if b"\r" in whole:
            lines = [line.removesuffix(b"\r") for line in lines]
        if not block and lines == [b""]:
            return
        if lines:
            yield LineBlock(first, lines)
            first += len(lines)
        if not block:
            return


def refuse_line(path: Path, line: int, reason: str) -> DataError:
    return DataError(f"{path}: line {line}: {reason}")
