"""What the trainer, the ZeRO-3 slices and the gather queue need of a model, whoever wrote it.

Shapes: B sequences, T positions, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tierstore.moe.router import LayerRouter
from tierstore.parallel.layout import Division

#: A target that does not count.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class TaskSegment:
    """``rows`` of a batch that are one task's. Its part of the objective is ``weight`` times the mean over the
    ``step_targets`` targets that the task has in the whole step.
    """

    task: str
    rows: range
    weight: float
    step_targets: int

    def moved(self, start: int, stop: int) -> TaskSegment:
        """What the rows from ``start`` to ``stop`` have of it, counted from ``start``."""
        first, last = max(self.rows.start, start), min(self.rows.stop, stop)
        return replace(self, rows=range(first - start, max(first, last) - start))


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: ``tokens_BT`` and the ``targets_BT`` that follow them, int64; a target of ``IGNORED`` does not count.

    ``positions_BT``: positions, which begin again with each document (None: 0 to T - 1). ``step_targets``: how many
    targets of the whole step count, of all micro-batches and ranks (0: every one does), and ``parts``: in how many
    batches they lie. ``segments``: the tasks whose rows these are, in order; none where there are no tasks. A rank may
    have no row of such a batch. ``mask_BT``: bool, False for padding (None: there is none), which takes no part in what
    balances experts.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor | None = None
    step_targets: int = 0
    parts: int = 1
    segments: tuple[TaskSegment, ...] = ()
    mask_BT: Tensor | None = None

    @property
    def counted(self) -> int:
        """How many targets of this batch count."""
        return int((self.targets_BT != IGNORED).sum()) if self.step_targets else self.targets_BT.numel()

    def counted_of(self, segment: TaskSegment) -> int:
        """How many targets of ``segment`` count."""
        return int((self.targets_BT[segment.rows.start : segment.rows.stop] != IGNORED).sum())

    @property
    def share(self) -> float:
        """By what the mean loss of this batch is multiplied, so that the mean over all parts of the step is that of its
        targets. 1 where all parts count as many.
        """
        return self.parts * self.counted / self.step_targets if self.step_targets else 1.0

    def of_rank(self, rank: int, world: int) -> Batch:
        """The rows of rank ``rank``. What cannot be shared evenly is left out, but of tasks; where there are fewer rows than
        ranks, every rank takes all of them.
        """
        count = self.tokens_BT.shape[0]
        rows = count // world
        if world == 1 or not rows:
            return self
        if self.segments:
            return self.piece(range(rank * count // world, (rank + 1) * count // world), world)
        return self.piece(range(rank * rows, (rank + 1) * rows), world)

    def piece(self, rows: range, world: int) -> Batch:
        """Its ``rows`` alone, as one of ``world`` pieces."""
        part = slice(rows.start, rows.stop)
        moved = [segment.moved(rows.start, rows.stop) for segment in self.segments]
        return replace(
            self,
            tokens_BT=self.tokens_BT[part],
            targets_BT=self.targets_BT[part],
            positions_BT=None if self.positions_BT is None else self.positions_BT[part],
            mask_BT=None if self.mask_BT is None else self.mask_BT[part],
            parts=self.parts * world,
            segments=tuple(segment for segment in moved if segment.rows),
        )

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        return replace(
            self,
            tokens_BT=self.tokens_BT.to(device),
            targets_BT=self.targets_BT.to(device),
            positions_BT=None if self.positions_BT is None else self.positions_BT.to(device),
            mask_BT=None if self.mask_BT is None else self.mask_BT.to(device),
        )


@dataclass(frozen=True, slots=True)
class SegmentLoss:
    """The mean cross entropy (``loss``, with its graph) of the ``counted`` targets of one task in a batch."""

    task: str
    counted: int
    loss: Tensor


def segment_losses(batch: Batch, mean: Callable[[TaskSegment], Tensor]) -> tuple[SegmentLoss, ...]:
    """The loss of each segment of ``batch`` that has targets, of which ``mean`` gives the mean cross entropy."""
    counted = [(segment, batch.counted_of(segment)) for segment in batch.segments]
    return tuple(SegmentLoss(segment.task, count, mean(segment)) for segment, count in counted if count)


def joint_loss(batch: Batch, losses: Sequence[SegmentLoss], nothing: Tensor) -> Tensor:
    """What ``ModelOutput.loss`` is of a batch of tasks: the mean over all parts of the step is the sum over tasks of their
    weights times their mean losses. ``nothing``: a zero with a graph, for a rank without a target.
    """
    of = {segment.task: segment for segment in batch.segments}
    total = nothing
    for found in losses:
        segment = of[found.task]
        share = batch.parts * segment.weight * found.counted / segment.step_targets
        total = total + found.loss * share
    return total


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """One forward pass.

    ``loss``: mean cross entropy of this rank's tokens in nats, fp32, times the batch's share. ``aux_loss``, ``z_loss``:
    unweighted, summed over the MoE layers, this rank's shares. ``objective``: what to differentiate, this rank's share of
    ``loss`` (its W-th part on W ranks) plus both by their weights. ``loads``: assignments per expert from the global
    batch, one int64 (E,) for each MoE layer. ``logits``: fp32 (B, T, V) if no targets were given. ``segments``: this rank's
    losses by task, of a batch of tasks. Padding counts in none of them.
    """

    loss: Tensor | None
    aux_loss: Tensor
    z_loss: Tensor
    objective: Tensor | None
    loads: tuple[Tensor, ...]
    logits: Tensor | None
    segments: tuple[SegmentLoss, ...] = ()


class DenseModel(Protocol):
    """A model as its dense parameters see it: the units, and where passes over them begin and end."""

    @property
    def module(self) -> nn.Module:
        """What holds the parameters; a forward pass of the model is a call of it."""
        ...

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The modules of units 1 to U - 2. Each is called once in a forward pass, its input stream the first argument."""
        ...

    def dense_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        """Every dense parameter, in the order of the forward pass: embedding, a unit for each block, norm and head.

        A tied head is the first unit's embedding.
        """
        ...

    def unit_divisions(self) -> list[list[Division | None]]:
        """How tensor parallelism divides each parameter of each of ``dense_units``, however many ranks there are; None for
        those that every rank has whole.
        """
        ...

    def frozen_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        """Units of dense parameters that are not trained: they are read from records, whole, and stay. None where all
        are trained.
        """
        ...

    def cast_parameters(self) -> list[nn.Parameter]:
        """Parameters that a pass needs in the compute type alone: they may be gathered in it."""
        ...

    def stream(self, output: Any) -> Tensor:
        """The residual stream in what a block returned."""
        ...

    def made(self, output: Any) -> Tensor | None:
        """What the last unit made, in what the module returned: when its gradient is there, the backward pass begins."""
        ...


class Model(DenseModel, Protocol):
    """A model that the trainer can step. Its experts come from a source; all its parameters are dense.

    Not thread safe; a backward pass belongs to the last forward pass or to none.
    """

    def set_step(self, step: int, micro: int = 0) -> None:
        """Where training stands. Call before each training forward pass."""
        ...

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass over ``batch``, with its loss."""
        ...

    def routers(self) -> list[LayerRouter]:
        """The router of each MoE layer, and the norm before it, in the order of the forward pass."""
        ...

    def suspend(self) -> object:
        """What the forward pass under way has to find again when another one has gone on meanwhile, for ``resume``."""
        ...

    def resume(self, state: object) -> None:
        """The forward pass that ``suspend`` gave ``state`` for goes on, or one of its blocks is computed again."""
        ...

    def leaving(self, block: int, output: Any) -> list[Tensor]:
        """Of what block number ``block`` has just computed, what the objective may depend on: the residual stream, and
        what balances its experts. Taken out of the model where it is kept there.
        """
        ...

    def replaced(self, block: int, output: Any, tensors: Sequence[Tensor]) -> Any:
        """``output`` with ``tensors`` in the place of those that ``leaving`` gave."""
        ...

    def end_step(self) -> None:
        """An optimizer step has been taken: what is not learned by gradients is adjusted."""
        ...

    def state(self) -> dict[str, bytes]:
        """What a commit must keep beside the parameters."""
        ...

    def load_state(self, state: Mapping[str, bytes]) -> None:
        """Takes up what ``state`` gave. Raises StoreFormatError."""
        ...

    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """``count`` tokens that follow ``prompt`` (at least one), sampled at ``temperature`` (0: greedy)."""
        ...
