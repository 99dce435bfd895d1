"""Plain text, one key a line. A key is any text without white space; only the last line may be empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.lab.importers.keys import KeyOptions, KeyRequests
from tierstore.lab.importers.source import LineBlock, line_blocks, open_text, refuse_line

_ODD = (b" ", b"\t", b"\r", b"\v", b"\f", b"\0")


@dataclass(frozen=True, kw_only=True)
class TextOptions(KeyOptions):
    """Options of plain text."""

    skip: str | None = field(
        default=None, metadata={"help": "a line that is this, but for blanks around it, is left out"}
    )


def text_requests(path: Path, options: TextOptions) -> Iterator[KeyRequests]:
    """The keys of the lines. Raises DataError naming the line."""
    skip = None if options.skip is None else options.skip.strip().encode()
    with open_text(path, options.window_log) as file:
        for block in line_blocks(file):
            yield _keys(path, block, skip), None


def _keys(path: Path, block: LineBlock, skip: bytes | None) -> list[bytes]:
    lines = block.lines if skip is None else [line for line in block.lines if line.strip() != skip]
    # Searched whole: a test of each line would take longer than everything else.
    whole = b"\n".join(lines)
    if b"" not in lines and not any(odd in whole for odd in _ODD):
        return lines
    for number, line in enumerate(block.lines, block.first):
        if line.strip() != skip and (len(line.split()) != 1 or b"\0" in line):
            raise refuse_line(path, number, f"expected one key, found {_shown(line)}")
    return [line.strip() for line in lines]


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace")) if line else "an empty line"
