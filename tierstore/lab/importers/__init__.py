"""Sources to import from: opened, unpacked where they are compressed, and read in blocks of lines."""

from __future__ import annotations

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tierstore.errors import CapabilityError, ConfigError, DataError
from tierstore.trace.format import EventColumns, RecordTable

_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_SKIPPABLE = b"\x2a\x4d\x18"  # behind a byte 50 to 5f: a frame that zstd passes over, as pzstd writes them
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # of UTF-16 and UTF-32
_BLOCK_BYTES = 1 << 22
DEFAULT_WINDOW_LOG, _LARGEST_WINDOW_LOG = 27, 31  # zstd's own limits: without --long, and with it


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How every source is read."""

    window_log: int = field(
        default=DEFAULT_WINDOW_LOG,
        metadata={
            "help": "log2 of the largest window of zstd to read, which takes as much memory (up to 31)"
        },
    )

    def __post_init__(self) -> None:
        if not 10 <= self.window_log <= _LARGEST_WINDOW_LOG:
            raise ConfigError(f"window_log: expected 10 to {_LARGEST_WINDOW_LOG}, got {self.window_log}")


class Importer(Protocol):
    """One source being read. The records are all known once the chunks have been read to their end."""

    def chunks(self) -> Iterator[EventColumns]:
        """The events. Raises DataError naming the file, line or byte, and what is wrong."""

    def table(self) -> RecordTable:
        """The records that the chunks refer to."""

    def names(self) -> Iterator[str]:
        """The source's names of the records, in order of their numbers; names contain no line breaks."""

    def columns(self) -> Mapping[str, str]:
        """The fields or columns of the source that were read, in words; known once a chunk has been read."""


@contextmanager
def open_source(path: Path, window_log: int = _LARGEST_WINDOW_LOG) -> Iterator[BinaryIO]:
    """``path`` for reading, unpacked if its first bytes are those of gzip, xz or zstd (its window at most
    ``2 ** window_log`` bytes).

    Raises OSError; DataError for damaged content; CapabilityError for zstd where no package reads it.
    """
    with path.open("rb") as file:
        start = file.read(max(map(len, _MAGIC)))
        file.seek(0)
        name = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
        if start[1:4] == _SKIPPABLE and start[0] >> 4 == 5:
            name = "zstd"
        if name is None:
            yield file
            return
        opened, damage = _unpacking(name, file, path, window_log)
        try:
            # Buffered, because a read of an unpacking file ends wherever the decompressor stopped.
            with opened as unpacked, io.BufferedReader(unpacked, 1 << 20) as buffered:
                yield buffered
        except damage as error:
            if name == "zstd" and "memory" in str(error):
                raise DataError(
                    f"{path}: a zstd window above 2^{window_log} bytes: expected --set window_log="
                    f"{_LARGEST_WINDOW_LOG}, which may take 2 GiB of memory"
                ) from error
            raise DataError(f"{path}: damaged {name} at byte {file.tell()}: {error}") from error


@contextmanager
def open_text(path: Path, window_log: int) -> Iterator[BinaryIO]:
    """As ``open_source``, behind a byte-order mark. Raises DataError for that of another encoding than UTF-8."""
    with open_source(path, window_log) as file:
        head = file.read(4)
        refuse_wide(path, head)
        file.seek(len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0)
        yield file


def refuse_wide(path: Path, head: bytes) -> None:
    if head.startswith(_WIDE_MARKS):
        raise DataError(f"{path}: UTF-16 or UTF-32, by its byte-order mark; expected UTF-8")


def _unpacking(
    name: str, file: BinaryIO, path: Path, window_log: int
) -> tuple[Any, tuple[type[Exception], ...]]:
    """``file`` unpacked, and the errors that say that it is damaged."""
    if name == "gzip":
        return gzip.GzipFile(fileobj=file), (EOFError, gzip.BadGzipFile, zlib.error)
    if name == "xz":
        return lzma.LZMAFile(file), (EOFError, lzma.LZMAError)
    for module in ("compression.zstd", "backports.zstd"):  # the first is part of Python 3.14
        with suppress(ImportError):
            zstd = importlib.import_module(module)
            largest = {zstd.DecompressionParameter.window_log_max: window_log}
            return zstd.ZstdFile(file, options=largest), (EOFError, zstd.ZstdError)
    raise CapabilityError(
        f"{path}: zstd-compressed, which needs backports.zstd: pip install 'tierstore[zstd]'"
    )


def line_blocks(file: BinaryIO, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, list[bytes]]]:
    """The lines of ``file`` without their ends (``\\n`` or ``\\r\\n``; the last need not be ended) in blocks, each with the
    number of its first line, from 1.
    """
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
            yield first, lines
            first += len(lines)
        if not block:
            return


def refuse_line(path: Path, line: int, reason: str) -> DataError:
    return DataError(f"{path}: line {line}: {reason}")
