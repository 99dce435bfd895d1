"""Plain request traces: keys become records, numbered in order of first appearance; so many requests a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.access import Phase
from tierstore.errors import ConfigError
from tierstore.trace.format import EventColumns, TraceKind
from tierstore.trace.records import RecordTable

_MAX_FRAMES = 2**32 - 1

KeyRequests: TypeAlias = tuple[Sequence[Any], NDArray[np.int64] | None]
"""The next keys of a plain trace, and their sizes in bytes (None: the source has no sizes)."""


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
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
        if self.requests_per_step < 1:
            raise ConfigError(f"requests_per_step: expected at least 1, got {self.requests_per_step}")


class KeyNumbers(dict[Any, int]):
    """Numbers keys from 0 as they are first asked for."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class KeyTrace:
    """A plain trace being read from ``requests``. A key's size is that of its first request."""

    def __init__(self, options: KeyOptions, requests: Iterator[KeyRequests]) -> None:
        self._options = options
        self._source = requests
        self._numbers = KeyNumbers()
        self._sizes: list[NDArray[np.int64]] = []
        self._sized = 0
        self._requests = 0
        self.resized = 0  # requests whose size was not that of their key's first

    def chunks(self) -> Iterator[EventColumns]:
        """One access a request, and an end for each step, also for the last that the requests do not fill."""
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
        self.resized += int((self.sizes()[records] != sizes).sum())

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each record; 1 where the source has no sizes."""
        if self._sized < len(self._numbers):
            return np.ones(len(self._numbers), np.int64)
        self._sizes = [np.concatenate([np.zeros(0, np.int64), *self._sizes])]
        return self._sizes[0]

    def table(self) -> RecordTable:
        sizes, frame = self.sizes(), self._options.frame_bytes
        frames = np.ones_like(sizes) if not frame else np.clip(-(-sizes // frame), 1, _MAX_FRAMES)
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
            yield key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def stepped(records: NDArray[np.uint32], first: int, per_step: int) -> EventColumns:
    """One access a record, the first of them request number ``first`` of all; a step's end every ``per_step``."""
    numbers = np.arange(first, first + len(records), dtype=np.int64)
    ended_before = numbers // per_step - first // per_step
    ends_after = int((first + len(records)) // per_step - first // per_step)
    events = len(records) + ends_after
    kinds = np.full(events, TraceKind.END_STEP, np.uint8)
    counts = np.zeros(events, np.uint64)
    place = np.arange(len(records)) + ended_before
    kinds[place] = TraceKind.ACCESS
    counts[place] = 1
    # An end belongs to the step it ends: as many steps as there were ends before it.
    steps = first // per_step + np.cumsum(kinds == TraceKind.END_STEP) - (kinds == TraceKind.END_STEP)
    return EventColumns.build(counts, records, kinds=kinds, phases=Phase.USER, steps=steps)
