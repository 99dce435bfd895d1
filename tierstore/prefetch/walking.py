"""Carrying an access of the access program out: groups of its experts, one after another, through the weight slots.

While experts of one group compute, the next ones are copied to the device and the following groups and layer passes are
read. Every action is queued on the engine behind whatever it needs, so nothing here waits but for weights that a layer is
about to use.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.cache.access import Phase
from tierstore.errors import StoreError
from tierstore.prefetch.program import Access, PassProgram, Speculation
from tierstore.quant.weights import Weights
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier

#: ``records[layer][expert]`` says which record each expert is.
RecordsByExpert = Mapping[int, Mapping[int, LiveRecord]]
#: What comes before an expert is computed with: the access, the place in it, the record.
BringUp = Callable[[Access, int, LiveRecord], None]


class Arrived(NamedTuple):
    """An expert whose weights are there: its place in the access, and whether it is the last of its group.

    ``more``: the next one is there too, and ``weights`` stay as they are beside it.
    """

    unit: int
    weights: Weights
    last: bool
    more: bool


class _Staged(NamedTuple):
    """Weights on their way: the tickets that are to be waited for, and the slot that they are copied to. Without one they
    are computed with in the host cache (``weights``).
    """

    after: Sequence[int]
    slot: int | None = None
    weights: Weights | None = None

    @property
    def at_hand(self) -> bool:
        return self.slot is None and not self.after


class AccessWalk:
    """Walks the accesses of ``program`` over ``records``; ``weight_slots`` slots of ``device`` are its own.

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
        weight_slots: int,
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
        self._free_slots = deque(range(weight_slots))
        #: Bytes that were on their way, but not there, when they were needed.
        self.late_prefetch_bytes = 0

    def walk(self, access: Access, bring_up: BringUp | None = None) -> Generator[Arrived]:
        """Yields each expert, group by group, when its weights are there. ``bring_up`` is called for the experts
        of a group of a forward pass before that.

        The caller may end each request (``HostCache.end_unit``) when it has no use for the weights any more; those that it
        has not ended end with their group.

        Left before its end (the computation raised, a read failed), the access of a store that is opened to write stays
        open: the caller poisons the store, whose last commit stands. In a store opened to read it is ended, and the
        next access finds everything as if this one had been walked.
        """
        layer, records = access.layer, self._records_of(access)
        groups = self._store.begin_access(access.phase, layer, _numbers(records), access.flags)
        #: What is on its way to the device, or there, in order.
        staged: deque[_Staged] = deque()
        try:
            for group in range(groups):
                units = self._cache.next_group()
                if self._nearest_first:
                    units.sort(key=lambda unit: self._distance(records[unit]))
                if group == groups - 1:
                    self._program.speculate(access, self._prefetch, self._cache.residency.cancel_prefetch)
                if access.phase is Phase.FORWARD and bring_up is not None:
                    for unit in units:
                        bring_up(access, unit, records[unit])
                following = 0
                for unit in units:
                    while (
                        following < len(units)
                        and (made := self._stage(records[units[following]])) is not None
                    ):
                        staged.append(made)
                        following += 1
                    weights = self._arrive(records[unit], staged, layer)
                    more = staged[0].slot is None and len(staged) > 1 and staged[1].at_hand
                    yield Arrived(unit, weights, unit == units[-1], more)
                    self._release(staged.popleft())
                self._cache.end_group()
                self._program.done(access, units)
        except BaseException:
            if self._store.opened_to is StoreAccess.READ:
                self._abandon(staged)
            raise

    def wait(self, tickets: Sequence[int], layer: int, tier: Tier, cause: Cause) -> None:
        """Waits for ``tickets``; what they take is charged to ``layer``, ``tier`` and ``cause``."""
        if any(not self._store.engine.done(ticket) for ticket in tickets):
            with self._ledger.stall(layer=layer, tier=tier, cause=cause):
                self._store.wait(tickets)
        else:
            self._store.wait(tickets)

    def _prefetch(self, ahead: Speculation) -> int:
        numbers = _numbers(self._records_of(ahead))
        return self._cache.prefetch(ahead.phase, ahead.layer, numbers, ahead.flags)

    def _records_of(self, asked: Access | Speculation) -> list[LiveRecord]:
        return [self._records[asked.layer][expert] for expert in asked.experts.tolist()]

    def _distance(self, record: LiveRecord) -> int:
        """0 in memory, 1 read ahead, 2 read by the access that is open: it follows from the program's order alone."""
        entry = record.entry(Group.WEIGHTS)
        if not self._cache.ready(entry):
            return 0
        fetched = self._cache.fetched(entry)
        return 1 if fetched is not None and fetched.speculative else 2

    def _stage(self, record: LiveRecord) -> _Staged | None:
        """None: no slot is free."""
        entry = record.entry(Group.WEIGHTS)
        weights = self._device.in_place(self._cache.sections(entry)[0])
        if weights is not None:
            return _Staged(self._cache.ready(entry), weights=weights)
        if not self._free_slots:
            return None
        return self._load(self._free_slots.popleft(), record)

    def _load(self, slot: int, record: LiveRecord) -> _Staged:
        entry = record.entry(Group.WEIGHTS)
        ticket = self._device.load(slot, self._cache.sections(entry)[0], self._cache.ready(entry))
        self._cache.reads(entry, ticket)
        return _Staged([ticket], slot)

    def _arrive(self, record: LiveRecord, staged: deque[_Staged], layer: int) -> Weights:
        """Waits for the first of ``staged``, the weights of ``record``. Raises ChecksumError, OSError."""
        coming = staged[0]
        if coming.after:
            try:
                if all(map(self._store.engine.done, coming.after)):
                    self._store.wait(coming.after)
                else:
                    self.wait(coming.after, layer, *self._reason(record))
            except (StoreError, OSError):
                if self._store.opened_to is StoreAccess.WRITE:
                    raise
                self._store.read_again(record)
                if coming.slot is not None:
                    staged[0] = self._load(coming.slot, record)
                    self.wait(staged[0].after, layer, Tier.NVME, Cause.DEMAND_READ)
            self._cache.came(record.entry(Group.WEIGHTS))
        if coming.weights is not None:
            return coming.weights
        assert coming.slot is not None
        return self._device.weights(coming.slot)

    def _release(self, done: _Staged) -> None:
        if done.slot is not None:
            self._device.release_weights(done.slot)
            self._free_slots.append(done.slot)

    def _abandon(self, staged: Sequence[_Staged]) -> None:
        """Ends the access that is open: slots are free again, and its groups are gone through, those to come included, as
        the decisions of a whole access are what traces record.
        """
        for coming in staged:
            with contextlib.suppress(StoreError, OSError, RuntimeError):  # one that failed has ended as well
                self._store.wait(coming.after)
            self._release(coming)
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
