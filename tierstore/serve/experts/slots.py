"""Weight slots of the device, loaded through the host cache.

A load is one access of the host cache: its experts are pinned, their copies are queued behind their reads, and they are
unpinned again, before anything is waited for. So no access is open while experts compute, and an error that a wait raises
leaves the cache as it was. What the host cache then evicts keeps its memory until the copies that read it are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tierstore.cache.access import Need, Phase
from tierstore.cache.host_cache import Fetched
from tierstore.errors import StoreError
from tierstore.prefetch.walking import RecordsByExpert
from tierstore.quant.weights import Weights
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier


class Asked(Enum):
    """When an expert was asked for."""

    NOW = "now"  # a pass uses it
    AHEAD = "ahead"  # a coming pass will, or may


@dataclass(frozen=True, slots=True)
class _Load:
    """What a slot was loaded with: the copy's ticket, and the read that the copy follows, if it was read."""

    record: LiveRecord
    ticket: int
    read: Fetched | None
    asked: Asked
    nbytes: int


class ExpertSlots:
    """The weight slots of ``device``. ``records[layer][expert]`` says which record each expert is."""

    def __init__(
        self, store: StoreCore, device: DeviceTier, records: RecordsByExpert, *, ledger: StallLedger
    ) -> None:
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = records
        self._ledger = ledger
        count = device.slots.weights
        #: What each slot holds, or will; None: nothing that is of use.
        self._loads: list[_Load | None] = [None] * count
        #: The last copy into each slot: the next one follows it.
        self._copies = [0] * count
        #: Whether the copy is known to have ended well.
        self._arrived = [False] * count
        #: Slots that were given out by ``weights`` and not released.
        self._used: set[int] = set()
        #: Bytes that were on their way, but not there, when they were needed.
        self.late_bytes = 0
        #: Copies so far, and their bytes.
        self.copies = 0
        self.copied_bytes = 0

    @property
    def count(self) -> int:
        return len(self._loads)

    @property
    def weight_bytes(self) -> int:
        """What one slot takes on the device."""
        return self._device.slots.weight_bytes

    def load(self, layer: int, experts: Sequence[int], slots: Sequence[int], asked: Asked) -> None:
        """Queues the copy of each of ``experts`` into its slot. Raises BudgetError where the host cache cannot hold one
        expert, StoreError.
        """
        pairs = sorted(
            ((self._records[layer][expert], slot) for expert, slot in zip(experts, slots, strict=True)),
            key=lambda pair: pair[0].number,
        )
        if not pairs:
            return
        numbers = np.array([record.number for record, _ in pairs], np.uint32)
        groups = self._store.begin_access(Phase.FORWARD, layer, numbers, _weights(len(pairs)))
        for _ in range(groups):
            for unit in self._cache.next_group():
                self._copy(*pairs[unit], asked)
                self._cache.end_unit(unit)
            self._cache.end_group()

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Reads ``experts`` (ascending) into the host cache, as far as its speculation goes; returns how many of them, from
        the first on, are there or on their way.
        """
        numbers = np.array([self._records[layer][expert].number for expert in experts], np.uint32)
        return self._cache.prefetch(Phase.FORWARD, layer, numbers, _weights(len(numbers)))

    def cancel_prefetch(self) -> None:
        """Gives up what ``prefetch`` has read and no pass has used."""
        self._cache.residency.cancel_prefetch()

    def end_step(self) -> None:
        """A pass begins: to the host cache each is a step."""
        self._cache.residency.end_step()

    def intact(self, slot: int) -> bool:
        """Whether the slot holds an expert, or will."""
        return self._loads[slot] is not None

    def lose(self, slot: int) -> None:
        """The slot holds nothing that is of use."""
        self._loads[slot] = None

    def there(self, slot: int) -> bool:
        """Whether the slot's copy has ended. For a timeline: no decision may depend on it."""
        return self._arrived[slot] or self._store.engine.done(self._copies[slot])

    def weights(self, slot: int, layer: int) -> Weights:
        """The weights in ``slot``, valid until ``release``; waiting for them is charged to ``layer``.

        Raises ChecksumError, OSError: then the slot holds nothing.
        """
        load = self._loads[slot]
        assert load is not None
        if not self._arrived[slot]:
            try:
                try:
                    self._wait(load, layer)
                except (StoreError, OSError):
                    if self._store.opened_to is StoreAccess.WRITE:
                        raise
                    self._load_again(load.record, slot, layer)
            except BaseException:
                self._loads[slot] = None
                raise
            self._arrived[slot] = True
        self._used.add(slot)
        return self._device.weights(slot)

    def release(self, slot: int) -> None:
        """What was queued on the device may use the slot still; a load of it follows that."""
        self._used.discard(slot)
        self._device.release_weights(slot)

    def _copy(self, record: LiveRecord, slot: int, asked: Asked) -> None:
        if slot in self._used:  # by a pass that was not completed
            self.release(slot)
        entry = record.entry(Group.WEIGHTS)
        source = self._cache.sections(entry)[0]
        last = self._copies[slot]
        after = self._cache.ready(entry)
        if last and not self._arrived[slot] and not self._store.engine.done(last):
            after = [*after, last]
        ticket = self._device.load(slot, source, after)
        self._cache.reads(entry, ticket)
        self._loads[slot] = _Load(record, ticket, self._cache.fetched(entry), asked, source.nbytes)
        self._copies[slot], self._arrived[slot] = ticket, False
        self.copies += 1
        self.copied_bytes += source.nbytes

    def _load_again(self, record: LiveRecord, slot: int, layer: int) -> None:
        """A read may have failed with what it followed; a second one is waited for. Raises ChecksumError, OSError."""
        resident = bool(self._cache.sections(record.entry(Group.WEIGHTS)))
        with self._ledger.stall(layer=layer, tier=Tier.NVME, cause=Cause.DEMAND_READ):
            self._store.begin_access(Phase.FORWARD, layer, np.array([record.number], np.uint32), _weights(1))
            self._cache.next_group()
            try:
                if resident:
                    self._store.read_again(record)
                self._copy(record, slot, Asked.NOW)
                self._store.wait([self._copies[slot]])
            finally:
                self._cache.end_group()

    def _wait(self, load: _Load, layer: int) -> None:
        if self._store.engine.done(load.ticket):
            self._store.wait([load.ticket])
            return
        reading = load.read is not None and not self._store.engine.done(load.read.ticket)
        ahead = load.asked is Asked.AHEAD or (load.read is not None and load.read.speculative)
        if ahead:
            self.late_bytes += load.nbytes
        tier, cause = Tier.DEVICE, Cause.COPY
        if reading:
            tier, cause = Tier.NVME, Cause.LATE_PREFETCH if ahead else Cause.DEMAND_READ
        with self._ledger.stall(layer=layer, tier=tier, cause=cause):
            self._store.wait([load.ticket])


def _weights(count: int) -> npt.NDArray[np.uint16]:
    return np.full(count, int(Need.WEIGHTS), np.uint16)
