"""The vertical dimension of the schedule (SE-MoE section 2.2): experts move disk -> host -> device as
layers need them.

``TieredExperts`` is the model's expert source. Each layer pass is one atomic access of the host
cache: while experts of one group compute, the next ones are copied to the device and the following
groups and layer passes are read. In the backward pass an expert's gradient leaves the device as
soon as it is complete, and is stepped at once or kept for the norm (``GradientPlan``); both are
queued on the engine behind whatever they need, so nothing here waits but for weights that a layer
is about to use.

Decisions are taken in program order, and do not depend on what has finished: see
``native/cache/residency.hpp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tierstore import parallel
from tierstore.cache.access import Need, Phase
from tierstore.cache.config import GroupOrder
from tierstore.errors import ConfigError
from tierstore.prefetch.gradients import GradientKeeper
from tierstore.prefetch.plan import GradientPlan
from tierstore.prefetch.predictor import Predictor
from tierstore.prefetch.replicas import ReplicaSums
from tierstore.prefetch.schedule import Pass, Schedule
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.optimizer import CachedRecord
from tierstore.tiers.device import DeviceTier

__all__ = ["TieredExperts", "TieredLease"]


@dataclass(frozen=True, slots=True)
class TieredLease:
    """One expert on the device, until the iterator that gave it advances."""

    expert: int
    weights: torch.Tensor
    gradients: torch.Tensor | None = None


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
        plan: GradientPlan,
        predictor: Predictor,
        schedule: Schedule,
        ledger: StallLedger,
        replicas: parallel.Group | None = None,
    ) -> None:
        group = replicas or parallel.Group.alone()
        if group.size > 1 and store.config.group_order is not GroupOrder.KEY:
            raise ConfigError("group_order: experts with replicas need a store with GroupOrder.KEY")
        self._store = store
        self._cache = store.cache
        self._device = device
        self._records = records
        self._predictor = predictor
        self._ledger = ledger
        self._schedule = schedule
        self._free_slots = deque(range(weight_slots))
        #: What the forward passes of the present micro-batch used, by layer.
        self._used: dict[int, list[int]] = {}
        self._training = False
        self._last_micro = True
        self.gradients = GradientKeeper(store, device, records, plan)
        self._sums = ReplicaSums(group, device.slots, ledger=ledger)
        #: Bytes that were on their way, but not there, when they were needed.
        self.late_prefetch_bytes = 0

    # Where training stands ---------------------------------------------------------------------------------

    def begin_micro(self, *, index: int, count: int) -> None:
        """A training micro-batch begins: ``index`` of ``count``. The optimizer's row, if due, is open."""
        self._training = True
        self._last_micro = index == count - 1
        self._used.clear()
        self.gradients.begin_micro(index=index, count=count)

    def begin_evaluation(self) -> None:
        """Only forward passes follow, until the next ``begin_micro``."""
        self._training = False
        self._used.clear()

    # The expert source -------------------------------------------------------------------------------------

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[TieredLease]:
        """Leases of ``experts`` (ascending) for a forward pass, those in memory first. Their weights are caught up with the
        optimizer, and gradients that wait for their step are stepped first.

        A second forward pass of a layer in a micro-batch is its recomputation (activation checkpointing):
        the same experts, and the layer's backward pass comes next.
        """
        again = self._training and layer in self._used
        if again:
            ahead = self._schedule.recomputed(layer)
        else:
            ahead = self._following(Phase.FORWARD, layer)
            self._used[layer] = list(experts)
        records = [self._records[layer][expert] for expert in experts]
        for unit, slot, _ in self._walk(Phase.FORWARD, layer, records, ahead, self._prepare_forward):
            yield TieredLease(experts[unit], self._device.weights(slot))
            self._cache.end_unit(unit)
        if not again:
            self._predictor.observe(layer, experts)
            self.gradients.step_pending(layer)

    def _prepare_forward(self, record: CachedRecord) -> None:
        if self.gradients.is_pending(record):
            self.gradients.step(record)
        else:
            self._store.optimizer.catch_up(record)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[TieredLease]:
        """Leases with gradient slots. Advancing past one takes its gradient as complete, once it has been summed
        over the replicas.
        """
        records = [self._records[layer][expert] for expert in experts]
        ahead = self._following(Phase.BACKWARD, layer)
        for unit, slot, last in self._walk(Phase.BACKWARD, layer, records, ahead, None):
            taken, guards = self._device.take_gradient()
            self._wait(guards, layer, Tier.HOST, Cause.OPTIMIZER)
            gradient = self._device.gradients(taken)
            yield TieredLease(experts[unit], self._device.weights(slot), gradient)
            self._sums.add(gradient, partial(self._complete, records, unit, taken), layer=layer)
            if last:
                self._sums.flush(layer=layer)
        self.gradients.end_layer(layer)

    def _complete(self, records: Sequence[CachedRecord], unit: int, gradient: int) -> None:
        self.gradients.take(records[unit], gradient)
        self._cache.end_unit(unit)

    # One access --------------------------------------------------------------------------------------------

    def _walk(
        self,
        phase: Phase,
        layer: int,
        records: Sequence[CachedRecord],
        ahead: Sequence[Pass],
        prepare: Callable[[CachedRecord], None] | None,
    ) -> Iterator[tuple[int, int, bool]]:
        """Yields (place in ``records``, weight slot, last of its group) for each record, in the order of its groups; the
        slot is loaded when it is yielded.

        The caller ends each unit, at the latest when the last one of its group has been yielded.

        Left before its end (the computation raised), the access stays open: whoever drives this poisons
        the store, whose last commit stands.
        """
        numbers, flags = self._needs(phase, records, later=0)
        groups = self._store.begin_access(phase, layer, numbers, flags)
        for group in range(groups):
            units = self._cache.next_group()
            if group == groups - 1:
                self._speculate(ahead)
            if prepare is not None:
                for unit in units:
                    prepare(records[unit])
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

    # What passes need --------------------------------------------------------------------------------------

    def _needs(
        self, phase: Phase, records: Sequence[CachedRecord], *, later: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        if phase is Phase.FORWARD:
            flags = [self._forward_need(record, later) for record in records]
        else:
            flags = [self.gradients.backward_need(record) for record in records]
        return np.array([record.number for record in records], np.uint32), np.array(flags, np.uint16)

    def _forward_need(self, record: CachedRecord, later: int) -> Need:
        if self.gradients.is_pending(record):
            return Need.STEP_SPILLED
        # A pass of the next step comes after the present one has been applied.
        next_step = self._training and later > 0 and self._last_micro
        if next_step and self.gradients.is_kept(record):
            return Need.STEP_SPILLED
        history = self._store.history
        behind = history.applied + next_step - record.live.step
        return Need.STEP if history.replays and behind > 0 else Need.WEIGHTS

    def _following(self, phase: Phase, layer: int) -> list[Pass]:
        return self._schedule.following(phase, layer, training=self._training)

    def _speculate(self, ahead: Sequence[Pass]) -> None:
        for following in ahead:
            layer, experts = self._expected(following)
            if not experts:
                continue
            records = [self._records[layer][expert] for expert in experts]
            numbers, flags = self._needs(following.phase, records, later=following.later)
            taken = self._cache.prefetch(following.phase, layer, numbers, flags)
            if taken < len(experts):
                return

    def _expected(self, item: Pass) -> tuple[int, list[int]]:
        """The MoE layer of a pass, and the experts that it is expected to use."""
        layer = item.moe_layer
        assert layer is not None
        if item.phase is Phase.BACKWARD and item.later == 0 and layer in self._used:
            return layer, self._used[layer]
        return layer, self._predictor.predict(layer)
