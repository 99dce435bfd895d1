"""Execution of an access of the access program: brings its experts, group by group, to where they are computed.

That is the host cache, the slots of a device (``DeviceCache``), or mapped files (``MappedRecords``). Weights that a slot or
a mapped file has are not read. While the experts of one group are computed, the next ones are copied to the device, then
those of coming passes, and the following groups and passes are read. If slots fit all experts, a stepped expert is copied
again behind its step, however far its next pass is, unless its gradient waits in a spare buffer. Every action is queued on
the engine behind those that it needs, so this code waits only for weights that a layer is about to use.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._native import GroupOrder
from tierstore.cache.access import Need, Phase
from tierstore.errors import StoreError
from tierstore.prefetch.device_cache import Copy, DeviceCache, RecordsByExpert
from tierstore.prefetch.program import Access, Flags, PassProgram, Speculation
from tierstore.quant.weights import Weights
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.store.mapped import MappedWeights
from tierstore.tiers.device import DeviceTier, WeightLoads

#: Queues the actions that must precede the use of an expert. Arguments: the access, the index in it, the record.
BringUp = Callable[[Access, int, LiveRecord], None]

_NEEDS = int(Need.WEIGHTS | Need.MOMENTS | Need.GRADIENTS)


class Arrived(NamedTuple):
    """An expert whose weights have arrived: its index in the access, and whether it is the last of its group.

    ``more``: the next expert has arrived, too, and ``weights`` stay valid while it is used.
    """

    unit: int
    weights: Weights
    last: bool
    more: bool


class _Coming(NamedTuple):
    """A coming pass, and the indices of its experts whose copies are still to be queued. ``far``: it may be beyond the
    lookahead.
    """

    ahead: Speculation
    left: list[int]
    far: bool = False


class AccessWalk:
    """Walks the accesses of ``program`` over ``records``. Nothing else may use the weight slots of ``device``.

    ``nearest_first``: yield a group's experts in the order of their expected arrival, if nothing else depends on the order:
    those in memory, those that were prefetched, those that this access reads. ``late``: the numbers of the records whose
    steps wait in spare buffers; they are not copied again before the lookahead reaches them.
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
        late: Set[int] = frozenset(),
    ) -> None:
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = records
        self._program = program
        self._ledger = ledger
        self._nearest_first = nearest_first
        self._late = late
        self.slots = DeviceCache(store, device, records)
        #: Whether frozen weights are computed with where mapped files have them.
        self._maps = bool(store.mapped.mapping) and device.loads is WeightLoads.IN_PLACE
        self._by_key = store.config.group_order is GroupOrder.KEY
        #: For the open access: request number here > request number in the host cache's access.
        self._host_unit: dict[int, int] = {}
        self._coming: list[_Coming] = []
        #: Bytes whose prefetch had not finished when they were needed.
        self.late_prefetch_bytes = 0

    def walk(self, access: Access, bring_up: BringUp | None = None) -> Generator[Arrived]:
        """Yield each expert, group by group, when its weights have arrived. In a forward pass, ``bring_up`` is called for
        each expert of a group first. A request's number is its place in ``access.experts``; the host cache sees only
        ``asked``, the requests that need something of it, and numbers these from 0.

        The caller may end a request (``end_unit``) as soon as it no longer needs the weights; otherwise it ends with its
        group.

        If the walk is left early (the computation raised, a read failed), the access stays open in a store opened to write:
        the caller must poison the store, whose last commit remains valid. In a store opened to read the access is ended, and
        the next one finds the same state as after a complete walk.
        """
        layer, records = access.layer, self._records_of(access)
        held = self._spared(access, records)
        flags = self._host_flags(access.flags, records, held)
        if self.slots.keeps:  # then the bits of sequences are for the slots' policy only
            flags = flags & np.uint16(Need.FIRST_SEQUENCE - 1)
        asked = np.flatnonzero(flags & np.uint16(_NEEDS))
        self._host_unit = {unit: place for place, unit in enumerate(asked.tolist())}
        spared = [unit for unit in range(len(records)) if unit not in self._host_unit]
        groups, lost = 0, list[int]()
        if len(asked) or not records:  # a pass that requests no expert of this rank is an access, too
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
                    if self.slots.fits_all and access.phase is Phase.BACKWARD and access.ahead:
                        # No other expert needs their slots until then, so their copies need not wait for the lookahead.
                        again = self._program.stepped_again(access)
                        self._coming.append(_Coming(again, list(range(len(again.experts))), far=True))
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
        """End request ``unit`` of the open access: the caller no longer needs its weights."""
        place = self._host_unit.get(unit)
        if place is not None:
            self._cache.end_unit(place)

    def wait(self, tickets: Sequence[int], layer: int, tier: Tier, cause: Cause) -> None:
        """Wait for ``tickets``; the time is charged to ``layer``, ``tier`` and ``cause``."""
        if any(not self._store.engine.done(ticket) for ticket in tickets):
            with self._ledger.stall(layer=layer, tier=tier, cause=cause):
                self._store.wait(tickets)
        else:
            self._store.wait(tickets)

    def end_step(self) -> None:
        """Tell the slots' policy that a step has ended."""
        self.slots.residency.end_step()

    # What is requested of which cache -----------------------------------------------------------------------

    def _spared(self, access: Access, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """Pin the ``records`` that are in slots; returns a mask of them, or of those in mapped files. Experts that a forward
        pass steps first are excluded, because the step makes their copies stale.
        """
        if self._maps:
            self._store.failures.check()
            return self._elsewhere(records)
        spared = np.zeros(len(records), np.bool_)
        if self.slots.keeps:
            stepped = (access.flags & np.uint16(Need.DIRTY_WEIGHTS) != 0) & (access.phase is Phase.FORWARD)
            places = np.flatnonzero(~stepped)
            spared[places] = self.slots.keep([records[place] for place in places.tolist()])
        return spared

    def _elsewhere(self, records: Sequence[LiveRecord]) -> npt.NDArray[np.bool_]:
        """Which of ``records`` have their weights in slots or mapped files, so that the host cache need not have them."""
        if self.slots.keeps:
            return self.slots.holds(records)
        return np.array([self._mapped(record) is not None for record in records], np.bool_)

    def _host_flags(self, flags: Flags, records: Sequence[LiveRecord], held: npt.NDArray[np.bool_]) -> Flags:
        """``flags`` without the weights of experts ``held`` elsewhere, except requests that write the weights.

        If steps follow, weights that are also in the host cache are still requested: this reads nothing, and the policy sees
        each use. Otherwise it would evict weights that the step is about to need.
        """
        reads = held & (flags & np.uint16(Need.DIRTY_WEIGHTS) == 0)
        if self._program.trains:
            for place in np.flatnonzero(reads).tolist():
                reads[place] = not self._cache.sections(records[place].entry(Group.WEIGHTS))
        return np.where(reads, flags & ~np.uint16(Need.WEIGHTS), flags)

    def _in_order(
        self, units: list[int], spared: list[int], held: npt.NDArray[np.bool_], *, last: bool
    ) -> tuple[list[int], list[int]]:
        """The requests of a group in the order in which they are served, and those of ``spared`` (requests that need nothing
        of the host cache) that are left for later groups. Experts ``held`` come first, unless the order is by key.
        """
        if not (self.slots.keeps or self._maps):
            return units, spared
        if self._by_key:
            now = spared if last else [unit for unit in spared if unit < max(units)]
            return sorted([*units, *now]), [unit for unit in spared if unit not in now]
        return [*spared, *sorted(units, key=lambda unit: not held[unit])], []

    # Serving a group ----------------------------------------------------------------------------------------

    def _serve(
        self, access: Access, units: Sequence[int], records: Sequence[LiveRecord], lost: list[int]
    ) -> Generator[Arrived]:
        """Yield the experts of a group. Adds to ``lost`` those whose copy failed and whose weights only a slot had."""
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
        """The weights of ``record`` in a mapped file or the host cache, if they are used in place."""
        if self._device.loads is WeightLoads.COPIED:
            return None
        if (mapped := self._mapped(record)) is not None:
            return self._device.in_place(mapped.weights)
        return self._device.in_place(self._cache.sections(record.entry(Group.WEIGHTS))[0])

    def _mapped(self, record: LiveRecord) -> MappedWeights | None:
        return self._store.mapped.find(record) if self._maps else None

    def _ready(self, record: LiveRecord) -> list[int]:
        if (mapped := self._mapped(record)) is not None:
            return [mapped.checked] if mapped.checked else []
        return self._cache.ready(record.entry(Group.WEIGHTS))

    def _records_of(self, asked: Access | Speculation) -> list[LiveRecord]:
        return [self._records[asked.layer][expert] for expert in asked.experts.tolist()]

    def _distance(self, record: LiveRecord) -> int:
        """0: in memory, 1: prefetched, 2: read by the open access. Depends only on program order."""
        entry = record.entry(Group.WEIGHTS)
        if not self._cache.ready(entry):
            return 0
        fetched = self._cache.fetched(entry)
        return 1 if fetched is not None and fetched.speculative else 2

    def _wait_in_place(self, record: LiveRecord, layer: int) -> None:
        """Wait for weights that are used in a mapped file or the host cache. Raises ChecksumError, OSError."""
        if (mapped := self._mapped(record)) is not None:
            try:
                self.wait(self._ready(record), layer, Tier.NVME, Cause.DEMAND_READ)
            except (StoreError, OSError):
                self._store.mapped.forget(record)
                raise
            self._store.mapped.count(mapped)
        elif ready := self._ready(record):
            self._wait_again(ready, record, layer)
            self._cache.mark_ready(record.entry(Group.WEIGHTS))

    def _wait_again(self, tickets: Sequence[int], record: LiveRecord, layer: int) -> bool:
        """Wait for ``tickets``, which bring the weights of ``record``. In a store opened to read, retry a failed read once;
        returns whether it was retried. Raises ChecksumError, OSError.
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
        """Wait for the copy of ``record`` in a slot. Returns False if the copy failed and the weights were not requested of
        the host cache. Raises ChecksumError, OSError.
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
            self._cache.mark_ready(record.entry(Group.WEIGHTS))
        return True

    # Speculation --------------------------------------------------------------------------------------------

    def _prefetch(self, ahead: Speculation) -> int:
        """Prefetch what a coming pass needs and neither slots nor mapped files have; copies are queued when slots become
        free. Returns the length of the covered prefix of its experts.
        """
        records = self._records_of(ahead)
        flags = ahead.flags
        if self.slots.keeps or self._maps:
            flags = self._host_flags(flags, records, self._elsewhere(records))
        asked = np.flatnonzero(flags & np.uint16(_NEEDS))
        taken = len(records)
        if len(asked):
            numbers = _numbers([records[place] for place in asked.tolist()])
            covered = self._cache.prefetch(ahead.phase, ahead.layer, numbers, flags[asked])
            if covered < len(asked):
                taken = int(asked[covered])
        if self.slots.keeps:
            self._coming.append(_Coming(ahead, list(range(taken))))
        return taken

    def bring(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Queue copies of ``experts`` (ascending) to slots, ahead of the pass that requests them; returns their tickets. The
        host cache's access ends before anything is waited for. Raises BudgetError, StoreError.
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
        """Prefetch ``experts`` (ascending) into the host cache, as far as its prefetch budget allows. Returns the length of
        the prefix that is there or being read.
        """
        numbers = _numbers([self._records[layer][expert] for expert in experts])
        weights = np.full(len(numbers), int(Need.WEIGHTS), np.uint16)
        return self._cache.prefetch(Phase.FORWARD, layer, numbers, weights)

    def give_up(self, layer: int) -> None:
        """Drop all experts of ``layer`` from slots."""
        self.slots.give_up(list(self._records[layer].values()))

    def _copy_ahead(self) -> None:
        """Queue copies of coming experts, nearest first, as far as slots allow: of those that the host cache has or is
        reading, and whose steps are queued.
        """
        for ahead, left, far in self._coming:
            unchanged = self._program.unchanged(ahead)
            for place in list(left):
                record = self._records[ahead.layer][int(ahead.experts[place])]
                there = self._cache.sections(record.entry(Group.WEIGHTS)) or self.slots.holds([record])[0]
                if not (unchanged[place] and there) or (far and record.number in self._late):
                    continue
                if not self.slots.prefetch(ahead.phase, ahead.layer, [record]):
                    return
                left.remove(place)
        self._coming = [coming for coming in self._coming if coming.left]

    def _cancel(self) -> None:
        self._cache.residency.cancel_prefetch()
        self.slots.residency.cancel_prefetch()

    # Failures and reasons -----------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """End the open accesses. Goes through all their remaining groups, because traces record the decisions of whole
        accesses.
        """
        self.slots.abandon()
        residency = self._cache.residency
        while residency.access_open:
            if not residency.group_open:
                self._cache.next_group()
            self._cache.end_group()

    def _reason(self, record: LiveRecord) -> tuple[Tier, Cause]:
        """The tier and cause to charge for waiting for the weights of ``record``."""
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
