"""Text in columns: one request a line, key (and size) in columns that options or a header name."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError
from tierstore.lab.importers import open_text, refuse_line
from tierstore.lab.importers.plain import KeyOptions, KeyRequests

_BLOCK = 1 << 13  # rows: few enough that the garbage collector stays out of the old ones
_MAX_SIZE = 2**62
_SEEN = 100  # rows that show whether the first one is a header
_TABS = ("tab", "\\t")
# Usual names of columns in headers, in lower case and without blanks, dots, - and _.
_KEYS = re.compile(r"(cache)?key(id)?|id|(obj|object|item|block)(id)?|lbn")
_SIZES = re.compile(r"(obj|object|value)?size(inbytes)?|bytes")
_TIMES = re.compile(r"time(stamp)?|ts")


@dataclass(frozen=True, kw_only=True)
class CsvOptions(KeyOptions):
    """Which columns. A column is a number, from 1, or a name that the header gives."""

    key: str | None = field(
        default=None,
        metadata={
            "help": "column of the key: a number from 1, or a name (none: one called key, obj_id.., or the first)"
        },
    )
    size: str | None = field(default=None, metadata={"help": "column of the size in bytes (none: no sizes)"})
    delimiter: str | None = field(
        default=None,
        metadata={
            "help": "one character between columns, or the word tab (none: commas, or else the tabs, of the first line)"
        },
    )
    skip_lines: int = field(default=0, metadata={"help": "lines to skip at the start"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delimiter not in (None, *_TABS) and not re.fullmatch(r'[^"\r\n\0]', self.delimiter or ""):
            raise ConfigError(
                f"delimiter: expected one character, not a quote, or the word tab, got {self.delimiter!r}"
            )
        if not 0 <= self.skip_lines < 2**63:
            raise ConfigError(f"skip_lines: expected at least 0, got {self.skip_lines}")


def csv_requests(path: Path, options: CsvOptions, columns: dict[str, str]) -> Iterator[KeyRequests]:
    """Keys and sizes of the rows, whose cells may be quoted; ``columns`` receives which columns they are. Raises DataError
    naming the line.
    """
    with open_text(path, options.window_log) as file:
        delimiter = _delimiter(file, options)
        columns["delimiter"] = {"\t": "tab", " ": "blank"}.get(delimiter, delimiter)
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            for _ in islice(reader, options.skip_lines):
                pass
            before = reader.line_num
            first = list(islice(reader, 1))
            after_first = reader.line_num
            head = first + list(islice(reader, _SEEN))
            key, size, header = _columns(path, options, head, columns)
            if header:
                before = after_first
            rows = chain(head[1:] if header else head, reader)
            while block := list(islice(rows, _BLOCK)):
                found = _requests(block, key, size)
                if found is None:
                    raise _refusal(path, block, key, size, before)
                yield found
                before = reader.line_num
        except csv.Error as error:
            raise refuse_line(path, reader.line_num, str(error)) from error


def _delimiter(file: BinaryIO, options: CsvOptions) -> str:
    """The character between columns; the position of ``file`` does not change."""
    if options.delimiter is not None:
        return "\t" if options.delimiter in _TABS else options.delimiter
    start = file.tell()
    first = list(islice(file, options.skip_lines, options.skip_lines + 1))
    file.seek(start)
    return "\t" if first and b"\t" in first[0] and b"," not in first[0] else ","


def _columns(
    path: Path, options: CsvOptions, head: list[list[str]], columns: dict[str, str]
) -> tuple[int, int | None, bool]:
    """Indices of key and size, and whether the first row of ``head`` is a header. ``columns`` receives them in
    words.
    """
    wanted = [name for name in (options.key, options.size) if name is not None]
    named = not all(_is_index(name) for name in wanted)
    index_of_key = int(options.key) - 1 if options.key is not None and _is_index(options.key) else 0
    header = named or _is_header(head, index_of_key)
    names = [name.strip() for name in head[0]] if header and head else []
    usual = [_usual(name) for name in names]

    def index(name: str) -> int:
        if name.strip() in names:
            return names.index(name.strip())
        if not _is_index(name):
            found = ", ".join(names) or "none"
            raise refuse_line(path, options.skip_lines + 1, f"expected a column {name!r}, found {found}")
        return int(name) - 1

    def shown(column: int) -> str:
        return f"column {column + 1}" + (f" ({names[column]})" if column < len(names) else "")

    if options.key is None:
        others = [column for column, name in enumerate(usual) if not _is_amount(name)] or [0]
        key = next((column for column in others if names and _KEYS.fullmatch(usual[column])), others[0])
    else:
        key = index(options.key)
    size = None if options.size is None else index(options.size)
    unread = [column for column, name in enumerate(usual) if _SIZES.fullmatch(name) and column != key]
    columns["header"] = f"line {options.skip_lines + 1}" if header else "none"
    columns["key"] = shown(key)
    columns["size"] = "none" if size is None else shown(size)
    if size is None and unread:
        columns["size"] += f" ({shown(unread[0])} is not read: --set size={unread[0] + 1})"
    columns["time"] = "not read"
    return key, size, header


def _is_index(name: str) -> bool:
    return name.isdecimal() and len(name) < 10 and int(name) > 0


def _usual(name: str) -> str:
    return "".join(name.lower().split()).translate(dict.fromkeys(map(ord, "-_.")))


def _is_amount(usual: str) -> bool:
    return bool(_SIZES.fullmatch(usual) or _TIMES.fullmatch(usual))


def _is_header(head: list[list[str]], key: int) -> bool:
    """Whether the first row names columns:

    - no cell is a number,
    - no cell comes again below in its column, and
    - at least one cell is a usual name of keys, or stands above nothing but numbers (in the key's column only if it is also
      a usual name of sizes or times).
    """
    said = False
    for column, cell in enumerate(head[0] if head else []):
        below = [row[column] for row in head[1:] if column < len(row)]
        if _is_number(cell) or (cell.strip() and cell in below):
            return False
        numbers = below != [] and all(map(_is_number, below))
        usual = _usual(cell)
        said |= _KEYS.fullmatch(usual) is not None
        said |= numbers and usual != "" and (column != key or _is_amount(usual))
    return said


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _requests(block: list[list[str]], key: int, size: int | None) -> KeyRequests | None:
    """The rows as columns; None where one of them is wrong."""
    sizes: NDArray[np.int64] | None = None
    try:
        keys = [row[key] for row in block]
        if size is not None:
            sizes = np.fromiter((int(row[size]) for row in block), np.int64, len(block))
    except (IndexError, ValueError, OverflowError):
        return None
    sized = sizes is None or (int(sizes.min()) >= 0 and int(sizes.max()) <= _MAX_SIZE)
    return (keys, sizes) if sized and "" not in keys else None


def _refusal(path: Path, block: list[list[str]], key: int, size: int | None, before: int) -> Exception:
    """The error for the first wrong row of ``block``. If quoted cells contain line breaks, its line is approximate."""
    line, row = next(
        (line, row) for line, row in enumerate(block, before + 1) if _requests([row], key, size) is None
    )
    columns = max(key, size or 0) + 1
    if len(row) < columns:
        return refuse_line(path, line, f"expected at least {columns} columns, found {len(row)}")
    if not row[key] or size is None:
        return refuse_line(path, line, f"expected a key in column {key + 1}, found nothing")
    most = ", more than 2^62" if row[size].strip().isdecimal() else ""
    return refuse_line(path, line, f"expected a size in bytes, found {row[size][:60]!r}{most}")
