"""Expert gradients of one training step, in the host cache: accumulated in fp32, and stepped when they are due.

A gradient arrives complete for one micro-batch. If it cannot be stepped at once (more micro-batches follow, or clipping
waits for the norm), it is added to the record's GRADIENTS entry of the host cache, which spills to disk like any other
dirty entry. The sum of squares is computed for every final gradient: by its step, if that is taken at once; otherwise before
the gradient changes any state.
So the norm is exact, and a non-finite gradient is always noticed. The access program decides what happens to each gradient
and when.

Where a device has *spare* host buffers, the first gradients of a step's backward passes wait there. Their experts are the
last that the next forward pass uses, so their steps are left for times when the engine has nothing more urgent to do. AdamW
then also runs beside the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierstore._native import Buffer, DoubleTable, Dtype, Priority
from tierstore.cache.access import GROUP_STRIDE, Need
from tierstore.errors import StoreError
from tierstore.parallel import Channel, RankGroup, Work
from tierstore.prefetch.program import Access, AccessProgram, Action
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.core import StoreCore
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord
from tierstore.tiers import DeviceSlots
from tierstore.tiers.device import DeviceTier, gradient_type


class ExpertGradients:
    """The interface through which a training loop finishes the expert gradients of a step. The base class is for frozen
    experts, which have no gradients.
    """

    def squares(self) -> list[float]:
        """Wait for and return the sums of squares of all final expert gradients, by record."""
        return []

    def sum_of_squares(self) -> float:
        """The sum of ``squares``, rounded once."""
        return math.fsum(self.squares())

    def apply(self, scale: float) -> None:
        """Make the kept gradients, times ``scale``, pending, now that the norm is known. Each is stepped before its expert
        is used again. Raises StoreError outside of an optimizer step, or if gradients of an earlier step are pending.
        """

    def discard(self) -> None:
        """Drop the kept gradients, because the step is skipped."""

    def step_pending(self) -> None:
        """Step all pending gradients, as a commit requires."""


class GradientAccumulator(ExpertGradients):
    """Carries out the actions of ``program`` on gradients. ``records[layer][expert]`` is each expert's record."""

    def __init__(
        self,
        store: StoreCore,
        device: DeviceTier,
        records: Mapping[int, Mapping[int, LiveRecord]],
        program: AccessProgram,
    ) -> None:
        self._store = store
        self._cache = store.cache
        self._engine = store.engine
        self._device = device
        self._dtype = Dtype.BF16 if gradient_type(device.slots) == torch.bfloat16 else Dtype.FP32
        self._records = records
        self._program = program
        count = 1 + max((r.number for layer in records.values() for r in layer.values()), default=0)
        self._squares = DoubleTable(count)
        self._square_tickets: list[int] = []
        #: The numbers of the records whose gradients of this step are in spare buffers.
        self.late: set[int] = set()
        self._scale = 1.0

    def begin_step(self) -> None:
        """Begin a step, without any gradients."""
        self._squares.array()[:] = 0.0
        self._square_tickets = []
        self.late.clear()

    # Actions on a pinned record ----------------------------------------------------------------------------

    def take(self, record: LiveRecord, action: Action, step: int, slot: int) -> None:
        """Take the gradient in device slot ``slot``, complete for this micro-batch. ``step`` is as in ``Access``."""
        kept = bool(action & (Action.KEEP | Action.ACCUMULATE))
        spare = not kept and len(self.late) < self._device.slots.spare
        copied, after = self._device.copy_to_host(slot, spare=spare)
        if kept:
            reading = [self._accumulate(record, action, copied, after)]
            self.settle(record, action, step)
        elif spare:
            self.late.add(record.number)
            square = self._square(record, copied, self._dtype, after)
            ticket = self._store.optimizer.step(
                record, copied, number=step, after=after, priority=Priority.IDLE
            )
            reading = [square, ticket]
        else:
            ticket = self._store.optimizer.step(
                record, copied, number=step, squares=self._squares, after=after
            )
            self._square_tickets.append(ticket)
            reading = [ticket]
        self._device.free_gradient(slot, reading)

    def settle(self, record: LiveRecord, action: Action, step: int) -> None:
        """Finish the kept gradient, and take optimizer step ``step`` with it, as ``action`` says. A stepped gradient is
        dropped when the record's request in the access ends.
        """
        entry = record.entry(Group.GRADIENTS)
        gradient = self._cache.sections(entry)[0]
        if action & Action.FINISH:
            self._cache.reads(entry, self._square(record, gradient, Dtype.FP32, self._cache.ready(entry)))
        if action & Action.STEP:
            after = self._cache.ready(entry)
            ticket = self._store.optimizer.step(record, gradient, number=step, scale=self._scale, after=after)
            self._cache.reads(entry, ticket)

    def _accumulate(self, record: LiveRecord, action: Action, copied: Buffer, after: Sequence[int]) -> int:
        entry = record.entry(Group.GRADIENTS)
        target = self._cache.sections(entry)[0]
        before = [*after, *self._cache.before_write(entry)]
        queue = self._engine.widen if action & Action.KEEP else self._engine.accumulate
        ticket = queue(target, copied, self._dtype, after=before)
        self._cache.wrote(entry, ticket)
        return ticket

    def _square(self, record: LiveRecord, gradient: Buffer, dtype: Dtype, after: Sequence[int]) -> int:
        ticket = self._engine.sum_of_squares(gradient, self._squares, record.number, dtype, after=after)
        self._square_tickets.append(ticket)
        return ticket

    # Beside the passes -------------------------------------------------------------------------------------

    def carry_out(self, access: Access) -> None:
        """Carry out an access without computation, whose requests all have the same flags and action."""
        need, action = Need(int(access.flags[0])), Action(int(access.actions[0]))
        records = [self._records[access.layer][expert] for expert in access.experts.tolist()]
        for record in self._store.access(access.phase, access.layer, records, need):
            self.settle(record, action, access.step)
        self._program.done(access, range(len(records)))

    def squares(self) -> list[float]:
        self._store.wait(self._square_tickets)
        self._square_tickets = []
        found: list[float] = self._squares.array().tolist()
        return found

    def apply(self, scale: float) -> None:
        _ = self._store.history.current
        if (waiting := next(self._program.pending(), None)) is not None:
            raise StoreError(f"gradients of optimizer step {waiting.step} still wait for it")
        self._scale = scale
        self._program.apply()

    def discard(self) -> None:
        numbers = sorted(self._records[layer][expert].number for layer, expert in self._program.kept())
        self._cache.drop([number * GROUP_STRIDE + Group.GRADIENTS for number in numbers])
        self._program.discard()

    def step_pending(self) -> None:
        for access in self._program.pending():
            self.carry_out(access)


# Gradients of several micro-batches that share a lease, added up in its gradient slot -----------------------


_ALIGNMENT = 16  # fp32 values: a tensor starts on a multiple of 64 bytes


class FlatTensors:
    """Memory for flat fp32 tensors of ``numel`` elements; it grows to the largest call's needs."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel = numel
        self._stride = -(-numel // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.empty(0, dtype=torch.float32, device=device)

    def of(self, count: int) -> list[Tensor]:
        """``count`` tensors of undefined content, valid until the next call."""
        needed = count * self._stride
        if self._memory.numel() < needed:
            self._memory = self._memory.new_empty(0)  # frees the old memory before allocating
            self._memory = self._memory.new_empty(needed)
        return [self._memory[start : start + self._numel] for start in range(0, needed, self._stride)]


class GradientParts:
    """Adds up gradients of several micro-batches in fp32 and in their order, as for gradients kept in the host cache.

    Each part is summed over ``replicas`` before it is added, so the result has the same bits as when one micro-batch runs
    after another. Uses memory for one part beside the slot; with replicas, for all parts but the first.
    """

    def __init__(self, replicas: RankGroup, *, ledger: StallLedger) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._spare: FlatTensors | None = None

    def add_up(self, micros: Sequence[int], total: Tensor, *, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each of ``micros`` and the tensor to write its part to; afterwards ``total`` is the sum."""
        alone = self._replicas.size == 1
        assert len(micros) == 1 or total.dtype == torch.float32
        self._spare = self._spare or FlatTensors(total.numel(), total.device)
        spare = self._spare.of(min(len(micros) - 1, 1) if alone else len(micros) - 1)
        if alone:
            for place, micro in enumerate(micros):
                part = spare[0] if place else total
                yield micro, part
                if place:
                    total.add_(part)
            return
        parts = [total, *spare]
        yield from zip(micros, parts, strict=True)
        work = self._replicas.all_reduce(*parts, channel=Channel.STREAM)
        with self._ledger.stall(layer=layer, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        for part in parts[1:]:
            total.add_(part)


# Sums over the replicas of an expert ------------------------------------------------------------------------
#
# A gradient stays in its device slot, and its record pinned, until its sum is complete: half of the slots may be computed
# into while the other half is being summed. Small gradients are batched. The batch size changes no result, and depends
# only on the number and size of slots, so all replicas form the same batches.


BATCH_BYTES = 1 << 20  # in longer messages, transfer time outweighs latency


@dataclass(slots=True)
class _Batch:
    """Gradients that are summed in one message, and the functions to call afterwards, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    complete: list[Callable[[], None]] = field(default_factory=list)
    work: Work | None = None


class ReplicaSums:
    """Sums gradients in the gradient slots of ``slots`` over ``group``.

    All replicas must add the same gradients in the same order. In a group of one, gradients are complete at once.
    """

    def __init__(self, group: RankGroup, slots: DeviceSlots[torch.dtype], *, ledger: StallLedger) -> None:
        self._group = group
        together = max(1, BATCH_BYTES // slots.gradient_bytes)
        # Two batches of half the slots: one is being filled, the other is being summed.
        self._limit = min(slots.gradients // 2, together)
        self._ledger = ledger
        self._filling = _Batch()
        self._travelling: _Batch | None = None

    def add(self, gradient: Tensor, complete: Callable[[], None], *, layer: int) -> None:
        """Sum ``gradient`` in place, then call ``complete``, now or later, in the order of ``add`` calls."""
        if self._group.size == 1:
            complete()
            return
        self._filling.tensors.append(gradient)
        self._filling.complete.append(complete)
        if len(self._filling.tensors) >= self._limit:
            self._send(layer)
        if self._limit == 0:
            self._finish(layer)

    def flush(self, *, layer: int) -> None:
        """Complete all gradients that were added."""
        self._send(layer)
        self._finish(layer)

    def _send(self, layer: int) -> None:
        self._finish(layer)
        if self._filling.tensors:
            self._filling.work = self._group.all_reduce(*self._filling.tensors, channel=Channel.STREAM)
            self._travelling, self._filling = self._filling, _Batch()

    def _finish(self, layer: int) -> None:
        if self._travelling is None:
            return
        work, complete = self._travelling.work, self._travelling.complete
        self._travelling = None
        assert work is not None
        with self._ledger.stall(layer=layer, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        for step in complete:
            step()
