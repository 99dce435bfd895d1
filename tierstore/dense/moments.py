"""Moments that live on disk, in the records of the rank's store, and pass through memory one unit at a time.

A step reads a unit's moments, steps it, and queues their write; there are two places, so that a write drains while the
next unit is read and stepped. Between commits a record's moments are overwritten where no commit refers to them, so
what is durable is what the last commit held.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tierstore._native import Arena, Buffer, HugePages
from tierstore.dense.footprint import MOMENT_PLACES, moment_bytes
from tierstore.dense.layout import UnitLayout
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.tiers.device import tensor_of


@dataclass(slots=True)
class _Place:
    """Memory for two arrays of the largest slices, from ``offset`` of the arena; ``writes`` drain out of it."""

    offset: int
    writes: list[int] = field(default_factory=list)


class DiskMoments:
    """The moments of all units of a rank, of slices of at most ``largest`` elements."""

    def __init__(self, largest: int) -> None:
        self.nbytes = moment_bytes(largest)
        self._size = self.nbytes // (2 * MOMENT_PLACES)
        self._arena = Arena(self.nbytes, HugePages.AUTO)
        self._places = deque(_Place(i * 2 * self._size) for i in range(MOMENT_PLACES))
        self._store: StoreCore | None = None
        self._written: set[str] = set()

    def attach(self, store: StoreCore, *, written: set[str]) -> None:
        """The records are in ``store``; those of the keys ``written`` have moments there, the others zeros."""
        self._store = store
        self._written = written

    @contextlib.contextmanager
    def borrow(self, layout: UnitLayout, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """``exp_avg`` and ``exp_avg_sq`` of a unit, to be changed inside; written at the end, as those of ``step``.

        Waits for the read. Raises RuntimeError without a store, ChecksumError, OSError.
        """
        if self._store is None:
            raise RuntimeError("dense.optimizer_state = nvme: the slices have no records yet")
        place = self._places.popleft()
        try:
            self._store.wait(place.writes)
            buffers = [
                Buffer(self._arena, [(place.offset + i * self._size, self._size)], layout.slice_numel * 4)
                for i in range(2)
            ]
            exp_avg, exp_avg_sq = (tensor_of(buffer, torch.float32) for buffer in buffers)
            if layout.key in self._written:
                self._store.read_through(layout.key, {Group.MOMENTS: buffers})
            else:
                exp_avg.zero_()
                exp_avg_sq.zero_()
            yield exp_avg, exp_avg_sq
            place.writes = self._store.write_through(layout.key, {Group.MOMENTS: buffers}, step=step)
            self._written.add(layout.key)
        finally:
            self._places.append(place)

    def ensure(self, layout: UnitLayout, step: int) -> None:
        """Before a commit: a unit that was never stepped has moments, too."""
        if layout.key not in self._written:
            with self.borrow(layout, step):
                pass
