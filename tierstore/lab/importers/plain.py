"""Plain request traces. Keys become records, numbered in order of first appearance; every N requests are a step.

Two formats are here, and columns in ``csv_columns``: plain text, one key a line (a key is any text without white space;
only the last line may be empty), and libCacheSim's oracleGeneral, records of 24 bytes (u32 time, u64 object, u32 size,
i64 next access, -1 for none).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.access import Phase
from tierstore.errors import ConfigError, DataError
from tierstore.lab.importers import SourceOptions, line_blocks, open_source, open_text, refuse_line
from tierstore.trace.format import EventColumns, RecordTable, TraceKind

_MAX_FRAMES = 2**32 - 1  # of a record
_MAX_ASKED = 2.0**63  # bytes of all requests, as the simulator counts them
_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")

KeyRequests: TypeAlias = tuple[Sequence[Any], NDArray[np.int64] | None]
"""The next keys of a plain trace, and their sizes in bytes (None: the source has no sizes)."""


@dataclass(frozen=True, kw_only=True)
class KeyOptions(SourceOptions):
    """How requests become a trace."""

    requests_per_step: int = field(default=1000, metadata={"help": "requests that make one step"})
    frame_bytes: int = field(
        default=0,
        metadata={
            "help": "bytes of a frame, for sizes (0: every key is one frame, as large as the largest)",
            "size": True,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.requests_per_step < 2**63:
            raise ConfigError(f"requests_per_step: expected at least 1, got {self.requests_per_step}")


class KeyNumbers(dict[Any, int]):
    """Numbers keys from 0 in order of their first requests."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class KeyTrace:
    """A plain trace, read from ``path`` by ``read``, which also reports where it found keys and sizes. A key's size is that
    of its first request.
    """

    def __init__(
        self,
        path: Path,
        options: Any,
        read: Callable[[Path, Any, dict[str, str]], Iterator[KeyRequests]],
    ) -> None:
        self._options: KeyOptions = options
        self._columns: dict[str, str] = {}
        self._source = read(path, options, self._columns)
        self._asked = 0.0
        self._numbers = KeyNumbers()
        self._sizes: list[NDArray[np.int64]] = []
        self._sized = 0
        self._requests = 0
        self.resized = 0  # requests whose size was not that of their key's first

    def chunks(self) -> Iterator[EventColumns]:
        """One access for each request, and an end for each step, including an incomplete last one."""
        per_step = self._options.requests_per_step
        for keys, sizes in self._source:
            records = np.fromiter(map(self._numbers.__getitem__, keys), np.uint32, len(keys))
            if sizes is not None:
                self._keep_sizes(records, sizes)
            yield stepped(records, self._requests, per_step)
            self._requests += len(records)
        if self._requests % per_step:
            yield EventColumns.build([0], [], kinds=TraceKind.END_STEP, steps=self._requests // per_step)

    def _keep_sizes(self, records: NDArray[np.uint32], sizes: NDArray[np.int64]) -> None:
        numbers, first = np.unique(records, return_index=True)
        fresh = numbers >= self._sized
        self._sizes.append(sizes[first[fresh]])
        self._sized += int(fresh.sum())
        counted = self.sizes()[records]
        self.resized += int((counted != sizes).sum())
        self._asked += float(counted.sum(dtype=np.float64))
        if self._asked >= _MAX_ASKED:
            raise DataError(
                f"sizes: expected less than 2^63 bytes in all requests, found more; the largest is "
                f"{int(self.sizes().max())} bytes"
            )

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each record; 1 where the source has no sizes."""
        if self._sized < len(self._numbers):
            return np.ones(len(self._numbers), np.int64)
        self._sizes = [np.concatenate([np.zeros(0, np.int64), *self._sizes])]
        return self._sizes[0]

    def table(self) -> RecordTable:
        sizes, frame = self.sizes(), self._options.frame_bytes
        frames = np.ones_like(sizes) if not frame else np.maximum(-(-sizes // frame), 1)
        if frames.max(initial=0) > _MAX_FRAMES:
            largest = int(sizes.argmax())
            raise DataError(
                f"key {next(islice(self.names(), largest, None))!r} of {sizes[largest]} bytes: expected at most "
                f"{_MAX_FRAMES} frames, so frame_bytes of at least {-(-int(sizes[largest]) // _MAX_FRAMES)}, got {frame}"
            )
        empty = np.zeros_like(sizes)
        return RecordTable.of_columns(
            0,
            np.stack((frames, empty, empty), axis=1),
            np.stack((sizes, empty, empty), axis=1),
            1,
            count=len(sizes),
        )

    def names(self) -> Iterator[str]:
        for key in self._numbers:
            # A backslash is doubled, so that no two keys have one name.
            if isinstance(key, bytes):
                name = key.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
            else:
                name = str(key).replace("\\", "\\\\")
            yield _LINE_ENDS.sub(lambda end: end[0].encode("unicode_escape").decode(), name)

    def columns(self) -> Mapping[str, str]:
        return self._columns


def stepped(records: NDArray[np.uint32], first: int, per_step: int) -> EventColumns:
    """One access for each record, numbered from ``first`` on; an end of a step after every ``per_step`` requests."""
    numbers = np.arange(first, first + len(records), dtype=np.int64)
    ended_before = numbers // per_step - first // per_step
    ends_after = int((first + len(records)) // per_step - first // per_step)
    events = len(records) + ends_after
    kinds = np.full(events, TraceKind.END_STEP, np.uint8)
    counts = np.zeros(events, np.uint64)
    accesses = np.arange(len(records)) + ended_before
    kinds[accesses] = TraceKind.ACCESS
    counts[accesses] = 1
    # An end belongs to the step it ends: as many steps as there were ends before it.
    steps = first // per_step + np.cumsum(kinds == TraceKind.END_STEP) - (kinds == TraceKind.END_STEP)
    return EventColumns.build(counts, records, kinds=kinds, phases=Phase.USER, steps=steps)


_ODD = (b" ", b"\t", b"\r", b"\v", b"\f", b"\0")


@dataclass(frozen=True, kw_only=True)
class TextOptions(KeyOptions):
    """Options of plain text."""

    skip: str | None = field(
        default=None, metadata={"help": "a line that is this, but for blanks around it, is left out"}
    )


def text_requests(path: Path, options: TextOptions, columns: dict[str, str]) -> Iterator[KeyRequests]:
    """The keys of the lines. Raises DataError naming the line."""
    columns.update(key="line", size="none")
    skip = None if options.skip is None else options.skip.strip().encode()
    with open_text(path, options.window_log) as file:
        for first, block in line_blocks(file):
            yield _keys(path, first, block, skip), None


def _keys(path: Path, first: int, block: list[bytes], skip: bytes | None) -> list[bytes]:
    lines = block if skip is None else [line for line in block if line.strip() != skip]
    # Searched whole: a test of each line would take longer than everything else.
    whole = b"\n".join(lines)
    if b"" not in lines and not any(odd in whole for odd in _ODD):
        return lines
    for number, line in enumerate(block, first):
        if line.strip() != skip and (len(line.split()) != 1 or b"\0" in line):
            raise refuse_line(path, number, f"expected one key, found {_shown(line)}")
    return [line.strip() for line in lines]


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace")) if line else "an empty line"


ORACLE_RECORD = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
_BLOCK = 1 << 17  # records


def oracle_general_requests(
    path: Path, options: KeyOptions, columns: dict[str, str]
) -> Iterator[KeyRequests]:
    """Objects and their sizes. Times and next accesses are checked and not kept. Raises DataError."""
    columns.update(key="object", size="size", time="not read")
    at = 0
    with open_source(path, options.window_log) as file:
        while block := file.read(_BLOCK * ORACLE_RECORD.itemsize):
            left_over = len(block) % ORACLE_RECORD.itemsize
            if left_over:
                end = at + len(block) - left_over
                raise DataError(
                    f"{path}: byte {end}: expected a record of {ORACLE_RECORD.itemsize} bytes, found {left_over}"
                )
            rows = np.frombuffer(block, ORACLE_RECORD)
            wrong = np.flatnonzero(rows["next"] < -1)
            if len(wrong):
                byte = at + int(wrong[0]) * ORACLE_RECORD.itemsize
                raise DataError(
                    f"{path}: byte {byte}: expected a next access of at least -1, "
                    f"found {int(rows['next'][wrong[0]])}: not an oracleGeneral trace?"
                )
            yield rows["key"].tolist(), rows["size"].astype(np.int64)
            at += len(block)
