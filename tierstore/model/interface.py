"""The interface of a model for the trainer, the ZeRO-3 slices and the gather queue.

Shapes: B sequences, T positions, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tierstore.accelerator import upload
from tierstore.moe.router import LayerRouter
from tierstore.parallel.layout import Division

#: The value of a target excluded from the loss.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class TaskSegment:
    """The ``rows`` of one task in a batch. Its part of the objective is ``weight`` times the mean over the task's
    ``step_targets`` targets in the whole step.
    """

    task: str
    rows: range
    weight: float
    step_targets: int

    def moved(self, start: int, stop: int) -> TaskSegment:
        """The part within the rows from ``start`` to ``stop``, counted from ``start``."""
        first, last = max(self.rows.start, start), min(self.rows.stop, stop)
        return replace(self, rows=range(first - start, max(first, last) - start))


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: ``tokens_BT`` and the ``targets_BT`` that follow them, int64; a target of ``IGNORED`` does not count.

    ``positions_BT``: positions, which restart with each document (None: 0 to T - 1). ``step_targets``: the number of
    counted targets in the whole step, of all micro-batches and ranks (0: all count), and ``parts``: the number of batches
    that contain them. ``segments``: the tasks of the rows, in order; empty without tasks. A rank may have no row of a
    batch of tasks. ``mask_BT``: bool, False for padding (None: no padding), which does not count in the balance of
    experts.
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
        """The number of counted targets in this batch."""
        return int((self.targets_BT != IGNORED).sum()) if self.step_targets else self.targets_BT.numel()

    def counted_of(self, segment: TaskSegment) -> int:
        """The number of counted targets in ``segment``."""
        return int((self.targets_BT[segment.rows.start : segment.rows.stop] != IGNORED).sum())

    @property
    def share(self) -> float:
        """The factor of this batch's mean loss with which the mean over all parts of the step equals the mean over all of
        the step's counted targets. 1 if all parts have equally many.
        """
        return self.parts * self.counted / self.step_targets if self.step_targets else 1.0

    def of_rank(self, rank: int, world: int) -> Batch:
        """The rows of rank ``rank``. Rows that cannot be shared evenly are left out, except with tasks; if there are
        fewer rows than ranks, every rank takes all of them.
        """
        count = self.tokens_BT.shape[0]
        rows = count // world
        if world == 1 or not rows:
            return self
        if self.segments:
            return self.piece(range(rank * count // world, (rank + 1) * count // world), world)
        return self.piece(range(rank * rows, (rank + 1) * rows), world)

    def piece(self, rows: range, world: int) -> Batch:
        """The batch of only ``rows``, one of ``world`` pieces."""
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
        """The batch, which is on the CPU, on ``device``."""
        return replace(
            self,
            tokens_BT=upload(self.tokens_BT, device),
            targets_BT=upload(self.targets_BT, device),
            positions_BT=None if self.positions_BT is None else upload(self.positions_BT, device),
            mask_BT=None if self.mask_BT is None else upload(self.mask_BT, device),
        )


@dataclass(frozen=True, slots=True)
class SegmentLoss:
    """The mean cross entropy (``loss``, with its graph) of the ``counted`` targets of one task in a batch."""

    task: str
    counted: int
    loss: Tensor


def segment_losses(batch: Batch, mean: Callable[[TaskSegment], Tensor]) -> tuple[SegmentLoss, ...]:
    """The loss of each segment of ``batch`` with targets; ``mean`` computes its mean cross entropy."""
    counted = [(segment, batch.counted_of(segment)) for segment in batch.segments]
    return tuple(SegmentLoss(segment.task, count, mean(segment)) for segment, count in counted if count)


def joint_loss(batch: Batch, losses: Sequence[SegmentLoss], nothing: Tensor) -> Tensor:
    """``ModelOutput.loss`` of a batch of tasks: its mean over all parts of the step is the sum over tasks of their
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
    unweighted, summed over the MoE layers, this rank's shares. ``objective``: the value to differentiate: this rank's
    share of ``loss`` (its W-th part on W ranks) plus the weighted auxiliary losses. ``loads``: assignments per expert
    from the global batch, one int64 (E,) for each MoE layer. ``logits``: fp32 (B, T, V) if no targets were given.
    ``segments``: this rank's losses by task, for a batch of tasks. Padding counts in none of these.
    """

    loss: Tensor | None
    aux_loss: Tensor
    z_loss: Tensor
    objective: Tensor | None
    loads: tuple[Tensor, ...]
    logits: Tensor | None
    segments: tuple[SegmentLoss, ...] = ()


def active_experts(passes: Iterable[Sequence[Tensor]]) -> int:
    """The number of experts, over all layers, that got tokens in ``passes``, each given by its ``loads``."""
    return sum(int(torch.stack(loads).any(dim=0).sum()) for loads in zip(*passes, strict=True))


class DenseModel(Protocol):
    """A model's dense parameters: the parameter groups, and where passes over them begin and end."""

    @property
    def module(self) -> nn.Module:
        """The module with the parameters; a forward pass of the model calls it."""
        ...

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The modules of parameter groups 1 to U - 2. A forward pass calls each once, with its input stream first."""
        ...

    def dense_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        """All dense parameters, in the order of the forward pass: embedding, a group for each block, norm and head.

        A tied head is the first group's embedding.
        """
        ...

    def unit_divisions(self) -> list[list[Division | None]]:
        """The tensor-parallel division of each parameter of each of ``dense_units``, for any number of ranks; None for
        those that every rank has whole.
        """
        ...

    def frozen_units(self) -> list[tuple[str, list[nn.Parameter]]]:
        """Groups of frozen dense parameters: read whole from records, and kept. None if all are trained."""
        ...

    def cast_parameters(self) -> list[nn.Parameter]:
        """Parameters that a pass needs only in the compute type, so that they may be gathered in it."""
        ...

    def stream(self, output: Any) -> Tensor:
        """The residual stream in the output of a block."""
        ...

    def made(self, output: Any) -> Tensor | None:
        """The tensor in the module's output that the last group computed. When its gradient exists, the backward pass has
        begun."""
        ...


class Model(DenseModel, Protocol):
    """A model that the trainer can step. Its experts come from a source; all of its parameters are dense.

    Not thread safe; a backward pass belongs to the last forward pass or to none.
    """

    def set_step(self, step: int, micro: int = 0) -> None:
        """Sets the position of training. Call before each training forward pass."""
        ...

    def run(self, batch: Batch) -> ModelOutput:
        """A forward pass over ``batch``, with its loss."""
        ...

    def routers(self) -> list[LayerRouter]:
        """The router of each MoE layer, and the norm before it, in the order of the forward pass."""
        ...

    def suspend(self) -> object:
        """The state of the forward pass in progress, for ``resume`` after another pass has run."""
        ...

    def resume(self, state: object) -> None:
        """Restores the ``state`` of ``suspend``, to continue its forward pass or to recompute one of its blocks."""
        ...

    def leaving(self, block: int, output: Any) -> list[Tensor]:
        """The results of block number ``block`` that the objective may depend on: the residual stream, and its balance
        terms. Removes them from the model if it keeps them.
        """
        ...

    def replaced(self, block: int, output: Any, tensors: Sequence[Tensor]) -> Any:
        """``output`` with ``tensors`` in place of those from ``leaving``."""
        ...

    def end_step(self) -> None:
        """Called after an optimizer step: adjusts values not learned by gradients."""
        ...

    def state(self) -> dict[str, bytes]:
        """The state for a commit beside the parameters."""
        ...

    def load_state(self, state: Mapping[str, bytes]) -> None:
        """Restores the result of ``state``. Raises StoreFormatError."""
        ...

    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """``count`` tokens that follow ``prompt`` (at least one), sampled at ``temperature`` (0: greedy)."""
        ...
