"""Expert prefetch (SE-MoE section 2.2, its vertical dimension): experts move disk -> host -> device as
layers need them.

``TieredExperts`` is the model's expert source: it carries out the access program (``tierstore.prefetch.program``) on a
store. Each layer pass is one atomic access of the host
cache: while experts of one group compute, the next ones are copied to the device and the following
groups and layer passes are read. In the backward pass an expert's gradient leaves the device as
soon as it is complete. Every action is
queued on the engine behind whatever it needs, so nothing here waits but for weights that a layer
is about to use.

Decisions are taken in program order, and do not depend on what has finished: see
``native/cache/residency.hpp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tierstore import parallel
from tierstore.cache.access import Phase
from tierstore.cache.config import GroupOrder
from tierstore.errors import ConfigError
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.gradients import GradientAccumulator
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.predictor import Predictor
from tierstore.prefetch.program import Access, AccessProgram, Action, Experts, Speculation
from tierstore.prefetch.replicas import ReplicaSums
from tierstore.prefetch.schedule import Schedule
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.adamw import StepHistory
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.optimizer import CachedRecord
from tierstore.tiers.device import DeviceTier


class TieredExperts:
    """Experts of ``store`` as the MoE layers ask for them.

    ``records[layer][expert]`` says which record each is; ``schedule`` knows those layers, and how far to
    look ahead. ``replicas``: the ranks whose stores hold these experts too; their gradients are summed before a step.
    """

    def __init__(
        self,
        store: StoreCore,
        device: DeviceTier,
        records: Mapping[int, Mapping[int, CachedRecord]],
        *,
        weight_slots: int,
        timing: StepTiming,
        predictor: Predictor,
        schedule: Schedule,
        ledger: StallLedger,
        replicas: parallel.RankGroup | None = None,
    ) -> None:
        group = replicas or parallel.RankGroup.alone()
        if group.size > 1 and store.config.group_order is not GroupOrder.KEY:
            raise ConfigError("group_order: experts with replicas need a store with GroupOrder.KEY")
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = records
        self._ledger = ledger
        self._free_slots = deque(range(weight_slots))
        ids = 1 + max((expert for layer in records.values() for expert in layer), default=0)
        counts = _RecordSteps(store.history, records)
        self.program = AccessProgram(schedule, predictor, counts, timing=timing, experts=ids)
        self.gradients = GradientAccumulator(store, device, records, self.program)
        self._sums = ReplicaSums(group, device.slots, ledger=ledger)
        #: Bytes that were on their way, but not there, when they were needed.
        self.late_prefetch_bytes = 0

    # Where training stands ---------------------------------------------------------------------------------

    def begin_micro(self, *, index: int, count: int | None) -> None:
        """Training micro-batch ``index`` of ``count`` begins. None: it is not known; ``end_passes`` follows the last."""
        self.program.begin_micro(index=index, count=count)
        if index == 0:
            self.gradients.begin_step()

    def end_passes(self) -> None:
        """The last backward pass of a step whose count was not known has ended: its gradients are final."""
        for access in self.program.finish():
            self.gradients.carry_out(access)

    def begin_evaluation(self) -> None:
        """Only forward passes follow, until the next ``begin_micro``."""
        self.program.begin_evaluation()

    # The expert source -------------------------------------------------------------------------------------

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending) for a forward pass, those in memory first. Their weights are caught up with the
        optimizer, and gradients that wait for their step are stepped first.
        """
        accesses = self.program.forward(layer, experts)
        access = next(accesses)
        for unit, slot, _ in self._walk(access, self._records_of(access)):
            yield ExpertLease(int(access.experts[unit]), self._device.weights(slot))
            self._cache.end_unit(unit)
        for access in accesses:
            self.gradients.carry_out(access)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases with gradient slots. Advancing past one takes its gradient as complete, once it has been summed
        over the replicas.
        """
        accesses = self.program.backward(layer, experts)
        access = next(accesses)
        for unit, slot, last in self._walk(access, self._records_of(access)):
            taken, guards = self._device.allocate_gradient()
            self._wait(guards, layer, Tier.HOST, Cause.OPTIMIZER)
            gradient = self._device.gradients(taken)
            yield ExpertLease(int(access.experts[unit]), self._device.weights(slot), gradient)
            self._sums.add(gradient, partial(self._complete, access, unit, taken), layer=layer)
            if last:
                self._sums.flush(layer=layer)
        for access in accesses:
            self.gradients.carry_out(access)

    def _complete(self, access: Access, unit: int, gradient: int) -> None:
        record = self._records[access.layer][int(access.experts[unit])]
        self.gradients.take(record, Action(int(access.actions[unit])), access.step, gradient)
        self._cache.end_unit(unit)

    # One access --------------------------------------------------------------------------------------------

    def _walk(self, access: Access, records: Sequence[CachedRecord]) -> Iterator[tuple[int, int, bool]]:
        """Yields (place in ``records``, weight slot, last of its group) for each record, in the order of its groups; the
        slot is loaded when it is yielded.

        The caller ends each unit, at the latest when the last one of its group has been yielded.

        Left before its end (the computation raised), the access stays open: whoever drives this poisons
        the store, whose last commit stands.
        """
        layer = access.layer
        groups = self._store.begin_access(access.phase, layer, _numbers(records), access.flags)
        for group in range(groups):
            units = self._cache.next_group()
            if group == groups - 1:
                self.program.speculate(access, self._prefetch)
            if access.phase is Phase.FORWARD:
                for unit in units:
                    self._bring_up(records[unit], Action(int(access.actions[unit])), access.step)
            staged: deque[tuple[int, int]] = deque()
            following = 0
            for unit in units:
                while following < len(units) and self._free_slots:
                    staged.append(self._stage(records[units[following]]))
                    following += 1
                slot, ticket = staged.popleft()
                self._wait_weights(records[unit], ticket, layer)
                yield unit, slot, unit == units[-1]
                self._device.release_weights(slot)
                self._free_slots.append(slot)
            self._cache.end_group()
            self.program.done(access, units)

    def _bring_up(self, record: CachedRecord, action: Action, step: int) -> None:
        """What comes before an expert is computed with."""
        if action is Action.CATCH_UP:
            self._store.optimizer.catch_up(record)
        elif action is Action.STEP:
            self.gradients.settle(record, action, step)

    def _prefetch(self, ahead: Speculation) -> int:
        numbers = _numbers(self._records_of(ahead))
        return self._cache.prefetch(ahead.phase, ahead.layer, numbers, ahead.flags)

    def _records_of(self, asked: Access | Speculation) -> list[CachedRecord]:
        return [self._records[asked.layer][expert] for expert in asked.experts.tolist()]

    def _stage(self, record: CachedRecord) -> tuple[int, int]:
        slot = self._free_slots.popleft()
        entry = record.entry(Group.WEIGHTS)
        source = self._cache.sections(entry)[0]
        ticket = self._device.load(slot, source, self._cache.ready(entry))
        self._cache.reads(entry, ticket)
        return slot, ticket

    def _wait_weights(self, record: CachedRecord, ticket: int, layer: int) -> None:
        if self._store.engine.done(ticket):
            self._store.wait([ticket])
        else:
            self._wait([ticket], layer, *self._reason(record))

    def _reason(self, record: CachedRecord) -> tuple[Tier, Cause]:
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

    def _wait(self, tickets: Sequence[int], layer: int, tier: Tier, cause: Cause) -> None:
        if any(not self._store.engine.done(ticket) for ticket in tickets):
            with self._ledger.stall(layer=layer, tier=tier, cause=cause):
                self._store.wait(tickets)
        else:
            self._store.wait(tickets)


class _RecordSteps:
    """``StepCounts`` of a store's records."""

    def __init__(self, history: StepHistory, records: Mapping[int, Mapping[int, CachedRecord]]) -> None:
        self._history = history
        self._records = records

    @property
    def applied(self) -> int:
        return self._history.applied

    @property
    def replays(self) -> bool:
        return self._history.replays

    def of(self, layer: int, experts: Experts) -> npt.NDArray[np.int64]:
        records = self._records[layer]
        return np.array([records[expert].live.step for expert in experts.tolist()], np.int64)


def _numbers(records: Sequence[CachedRecord]) -> npt.NDArray[np.uint32]:
    return np.array([record.number for record in records], np.uint32)
