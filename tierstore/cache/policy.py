"""Cache policies of your own, written in Python.

``[cache] policy = "package.module:Class"`` names a class with the methods of ``PythonPolicy``; ``[cache.options]``
are its keyword arguments (numbers arrive as floats). The live store, ``tierstore.trace.replay.replay`` and the
simulator call the same object, some ten times slower than a native policy.

A policy must be deterministic: it must not look at a clock or iterate over a set. Its exceptions pass through the
store unchanged, with a note that names the class; the store then accepts no more work and reopens at its last commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tierstore._native import Candidates, Clock


class PythonPolicy(Protocol):
    """The calls that the cache makes. Entries are numbers.

    Further methods are called if the class has them: ``set_capacity(frames)`` first of all;
    ``add(entry, record, layer, frames)`` for each entry before any other call about it (0 frames: it never becomes
    resident); ``access(phase, layer, entries)`` as each access begins (``tierstore.cache.access.Phase``); and
    ``miss(entry)`` before frames are freed for an entry.
    """

    def insert(self, entry: int) -> None:
        """``entry`` has become resident: for a request, or by a prefetch that has not been used yet."""

    def hit(self, entry: int) -> None:
        """``entry`` was requested while resident."""

    def remove(self, entry: int) -> None:
        """``entry`` is no longer resident: it was evicted or dropped."""

    def tick(self, clock: Clock) -> None:
        """``Clock.REQUEST`` after each request, ``Clock.STEP`` at the end of each training step."""

    def select(self, frames: int, candidates: Candidates) -> Iterable[int]:
        """Entries to evict, in order: each must satisfy ``candidates.evictable(entry)``, and their
        ``candidates.frames(entry)`` must sum to ``frames``, or all are given. The rest is ignored.

        This call only selects: ``remove`` is called for each evicted entry.
        """
