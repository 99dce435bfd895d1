"""What becomes of expert gradients: accumulated in fp32, stepped at once or when the norm is known.

A gradient arrives complete for one micro-batch. Where it cannot be stepped at once (more
micro-batches follow, or clipping waits for the norm) it is added to the record's GRADIENTS entry of
the host cache, which spills to disk like any other dirty entry. The sum of squares is taken of
every final gradient, before any state moves on its account when clipping, so the norm is exact and
a non-finite gradient is always noticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tierstore._native import Buffer, DoubleTable
from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.prefetch.plan import StepTiming
from tierstore.store.format import Group
from tierstore.store.optimizer import CachedRecord
from tierstore.store.parameter_store import ParameterStore
from tierstore.tiers.device import DeviceTier

__all__ = ["GradientKeeper"]


class GradientKeeper:
    """The gradients of one training step. ``records[layer]`` are the experts of a layer, in key order, by
    number.
    """

    def __init__(
        self,
        store: ParameterStore,
        device: DeviceTier,
        records: Mapping[int, Mapping[int, CachedRecord]],
        timing: StepTiming,
    ) -> None:
        self._store = store
        self._cache = store.cache
        self._engine = store.engine
        self._device = device
        self._records = records
        self._timing = timing
        count = 1 + max((r.number for layer in records.values() for r in layer.values()), default=0)
        self._squares = DoubleTable(count)
        self._square_tickets: list[int] = []
        self._squared: set[int] = set()  # records whose sum of squares is that of their final gradient
        self._kept: set[int] = set()  # records whose GRADIENTS entry holds something
        self._pending: set[int] = set()  # of those: final, with the norm known, waiting for their step
        self._scale = 1.0
        self._last_micro = True

    # The backward passes of one step -----------------------------------------------------------------------

    def begin_micro(self, *, index: int, count: int) -> None:
        if index == 0:
            self._squares.array()[:] = 0.0
            self._square_tickets = []
            self._squared.clear()
        self._last_micro = index == count - 1

    @property
    def _steps_now(self) -> bool:
        return self._timing is StepTiming.IMMEDIATE and self._last_micro

    def backward_need(self, record: CachedRecord) -> Need:
        """What a backward pass of ``record`` needs in memory, and what it leaves behind."""
        if not self._steps_now:
            return Need.WEIGHTS | Need.ACCUMULATE
        return Need.STEP_SPILLED if record.number in self._kept else Need.STEP

    def take(self, record: CachedRecord, slot: int) -> None:
        """The gradient in device slot ``slot`` is complete for this micro-batch; the record is pinned."""
        landed, after = self._device.land(slot)
        if self._steps_now and record.number not in self._kept:
            square = self._square(record, landed, after)
            reading = [square, self._store.optimizer.step(record, landed, after=after)]
        else:
            reading = [self._accumulate(record, landed, after)]
            if self._last_micro:
                self._square_kept(record)
            if self._steps_now:
                self.step(record)
        self._device.release_gradient(slot, reading)

    def end_layer(self, layer: int) -> None:
        """``layer``'s backward pass is over: after the last one, finishes what only earlier ones reached."""
        if not self._last_micro:
            return
        left = [r for r in self._records[layer].values() if r.number in self._kept - self._squared]
        if self._steps_now:
            for record in self._store.access(Phase.OPTIMIZER, layer, left, Need.STEP_SPILLED):
                self._square_kept(record)
                self.step(record)
        else:
            for record in self._store.access(Phase.BACKWARD, layer, left, Need.GRADIENTS):
                self._square_kept(record)

    def _accumulate(self, record: CachedRecord, landed: Buffer, after: Sequence[int]) -> int:
        entry = record.entry(Group.GRADIENTS)
        target = self._cache.sections(entry)[0]
        before = [*after, *self._cache.before_write(entry)]
        if record.number in self._kept:
            ticket = self._engine.accumulate(target, landed, after=before)
        else:
            ticket = self._engine.copy(target, landed, after=before)
            self._kept.add(record.number)
        self._cache.wrote(entry, ticket)
        return ticket

    def _square_kept(self, record: CachedRecord) -> None:
        entry = record.entry(Group.GRADIENTS)
        ticket = self._square(record, self._cache.sections(entry)[0], self._cache.ready(entry))
        self._cache.reads(entry, ticket)

    def _square(self, record: CachedRecord, gradient: Buffer, after: Sequence[int]) -> int:
        ticket = self._engine.sum_of_squares(gradient, self._squares, record.number, after=list(after))
        self._square_tickets.append(ticket)
        self._squared.add(record.number)
        return ticket

    # The norm, and the steps that waited for it ------------------------------------------------------------

    def sum_of_squares(self) -> float:
        """The sum of squares of all final expert gradients, added in key order; waits for them."""
        self._store.wait(self._square_tickets)
        self._square_tickets = []
        return math.fsum(self._squares.array().tolist())

    def apply(self, scale: float) -> None:
        """The kept gradients, times ``scale``, are due: each is stepped before its expert is used again."""
        self._scale = scale
        self._pending = set(self._kept)

    def discard(self) -> None:
        """Forgets the kept gradients: the step is skipped."""
        self._cache.drop([number * GROUP_STRIDE + Group.GRADIENTS for number in sorted(self._kept)])
        self._kept.clear()
        self._pending.clear()

    def is_pending(self, record: CachedRecord) -> bool:
        """Whether the record's kept gradient is final and due."""
        return record.number in self._pending

    def is_kept(self, record: CachedRecord) -> bool:
        """Whether the record has a gradient of the present step that waits."""
        return record.number in self._kept

    def step(self, record: CachedRecord) -> None:
        """Queues the step of a pinned record with its kept gradient, dropped at the end of the unit."""
        entry = record.entry(Group.GRADIENTS)
        gradient = self._cache.sections(entry)[0]
        scale = self._scale if self._timing is StepTiming.DEFERRED else 1.0
        ticket = self._store.optimizer.step(record, gradient, scale=scale, after=self._cache.ready(entry))
        self._cache.reads(entry, ticket)
        self._kept.discard(record.number)
        self._pending.discard(record.number)

    def step_pending(self, layer: int | None = None) -> None:
        """Steps the pending records of ``layer`` (of all layers when None)."""
        for number in sorted(self._records) if layer is None else [layer]:
            due = [record for record in self._records[number].values() if record.number in self._pending]
            for record in self._store.access(Phase.OPTIMIZER, number, due, Need.STEP_SPILLED):
                self.step(record)
