"""Expert prefetch (the vertical dimension of SE-MoE section 2.2): experts move disk -> host -> device as layers need them.

``TieredExperts`` is the model's expert source: it carries out the access program (``tierstore.prefetch.program``) on a
store. Each layer pass is one atomic access of the host cache: while the experts of one group are computed, the next ones
are copied to the device, and the following groups and layer passes are read (``tierstore.prefetch.walking``). In the
backward pass an expert's gradient leaves the device as soon as it is complete. Every action is queued on the engine behind
those that it needs, so this code waits only for weights that a layer is about to use. ``FrozenExperts`` are read in both
directions and get no gradients.

Decisions are taken in program order and do not depend on what has finished: see ``native/cache/residency.hpp``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import numpy.typing as npt

from tierstore import parallel
from tierstore._native import GroupOrder
from tierstore.errors import ConfigError
from tierstore.moe.source import ExpertLease, users_of
from tierstore.prefetch.device_cache import RecordsByExpert
from tierstore.prefetch.gradients import (
    ExpertGradients,
    GradientAccumulator,
    GradientParts,
    ReplicaSums,
)
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import (
    Access,
    AccessProgram,
    Action,
    Experts,
    Finals,
    FrozenProgram,
    GuessCounts,
    PassProgram,
)
from tierstore.prefetch.schedule import Schedule
from tierstore.prefetch.walking import AccessWalk
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.adamw import StepHistory
from tierstore.store.core import StoreCore
from tierstore.store.index.live import LiveRecord
from tierstore.tiers.device import DeviceTier
from tierstore.tiers.slots import SlotGradient


class ExpertTiers(ABC):
    """An expert source (``JointSource``) over a store's tiers, as a training loop drives it.

    ``program`` decides which accesses to make, ``walk`` carries them out.
    """

    program: PassProgram
    gradients: ExpertGradients
    walk: AccessWalk

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes whose prefetch had not finished when they were needed."""
        return self.walk.late_prefetch_bytes

    @property
    def guesses(self) -> GuessCounts:
        """Counts of right and wrong predictions of forward passes."""
        return self.program.guesses

    def begin_micro(self, *, index: int, count: int | None) -> None:
        """Begin training micro-batch ``index`` of ``count``. None: unknown; call ``end_passes`` after the last one."""
        if index == 0:
            self.walk.end_step()
        self.program.begin_micro(index=index, count=count)

    def resume_micro(self, *, index: int, finals: Finals) -> None:
        """Resume micro-batch ``index`` for its backward pass; others have begun in the meantime. With ``Finals.NONE`` no
        gradient becomes final, because the step will be skipped.
        """
        self.program.resume_micro(index=index, finals=finals)

    def end_passes(self) -> None:  # noqa: B027
        """Make gradients final, after the last backward pass of a step whose micro-batch count was unknown."""

    def begin_evaluation(self) -> None:
        """Begin a run of forward passes only, until the next ``begin_micro``."""
        self.walk.end_step()
        self.program.begin_evaluation()

    def reach(self, layer: int) -> list[int]:
        """The layers that ``offer`` may name as its ``layer`` during the next pass, the forward pass of ``layer``."""
        return self.program.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """Tell the predictor how often the router of ``layer`` chooses each expert for the input of layer ``source``."""
        self.program.offer(source, layer, chosen_E)

    @abstractmethod
    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending) for a forward pass, in the cache's order."""

    @abstractmethod
    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """The same for a backward pass. Advancing past a lease takes its gradient as complete."""

    @abstractmethod
    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        """One access for all micro-batches, as in ``JointSource``."""


class TieredExperts(ExpertTiers):
    """Trained experts of ``store``.

    ``records[layer][expert]`` is each expert's record; ``schedule`` covers those layers and sets the lookahead.
    ``replicas``: the ranks whose stores hold these experts too; gradients are summed over them before a step.
    """

    program: AccessProgram
    gradients: GradientAccumulator

    def __init__(
        self,
        store: StoreCore,
        device: DeviceTier,
        records: Mapping[int, Mapping[int, LiveRecord]],
        *,
        timing: StepTiming,
        predictor: Predictor,
        schedule: Schedule,
        ledger: StallLedger,
        replicas: parallel.RankGroup | None = None,
    ) -> None:
        group = replicas or parallel.RankGroup.alone()
        assert group.size == 1 or device.slots.gradient is SlotGradient.SUM
        if group.size > 1 and store.config.group_order is not GroupOrder.KEY:
            raise ConfigError("group_order: experts with replicas need a store with GroupOrder.KEY")
        self._store = store
        self._device = device
        self._records = records
        ids = 1 + max((expert for layer in records.values() for expert in layer), default=0)
        counts = _RecordSteps(store.history, records)
        self.program = AccessProgram(schedule, predictor, counts, timing=timing, experts=ids)
        self.gradients = GradientAccumulator(store, device, records, self.program)
        self._sums = ReplicaSums(group, device.slots, ledger=ledger)
        self._parts = GradientParts(group, ledger=ledger)
        self.walk = AccessWalk(store, device, records, self.program, ledger=ledger, late=self.gradients.late)

    def begin_micro(self, *, index: int, count: int | None) -> None:
        super().begin_micro(index=index, count=count)
        if index == 0:
            self.gradients.begin_step()

    def end_passes(self) -> None:
        for access in self.program.finish():
            self.gradients.carry_out(access)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases for a forward pass. Missed optimizer steps are replayed and pending gradients stepped first."""
        accesses = self.program.forward(layer, experts)
        access = next(accesses)
        for unit, weights, *_ in self.walk.walk(access, self._bring_up):
            yield ExpertLease(int(access.experts[unit]), weights)
            self.walk.end_unit(unit)
        for access in accesses:
            self.gradients.carry_out(access)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases with gradient slots; a gradient is complete once it is summed over the replicas."""
        accesses = self.program.backward(layer, experts)
        access = next(accesses)
        for unit, weights, last, _ in self.walk.walk(access):
            taken, guards = self._device.allocate_gradient()
            self.walk.wait(guards, layer, Tier.HOST, Cause.OPTIMIZER)
            gradient = self._device.gradients(taken)
            yield ExpertLease(int(access.experts[unit]), weights, gradient)
            self._sums.add(gradient, partial(self._complete, access, unit, taken), layer=layer)
            if last:
                self._sums.flush(layer=layer)
        for access in accesses:
            self.gradients.carry_out(access)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        """An expert's gradients of all micro-batches, each summed over the replicas, are added up in its gradient slot."""
        users = users_of(asked)
        accesses = self.program.backward(layer, list(users))
        access = next(accesses)
        for unit, weights, *_ in self.walk.walk(access):
            taken, guards = self._device.allocate_gradient()
            self.walk.wait(guards, layer, Tier.HOST, Cause.OPTIMIZER)
            expert, total = int(access.experts[unit]), self._device.gradients(taken)
            for micro, part in self._parts.add_up(users[expert], total, layer=layer):
                yield micro, ExpertLease(expert, weights, part)
            self._complete(access, unit, taken)
        for access in accesses:
            self.gradients.carry_out(access)

    def _complete(self, access: Access, unit: int, gradient: int) -> None:
        record = self._records[access.layer][int(access.experts[unit])]
        self.gradients.take(record, Action(int(access.actions[unit])), access.step, gradient)
        self.walk.end_unit(unit)

    def _bring_up(self, access: Access, unit: int, record: LiveRecord) -> None:
        """Queue the replay or step that must precede the computation with an expert."""
        action = Action(int(access.actions[unit]))
        if action is Action.CATCH_UP:
            self._store.optimizer.catch_up(record)
        elif action is Action.STEP:
            self.gradients.settle(record, action, access.step)


class FrozenExperts(ExpertTiers):
    """Experts of ``store`` that are not trained: leases have no gradients, in either direction, and ``device`` needs no
    gradient slots. Arguments as for ``TieredExperts``.
    """

    program: FrozenProgram

    def __init__(
        self,
        store: StoreCore,
        device: DeviceTier,
        records: RecordsByExpert,
        *,
        predictor: Predictor,
        schedule: Schedule,
        ledger: StallLedger,
    ) -> None:
        self.program = FrozenProgram(schedule, predictor)
        self.gradients = ExpertGradients()
        self.walk = AccessWalk(store, device, records, self.program, ledger=ledger, nearest_first=True)

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        """Set which sequences request each expert in the next forward pass: a bit mask, one bit per sequence."""
        self.program.set_requesters(requesters)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases for a forward pass; experts in memory come first."""
        for access in self.program.forward(layer, experts):
            yield from self.lease(access)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases for a backward pass. Gradients flow through the experts, which get none themselves."""
        for access in self.program.backward(layer, experts):
            yield from self.lease(access)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        users = users_of(asked)
        for lease in self.backward(layer, list(users)):
            for micro in users[lease.expert]:
                yield micro, lease

    def lease(self, access: Access) -> Iterator[ExpertLease]:
        """Leases of the experts of ``access``."""
        experts = access.experts.tolist()
        # A walk that is left early must end its access before the next one begins, so close it with this generator.
        with closing(self.walk.walk(access)) as walk:
            for unit, weights, _, more in walk:
                yield ExpertLease(experts[unit], weights, more=more)


class _RecordSteps:
    """The ``StepCounts`` of a store's records."""

    def __init__(self, history: StepHistory, records: Mapping[int, Mapping[int, LiveRecord]]) -> None:
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
        return np.array([records[expert].step for expert in experts.tolist()], np.int64)
