"""Extent files: equal slots, preallocated, reused only when no commit needs them.

An ``Extent`` owns one file and its free slots. ``reserve`` allocates space with ``fallocate`` before it is needed, so a
full disk is an ``OSError`` (ENOSPC, path, bytes needed) there, and never a failed write later. ``discard`` returns the
blocks of superfluous free slots to the file system; such slots are *holes*, and ``reserve`` fills them before use.

A slot is *shared* while a durable table of the index refers to it: shared slots are never written.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._native import (
    Activity,
    Arena,
    Buffer,
    CrcTable,
    DirectIo,
    Engine,
    File,
    FileAccess,
    FileCreate,
    HugePages,
    Link,
    Meter,
    NumberSet,
    Priority,
)
from tierstore.capabilities import Capability
from tierstore.links import limited
from tierstore.store.disk.write_budget import WriteBudget
from tierstore.store.format import SECTION_ALIGNMENT, GroupLayout

_PAGE = 4096


class Discard:
    """The capability, resolved for the file systems of the directories ``scratch``. ON raises OSError if one lacks it."""

    def __init__(self, wanted: Capability, scratch: Sequence[Path]) -> None:
        #: Why nothing is discarded; empty if discarding is on.
        self.reason = "off" if wanted is Capability.OFF else ""
        if wanted is not Capability.OFF:
            try:
                for directory in scratch:
                    _try(directory / "discard")
            except OSError as error:
                if wanted is Capability.ON:
                    raise
                self.reason = f"off ({error.strerror})"

    def __bool__(self) -> bool:
        return not self.reason

    def failed(self, error: OSError) -> None:
        """Turns discarding off, because a hole could not be punched. ``describe`` gives the reason."""
        self.reason = self.reason or f"off ({error.filename}: {error.strerror})"

    def describe(self) -> str:
        return f"discard: {self.reason or 'on'}"


def _try(path: Path) -> None:
    with File(str(path), create=FileCreate.YES, direct=DirectIo.OFF) as file:
        path.unlink()
        file.allocate(0, 2 * _PAGE)
        file.punch(0, _PAGE)


#: Errors of a full drive, and of an exhausted quota.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

#: Between commits a slot that is only read collects tickets; at this many, the finished ones are dropped.
_PRUNE_READS = 16
#: Fewer bytes than this are not worth a hole.
_WORTH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """The location of one group of a record: slot ``number`` of ``extent``."""

    extent: Extent
    number: int


class Extent:
    """Slots of ``layout`` in the file ``path``, in the store's directory ``directory``.

    With ``FileCreate.NO`` a missing file is OSError (ENOENT). With ``FileAccess.READ`` nothing can be written or
    reserved. ``budget`` limits the bytes written, ``meter`` counts the transfers, and each of ``links`` limits their
    speed.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        layout: GroupLayout,
        *,
        directory: int,
        direct: DirectIo,
        create: FileCreate,
        access: FileAccess = FileAccess.READ_WRITE,
        links: Sequence[Link] = (),
        meter: Meter | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        self.path = path
        self.layout = layout
        self.slot_bytes = layout.slot_bytes
        self.directory = directory
        #: Whether the file or its size changed since the directory was last synced.
        self.unsynced_directory = not path.exists()
        self._engine = engine
        #: Emulated links that limit the speed (``tierstore.links``).
        self.links = list(links)
        self._budget = budget
        # Free slots with blocks, and free slots that may have none.
        self._free = NumberSet()
        self._holes = NumberSet()
        self._unchecked = NumberSet()
        self._holes_unpunched = False
        # Free slots that read as zeros: their blocks were allocated, and not written since.
        self._zeros = NumberSet()
        # By slot: the number of durable tables that refer to it.
        self._references = array("H")
        self._punches: list[int] = []
        self._punch_errors: list[OSError] = []  # not reported yet
        self._last_write: dict[int, int] = {}
        self._reads: dict[int, list[int]] = {}
        self._written = False
        self.file = File(str(path), create=create, direct=direct, access=access, meter=meter)
        self.slots = 0
        self._lengthen(self.file.size // self.slot_bytes)

    # Space --------------------------------------------------------------------------------------------------

    def _lengthen(self, slots: int) -> None:
        self.slots += slots
        self._references.frombytes(bytes(slots * self._references.itemsize))

    def reserve(self, slots: int) -> None:
        """Allocates blocks for at least ``slots`` slots, including those in use; the file grows if necessary. Raises
        OSError (ENOSPC, EDQUOT) with nothing changed but blocks.
        """
        short = max(slots - self.reserved_slots, 0)
        if not (short or self._unchecked):
            return
        filled = self._holes.smallest(short)
        grown = np.arange(self.slots, self.slots + short - len(filled), dtype=np.uint32)
        self.end_punches()
        missing = np.sort(np.concatenate([self._unchecked.array(), filled, grown]))
        try:
            for first, count in _runs(missing):
                self.file.allocate(first * self.slot_bytes, count * self.slot_bytes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            # A refused fallocate keeps its partial allocation, which a later opening would take for slots.
            os.ftruncate(self.file.fileno(), self.slots * self.slot_bytes)
            free = os.fstatvfs(self.file.fileno())
            message = (
                f"{os.strerror(error.errno)}: {len(missing) * self.slot_bytes} more bytes are needed and "
                f"{free.f_bavail * free.f_frsize} are free"
            )
            raise OSError(error.errno, message, str(self.path)) from error
        self._unchecked.clear()
        self._holes.difference_update(filled)
        self._free.update(filled)
        self._free.update(grown)
        self._zeros.update(grown)
        if len(grown):
            self.unsynced_directory = True
        self._lengthen(len(grown))

    def recover(self) -> None:
        """After opening: frees every slot that no durable table refers to."""
        # The file may have holes (discarded slots, a copy, a restored backup): blocks are not assumed.
        used = np.array(self._references) > 0
        self._unchecked.clear()
        self._unchecked.update(np.flatnonzero(used).astype(np.uint32))
        self._holes.clear()
        self._holes.update(np.flatnonzero(~used).astype(np.uint32))
        self._holes_unpunched = bool(self._holes)

    def clear_holes(self) -> None:
        """Makes every slot that has been free since the file was opened read as zeros, if the file system can."""
        if not self._holes_unpunched:
            return
        self.end_punches()
        try:
            for first, count in _runs(self._holes.array()):
                self.file.punch(first * self.slot_bytes, count * self.slot_bytes)
        except OSError:  # no holes on this file system: zeros must be written
            return
        self._holes_unpunched = False
        self._zeros.update(self._holes.array())

    def reads_as_zeros(self, slot: int) -> bool:
        """Whether ``slot`` reads as zeros without having been written."""
        return slot in self._zeros

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def reserved_slots(self) -> int:
        """Slots with blocks, once those in use have been checked."""
        return self.slots - len(self._holes)

    def allocate(self) -> Slot:
        """Allocates a free slot; there must be one (``free_slots``)."""
        return Slot(self, self._free.pop_first())

    def free(self, slot: int) -> None:
        """Frees a slot to which nothing on disk refers any more."""
        (self._holes if self._unchecked.discard(slot) else self._free).add(slot)

    def retain_all(self, slots: npt.NDArray[np.uint32]) -> None:
        """Adds a durable table's reference to each of ``slots``, which are distinct."""
        np.frombuffer(self._references, np.uint16)[slots] += 1

    def release_all(self, slots: npt.NDArray[np.uint32]) -> None:
        """Drops a durable table's reference to each of ``slots``, which are distinct; frees those without references."""
        references = np.frombuffer(self._references, np.uint16)
        references[slots] -= 1
        for slot in slots[references[slots] == 0].tolist():
            self.free(slot)

    def shared(self, slot: int) -> bool:
        """Whether a durable table refers to ``slot``."""
        return self._references[slot] > 0

    def all_shared(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """``shared`` of each of ``slots``."""
        return np.frombuffer(self._references, np.uint16)[slots] > 0 if len(slots) else np.empty(0, bool)

    def discard(self, keep: int, discard: Discard) -> None:
        """Queues hole punches for free slots beyond ``keep`` slots with blocks, the last in the file first, and for the
        slots that were free when the file was opened, which may have blocks.
        """
        self._wait_for_punches([ticket for ticket in self._punches if self._engine.done(ticket)])
        for error in self._punch_errors:
            discard.failed(error)
        self._punch_errors = []
        if not discard:
            return
        surplus = max(min(self.reserved_slots - keep, len(self._free)), 0)
        unpunched = len(self._holes) if self._holes_unpunched else 0
        if (surplus + unpunched) * self.slot_bytes < _WORTH_BYTES:
            return
        given = self._free.largest(surplus)
        holes = np.sort(np.concatenate([given, self._holes.smallest(unpunched)]))
        read = np.sort(np.fromiter(self._reads, np.uint32, len(self._reads)))
        for first, count in _runs(holes):
            between = np.searchsorted(read, (first, first + count))
            slots = read[between[0] : between[1]].tolist()
            reads = [ticket for slot in slots for ticket in self.reads_in_flight(slot)]
            begin, nbytes = first * self.slot_bytes, count * self.slot_bytes
            self._punches.append(self._engine.punch(self.file, begin, nbytes, after=reads))
        self._free.difference_update(given)
        self._holes.update(given)
        self._holes_unpunched = False

    def end_punches(self) -> None:
        """Waits for the queued hole punches."""
        self._wait_for_punches(self._punches)

    def _wait_for_punches(self, tickets: Sequence[int]) -> None:
        """Waits for punches; a slot that could not be punched still counts as a hole."""
        ended = set(tickets)
        self._punches = [ticket for ticket in self._punches if ticket not in ended]
        for ticket in tickets:
            try:
                self._engine.wait(ticket)
            except OSError as error:
                self._punch_errors.append(error)

    # Transfers ----------------------------------------------------------------------------------------------

    def read(
        self,
        slot: int,
        sections: Sequence[Buffer],
        crcs: CrcTable,
        after: Sequence[int],
        priority: Priority,
        *,
        crcs_from: int = 0,
    ) -> int:
        """Queues a read of a whole slot, after the last write to it, checked by ``crcs`` from ``crcs_from`` on."""
        if slot in self._last_write:
            after = [*after, self._last_write[slot]]
        ticket = self._engine.read(
            self.file,
            slot * self.slot_bytes,
            sections,
            crcs,
            crcs_from + self.layout.first_section,
            align=SECTION_ALIGNMENT,
            after=after,
            priority=priority,
        )
        ticket = self._limited(ticket, sections, Activity.READ, after, priority)
        reads = self._reads.setdefault(slot, [])
        if len(reads) >= _PRUNE_READS:
            reads[:] = self._unfinished(reads)
        reads.append(ticket)
        return ticket

    def map(self, slot: int, crcs: CrcTable, crcs_from: int) -> tuple[Buffer, int]:
        """The first section of ``slot`` where a read-only mapping of the file has it, and the ticket of its comparison with
        its checksum, which fails as a read does. Raises OSError.
        """
        offset, crc = slot * self.slot_bytes, crcs_from + self.layout.first_section
        section = self.file.map(offset, self.layout.sections[0].nbytes)
        return section, self._engine.verify_mapped(self.file, offset, section, crcs, crc)

    def reads_in_flight(self, slot: int) -> list[int]:
        """Tickets of the unfinished reads of ``slot``."""
        return self._unfinished(self._reads.get(slot, ()))

    def _unfinished(self, tickets: Iterable[int]) -> list[int]:
        # Finished transfers, even failed ones, delay nothing any more.
        return [ticket for ticket in tickets if not self._engine.done(ticket)]

    def write(
        self,
        slot: int,
        sections: Sequence[Buffer],
        crcs: CrcTable,
        after: Sequence[int],
        *,
        crcs_from: int = 0,
    ) -> int:
        """Queues a write of a slot, or of its first sections, after every read and write queued on that slot before."""
        self._zeros.discard(slot)
        before = [*after, *self._unfinished(self._reads.pop(slot, ()))]
        if slot in self._last_write:
            before.append(self._last_write[slot])
        if self._budget is not None:
            written = sum(section.padded_nbytes for section in self.layout.sections[: len(sections)])
            before.append(self._budget.turn(written, before))
        ticket = self._engine.write(
            self.file,
            slot * self.slot_bytes,
            sections,
            crcs,
            crcs_from + self.layout.first_section,
            align=SECTION_ALIGNMENT,
            after=before,
            priority=Priority.WRITE_BACK,
        )
        ticket = self._limited(ticket, sections, Activity.WRITE, before, Priority.WRITE_BACK)
        self._last_write[slot] = ticket
        self._written = True
        return ticket

    def _limited(
        self,
        ticket: int,
        sections: Sequence[Buffer],
        activity: Activity,
        after: Sequence[int],
        priority: Priority,
    ) -> int:
        """``ticket`` at the speed of the emulated links."""
        if self.links:
            nbytes = sum(-(-section.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT for section in sections)
            for link in self.links:
                ticket = limited(
                    self._engine, link, ticket, nbytes, activity=activity, after=after, priority=priority
                )
        return ticket

    def sync(self, after: Sequence[int]) -> int | None:
        """Queues an fdatasync if the file was written or grown since the last one."""
        if not (self._written or self.unsynced_directory):
            return None
        self._written = False
        return self._engine.sync(self.file, after=list(after))

    def forget_finished(self) -> None:
        """Drops the ordering state of transfers that are known to have finished (after a commit)."""
        self._last_write = {s: t for s, t in self._last_write.items() if not self._engine.done(t)}
        unfinished = {s: self._unfinished(ts) for s, ts in self._reads.items()}
        self._reads = {s: ts for s, ts in unfinished.items() if ts}

    def close(self) -> None:
        self.file.close()


def _runs(slots: npt.NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of adjacent ``slots``, which ascend."""
    if not len(slots):
        return
    begins = np.flatnonzero(np.diff(slots, prepend=slots[0]) != 1)  # the first is one, too
    firsts, ends = slots[begins].tolist(), [*begins[1:].tolist(), len(slots)]
    for first, begin, end in zip(firsts, begins.tolist(), ends, strict=True):
        yield first, end - begin


def scratch_buffers(layout: GroupLayout) -> list[Buffer]:
    """Memory for one slot of ``layout``, one Buffer a section; it lives as long as they do. In huge pages, if there are any:
    a direct read pins each page, which takes over half of its time if they are small.
    """
    arena = Arena(layout.slot_bytes, HugePages.AUTO)
    sections, offset = [], 0
    for section in layout.sections:
        sections.append(Buffer(arena, [(offset, section.padded_nbytes)], section.nbytes))
        offset += section.padded_nbytes
    return sections


#: Reads of ``read_ahead`` in flight at once, and their bytes.
_IN_FLIGHT, _IN_FLIGHT_BYTES = 64, 64 << 20
_Item = TypeVar("_Item")
_Read = TypeVar("_Read")
#: Allocates memory for a slot.
Scratch: TypeAlias = Callable[[GroupLayout], list[Buffer]]


def ahead_bytes(total: int, largest: int) -> int:
    """The most memory that ``read_ahead`` takes for items of ``total`` bytes, the largest of ``largest``."""
    return min(total, _IN_FLIGHT_BYTES + largest)


def read_ahead(
    items: Iterable[_Item], nbytes: Callable[[_Item], int], begin: Callable[[_Item, Scratch], _Read]
) -> Iterator[_Read]:
    """``begin(item, scratch)`` of each item, which queues reads of ``nbytes(item)`` into memory of ``scratch``; those of the
    next items are queued meanwhile. Before it takes the next item, the caller must wait for the reads and
    finish with the memory.

    Memory is reused: at most ``_IN_FLIGHT_BYTES`` and one item's, in addition to what the caller keeps.
    """
    spare: list[tuple[GroupLayout, list[Buffer]]] = []  # the longest unused first
    coming: deque[tuple[_Read, int, list[tuple[GroupLayout, list[Buffer]]]]] = deque()
    in_flight = held = 0  # bytes of reads, and of all memory taken for them

    def scratch(layout: GroupLayout) -> list[Buffer]:
        nonlocal held
        for number in reversed(range(len(spare))):
            if spare[number][0] == layout:
                taken.append(spare.pop(number))
                return taken[-1][1]
        # Memory for other layouts is kept as far as the limit allows: later items need it.
        while spare and held > _IN_FLIGHT_BYTES:
            held -= spare.pop(0)[0].slot_bytes
        taken.append((layout, scratch_buffers(layout)))
        held += layout.slot_bytes
        return taken[-1][1]

    def first() -> Iterator[_Read]:
        nonlocal in_flight
        read, size, lent = coming.popleft()
        yield read
        in_flight -= size
        spare.extend(lent)

    for item in items:
        while coming and (len(coming) == _IN_FLIGHT or in_flight + nbytes(item) > _IN_FLIGHT_BYTES):
            yield from first()
        taken: list[tuple[GroupLayout, list[Buffer]]] = []
        coming.append((begin(item, scratch), nbytes(item), taken))
        in_flight += nbytes(item)
    while coming:
        yield from first()
