"""Extent files: equal slots, preallocated, reused only when nothing can still need them.

An ``Extent`` owns one file and knows which of its slots are free. Space is reserved with ``fallocate`` before
it is needed, so a full disk is an ``OSError`` (ENOSPC, path, bytes needed) from ``reserve``, never a failed
write later.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tierstore._native import (
    Activity,
    Buffer,
    CrcTable,
    DirectIo,
    Engine,
    File,
    FileCreate,
    Link,
    Meter,
    Priority,
)
from tierstore.links import limited
from tierstore.store.format import SECTION_ALIGNMENT, GroupLayout

__all__ = ["Extent"]

#: Between commits a slot that is only read collects tickets; the finished ones are swept at this many.
_PRUNE_READS = 16


class Extent:
    """Slots of ``layout`` in the file ``path``. With ``FileCreate.NO`` a missing one is OSError (ENOENT).

    ``link``, if any, limits the speed of its transfers, and ``meter`` counts them.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        layout: GroupLayout,
        *,
        direct: DirectIo,
        create: FileCreate,
        link: Link | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.path = path
        self.layout = layout
        #: The file or its size changed since the directory was last synced.
        self.unsynced_directory = not path.exists()
        self._engine = engine
        self._link = link
        self._free: list[int] = []
        self._last_write: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        self._written = False
        # A file that was found may have holes (a copy, a restored backup): no block is taken for granted.
        self._slots_with_blocks = 0
        self.file = File(str(path), create=create, direct=direct, meter=meter)
        self.slots = self.file.size // layout.slot_bytes

    def reserve(self, slots: int) -> None:
        """Makes the extent at least ``slots`` slots long, every slot with blocks of its own.

        Raises OSError (ENOSPC) with nothing changed.
        """
        wanted = max(slots, self.slots)
        if wanted <= self._slots_with_blocks:
            return
        begin, end = self._slots_with_blocks * self.layout.slot_bytes, wanted * self.layout.slot_bytes
        try:
            self.file.allocate(begin, end - begin)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._give_back_partial_growth()
            free = os.statvfs(self.path.parent)
            message = (
                f"No space left on device: {end - begin} more bytes are needed and "
                f"{free.f_bavail * free.f_frsize} are free"
            )
            raise OSError(errno.ENOSPC, message, str(self.path)) from error
        for slot in range(self.slots, wanted):
            heapq.heappush(self._free, slot)
        if wanted > self.slots:
            self.unsynced_directory = True
        self.slots = self._slots_with_blocks = wanted

    def _give_back_partial_growth(self) -> None:
        """A refused fallocate leaves what it got so far, and a later opening would take it for slots."""
        with contextlib.suppress(FileNotFoundError):  # scratch has no name
            os.truncate(self.path, self.slots * self.layout.slot_bytes)

    def adopt(self, used: set[int]) -> None:
        """After opening: every slot that is not in ``used`` is free."""
        self._free = [slot for slot in range(self.slots) if slot not in used]
        heapq.heapify(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def reserved_slots(self) -> int:
        return self.slots

    def take(self) -> int:
        """A free slot; the extent grows by an eighth when there is none."""
        if not self._free:
            self.reserve(self.slots + max(1, self.slots // 8))
        elif self._slots_with_blocks < self.slots:
            self.reserve(self.slots)
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Frees a slot whose last content nothing on disk refers to any more."""
        heapq.heappush(self._free, slot)

    def read(
        self,
        slot: int,
        sections: Sequence[Buffer],
        crcs: CrcTable,
        first_crc: int,
        after: Sequence[int],
        priority: Priority,
    ) -> int:
        """Queues a checked read of a whole slot, after the last write to it."""
        write = self._last_write.get(slot)
        before = [*after, write] if write else list(after)
        ticket = self._engine.read(
            self.file,
            slot * self.layout.slot_bytes,
            list(sections),
            crcs,
            first_crc,
            align=SECTION_ALIGNMENT,
            after=before,
            priority=priority,
        )
        ticket = limited(
            self._engine,
            self._link,
            ticket,
            self.layout.slot_bytes,
            activity=Activity.READ,
            after=before,
            priority=priority,
        )
        reads = self._reads.setdefault(slot, [])
        if len(reads) >= _PRUNE_READS:
            reads[:] = self._unfinished(reads)
        reads.append(ticket)
        return ticket

    def reads_in_flight(self, slot: int) -> list[int]:
        """Tickets of the reads of ``slot`` that have not finished."""
        return self._unfinished(self._reads.get(slot, ()))

    def _unfinished(self, tickets: Iterable[int]) -> list[int]:
        # What has finished, even badly, is in nobody's way any more.
        return [ticket for ticket in tickets if not self._engine.done(ticket)]

    def write(
        self, slot: int, sections: Sequence[Buffer], crcs: CrcTable, first_crc: int, after: Sequence[int]
    ) -> int:
        """Queues a write of a whole slot, after every read and write queued on that slot before."""
        before = [*after, *self._unfinished(self._reads.pop(slot, ()))]
        if slot in self._last_write:
            before.append(self._last_write[slot])
        ticket = self._engine.write(
            self.file,
            slot * self.layout.slot_bytes,
            list(sections),
            crcs,
            first_crc,
            align=SECTION_ALIGNMENT,
            after=before,
            priority=Priority.WRITE_BACK,
        )
        ticket = limited(
            self._engine,
            self._link,
            ticket,
            self.layout.slot_bytes,
            activity=Activity.WRITE,
            after=before,
            priority=Priority.WRITE_BACK,
        )
        self._last_write[slot] = ticket
        self._written = True
        return ticket

    def sync(self, after: Sequence[int]) -> int | None:
        """Queues an fdatasync when something was written or grown since the last one."""
        if not (self._written or self.unsynced_directory):
            return None
        self._written = False
        return self._engine.sync(self.file, after=list(after))

    def forget_finished(self) -> None:
        """Drops the ordering kept for transfers that are known to have finished (after a commit)."""
        self._last_write = {s: t for s, t in self._last_write.items() if not self._engine.done(t)}
        unfinished = {s: self._unfinished(ts) for s, ts in self._reads.items()}
        self._reads = {s: ts for s, ts in unfinished.items() if ts}

    def close(self) -> None:
        self.file.close()
