"""Plain text, one key a line. A key is any text without white space; only the last line may be empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.lab.importers.keys import KeyOptions, KeyRecords
from tierstore.lab.importers.source import LineBlock, line_blocks, open_source, refuse_line
from tierstore.trace.format import EventColumns
from tierstore.trace.records import RecordTable

_ODD = (b" ", b"\t", b"\r", b"\v", b"\f", b"\0")


@dataclass(frozen=True, kw_only=True)
class TextOptions(KeyOptions):
    """Options of plain text."""

    skip: str | None = field(default=None, metadata={"help": "a line that is exactly this is left out"})


class TextImporter:
    """Reads one key a line."""

    def __init__(self, path: Path, options: TextOptions) -> None:
        self._path = path
        self._skip = None if options.skip is None else options.skip.encode()
        self._records = KeyRecords(options)

    def chunks(self) -> Iterator[EventColumns]:
        with open_source(self._path) as file:
            for block in line_blocks(file):
                yield self._records.events(self._keys(block))
        yield self._records.last_step()

    def _keys(self, block: LineBlock) -> list[bytes]:
        # Searched whole: a test of each line would take longer than everything else.
        whole = b"\n".join(block.lines)
        keys = block.lines
        if b"" in keys or any(odd in whole for odd in _ODD):
            for number, line in enumerate(block.lines, block.first):
                if len(line.split()) != 1 or b"\0" in line:
                    raise refuse_line(self._path, number, f"expected one key, found {_shown(line)}")
            keys = [line.strip() for line in block.lines]
        return keys if self._skip is None else [key for key in keys if key != self._skip]

    def table(self) -> RecordTable:
        return self._records.table()

    def names(self) -> Iterator[str]:
        return self._records.names()


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace")) if line else "an empty line"
