"""Extent files: equal slots, preallocated, reused only when nothing can still need them.

An ``Extent`` owns one file and knows which of its slots are free. Space is reserved with ``fallocate`` before
it is needed, so a full disk is an ``OSError`` (ENOSPC, path, bytes needed) from ``reserve``, never a failed
write later. Blocks of free slots that are not needed any more can be given back to the file system (``discard``); such
slots are *bare*, and are reserved again before they are used.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
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
from tierstore.store.disk.discard import Discard
from tierstore.store.disk.write_budget import WriteBudget
from tierstore.store.format import SECTION_ALIGNMENT, GroupLayout

__all__ = ["NO_SPACE", "Extent"]

#: Errors of a drive that is full, or of an owner who may take no more of it.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

#: Between commits a slot that is only read collects tickets; the finished ones are swept at this many.
_PRUNE_READS = 16
#: Fewer bytes than this are not worth a hole.
_WORTH_BYTES = 1 << 20


class Extent:
    """Slots of ``layout`` in the file ``path``. With ``FileCreate.NO`` a missing one is OSError (ENOENT).

    ``links`` limit the speed of its transfers, each of them, ``budget`` what it writes, and ``meter`` counts them.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        layout: GroupLayout,
        *,
        direct: DirectIo,
        create: FileCreate,
        links: Sequence[Link] = (),
        meter: Meter | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        self.path = path
        self.layout = layout
        #: The file or its size changed since the directory was last synced.
        self.unsynced_directory = not path.exists()
        self._engine = engine
        self._links = links
        self._budget = budget
        # Free slots, as heaps: those with blocks, and those that may have none.
        self._free: list[int] = []
        self._bare: list[int] = []
        self._unchecked: set[int] = set()
        self._bare_since_opening = False
        self._punches: list[int] = []
        self._punch_errors: list[OSError] = []  # that nobody has been told of
        self._last_write: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        self._written = False
        self.file = File(str(path), create=create, direct=direct, meter=meter)
        self.slots = self.file.size // layout.slot_bytes

    def reserve(self, slots: int) -> None:
        """Gives at least ``slots`` slots, all in use among them, blocks of their own; the file grows if it must.

        Raises OSError (ENOSPC, EDQUOT) with nothing changed but blocks.
        """
        short = max(slots - self.reserved_slots, 0)
        filled = heapq.nsmallest(short, self._bare)
        grown = range(self.slots, self.slots + short - len(filled))
        if not (short or self._unchecked):
            return
        self.end_punches()
        bare = sorted({*self._unchecked, *filled, *grown})
        try:
            for first, count in _runs(bare):
                self.file.allocate(first * self.layout.slot_bytes, count * self.layout.slot_bytes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._give_back_partial_growth()
            free = os.statvfs(self.path.parent)
            message = (
                f"{os.strerror(error.errno)}: {len(bare) * self.layout.slot_bytes} more bytes are needed and "
                f"{free.f_bavail * free.f_frsize} are free"
            )
            raise OSError(error.errno, message, str(self.path)) from error
        self._unchecked.clear()
        self._bare = sorted(set(self._bare) - set(filled))
        for slot in (*filled, *grown):
            heapq.heappush(self._free, slot)
        if grown:
            self.unsynced_directory = True
        self.slots += len(grown)

    def _give_back_partial_growth(self) -> None:
        """A refused fallocate leaves what it got so far, and a later opening would take it for slots."""
        with contextlib.suppress(FileNotFoundError):  # scratch has no name
            os.truncate(self.path, self.slots * self.layout.slot_bytes)

    def adopt(self, used: set[int]) -> None:
        """After opening: every slot that is not in ``used`` is free."""
        # The file may have holes (discarded slots, a copy, a restored backup): no block is taken for granted.
        self._unchecked = set(used)
        self._bare = [slot for slot in range(self.slots) if slot not in used]
        self._bare_since_opening = bool(self._bare)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def reserved_slots(self) -> int:
        """Slots with blocks of their own, once those in use have been checked."""
        return self.slots - len(self._bare)

    def take(self) -> int:
        """A free slot; there must be one (``free_slots``)."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Frees a slot whose last content nothing on disk refers to any more."""
        if slot in self._unchecked:
            self._unchecked.remove(slot)
            heapq.heappush(self._bare, slot)
        else:
            heapq.heappush(self._free, slot)

    def discard(self, keep: int, discard: Discard) -> None:
        """Queues the holes of free slots beyond ``keep`` slots with blocks, the last in the file first.

        Nothing durable may refer to a free slot. Those that were free when the file was opened are among them: what
        they hold is not known.
        """
        self._wait_for_punches([ticket for ticket in self._punches if self._engine.done(ticket)])
        for error in self._punch_errors:
            discard.failed(error)
        self._punch_errors = []
        if not discard:
            return
        surplus = max(min(self.reserved_slots - keep, len(self._free)), 0)
        given = set(heapq.nlargest(surplus, self._free))
        holes = sorted(given | set(self._bare if self._bare_since_opening else ()))
        if len(holes) * self.layout.slot_bytes < _WORTH_BYTES:
            return
        for first, count in _runs(holes):
            slots = range(first, first + count)
            reads = [ticket for slot in slots for ticket in self.reads_in_flight(slot)]
            begin, nbytes = first * self.layout.slot_bytes, count * self.layout.slot_bytes
            self._punches.append(self._engine.punch(self.file, begin, nbytes, after=reads))
        self._free = sorted(set(self._free) - given)
        self._bare = sorted({*self._bare, *given})
        self._bare_since_opening = False

    def end_punches(self) -> None:
        """Waits for the holes that are being made."""
        self._wait_for_punches(self._punches)

    def _wait_for_punches(self, tickets: Sequence[int]) -> None:
        """Slots whose holes could not be made are as good as bare."""
        ended = set(tickets)
        self._punches = [ticket for ticket in self._punches if ticket not in ended]
        for ticket in tickets:
            try:
                self._engine.wait(ticket)
            except OSError as error:
                self._punch_errors.append(error)

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
        ticket = self._over_links(ticket, Activity.READ, before, priority)
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
        if self._budget is not None:
            before.append(self._budget.turn(self.layout.slot_bytes, before))
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
        ticket = self._over_links(ticket, Activity.WRITE, before, Priority.WRITE_BACK)
        self._last_write[slot] = ticket
        self._written = True
        return ticket

    def _over_links(self, ticket: int, activity: Activity, before: Sequence[int], priority: Priority) -> int:
        """A ticket for the transfer of a slot, over each link."""
        nbytes = self.layout.slot_bytes
        for link in self._links:
            ticket = limited(
                self._engine, link, ticket, nbytes, activity=activity, after=before, priority=priority
            )
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


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of adjacent ``slots``, which ascend."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[first], index - first
            first = index
