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
from tierstore.lab.importers.keys import KeyOptions, KeyRecords
from tierstore.lab.importers.source import open_source, refuse_line
from tierstore.trace.format import EventColumns
from tierstore.trace.records import RecordTable

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


class CsvImporter:
    """Reads rows, quoted where they are."""

    def __init__(self, path: Path, options: CsvOptions) -> None:
        self._path = path
        self._options = options
        self._records = KeyRecords(options)

    def chunks(self) -> Iterator[EventColumns]:
        with open_source(self._path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
            delimiter = "\t" if self._options.delimiter == "tab" else self._options.delimiter
            rows = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                key, size = self._columns(rows)
                while True:
                    before = rows.line_num
                    block = list(islice(rows, _BLOCK))
                    if not block:
                        break
                    yield self._events(block, key, size, before)
            except csv.Error as error:
                raise refuse_line(self._path, rows.line_num, str(error)) from error
        yield self._records.last_step()

    def _columns(self, rows: Iterator[list[str]]) -> tuple[int, int | None]:
        """Places of key and size; takes what stands before the first request."""
        for _ in islice(rows, self._options.skip_lines):
            pass
        wanted = [name for name in (self._options.key, self._options.size) if name is not None]
        if all(name.isdecimal() and int(name) > 0 for name in wanted):
            places = [int(name) - 1 for name in wanted]
        else:
            names = next(rows, [])
            missing = [name for name in wanted if name not in names and not name.isdecimal()]
            if missing:
                raise refuse_line(
                    self._path,
                    self._options.skip_lines + 1,
                    f"expected a column {missing[0]!r}, found {', '.join(names) or 'none'}",
                )
            places = [names.index(name) if name in names else int(name) - 1 for name in wanted]
        return places[0], places[1] if len(places) == 2 else None

    def _events(self, block: list[list[str]], key: int, size: int | None, before: int) -> EventColumns:
        sizes: NDArray[np.int64] | None = None
        try:
            keys = [row[key] for row in block]
            if size is not None:
                sizes = np.fromiter((int(row[size]) for row in block), np.int64, len(block))
        except (IndexError, ValueError, OverflowError) as error:
            raise self._refusal(block, key, size, before) from error
        if sizes is not None and (int(sizes.min()) < 0 or int(sizes.max()) > _MAX_SIZE):
            raise self._refusal(block, key, size, before)
        if "" in keys:
            raise self._refusal(block, key, size, before)
        return self._records.events(keys, sizes)

    def _refusal(self, block: list[list[str]], key: int, size: int | None, before: int) -> Exception:
        """Which row it was; with quoted line ends its line is the nearest that is known."""
        for line, row in enumerate(block, before + 1):
            if len(row) <= max(key, size or 0):
                columns = max(key, size or 0) + 1
                return refuse_line(self._path, line, f"expected at least {columns} columns, found {len(row)}")
            if not row[key]:
                return refuse_line(self._path, line, f"expected a key in column {key + 1}, found nothing")
            text = row[size] if size is not None else "0"
            if not text.strip().isdecimal() or int(text) > _MAX_SIZE:
                return refuse_line(self._path, line, f"expected a size in bytes, found {text!r}")
        raise AssertionError("no row of the block is wrong")

    @property
    def resized(self) -> int:
        """Requests whose size was not that of their key's first; known once the chunks have been read."""
        return self._records.resized

    def table(self) -> RecordTable:
        return self._records.table()

    def names(self) -> Iterator[str]:
        return self._records.names()
