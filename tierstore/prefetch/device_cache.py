"""The weight slots of a device as a cache over the host cache.

The native core that decides for the host cache (``Residency``) decides here too, with the same policy: an expert is a
record of one frame, and its frame is a slot. What a slot holds is a copy. It is never written back, and once the expert's
weights in the host cache are written (a step or a replay is queued) it is given up, in program order.

An access is walked expert by expert, so a layer may have more experts than there are slots: the expert that is computed
pins one slot, and those that come next, in this pass or in a later one, may hold all others (``Residency``'s lookahead).

Decisions follow from the program's order alone. A copy is queued behind the read that it needs, and what a slot held before
is overwritten once the device has done with it. One caller at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._native import Decision, GroupOrder, Residency
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.prefetch.program import Access
from tierstore.quant.weights import Weights
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier, WeightLoads

#: ``records[layer][expert]`` says which record each expert is.
RecordsByExpert = Mapping[int, Mapping[int, LiveRecord]]

_FETCH, _EVICT = int(Decision.FETCH), int(Decision.EVICT)
_STORED = int(Need.WEIGHTS)
#: The bits of an access that say whose sequences ask.
_ASKERS = 0xFFFF & ~(int(Need.FIRST_ASKER) - 1)


@dataclass(slots=True)
class Copy:
    """An expert's weights in ``slot``. ``ticket``: of the copy; 0 once it has been waited for. ``after``: what it followed.

    ``stale``: the expert has been written since, by the pass that computes with it.
    """

    slot: int
    ticket: int = 0
    after: Sequence[int] = ()
    stale: bool = False


class DeviceCache:
    """The weight slots of ``device``, for the experts of ``records``.

    Where the device computes with the host cache (``WeightLoads.IN_PLACE``), or the policy leaves all slots empty
    (``CacheConfig.headroom_frames``), a slot is free again as soon as its expert has been computed: ``keeps`` is False.
    """

    def __init__(self, store: StoreCore, device: DeviceTier, records: RecordsByExpert) -> None:
        config, slots = store.config.cache, device.slots.weights
        self.keeps = device.loads is WeightLoads.COPIED and slots > config.headroom_frames
        policy, options = (config.policy, dict(config.options)) if self.keeps else ("lru", {})
        #: Slots that experts may hold beside the one that is computed.
        self._lookahead = slots - 1 - (config.headroom_frames if self.keeps else 0)
        self.count = slots
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = [record for layer in records.values() for record in layer.values()]
        #: Where a record of the host cache is in the core.
        self._numbers = {record.number: number for number, record in enumerate(self._records)}
        self.residency = Residency(
            slots,
            policy=policy,
            policy_options=options,
            lookahead_frames=self._lookahead,
            group_order=GroupOrder.GIVEN,
        )
        layers = np.repeat(np.array(list(records), np.uint16), [len(experts) for experts in records.values()])
        nbytes = device.slots.weight_content_bytes
        self.residency.add_records(layers, [1, 0, 0], [nbytes, 0, 0], _STORED)
        self._copies: dict[int, Copy] = {}
        self._free = deque(range(slots))
        #: The last copy into each slot: the next one follows it.
        self._last = [0] * slots
        #: Of the open access: requests of the open group that are left, and the expert that is computed now.
        self._group: deque[int] = deque()
        self._current: int | None = None
        #: Experts that passes asked for, those of them that were in a slot, and those that had been guessed into one.
        self.asked = self.found = self.guessed = 0
        #: What ``prefetch`` has copied and no pass has asked for.
        self._guesses: set[int] = set()
        #: Copies so far.
        self.copies = 0
        #: What ``pin`` has pinned.
        self._pinned: set[int] = set()
        if self.keeps:
            self._cache.observe_writes(self._written)

    # What the slots hold ------------------------------------------------------------------------------------

    def holds(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """Which of ``records`` have their weights in a slot, or on the way to one."""
        copies, numbers = self._copies, self._numbers
        return np.array([numbers[record.number] in copies for record in records], np.bool_)

    def pin(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """A pass asks for ``records``: pins those that slots hold until each is released, and returns which those are, no
        more than leave a slot for an expert that is not there.
        """
        held = self.holds(records)
        known = set(self._of(records)[held].tolist())
        self.asked += len(records)
        self.found += len(known - self._guesses)
        self.guessed += len(known & self._guesses)
        self._guesses -= known
        held[np.flatnonzero(held)[self._lookahead :]] = False
        pinned = np.sort(self._of([records[place] for place in np.flatnonzero(held).tolist()]))
        self.residency.pin(pinned, np.full(len(pinned), _STORED, np.uint16))
        self._pinned.update(pinned.tolist())
        return held

    def _written(self, entry: int) -> None:
        """An entry of the host cache is written: a copy of it is out of date."""
        record, group = divmod(entry, GROUP_STRIDE)
        number = self._numbers.get(record)
        if number is None or group != Group.WEIGHTS or number not in self._copies:
            return
        if number == self._current:
            self._copies[number].stale = True
        else:
            self._drop(number)

    # An access ----------------------------------------------------------------------------------------------

    def begin(self, access: Access, units: Sequence[int], records: Sequence[LiveRecord]) -> None:
        """Opens an access to ``records``, which are the requests ``units`` of ``access``, in the order in which they will be
        computed.
        """
        flags = (access.flags[units] & np.uint16(_ASKERS)) | np.uint16(_STORED)
        self.residency.begin_access(access.phase, access.layer, self._of(records), flags)

    def advance(self, record: LiveRecord) -> Copy:
        """The next expert of the access, ``record``, has a slot until ``release``; its copy is queued if there is none.
        Copies of those that follow are queued, as far as there are slots.
        """
        if not self._group:
            units, demanded, ahead = self.residency.next_group()
            self._group.extend(units.tolist())
            self._carry_out(demanded)
            self._carry_out(ahead)
        self._current = self._numbers[record.number]
        return self._copies[self._current]

    def weights(self, copy: Copy) -> Weights:
        """What ``copy`` holds; valid until ``release``, once its ticket has finished."""
        return self._device.weights(copy.slot)

    def copy_again(self, record: LiveRecord) -> None:
        """Queues the copy of the pinned expert once more: what it followed has failed."""
        number = self._numbers[record.number]
        copy = self._copies[number]
        self._load(number, copy.slot, copy)

    def release(self, *, lost: bool = False) -> None:
        """The present expert has been computed, as far as the caller is concerned. ``lost``: its copy failed."""
        number, self._current = self._current, None
        assert number is not None
        copy = self._copies[number]
        self._device.release_weights(copy.slot)
        self.residency.end_unit(self._group.popleft())
        if not self._group:
            self.residency.end_group()
        if number in self._pinned:
            self._unpin([number])
        if lost or copy.stale or not self.keeps:
            self._drop(number)

    def bring(self, layer: int, record: LiveRecord) -> int:
        """Queues the copy of ``record``, which no slot holds, outside of a pass; returns its ticket."""
        self.residency.begin_access(Phase.FORWARD, layer, self._of([record]), np.array([_STORED], np.uint16))
        ticket = self.advance(record).ticket
        self.release()
        return ticket

    def give_up(self, records: Sequence[LiveRecord]) -> None:
        """No slot holds ``records`` any more."""
        for number in self._of(records).tolist():
            if number in self._copies:
                self._drop(number)

    def abandon(self) -> None:
        """The access ends before its last expert: the slots of those that are left hold nothing new."""
        residency = self.residency
        if self._current is not None:
            self.release(lost=self._copies[self._current].ticket != 0)
        if self._group:
            self._group.clear()
            residency.end_group()
        before = set(self._copies)
        while residency.access_open:  # its decisions are what a trace records
            for decided in residency.next_group()[1:]:
                self._carry_out(decided, loads=False)
            residency.end_group()
        self._unpin(sorted(self._pinned))
        for number in set(self._copies) - before:
            self._drop(number)

    # Speculation --------------------------------------------------------------------------------------------

    def prefetch(self, phase: Phase, layer: int, records: Sequence[LiveRecord]) -> int:
        """Queues copies of ``records``, which a coming pass uses and the host cache has, or keeps those that there are;
        returns how many of them, from the first on, are covered.
        """
        numbers = self._of(records)
        taken, decided = self.residency.prefetch(
            phase, layer, numbers, np.full(len(numbers), _STORED, np.uint16)
        )
        self._guesses.update(self._carry_out(decided))
        return taken

    # Slots --------------------------------------------------------------------------------------------------

    def _of(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.uint32]:
        return np.array([self._numbers[record.number] for record in records], np.uint32)

    def _carry_out(
        self, decided: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], *, loads: bool = True
    ) -> list[int]:
        """Frees the slots of what is evicted, and copies what is fetched to others; returns the numbers of that."""
        fetched = []
        for kind, number in _decisions(decided):
            if kind == _EVICT:
                self._forget(number)
            elif kind == _FETCH:
                fetched.append(number)
                if loads:
                    self._load(number, self._free.popleft())
                else:
                    self._copies[number] = Copy(self._free.popleft())
        return fetched

    def _load(self, number: int, slot: int, again: Copy | None = None) -> None:
        entry = self._records[number].entry(Group.WEIGHTS)
        after, last = self._cache.ready(entry), self._last[slot]
        guards = after if not last or self._store.engine.done(last) else [*after, last]
        ticket = self._device.load(slot, self._cache.sections(entry)[0], guards)
        self._cache.reads(entry, ticket)
        self._last[slot] = ticket
        self.copies += 1
        copy = self._copies[number] = again or Copy(slot)
        copy.ticket, copy.after = ticket, after

    def _unpin(self, numbers: Sequence[int]) -> None:
        self._pinned.difference_update(numbers)
        records = np.array(numbers, np.uint32)
        self.residency.unpin(records, np.full(len(records), _STORED, np.uint16))

    def _forget(self, number: int) -> None:
        self._guesses.discard(number)
        self._free.append(self._copies.pop(number).slot)

    def _drop(self, number: int) -> None:
        self._forget(number)
        self.residency.drop(np.array([number * GROUP_STRIDE], np.uint32))
        self.residency.set_stored(number, _STORED)


def _decisions(decided: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]) -> Iterator[tuple[int, int]]:
    """Each decision and the number of its record."""
    kinds, entries = decided
    return zip(kinds.tolist(), (entries // GROUP_STRIDE).tolist(), strict=True)
