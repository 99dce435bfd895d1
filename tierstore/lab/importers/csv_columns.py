"""Text in columns: one request a line, key (and size) in columns that options name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError
from tierstore.lab.importers.keys import KeyOptions, KeyRequests
from tierstore.lab.importers.source import open_source, refuse_line

_BLOCK = 1 << 13  # rows: few enough that the garbage collector stays out of the old ones
_MAX_SIZE = 2**62


@dataclass(frozen=True, kw_only=True)
class CsvOptions(KeyOptions):
    """Which columns. A column is a number, from 1, or a name that the first line gives."""

    key: str = field(default="1", metadata={"help": "column of the key: a number from 1, or a name"})
    size: str | None = field(default=None, metadata={"help": "column of the size in bytes (none: no sizes)"})
    delimiter: str = field(default=",", metadata={"help": "one character between columns (tab: a tab)"})
    skip_lines: int = field(default=0, metadata={"help": "lines to skip at the start"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.delimiter) != 1 and self.delimiter != "tab":
            raise ConfigError(f"delimiter: expected one character or the word tab, got {self.delimiter!r}")
        if self.skip_lines < 0:
            raise ConfigError(f"skip_lines: expected at least 0, got {self.skip_lines}")


def csv_requests(path: Path, options: CsvOptions) -> Iterator[KeyRequests]:
    """Keys and sizes of the rows, quoted where they are. Raises DataError naming the line."""
    with open_source(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        delimiter = "\t" if options.delimiter == "tab" else options.delimiter
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            key, size = _columns(path, options, rows)
            before = rows.line_num
            while block := list(islice(rows, _BLOCK)):
                found = _requests(block, key, size)
                if found is None:
                    raise _refusal(path, block, key, size, before)
                yield found
                before = rows.line_num
        except csv.Error as error:
            raise refuse_line(path, rows.line_num, str(error)) from error


def _columns(path: Path, options: CsvOptions, rows: Iterator[list[str]]) -> tuple[int, int | None]:
    """Indices of key and size; takes what stands before the first request."""
    for _ in islice(rows, options.skip_lines):
        pass
    wanted = [name for name in (options.key, options.size) if name is not None]
    if all(name.isdecimal() and int(name) > 0 for name in wanted):
        indices = [int(name) - 1 for name in wanted]
    else:
        names = next(rows, [])
        missing = [name for name in wanted if name not in names and not name.isdecimal()]
        if missing:
            found = ", ".join(names) or "none"
            raise refuse_line(
                path, options.skip_lines + 1, f"expected a column {missing[0]!r}, found {found}"
            )
        indices = [names.index(name) if name in names else int(name) - 1 for name in wanted]
    return indices[0], indices[1] if len(indices) == 2 else None


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
    """Which row it was; with quoted line ends its line is the nearest that is known."""
    for line, row in enumerate(block, before + 1):
        if len(row) <= max(key, size or 0):
            columns = max(key, size or 0) + 1
            return refuse_line(path, line, f"expected at least {columns} columns, found {len(row)}")
        if not row[key]:
            return refuse_line(path, line, f"expected a key in column {key + 1}, found nothing")
        text = row[size] if size is not None else "0"
        if not text.strip().isdecimal() or int(text) > _MAX_SIZE:
            return refuse_line(path, line, f"expected a size in bytes, found {text!r}")
    raise AssertionError("no row of the block is wrong")
