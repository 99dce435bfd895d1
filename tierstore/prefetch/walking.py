"""Carrying an access of the access program out: groups of its experts, one after another, where they are computed.

That is the host cache, or the slots of a device (``DeviceCache``). An expert that a slot holds needs no read of its weights.
While experts of one group compute, the next ones are copied to the device, then those of the coming passes, and the
following groups and passes are read. Every action is queued on the engine behind whatever it needs, so nothing here waits
but for weights that a layer is about to use.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.cache.access import Need, Phase
from tierstore.cache.config import GroupOrder
from tierstore.errors import StoreError
from tierstore.prefetch.device_cache import Copy, DeviceCache, RecordsByExpert
from tierstore.prefetch.program import Access, Flags, PassProgram, Speculation
from tierstore.quant.weights import Weights
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier, WeightLoads

#: What comes before an expert is computed with: the access, the place in it, the record.
BringUp = Callable[[Access, int, LiveRecord], None]

_NEEDS = int(Need.WEIGHTS | Need.MOMENTS | Need.GRADIENTS)


class Arrived(NamedTuple):
    """An expert whose weights are there: its place in the access, and whether it is the last of its group.

    ``more``: the next one is there too, and ``weights`` stay as they are beside it.
    """

    unit: int
    weights: Weights
    last: bool
    more: bool


class AccessWalk:
    """Walks the accesses of ``program`` over ``records``. The weight slots of ``device`` are its own.

    ``nearest_first``: a group's experts come in the order in which they will be there, as nothing else depends on their
    order: those in memory, those that were read ahead, those that this access reads.
    """

    def __init__(
        self,
        store: StoreCore,
        device: DeviceTier,
        records: RecordsByExpert,
        program: PassProgram,
        *,
        ledger: StallLedger,
        nearest_first: bool = False,
    ) -> None:
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = records
        self._program = program
        self._ledger = ledger
        self._nearest_first = nearest_first
        self.slots = DeviceCache(store, device, records)
        self._by_key = store.config.group_order is GroupOrder.KEY
        #: Of the open access: the place of each request in that of the host cache, where it is in it.
        self._host_unit: dict[int, int] = {}
        #: Coming passes, and the places in each of the experts whose copies are still to be queued.
        self._coming: list[tuple[Speculation, list[int]]] = []
        #: Bytes that were on their way, but not there, when they were needed.
        self.late_prefetch_bytes = 0

    def walk(self, access: Access, bring_up: BringUp | None = None) -> Generator[Arrived]:
        """Yields each expert, group by group, when its weights are there. ``bring_up`` is called for the experts
        of a group of a forward pass before that.

        The caller may end each request (``end_unit``) when it has no use for the weights any more; those that it has not
        ended end with their group.

        Left before its end (the computation raised, a read failed), the access of a store that is opened to write stays
        open: the caller poisons the store, whose last commit stands. In a store opened to read it is ended, and the
        next access finds everything as if this one had been walked.
        """
        layer, records = access.layer, self._records_of(access)
        held = self._spared(access, records)
        flags = self._host_flags(access.flags, records, held)
        if self.slots.keeps:  # whose sequences ask is for the policy of the slots
            flags = flags & np.uint16(Need.FIRST_ASKER - 1)
        asked = np.flatnonzero(flags & np.uint16(_NEEDS))
        self._host_unit = {unit: place for place, unit in enumerate(asked.tolist())}
        spared = [unit for unit in range(len(records)) if unit not in self._host_unit]
        groups, lost = 0, list[int]()
        if len(asked) or not records:  # a layer of which no expert is here is an access too
            numbers = _numbers([records[unit] for unit in asked.tolist()])
            groups = self._store.begin_access(access.phase, layer, numbers, flags[asked])
        try:
            for group in range(groups or min(len(spared), 1)):
                units = asked[self._cache.next_group()].tolist() if groups else []
                last = group >= groups - 1
                if self._nearest_first:
                    units.sort(key=lambda unit: self._distance(records[unit]))
                units, spared = self._in_order(units, spared, held, last=last)
                if last:
                    self._coming.clear()
                    self._program.speculate(access, self._prefetch, self._cancel)
                if access.phase is Phase.FORWARD and bring_up is not None:
                    for unit in units:
                        bring_up(access, unit, records[unit])
                yield from self._serve(access, units, records, lost)
                if groups:
                    self._cache.end_group()
                self._program.done(access, units)
                self._copy_ahead()
        except BaseException:
            if self._store.opened_to is StoreAccess.READ:
                self._abandon()
            raise
        if lost:
            missed = replace(
                access,
                experts=access.experts[lost],
                flags=access.flags[lost],
                actions=access.actions[lost],
                ahead=(),
            )
            for arrived in self.walk(missed, bring_up):
                yield arrived._replace(unit=lost[arrived.unit])

    def end_unit(self, unit: int) -> None:
        """The caller has no use for request ``unit`` of the open access any more."""
        place = self._host_unit.get(unit)
        if place is not None:
            self._cache.end_unit(place)

    def wait(self, tickets: Sequence[int], layer: int, tier: Tier, cause: Cause) -> None:
        """Waits for ``tickets``; what they take is charged to ``layer``, ``tier`` and ``cause``."""
        if any(not self._store.engine.done(ticket) for ticket in tickets):
            with self._ledger.stall(layer=layer, tier=tier, cause=cause):
                self._store.wait(tickets)
        else:
            self._store.wait(tickets)

    def end_step(self) -> None:
        """A step begins, to the policy of the slots."""
        self.slots.residency.end_step()

    # What is requested of which cache -----------------------------------------------------------------------

    def _spared(self, access: Access, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """Which of ``records`` are computed with in slots that hold them now, until they are released. What a forward pass
        steps first is none of them: then its copy is out of date.
        """
        spared = np.zeros(len(records), np.bool_)
        if self.slots.keeps:
            stepped = (access.flags & np.uint16(Need.DIRTY_WEIGHTS) != 0) & (access.phase is Phase.FORWARD)
            places = np.flatnonzero(~stepped)
            spared[places] = self.slots.pin([records[place] for place in places.tolist()])
        return spared

    def _host_flags(self, flags: Flags, records: Sequence[LiveRecord], held: npt.NDArray[np.bool_]) -> Flags:
        """``flags`` without the weights of those that slots have ``held``, but for what writes them.

        Where steps follow, what the host cache has too is still requested: nothing is read, and the policy sees each use.
        Otherwise it would write out, and read again, what the step is about to need.
        """
        reads = held & (flags & np.uint16(Need.DIRTY_WEIGHTS) == 0)
        if self._program.trains:
            for place in np.flatnonzero(reads).tolist():
                reads[place] = not self._cache.sections(records[place].entry(Group.WEIGHTS))
        return np.where(reads, flags & ~np.uint16(Need.WEIGHTS), flags)

    def _in_order(
        self, units: list[int], spared: list[int], held: npt.NDArray[np.bool_], *, last: bool
    ) -> tuple[list[int], list[int]]:
        """The requests of a group in the order in which they are served, and the ``spared``, which request nothing of the
        host cache, that are left for later groups. What slots hold comes first; by key, where that is the order.
        """
        if not self.slots.keeps:
            return units, spared
        if self._by_key:
            now = spared if last else [unit for unit in spared if unit < max(units)]
            return sorted([*units, *now]), [unit for unit in spared if unit not in now]
        return [*spared, *sorted(units, key=lambda unit: not held[unit])], []

    # Serving a group ----------------------------------------------------------------------------------------

    def _serve(
        self, access: Access, units: Sequence[int], records: Sequence[LiveRecord], lost: list[int]
    ) -> Generator[Arrived]:
        """Yields the experts of a group. Of those in ``lost`` a slot alone had the weights, and their copy failed."""
        there = [self._in_place(records[unit]) for unit in units]
        copied = [unit for unit, weights in zip(units, there, strict=True) if weights is None]
        if copied:
            self.slots.begin(access, copied, [records[unit] for unit in copied])
        for place, unit in enumerate(units):
            record, weights, last = records[unit], there[place], unit == units[-1]
            if weights is not None:
                self._wait_in_place(record, access.layer)
                following = None if last else there[place + 1]
                at_hand = following is not None and not self._ready(records[units[place + 1]])
                yield Arrived(unit, weights, last, at_hand)
                continue
            copy = self.slots.advance(record)
            self._copy_ahead()
            if not self._arrive(copy, record, unit, access.layer):
                self.slots.release(lost=True)
                lost.append(unit)
                continue
            yield Arrived(unit, self.slots.weights(copy), last, False)
            self.slots.release()

    def _in_place(self, record: LiveRecord) -> Weights | None:
        """The weights of ``record`` where they are computed with in the host cache."""
        if self._device.loads is WeightLoads.COPIED:
            return None
        return self._device.in_place(self._cache.sections(record.entry(Group.WEIGHTS))[0])

    def _ready(self, record: LiveRecord) -> list[int]:
        return self._cache.ready(record.entry(Group.WEIGHTS))

    def _records_of(self, asked: Access | Speculation) -> list[LiveRecord]:
        return [self._records[asked.layer][expert] for expert in asked.experts.tolist()]

    def _distance(self, record: LiveRecord) -> int:
        """0 in memory, 1 read ahead, 2 read by the access that is open: it follows from the program's order alone."""
        entry = record.entry(Group.WEIGHTS)
        if not self._cache.ready(entry):
            return 0
        fetched = self._cache.fetched(entry)
        return 1 if fetched is not None and fetched.speculative else 2

    def _wait_in_place(self, record: LiveRecord, layer: int) -> None:
        """Waits for weights that are computed with in the host cache. Raises ChecksumError, OSError."""
        if ready := self._ready(record):
            self._wait_again(ready, record, layer)
            self._cache.came(record.entry(Group.WEIGHTS))

    def _wait_again(self, tickets: Sequence[int], record: LiveRecord, layer: int) -> bool:
        """Waits for ``tickets``, which bring the weights of ``record``. In a store opened to read, a read that fails is
        tried once more; returns whether it was. Raises ChecksumError, OSError.
        """
        try:
            if all(map(self._store.engine.done, tickets)):
                self._store.wait(tickets)
            else:
                self.wait(tickets, layer, *self._reason(record))
        except (StoreError, OSError):
            if self._store.opened_to is StoreAccess.WRITE:
                raise
            self._store.read_again(record)
            return True
        return False

    def _arrive(self, copy: Copy, record: LiveRecord, unit: int, layer: int) -> bool:
        """Waits for the copy of ``record`` in a slot. Raises ChecksumError, OSError. False: the copy failed, and the host
        cache was not asked for the weights.
        """
        if not copy.ticket:
            return True
        awaited = self._device.awaited(copy.slot, copy.ticket)
        if self._store.opened_to is StoreAccess.READ and unit not in self._host_unit:
            try:
                self.wait(awaited, layer, *self._reason(record))
            except (StoreError, OSError):
                return False
        elif self._wait_again(awaited, record, layer):
            self.slots.copy_again(record)
            self.wait(self._device.awaited(copy.slot, copy.ticket), layer, Tier.NVME, Cause.DEMAND_READ)
        copy.ticket = 0
        if copy.after and self._ready(record) == copy.after:
            self._cache.came(record.entry(Group.WEIGHTS))
        return True

    # Speculation --------------------------------------------------------------------------------------------

    def _prefetch(self, ahead: Speculation) -> int:
        """Reads what a coming pass needs and no slot holds; its copies are queued when there are slots for them."""
        records = self._records_of(ahead)
        flags = ahead.flags
        if self.slots.keeps:
            flags = self._host_flags(flags, records, self.slots.holds(records))
        asked = np.flatnonzero(flags & np.uint16(_NEEDS))
        taken = len(records)
        if len(asked):
            numbers = _numbers([records[place] for place in asked.tolist()])
            covered = self._cache.prefetch(ahead.phase, ahead.layer, numbers, flags[asked])
            if covered < len(asked):
                taken = int(asked[covered])
        if self.slots.keeps:
            self._coming.append((ahead, list(range(taken))))
        return taken

    def bring(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Queues the copies of ``experts`` (ascending) to slots, ahead of a pass that asks for them; returns their tickets.
        The host cache's access for it has ended before anything is waited for. Raises BudgetError, StoreError.
        """
        records = [self._records[layer][expert] for expert in experts]
        records = [
            record for record, held in zip(records, self.slots.holds(records), strict=True) if not held
        ]
        if not records:
            return []
        tickets = []
        weights = np.full(len(records), int(Need.WEIGHTS), np.uint16)
        for _ in range(self._store.begin_access(Phase.FORWARD, layer, _numbers(records), weights)):
            for unit in self._cache.next_group():
                tickets.append(self.slots.bring(layer, records[unit]))
                self._cache.end_unit(unit)
            self._cache.end_group()
        return tickets

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Reads ``experts`` (ascending) into the host cache, as far as its speculation goes; returns how many of them, from
        the first on, are there or on their way.
        """
        numbers = _numbers([self._records[layer][expert] for expert in experts])
        weights = np.full(len(numbers), int(Need.WEIGHTS), np.uint16)
        return self._cache.prefetch(Phase.FORWARD, layer, numbers, weights)

    def give_up(self, layer: int) -> None:
        """No slot holds an expert of ``layer`` any more."""
        self.slots.give_up(list(self._records[layer].values()))

    def _copy_ahead(self) -> None:
        """Queues the copies of coming experts, nearest first, as far as slots are free: of those that the host cache has, or
        reads, and whose steps are queued.
        """
        for ahead, left in self._coming:
            unchanged = self._program.unchanged(ahead)
            for place in list(left):
                record = self._records[ahead.layer][int(ahead.experts[place])]
                there = self._cache.sections(record.entry(Group.WEIGHTS)) or self.slots.holds([record])[0]
                if not (unchanged[place] and there):
                    continue
                if not self.slots.prefetch(ahead.phase, ahead.layer, [record]):
                    return
                left.remove(place)
        self._coming = [(ahead, left) for ahead, left in self._coming if left]

    def _cancel(self) -> None:
        self._cache.residency.cancel_prefetch()
        self.slots.residency.cancel_prefetch()

    # Failures and reasons -----------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """Ends the accesses that are open: their groups are gone through, those to come included, as the decisions of a
        whole access are what traces record.
        """
        self.slots.abandon()
        residency = self._cache.residency
        while residency.access_open:
            if not residency.group_open:
                self._cache.next_group()
            self._cache.end_group()

    def _reason(self, record: LiveRecord) -> tuple[Tier, Cause]:
        """What the weights of ``record`` are still waiting for."""
        cache, done = self._cache, self._store.engine.done
        weights = record.entry(Group.WEIGHTS)
        ready, fetched = cache.ready(weights), cache.fetched(weights)
        as_read = fetched is not None and ready == [fetched.ticket]
        # A step or a replay of the weights needs the rest of the record.
        missing = []
        for group in [Group.WEIGHTS] if as_read else Group:
            fetched = cache.fetched(record.entry(group))
            if fetched is not None and not done(fetched.ticket):
                missing.append((group, fetched))
        for group, fetched in missing:
            if fetched.speculative:
                self.late_prefetch_bytes += sum(s.nbytes for s in cache.sections(record.entry(group)))
        if missing:
            group, fetched = missing[0]
            if group is Group.GRADIENTS:
                return Tier.NVME, Cause.GRADIENT_SPILL
            return Tier.NVME, Cause.LATE_PREFETCH if fetched.speculative else Cause.DEMAND_READ
        if all(done(ticket) for ticket in ready):
            return Tier.DEVICE, Cause.COPY
        return Tier.HOST, Cause.OPTIMIZER


def _numbers(records: Sequence[LiveRecord]) -> npt.NDArray[np.uint32]:
    return np.array([record.number for record in records], np.uint32)
