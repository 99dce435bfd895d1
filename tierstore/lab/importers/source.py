"""Sources to import from: opened, unpacked where they are compressed, and read in blocks of lines."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tierstore.errors import CapabilityError, DataError
from tierstore.trace.format import EventColumns
from tierstore.trace.records import RecordTable

_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
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
    """``path`` for reading, unpacked if its first bytes are those of gzip, xz or zstd.

    Raises OSError; DataError for damaged content; CapabilityError for zstd where no package reads it.
    """
    with path.open("rb") as file:
        start = file.read(max(map(len, _MAGIC)))
        file.seek(0)
        name = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
        if name is None:
            yield file
            return
        opened, damage = _unpacking(name, file, path)
        try:
            # Buffered, because a read of an unpacking file ends wherever the decompressor stopped.
            with opened as unpacked, io.BufferedReader(unpacked, 1 << 20) as buffered:
                yield buffered
        except damage as error:
            raise DataError(f"{path}: damaged {name} at byte {file.tell()}: {error}") from error


def _unpacking(name: str, file: BinaryIO, path: Path) -> tuple[Any, tuple[type[Exception], ...]]:
    """``file`` unpacked, and the errors that say that it is damaged."""
    if name == "gzip":
        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if name == "xz":
        return lzma.LZMAFile(file), (EOFError, lzma.LZMAError)
    for module in ("compression.zstd", "backports.zstd"):  # the first is part of Python 3.14
        with suppress(ImportError):
            zstd = importlib.import_module(module)
            return zstd.ZstdFile(file), (EOFError, zstd.ZstdError)
    raise CapabilityError(
        f"{path}: zstd-compressed, which needs backports.zstd: pip install 'tierstore[zstd]'"
    )


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
