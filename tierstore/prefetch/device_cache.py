"""The weight slots of a device as a cache over the host cache.

The native core that decides for the host cache (``Residency``) decides here too, with the same policy or one of the
slots' own (``CacheConfig.of_device``): an expert is a record of one frame, and its frame is a slot. A slot holds a
copy. It is never written back, and it is dropped, in program order, when a step or a replay that writes the expert's
weights in the host cache is queued.

An access is walked expert by expert, so a layer may have more experts than there are slots: the current expert pins one
slot, and the next experts, of this pass or a later one, may hold all others (``Residency``'s lookahead).

Decisions depend only on program order. A copy is queued behind the read that it needs, and a slot is overwritten once the
device has finished with its previous content. One caller at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._native import Decision, GroupOrder, Residency
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.errors import StoreFormatError
from tierstore.prefetch.program import Access
from tierstore.quant.weights import Weights
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier, WeightLoads

#: ``records[layer][expert]`` says which record each expert is.
RecordsByExpert = Mapping[int, Mapping[int, LiveRecord]]


def find_records(
    store: StoreCore, layers: Sequence[int], experts: Sequence[int], key: Callable[[int, int], str]
) -> RecordsByExpert:
    """The records ``key(layer, expert)`` of ``experts`` in each of ``layers``. Raises StoreFormatError for a missing one."""
    try:
        return {layer: {expert: store.record(key(layer, expert)) for expert in experts} for layer in layers}
    except KeyError as error:
        raise StoreFormatError(f"{store.directory}: record {error.args[0]!r} is missing") from error


_FETCH, _EVICT = int(Decision.FETCH), int(Decision.EVICT)
_STORED = int(Need.WEIGHTS)
#: The bits of an access that say which sequences request an expert.
_SEQUENCES = 0xFFFF & ~(int(Need.FIRST_SEQUENCE) - 1)


@dataclass(slots=True)
class Copy:
    """An expert's weights in ``slot``. ``ticket``: the copy's, 0 once it has been waited for. ``after``: the tickets that
    the copy follows. ``stale``: the pass that computes with the expert has written it since.
    """

    slot: int
    ticket: int = 0
    after: Sequence[int] = ()
    stale: bool = False


class DeviceCache:
    """The weight slots of ``device``, for the experts of ``records``.

    ``keeps`` is False if the device computes with the host cache (``WeightLoads.IN_PLACE``), or if the policy keeps all
    slots empty (``CacheConfig.headroom_frames``): then a slot is free again as soon as its expert has been computed.
    ``native/cache/residency.hpp`` has a table of the states of an entry (here an expert): pinned, kept, on hold.
    """

    def __init__(self, store: StoreCore, device: DeviceTier, records: RecordsByExpert) -> None:
        config, slots = store.config.cache.of_device, device.slots.weights
        self.keeps = device.loads is WeightLoads.COPIED and slots > config.headroom_frames
        policy, options = (config.policy, dict(config.options)) if self.keeps else ("lru", {})
        #: Slots that experts other than the current one may hold.
        self._lookahead = slots - 1 - (config.headroom_frames if self.keeps else 0)
        self.count = slots
        self._store = store
        self._cache = store.cache
        self.device = device
        self._records = [record for layer in records.values() for record in layer.values()]
        #: The core's number of each record, by its number in the host cache.
        self._numbers = {record.number: number for number, record in enumerate(self._records)}
        self.residency = Residency(
            slots,
            policy=policy,
            policy_options=options,
            lookahead_frames=self._lookahead,
            group_order=GroupOrder.GIVEN,
        )
        if self.keeps:
            store.record_slots(self.residency)
        layers = np.repeat(np.array(list(records), np.uint16), [len(experts) for experts in records.values()])
        nbytes = device.slots.weight_content_bytes
        self.residency.add_records(layers, [1, 0, 0], [nbytes, 0, 0], _STORED)
        self._copies: dict[int, Copy] = {}
        self._free = deque(range(slots))
        #: The ticket of the last copy into each slot, which the next copy follows.
        self._last = [0] * slots
        #: In the open access: the remaining requests of the open group, and the current expert.
        self._group: deque[int] = deque()
        #: The pass of the access, and its experts after the open group.
        self._pass = (Phase.FORWARD, 0)
        self._following = np.zeros(0, np.uint32)
        self._current: int | None = None
        #: Experts that passes requested; hits on experts that earlier passes left in a slot; hits on prefetched experts.
        self.asked = self.found = self.guessed = 0
        #: Experts that ``prefetch`` has copied and no pass has requested yet.
        self._guesses: set[int] = set()
        #: Number of copies so far.
        self.copies = 0
        #: The experts of the last ``keep``.
        self._kept = np.zeros(0, np.uint32)
        if self.keeps:
            self._cache.observe_writes(self._written)

    # What the slots hold ------------------------------------------------------------------------------------

    @property
    def fits_all(self) -> bool:
        """Whether no expert ever needs the slot of another."""
        return self.keeps and len(self._records) <= self._lookahead + 1

    def holds(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """Which of ``records`` have their weights in a slot, or being copied to one."""
        copies, numbers = self._copies, self._numbers
        return np.array([numbers[record.number] in copies for record in records], np.bool_)

    def keep(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """A pass requests ``records`` (ascending). Pin those that are in slots, each until it is released, but leave one
        slot free for the others. Returns a mask of the pinned ones.
        """
        self._kept = self._of(records)
        known = set(self._kept.tolist()) & self._copies.keys()
        self.asked += len(records)
        self.found += len(known - self._guesses)
        self.guessed += len(known & self._guesses)
        self._guesses -= known
        return self.residency.keep(self._kept, _flags(self._kept)).astype(np.bool_)

    def _written(self, entry: int) -> None:
        """Called when an entry of the host cache is written: its copy, if any, is stale."""
        record, group = divmod(entry, GROUP_STRIDE)
        number = self._numbers.get(record)
        if number is None or group != Group.WEIGHTS:
            return
        # The core receives the writes of all experts: a replay with another policy may hold a copy that no slot has.
        if number == self._current:
            self._copies[number].stale = True
        else:
            self._drop(number)

    # An access ----------------------------------------------------------------------------------------------

    def begin(self, access: Access, units: Sequence[int], records: Sequence[LiveRecord]) -> None:
        """Open an access to ``records``, the requests ``units`` of ``access``, in the order of their computation."""
        flags = (access.flags[units] & np.uint16(_SEQUENCES)) | np.uint16(_STORED)
        self._begin(access.phase, access.layer, records, flags)

    def _begin(
        self, phase: Phase, layer: int, records: Sequence[LiveRecord], flags: npt.NDArray[np.uint16]
    ) -> None:
        self._pass, self._following = (phase, layer), self._of(records)
        self.residency.begin_access(phase, layer, self._following, flags)

    def advance(self, record: LiveRecord) -> Copy:
        """Give ``record``, the next expert of the access, a slot until ``release``, and queue its copy if it has none. Also
        queues copies of the following experts, as far as slots allow.
        """
        if not self._group:
            units, demanded, ahead = self.residency.next_group()
            self._group.extend(units.tolist())
            self._following = self._following[len(units) :]
            self._carry_out(demanded)
            self._carry_out(ahead)
        elif len(self._following):
            # Slots that the group no longer needs are used for this pass first, and only then for a coming one.
            _, ahead = self.residency.prefetch(*self._pass, self._following, _flags(self._following))
            self._carry_out(ahead)
        self._current = self._numbers[record.number]
        return self._copies[self._current]

    def weights(self, copy: Copy) -> Weights:
        """The weights in the slot of ``copy``, whose ticket has finished; valid until ``release``."""
        return self.device.weights(copy.slot)

    def copy_again(self, record: LiveRecord) -> None:
        """Queue the copy of the pinned expert again, after a read that it followed has failed."""
        number = self._numbers[record.number]
        copy = self._copies[number]
        self._load(number, copy.slot, copy)

    def release(self, *, lost: bool = False) -> None:
        """Release the current expert: the caller has queued its computation. ``lost``: its copy failed."""
        number, self._current = self._current, None
        assert number is not None
        copy = self._copies[number]
        self.device.release_weights(copy.slot)
        self.residency.end_unit(self._group.popleft())
        if self.keeps:
            self._release(np.array([number], np.uint32))
        if lost or copy.stale or not self.keeps:
            self._drop(number)
        if not self._group:
            self.residency.end_group()

    def bring(self, layer: int, record: LiveRecord) -> int:
        """Queue the copy of ``record``, which no slot holds, outside of a pass; returns its ticket."""
        self._begin(Phase.FORWARD, layer, [record], np.array([_STORED], np.uint16))
        ticket = self.advance(record).ticket
        self.release()
        return ticket

    def give_up(self, records: Sequence[LiveRecord]) -> None:
        """Drop ``records`` from the slots that hold them."""
        for number in self._of(records).tolist():
            if number in self._copies:
                self._drop(number)

    def abandon(self) -> None:
        """End the access before its last expert; nothing is copied for the remaining ones."""
        residency = self.residency
        if self._current is not None:
            self.release(lost=self._copies[self._current].ticket != 0)
        if self._group:
            self._group.clear()
            residency.end_group()
        before = set(self._copies)
        while residency.access_open:  # a trace records the decisions of the whole access
            for decided in residency.next_group()[1:]:
                self._carry_out(decided, loads=False)
            residency.end_group()
        self._release(self._kept)
        for number in set(self._copies) - before:
            self._drop(number)

    # Speculation --------------------------------------------------------------------------------------------

    def prefetch(self, phase: Phase, layer: int, records: Sequence[LiveRecord]) -> int:
        """Queue copies of ``records``, which a coming pass uses and the host cache has, in this order, until slots run
        out; hold existing copies, too. Returns the length of the covered prefix.
        """
        numbers = self._of(records)
        taken, decided = self.residency.prefetch(phase, layer, numbers, _flags(numbers))
        self._guesses.update(self._carry_out(decided))
        return taken

    # Slots --------------------------------------------------------------------------------------------------

    def _of(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.uint32]:
        return np.array([self._numbers[record.number] for record in records], np.uint32)

    def _carry_out(
        self, decided: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], *, loads: bool = True
    ) -> list[int]:
        """Free the slots of evicted experts and copy fetched experts to free slots; returns the fetched numbers."""
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
        ticket = self.device.load(slot, self._cache.sections(entry)[0], guards)
        self._cache.reads(entry, ticket)
        self._last[slot] = ticket
        self.copies += 1
        copy = self._copies[number] = again or Copy(slot)
        copy.ticket, copy.after = ticket, after

    def _release(self, numbers: npt.NDArray[np.uint32]) -> None:
        self.residency.release(numbers, _flags(numbers))

    def _forget(self, number: int) -> None:
        self._guesses.discard(number)
        self._free.append(self._copies.pop(number).slot)

    def _drop(self, number: int) -> None:
        if number in self._copies:
            self._forget(number)
        self.residency.drop(np.array([number * GROUP_STRIDE], np.uint32))
        self.residency.set_stored(number, _STORED)


def _flags(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    return np.full(len(numbers), _STORED, np.uint16)


def _decisions(decided: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]) -> Iterator[tuple[int, int]]:
    """Each decision and the number of its record."""
    kinds, entries = decided
    return zip(kinds.tolist(), (entries // GROUP_STRIDE).tolist(), strict=True)
