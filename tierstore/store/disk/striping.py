"""One extent on several drives: whole slots are allocated on them by weight.

A slot is never divided. Experts are read and written many at a time, so drives work in parallel without it; a transfer
stays one operation of one file, as long as it can be; and what a drive that fails held is a list of records.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from tierstore.store.disk.discard import Discard
from tierstore.store.disk.drives import Drive, Drives
from tierstore.store.disk.extents import NO_SPACE, Extent, Slot
from tierstore.store.disk.shares import WeightedRoundRobin, apportion
from tierstore.store.format import GroupLayout


class StripedExtent:
    """The extents of one group of one schema, one on each of ``drives``, in their order. It allocates their slots and
    reserves their space; ``discard`` decides whether free slots may become holes.
    """

    def __init__(self, drives: Drives, extents: Sequence[Extent], discard: Discard) -> None:
        self.extents = list(extents)
        self.layout: GroupLayout = self.extents[0].layout
        self._drives = drives
        self._discard = discard
        self._turns = WeightedRoundRobin(len(self.extents))
        self._wanted = 0

    @property
    def slots(self) -> int:
        return sum(extent.slots for extent in self.extents)

    def reserve(self, slots: int) -> None:
        """Makes the extents at least ``slots`` slots long together, each as long as its share of them where it can.

        Raises OSError (ENOSPC) when all drives together lack the space; what they had is reserved then.
        """
        if len(self.extents) == 1:
            self._grow(0, max(slots, self.extents[0].reserved_slots))
        else:
            for extent in self.extents:
                extent.reserve(extent.reserved_slots)  # what was found may have holes
            missing = slots - sum(extent.reserved_slots for extent in self.extents)
            if missing > 0:
                self._share_out(slots, missing)
        self._wanted = max(self._wanted, slots)
        self.rebalance()

    def discard(self, needed: int) -> None:
        """Queues holes where more slots than ``needed`` have blocks."""
        self._wanted = min(self._wanted, needed)
        if len(self.extents) == 1:
            self.extents[0].discard(needed, self._discard)
            return
        keep = self._targets(needed)
        # What a full drive could not take on is kept elsewhere: together there are always as many as are needed.
        reserved = [extent.reserved_slots for extent in self.extents]
        lacking = sum(max(wish - had, 0) for wish, had in zip(keep, reserved, strict=True))
        for number in self._by_share():
            more = min(max(reserved[number] - keep[number], 0), lacking)
            keep[number] += more
            lacking -= more
        for extent, slots in zip(self.extents, keep, strict=True):
            extent.discard(slots, self._discard)

    def _targets(self, slots: int) -> list[int]:
        """For each drive, the slots that it should have of ``slots``: those in use, and its share of all that are free.

        So what is written next can be shared out as the weights say, wherever the last commits lie.
        """
        used = [extent.reserved_slots - extent.free_slots for extent in self.extents]
        free = apportion(max(slots - sum(used), 0), self._drives.shares)
        return [taken + own for taken, own in zip(used, free, strict=True)]

    def _share_out(self, slots: int, missing: int) -> None:
        targets = self._targets(slots)
        short = [
            max(target - extent.reserved_slots, 0)
            for target, extent in zip(targets, self.extents, strict=True)
        ]
        left = sum(self._grow_partly(number, more) for number, more in enumerate(apportion(missing, short)))
        for number in self._by_share():
            left = self._grow_partly(number, left) if left else 0
        if left:
            self._raise_full(left)

    def rebalance(self) -> None:
        """Reserves the shares as they are now. A drive that is faster than it was, or new, need not have the space: one
        that is full is no error.
        """
        if len(self.extents) > 1:
            for number, target in enumerate(self._targets(self._wanted)):
                with contextlib.suppress(_FullError):
                    self._grow(number, target)

    def _by_share(self) -> list[int]:
        return sorted(range(len(self.extents)), key=lambda number: (-self._drives.shares[number], number))

    def _grow(self, number: int, slots: int) -> None:
        """Raises OSError (ENOSPC) when the drive is full, or its limit reached."""
        drive, extent = self._drives[number], self.extents[number]
        more = (slots - extent.reserved_slots) * self.layout.slot_bytes
        if more > 0 and drive.limit and drive.reserved_bytes + more > drive.limit:
            left = max(drive.limit - drive.reserved_bytes, 0)
            message = f"No space left within stripe.limits: {more} more bytes are needed and {left} are left"
            raise _FullError(errno.ENOSPC, message, str(extent.path))
        try:
            extent.reserve(slots)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise _FullError(*error.args[:2], error.filename) from error
            raise

    def _grow_partly(self, number: int, slots: int) -> int:
        """Adds ``slots`` slots, or as many as fit; returns how many did not."""
        missing, more = slots, slots
        while more:
            try:
                self._grow(number, self.extents[number].reserved_slots + more)
            except _FullError:
                # A file system's own needs, and quotas, leave less than it says.
                fits = self._fitting(number)
                more = fits if fits < more else more // 2
            else:
                missing -= more
                more = min(more, missing)
        return missing

    def _fitting(self, number: int) -> int:
        """The most slots that fit on the drive, by what its file system says."""
        drive, slot_bytes = self._drives[number], self.layout.slot_bytes
        free = _free_bytes(drive)
        if drive.limit:
            free = min(free, max(drive.limit - drive.reserved_bytes, 0))
        return free // slot_bytes

    def _raise_full(self, slots: int) -> None:
        free = ", ".join(f"{_free_bytes(drive)} in {drive.path}" for drive in self._drives)
        message = (
            f"No space left on device: {slots * self.layout.slot_bytes} more bytes are needed on any drive, and free "
            f"are {free}"
        )
        raise _FullError(errno.ENOSPC, message, str(self.extents[0].path))

    def allocate(self) -> Slot:
        """A free slot of the drive whose turn it is, of those that have one; when none has, a drive grows.

        Raises OSError (ENOSPC) only when every drive is full.
        """
        if len(self.extents) == 1:
            self._provide(0)
            return self.extents[0].allocate()
        numbers = range(len(self.extents))
        free = [number for number in numbers if self.extents[number].free_slots]
        full: _FullError | None = None
        for among in (free, [number for number in numbers if number not in free]):
            while among:
                number = self._turns.next(self._drives.shares, among)
                try:
                    self._provide(number)
                    return self.extents[number].allocate()
                except _FullError as error:
                    full = full or error
                    among.remove(number)
        raise full or AssertionError("an extent on no drive")

    def _provide(self, number: int) -> None:
        """A free slot, and none without blocks among those there are. Raises _FullError."""
        extent = self.extents[number]
        if extent.free_slots:
            self._grow(number, extent.reserved_slots)
            return
        try:
            self._grow(number, extent.reserved_slots + max(1, extent.slots // 8))
        except _FullError:
            self._grow(number, extent.reserved_slots + 1)


class _FullError(OSError):
    """ENOSPC of one drive, which others may make good."""


def _free_bytes(drive: Drive) -> int:
    space = os.statvfs(drive.path)
    return space.f_bavail * space.f_frsize
