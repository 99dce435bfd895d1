"""A budget of bytes written a day: writes beyond it wait, and none fails.

A token bucket of one hour's share refills at the budget's rate, so any day sees at most 25/24 of the budget. Every write
to an extent or a scratch file draws from the bucket in the engine, *before* it reaches the drive:

- while the bucket is more than half full, no write waits;
- below that, write-backs without a waiting caller are paced at the budget's rate, and so is the speculation that needs
  their memory;
- when it is empty, writes with a waiting caller wait, too: dirty victims of demanded fetches, and commits. That time is
  charged to the cause "write budget".

So the budget changes the time of transfers, and never a decision: a decision based on a clock would differ from run to
run, and from its replay.

Each commit stores the level. Within a run time is CLOCK_MONOTONIC; between runs it is the wall clock: a step back counts
as no time, a step forward at most fills the bucket. Writes of a killed run after its last commit are not counted.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tierstore._native import Activity, Engine, Link, Priority
from tierstore.units import DAY_S, format_bytes

_BURST_S = 3600.0
_STATE = struct.Struct("<dd")  # level (bytes), wall clock (s)
_THREAD_IO = Path("/proc/thread-self/io")


class WriteBudget:
    """Limits writes to ``daily_bytes`` a day. ``clock`` is the wall clock, seconds."""

    def __init__(self, engine: Engine, daily_bytes: int, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock
        self.daily_bytes = daily_bytes
        self._bytes_per_s = daily_bytes / DAY_S
        self._link = Link(self._bytes_per_s, 0.0, self._bytes_per_s * _BURST_S)
        self._link.set_level(self._bytes_per_s * _BURST_S)

    def turn(self, nbytes: int, after: Sequence[int]) -> int:
        """A ticket for a write of ``nbytes`` to follow; it draws from the bucket when the tickets ``after`` are done."""
        return self._engine.hold(
            self._link, nbytes, Activity.WRITE, after=after, priority=Priority.WRITE_BACK
        )

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Takes this thread's writes in the block from the bucket, without waiting (if the kernel counts them)."""
        before = _thread_written_bytes()
        yield
        self._link.reserve(max(_thread_written_bytes() - before, 0))

    @property
    def level(self) -> float:
        """Bytes that may be written at once; negative if writes wait."""
        return self._link.level()

    @property
    def blocked_ns(self) -> int:
        """Time that the caller waited for writes delayed only by the budget."""
        return self._link.blocked_ns

    def pack(self) -> bytes:
        return _STATE.pack(self.level, self._clock())

    def unpack(self, raw: bytes) -> None:
        """Restores the level of an earlier run from its ``pack``; other bytes make the bucket empty."""
        level, then = _STATE.unpack(raw) if len(raw) == _STATE.size else (0.0, self._clock())
        # Written so that NaN counts as nothing.
        refilled = max(0.0, min(self._clock() - then, _BURST_S)) * self._bytes_per_s
        full = self._bytes_per_s * _BURST_S
        self._link.set_level(max(-full, min(level + refilled, full)) if level == level else 0.0)

    def describe(self) -> str:
        return (
            f"write budget: {format_bytes(self.daily_bytes)} a day, "
            f"{format_bytes(max(self.level, 0.0))} of them at once; then writes wait"
        )


def _thread_written_bytes() -> int:
    try:
        lines = _THREAD_IO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)
