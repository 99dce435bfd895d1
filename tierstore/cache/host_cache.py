"""The host cache: where entries are in memory, and in which order their bytes may move.

The native residency core (``tierstore._native.Residency``) decides, in program order and without a clock, which entry is
a hit, which is fetched and which is evicted. This module executes the decisions: it gives entries frames of the host
arena and queues their reads and write-backs on the ticket engine. It never waits.

Two rules keep every byte right; both are expressed as ``after=`` lists:

- a *write* of an entry's memory follows the ticket that wrote it last and all tickets that read it since;
- a new owner of a frame follows everything that its last owner had queued on it.

An *entry* is one section group of one record, numbered by record and group (``GROUP_STRIDE``). Callers are serialised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Buffer, Engine, Priority, Residency
from tierstore.cache.access import GROUP_STRIDE
from tierstore.cache.frames import FrameAllocator

#: Tickets of write-backs accumulate between commits; at this number, those that succeeded are removed.
_SWEEP_WRITES = 4096


class WriteBacks:
    """Tickets of the write-backs that a commit has to wait for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tickets: list[int] = []
        self._sweep_at = _SWEEP_WRITES

    def add(self, ticket: int) -> None:
        self._tickets.append(ticket)
        if len(self._tickets) >= self._sweep_at:
            # A failed one stays, so that the commit finds it.
            self._tickets = [ticket for ticket in self._tickets if not self._succeeded(ticket)]
            self._sweep_at = 2 * len(self._tickets) + _SWEEP_WRITES

    def _succeeded(self, ticket: int) -> bool:
        if not self._engine.done(ticket):
            return False
        try:
            self._engine.wait(ticket)
        except Exception:
            return False
        return True

    def take(self) -> list[int]:
        """The tickets added since the last call."""
        taken, self._tickets = self._tickets, []
        return taken


Decision = _native.Decision
_GRADIENTS = 2
#: With this many readers of an entry, finished ones are removed.
_READERS = 16


class Backing(Protocol):
    """Where a record's entries are stored: its slots on disk. Both calls queue work and return its ticket."""

    #: The record's name in messages.
    @property
    def key(self) -> str: ...

    def read(
        self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority
    ) -> int: ...

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """The read that brought an entry in."""

    ticket: int
    speculative: bool


@dataclass(slots=True)
class _Entry:
    """A resident entry's memory. ``ready``: the ticket that wrote it last. ``readers``: tickets that read it since."""

    sections: tuple[Buffer, ...] = ()
    ready: int = 0
    readers: list[int] = field(default_factory=list)
    fetched: Fetched | None = None


class HostCache:
    """Executes residency decisions over ``arena``, cut in frames of ``frame_bytes``.

    The arena is the budget: record memory is allocated nowhere else.
    """

    def __init__(
        self,
        *,
        engine: _native.Engine,
        arena: _native.Arena,
        frame_bytes: int,
        residency: Residency,
        find_backing: Callable[[int], Backing],
    ) -> None:
        self.engine = engine
        self.residency = residency
        self._frames = FrameAllocator(arena, frame_bytes, engine.done)
        #: Resident entries.
        self._entries: dict[int, _Entry] = {}
        # Shapes of the records, by number. An object for each of a hundred thousand records would be most of the index.
        self._shapes: list[tuple[tuple[int, ...], ...]] = []  # bytes of the sections of each group
        self._shape_of = array("H")
        self._find_backing = find_backing
        #: Write-backs that a commit waits for.
        self.write_backs = WriteBacks(engine)
        self._writes: list[Callable[[int], None]] = []
        self._broken = ""

    @property
    def broken(self) -> str:
        """Why a decision of the core was not executed; nothing here can be relied on after that. Empty if all is well."""
        if self.residency.policy_failed:
            return self._broken or "the cache policy failed"
        return self._broken

    def add_records(
        self,
        layers: npt.NDArray[np.uint16],
        groups: Sequence[Sequence[int]],
        charged: Sequence[int],
        *,
        stored: bool,
    ) -> int:
        """Register a record for each of ``layers``, whose group g has sections of ``groups[g]`` bytes; returns the first's
        number.

        ``charged[g]``: bytes that one transfer of group g moves, padding included. ``stored``: whether weights and moments,
        if there are sections of them, are on disk already; an entry that is not on disk is created, not read.
        """
        shape = tuple(map(tuple, groups))
        if shape not in self._shapes:
            self._shapes.append(shape)
        frames = [self._frames.count(sections) for sections in groups]
        on_disk = sum(1 << group for group in range(_GRADIENTS) if groups[group]) if stored else 0
        first = self.residency.add_records(layers, frames, list(charged), on_disk)
        self._shape_of.extend([self._shapes.index(shape)] * len(layers))
        return first

    # Accesses -----------------------------------------------------------------------------------------------

    def begin_access(
        self,
        phase: int,
        layer: int,
        records: npt.NDArray[np.uint32],
        flags: npt.NDArray[np.uint16],
    ) -> int:
        """Open one atomic access; returns the number of groups that it was split into."""
        groups, _ = self.residency.begin_access(phase, layer, records, flags)
        return groups

    def next_group(self) -> list[int]:
        """Pin the next group; its fetches are queued before the speculative ones for the groups after it.

        Returns its units, as indices into the access, in the order in which they are served: pinned, and resident
        or in flight.
        """
        units, demanded, speculative = self.residency.next_group()
        self._execute(demanded, Priority.DEMAND)
        self._execute(speculative, Priority.SPECULATIVE)
        served: list[int] = units.tolist()
        return served

    def end_unit(self, unit: int) -> None:
        """End one unit of the open group: its flags are applied, and its memory may be evicted from now on."""
        self._execute(self.residency.end_unit(unit), Priority.WRITE_BACK)

    def end_group(self) -> None:
        self._execute(self.residency.end_group(), Priority.WRITE_BACK)

    def prefetch(
        self,
        phase: int,
        layer: int,
        records: npt.NDArray[np.uint32],
        flags: npt.NDArray[np.uint16],
    ) -> int:
        """Prefetch for a coming access; returns how many of its units are covered."""
        taken, decisions = self.residency.prefetch(phase, layer, records, flags)
        self._execute(decisions, Priority.SPECULATIVE)
        return taken

    def unpin(self, records: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]) -> None:
        """Release the pins beyond the end of an access that ``residency.pin`` has set in it, with the same arguments."""
        self._execute(self.residency.unpin(records, flags), Priority.WRITE_BACK)

    @property
    def filled(self) -> float:
        """The fraction of the memory that entries occupy."""
        return self.residency.used_frames / self._frames.total

    def clean(self, records: Sequence[int] | None = None) -> None:
        """Queue the write-back of all dirty weights and moments entries, or of those of ``records``; they stay resident."""
        numbers = None if records is None else np.asarray(records, np.uint32)
        self._execute(self.residency.clean(numbers), Priority.WRITE_BACK)

    def drop(self, entries: Sequence[int]) -> None:
        """Discard entries without writing them."""
        self._execute(self.residency.drop(np.asarray(entries, dtype=np.uint32)), Priority.WRITE_BACK)

    def unclean(self) -> list[Backing]:
        """Backings of records with dirty weights or moments; after ``clean``, only pinned ones are left."""
        dirty = self.residency.dirty_entries().tolist()
        return [self._find_backing(e // GROUP_STRIDE) for e in dirty if e % GROUP_STRIDE != _GRADIENTS]

    # Memory of resident entries -----------------------------------------------------------------------------

    def sections(self, entry: int) -> tuple[Buffer, ...]:
        """An entry's memory, one Buffer per section; empty if it is not resident. Its bytes are valid after
        ``ready(entry)``.
        """
        state = self._entries.get(entry)
        return () if state is None else state.sections

    def ready(self, entry: int) -> list[int]:
        """The ticket after which the entry has the content of program order; empty if it has it already."""
        state = self._entries.get(entry)
        return [state.ready] if state is not None and state.ready else []

    def mark_ready(self, entry: int) -> None:
        """The caller has waited for ``ready(entry)``, or a later ticket, without failure: no caller needs to wait again."""
        self._entries[entry].ready = 0

    def fetched(self, entry: int) -> Fetched | None:
        """The read that fetched a resident entry; None if it was created in memory or is not resident."""
        state = self._entries.get(entry)
        return None if state is None else state.fetched

    def before_write(self, entry: int) -> list[int]:
        """Tickets that must finish before the entry's memory is written."""
        state = self._entries[entry]
        return [state.ready, *state.readers] if state.ready else list(state.readers)

    def wrote(self, entry: int, ticket: int) -> None:
        """Record that ``ticket`` (queued after ``before_write``) writes the entry. 0: the caller has written it already."""
        state = self._entries[entry]
        state.ready = ticket
        state.readers.clear()
        for written in self._writes:
            written(entry)

    def observe_writes(self, written: Callable[[int], None]) -> None:
        """From now on, call ``written`` with each entry when a write of it is queued."""
        self._writes.append(written)

    def reads(self, entry: int, ticket: int) -> None:
        """Record that ``ticket`` reads the entry's memory."""
        readers = self._entries[entry].readers
        if len(readers) >= _READERS:  # nothing writes an entry that is only read
            readers[:] = [earlier for earlier in readers if not self.engine.done(earlier)]
        readers.append(ticket)

    def read_again(self, entry: int) -> list[int]:
        """Queue another read of a resident, clean entry whose last read failed; returns its ticket. The failed ticket and
        its readers are forgotten.
        """
        state = self._entries[entry]
        backing = self._find_backing(entry // GROUP_STRIDE)
        state.ready = backing.read(entry % GROUP_STRIDE, state.sections, (), Priority.DEMAND)
        state.readers.clear()
        return [state.ready]

    # Execution ----------------------------------------------------------------------------------------------

    def _execute(
        self, decisions: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], priority: Priority
    ) -> None:
        try:
            self._carry_out(decisions, priority)
        except BaseException as error:
            # The core has moved on: from here, its state and the real one differ.
            self._broken = self._broken or f"the host cache could not carry out a decision: {error}"
            raise

    def _carry_out(
        self, decisions: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], priority: Priority
    ) -> None:
        kinds, entries = decisions
        if not len(kinds):  # most accesses of read-only records
            return
        for kind, entry in zip(kinds.tolist(), entries.tolist(), strict=True):
            if kind == Decision.HIT:
                continue
            if kind == Decision.FETCH:
                state, guards = self._allocate(entry)
                backing = self._find_backing(entry // GROUP_STRIDE)
                state.ready = backing.read(entry % GROUP_STRIDE, state.sections, guards, priority)
                state.fetched = Fetched(state.ready, priority is Priority.SPECULATIVE)
            elif kind == Decision.CREATE:
                # Nothing to read; its writer must still follow the last owners of its frames.
                state, guards = self._allocate(entry)
                state.readers = guards
            elif kind == Decision.WRITE_BACK:
                state = self._entries[entry]
                state.readers.append(self._write_back(entry, state))
            elif kind == Decision.EVICT_WRITE:
                state = self._entries[entry]
                state.readers.append(self._write_back(entry, state))
                self._free(entry)
            else:  # EVICT of a clean entry, DROP of one that is not needed again
                self._free(entry)

    def _write_back(self, entry: int, state: _Entry) -> int:
        after = [state.ready] if state.ready else []
        backing = self._find_backing(entry // GROUP_STRIDE)
        ticket = backing.write(entry % GROUP_STRIDE, state.sections, after)
        self.write_backs.add(ticket)
        return ticket

    def _allocate(self, entry: int) -> tuple[_Entry, list[int]]:
        """Allocate memory for a new resident entry; also returns the tickets that must finish before it is written."""
        record, group = divmod(entry, GROUP_STRIDE)
        sections, guards = self._frames.allocate(self._shapes[self._shape_of[record]][group])
        state = self._entries[entry] = _Entry(sections)
        return state, guards

    def _free(self, entry: int) -> None:
        state = self._entries.pop(entry, None)
        if state is None:  # not resident: only its copy on disk was dropped
            return
        queued = [t for t in (state.ready, *state.readers) if t and not self.engine.done(t)]
        self._frames.free(state.sections, queued)
