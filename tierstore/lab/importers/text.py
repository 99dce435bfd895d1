"""Plain text, one key a line. A key is any text without white space; only the last line may be empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.lab.importers.keys import KeyOptions, KeyRequests
from tierstore.lab.importers.source import LineBlock, line_blocks, open_source, refuse_line

_ODD = (b" ", b"\t", b"\r", b"\v", b"\f", b"\0")


@dataclass(frozen=True, kw_only=True)
class TextOptions(KeyOptions):
    """Options of plain text."""

    skip: str | None = field(default=None, metadata={"help": "a line that is exactly this is left out"})


def text_requests(path: Path, options: TextOptions) -> Iterator[KeyRequests]:
    """The keys of the lines. Raises DataError naming the line."""
    skip = None if options.skip is None else options.skip.encode()
    with open_source(path) as file:
        for block in line_blocks(file):
            keys = _keys(path, block)
            yield keys if skip is None else [key for key in keys if key != skip], None


def _keys(path: Path, block: LineBlock) -> list[bytes]:
    # Searched whole: a test of each line would take longer than everything else.
    whole = b"\n".join(block.lines)
    if b"" not in block.lines and not any(odd in whole for odd in _ODD):
        return block.lines
    for number, line in enumerate(block.lines, block.first):
        if len(line.split()) != 1 or b"\0" in line:
            raise refuse_line(path, number, f"expected one key, found {_shown(line)}")
    return [line.strip() for line in block.lines]


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace")) if line else "an empty line"
