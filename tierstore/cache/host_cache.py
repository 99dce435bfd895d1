"""The host cache: where entries lie in memory, and in which order their bytes may move.

The native residency core (``tierstore._native.Residency``) decides, in program order and without looking at a
clock, which entry is a hit, which is fetched and which is evicted. This module carries the decisions out: it
gives entries frames of the host arena and queues their reads and write-backs on the ticket engine. It never
waits.

Two rules keep every byte right, and both are nothing but ``after=`` lists:

- what *writes* an entry's memory follows the ticket that wrote it last and everything that reads it since;
- what takes over a frame follows everything that its last owner had queued on it.

An *entry* is one section group of one record, numbered by record and group (``GROUP_STRIDE``). One caller at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Buffer, Priority, Residency
from tierstore.cache.access import GROUP_STRIDE
from tierstore.cache.frames import frames_of

__all__ = ["Backing", "HostCache"]

Decision = _native.Decision
_GRADIENTS = 2
#: Between commits the tickets of write-backs pile up; those that succeeded are swept at this many.
_SWEEP_WRITES = 4096


class Backing(Protocol):
    """Where a record's entries come from and go to: its slots on disk. Both calls queue work and return its ticket."""

    #: What messages call the record.
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
    """One entry's memory. ``ready``: the ticket that wrote it last. ``readers``: tickets reading it since."""

    backing: Backing
    section_nbytes: tuple[int, ...]
    frames: list[int] = field(default_factory=list)
    sections: tuple[Buffer, ...] = ()
    ready: int = 0
    readers: list[int] = field(default_factory=list)
    fetched: Fetched | None = None


class HostCache:
    """Executes residency decisions over ``arena``, cut in frames of ``frame_bytes``.

    The arena is the budget: nothing here allocates record memory anywhere else.
    """

    def __init__(
        self,
        *,
        engine: _native.Engine,
        arena: _native.Arena,
        frame_bytes: int,
        residency: Residency,
    ) -> None:
        self.engine = engine
        self.residency = residency
        self._arena = arena
        self._frame_bytes = frame_bytes
        self._entries: dict[int, _Entry] = {}
        self._free = list(range(arena.nbytes // frame_bytes))
        self._guards: dict[int, tuple[int, ...]] = {}
        self._pending_writes: list[int] = []
        self._sweep_at = _SWEEP_WRITES
        self._broken = ""

    @property
    def broken(self) -> str:
        """Why decisions that the core has taken, or was about to take, were not carried out; nothing here can be
        relied on after that. Empty if all is well.
        """
        if self.residency.policy_failed:
            return self._broken or "the cache policy failed"
        return self._broken

    def add_record(
        self,
        layer: int,
        groups: Sequence[Sequence[int]],
        charged: Sequence[int],
        *,
        backing: Backing,
        stored: bool,
    ) -> int:
        """Registers a record whose group g has sections of ``groups[g]`` bytes; returns its number here.

        ``backing`` reads and writes it. ``charged[g]`` is what one transfer of group g moves (bytes, padding included).
        ``stored`` says whether weights and moments are on disk already; an entry
        that is not is created, not read.
        """
        frames = [frames_of(sections, self._frame_bytes) for sections in groups]
        record = self.residency.add_record(layer, frames, list(charged), 0b011 if stored else 0)
        for group, sections in enumerate(groups):
            self._entries[record * GROUP_STRIDE + group] = _Entry(backing, tuple(sections))
        return record

    # Accesses -----------------------------------------------------------------------------------------------

    def begin_access(
        self,
        phase: int,
        layer: int,
        records: npt.NDArray[np.uint32],
        flags: npt.NDArray[np.uint16],
    ) -> int:
        """Opens one atomic event and returns the number of groups that it was split into."""
        groups, _ = self.residency.begin_access(phase, layer, records, flags)
        return groups

    def next_group(self) -> list[int]:
        """Pins the next group; its fetches are queued ahead of the speculation for the groups after it.

        Returns its units, by their place in the access, in the order in which they are served: pinned, and resident
        or in flight.
        """
        units, demanded, speculative = self.residency.next_group()
        self._execute(demanded, Priority.DEMAND)
        self._execute(speculative, Priority.SPECULATIVE)
        served: list[int] = units.tolist()
        return served

    def end_unit(self, unit: int) -> None:
        """Ends one unit of the open group: flags are applied, and its memory may be evicted from here on."""
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
        """Speculates on a coming access; returns how many of its units are covered."""
        taken, decisions = self.residency.prefetch(phase, layer, records, flags)
        self._execute(decisions, Priority.SPECULATIVE)
        return taken

    def pin(self, records: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]) -> None:
        """Keeps what the open access needs pinned beyond its end, until ``unpin`` with the same arguments."""
        self.residency.pin(records, flags)

    def unpin(self, records: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]) -> None:
        self._execute(self.residency.unpin(records, flags), Priority.WRITE_BACK)

    def clean(self) -> None:
        """Queues the write-back of every dirty weights and moments entry; they stay resident."""
        self._execute(self.residency.clean(), Priority.WRITE_BACK)

    def drop(self, entries: Sequence[int]) -> None:
        """Discards entries without writing them."""
        self._execute(self.residency.drop(np.asarray(entries, dtype=np.uint32)), Priority.WRITE_BACK)

    def end_step(self) -> None:
        self.residency.end_step()

    def take_pending_writes(self) -> list[int]:
        """Tickets of the write-backs queued since the last call: what a commit waits for."""
        pending, self._pending_writes = self._pending_writes, []
        return pending

    def unclean(self) -> list[int]:
        """Dirty weights and moments entries. After ``clean`` they are those that somebody has pinned."""
        return [
            entry for entry in self.residency.dirty_entries().tolist() if entry % GROUP_STRIDE != _GRADIENTS
        ]

    def backing(self, entry: int) -> Backing:
        """The backing of the entry's record."""
        return self._entries[entry].backing

    # Memory of resident entries -----------------------------------------------------------------------------

    def sections(self, entry: int) -> tuple[Buffer, ...]:
        """A resident entry's memory, one Buffer a section. Its bytes are valid after ``ready(entry)``."""
        return self._entries[entry].sections

    def ready(self, entry: int) -> list[int]:
        """The ticket after which the entry's content is what program order says; none if it is already."""
        ticket = self._entries[entry].ready
        return [ticket] if ticket else []

    def fetched(self, entry: int) -> Fetched | None:
        """The read that brought a resident entry in; None for one that was created in memory."""
        return self._entries[entry].fetched

    def before_write(self, entry: int) -> list[int]:
        """Tickets that must finish before something writes the entry's memory."""
        state = self._entries[entry]
        return [state.ready, *state.readers] if state.ready else list(state.readers)

    def wrote(self, entry: int, ticket: int) -> None:
        """Records that ``ticket`` (queued after ``before_write``) writes the entry. 0: the caller has written
        it.
        """
        state = self._entries[entry]
        state.ready = ticket
        state.readers.clear()

    def reads(self, entry: int, ticket: int) -> None:
        """Records that ``ticket`` reads the entry's memory."""
        self._entries[entry].readers.append(ticket)

    # Execution ----------------------------------------------------------------------------------------------

    def _execute(
        self, decisions: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], priority: Priority
    ) -> None:
        try:
            self._carry_out(decisions, priority)
        except BaseException as error:
            # The core has moved on: what it believes and what is so differ from here on.
            self._broken = self._broken or f"the host cache could not carry out a decision: {error}"
            raise

    def _carry_out(
        self, decisions: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], priority: Priority
    ) -> None:
        kinds, entries = decisions
        for kind, entry in zip(kinds.tolist(), entries.tolist(), strict=True):
            if kind == Decision.HIT:
                continue
            state = self._entries[entry]
            if kind == Decision.FETCH:
                guards = self._give_frames(state)
                state.ready = state.backing.read(entry % GROUP_STRIDE, state.sections, guards, priority)
                state.fetched = Fetched(state.ready, priority is Priority.SPECULATIVE)
            elif kind == Decision.CREATE:
                # Nothing to read; whoever fills it must still follow the last owners of its frames.
                state.readers = self._give_frames(state)
                state.ready, state.fetched = 0, None
            elif kind == Decision.WRITE_BACK:
                state.readers.append(self._write_back(entry, state))
            elif kind == Decision.EVICT_WRITE:
                state.readers.append(self._write_back(entry, state))
                self._take_frames(state)
            else:  # EVICT of a clean entry, DROP of one that nobody needs again
                self._take_frames(state)

    def _write_back(self, entry: int, state: _Entry) -> int:
        after = [state.ready] if state.ready else []
        ticket = state.backing.write(entry % GROUP_STRIDE, state.sections, after)
        self._pending_writes.append(ticket)
        if len(self._pending_writes) >= self._sweep_at:
            self._sweep()
        return ticket

    def _sweep(self) -> None:
        """Forgets write-backs that have succeeded. One that failed stays, for the commit to find."""
        self._pending_writes = [ticket for ticket in self._pending_writes if not self._succeeded(ticket)]
        self._sweep_at = 2 * len(self._pending_writes) + _SWEEP_WRITES

    def _succeeded(self, ticket: int) -> bool:
        if not self.engine.done(ticket):
            return False
        try:
            self.engine.wait(ticket)
        except Exception:
            return False
        return True

    def _give_frames(self, state: _Entry) -> list[int]:
        """Frames for a new resident; returns the tickets that must finish before they are written."""
        count = frames_of(state.section_nbytes, self._frame_bytes)
        # Lowest first: neighbours tend to come together, and their spans merge into one.
        state.frames = [heapq.heappop(self._free) for _ in range(count)]
        guards: set[int] = set()
        for frame in state.frames:
            guards.update(self._guards.pop(frame, ()))
        sections, begin = [], 0
        for nbytes in state.section_nbytes:
            end = begin + frames_of((nbytes,), self._frame_bytes)
            sections.append(Buffer(self._arena, self._spans(state.frames[begin:end]), nbytes))
            begin = end
        state.sections = tuple(sections)
        state.readers = []
        return sorted(guards)

    def _spans(self, frames: list[int]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        size = self._frame_bytes
        for frame in frames:
            if spans and spans[-1][0] + spans[-1][1] == frame * size:
                spans[-1] = (spans[-1][0], spans[-1][1] + size)
            else:
                spans.append((frame * size, size))
        return spans

    def _take_frames(self, state: _Entry) -> None:
        queued = [t for t in (state.ready, *state.readers) if t and not self.engine.done(t)]
        guards = tuple(queued)
        for frame in state.frames:
            if guards:
                self._guards[frame] = guards
            heapq.heappush(self._free, frame)
        state.frames, state.sections, state.readers, state.ready = [], (), [], 0
