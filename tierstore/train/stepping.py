"""One optimizer step of a model whose experts are leased from a store, for any training loop.

::

    with stepper.step(lr, passes=count) as step:
        for each micro-batch:
            step.begin_pass()
            output = model.run(batch)
            step.backward(output.objective / count)

The end of the block finishes the gradients, takes the norm over dense parameters and experts together, and then either
steps everything or skips the step. Without clipping, and with the number of passes known, an expert is stepped in its
last backward pass, as soon as its gradient is complete. Otherwise the step waits for the norm, and is queued before the
expert's next use or at the next commit.

A non-finite loss is detected before any state changes, and skips the step; so does a non-finite gradient if steps wait
for the norm. Otherwise experts have been stepped by the time the norm is known, and a non-finite gradient stops the run
at its last commit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tierstore.cache.access import Phase
from tierstore.dense import DenseSlices
from tierstore.errors import TierstoreError
from tierstore.model.interface import Model
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.parallel import Channel, Mesh, RankGroup
from tierstore.parallel.config import Elastic
from tierstore.prefetch.experts import ExpertTiers
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.prefetch.horizontal import HorizontalQueue
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.program import Finals
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.core import OptimizerStep, StoreCore
from tierstore.timeline import OperationSpans, Track
from tierstore.train.chunk_control import ChunkControl
from tierstore.train.elastic import drop_before
from tierstore.train.layer_order import LayerOrder
from tierstore.train.ranks import commit_everywhere
from tierstore.train.setup import Setup


class NonFiniteError(TierstoreError):
    """A non-finite loss or gradient that the run does not skip."""


class StepError(TierstoreError, RuntimeError):
    """A training loop omitted or repeated an action. The message names it."""


@dataclass(frozen=True, kw_only=True)
class SessionParts(Setup):
    """The open parts of a training session: ``tierstore.train.session`` makes and closes them, a ``Stepper`` drives them.
    ``layers`` takes micro-batches in layer order; None in micro order.
    """

    store: StoreCore
    experts: ExpertTiers
    model: Model
    dense: DenseSlices
    queue: HorizontalQueue
    state: TrainState
    chunks: ChunkControl
    layers: LayerOrder | None


class StepOutcome(Enum):
    """The outcome of a step."""

    OPEN = "open"
    TAKEN = "taken"
    SKIPPED = "skipped"  # a loss or a gradient was not finite
    ABANDONED = "abandoned"  # the loop abandoned it


class Stepper:
    """Takes steps, and commits them. Owns nothing. One thread at a time."""

    def __init__(self, parts: SessionParts) -> None:
        self.parts = parts
        self._operations = OperationSpans(parts.store.engine, parts.timeline)

    @contextlib.contextmanager
    def step(self, lr: float, *, passes: int | None = None) -> Iterator[OpenStep]:
        """One optimizer step with learning rate ``lr`` of ``passes`` forward and backward passes (None: any number).

        If the block raises, the step may have been taken in part: the last commit stands, and no other is possible.
        Raises StepError, without changes, if a step is open or ``passes`` is invalid; at the end of the block StepError,
        NonFiniteError, ChecksumError, OSError, BudgetError, PeerError.
        """
        parts = self.parts
        if parts.store.history.is_open:
            raise StepError("a step is open already: end it before beginning the next one")
        if passes is None and parts.timing is StepTiming.IMMEDIATE:
            raise StepError("passes: expected a number: experts are stepped in their last backward pass")
        if passes is not None and passes < 1:
            raise StepError(f"passes: expected at least one, got {passes}")
        position = parts.state.position
        with (
            parts.store.failures.poisoning(f"step {position} was cut short"),
            parts.store.optimizer_step(lr) as step,
        ):
            opened = OpenStep(parts, step, passes)
            yield opened
            opened.close()
        parts.state.position += 1
        self._operations.drain()

    def commit(self, *, snapshot: str | None = None) -> int:
        """Makes the run durable up to this step; returns the generation."""
        parts = self.parts
        with (
            parts.store.failures.poisoning("a commit was cut short"),
            parts.timeline.span(Track.COMMITS, f"commit {parts.state.position}"),
            parts.ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.COMMIT),
        ):
            parts.experts.gradients.step_pending()
            parts.dense.save(parts.store, parts.store.history.applied)
            parts.state.chunks = parts.chunks.at_commit(parts.state.position)
            state = {**parts.model.state(), STATE_KEY: parts.state.pack()}
            generation = commit_everywhere(parts.store, parts.mesh, state, snapshot)
            if parts.config.parallel.elastic is Elastic.RESHARD and parts.mesh.world.rank == 0:
                drop_before(parts.config.store)
        self._operations.drain()
        return generation

    def begin_forward(self) -> None:
        """Announces a forward pass without a backward pass."""
        self.parts.experts.begin_evaluation()
        self.parts.queue.begin(training=False)


class OpenStep:
    """A step in progress. Its passes run one after another, each forward and then backward."""

    def __init__(self, parts: SessionParts, step: OptimizerStep, passes: int | None) -> None:
        self._parts = parts
        self._step = step
        #: The number of passes; None if unknown.
        self.passes = passes
        self._position = parts.state.position
        self.passes_begun = 0
        self.lr = step.lr
        self.outcome = StepOutcome.OPEN
        #: Of all gradients, before clipping; not finite if the step was not taken.
        self.grad_norm = math.nan
        #: Gradients whose norm is larger are scaled down to it (0: no clipping).
        self.clip_norm = parts.config.clip_norm
        parts.queue.begin(training=True)
        parts.dense.zero_grad()

    def begin_pass(self) -> None:
        """Announces a forward pass and its backward pass."""
        if self.passes_begun == self.passes:
            raise StepError(f"step {self._position}: another forward pass in a step of {self.passes}")
        parts, index = self._parts, self.passes_begun
        if index % parts.queue.micro_batches == 0:
            # Its schedule covers the passes known in advance, and other forward passes may have come between.
            parts.queue.begin(training=True)
        parts.experts.begin_micro(index=index, count=self.passes)
        parts.dense.begin_micro()
        parts.model.set_step(self._position, index)
        self.passes_begun += 1

    def resume_pass(self, index: int, finals: Finals) -> None:
        """Announces the backward pass of forward pass ``index``, for interleaved micro-batches."""
        self._parts.experts.resume_micro(index=index, finals=finals)
        self._parts.dense.resume_micro()

    def backward(self, objective: Tensor) -> None:
        """The backward pass of the last forward pass."""
        with self._parts.timeline.span(Track.COMPUTE, f"backward {self._position}.{self.passes_begun - 1}"):
            torch.autograd.backward(objective)
            self.end_pass()

    def end_pass(self) -> None:
        """Ends a pass: the backward pass has returned."""
        self._parts.dense.end_micro()

    def skip(self) -> None:
        """Skips the step, because a loss is not finite; it counts as skipped."""
        self.outcome = StepOutcome.SKIPPED

    def abandon(self) -> None:
        """Abandons the step, by the loop's decision."""
        self.outcome = StepOutcome.ABANDONED

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes the step, or skips it. Called only by ``Stepper``."""
        parts, config = self._parts, self._parts.config
        every = config.cache.write_back_every
        if every and (self._position + 1) % every == 0:
            # Now, while the disk is idle: dense parameters are being stepped, and the next pass has made no request yet.
            parts.store.cache.clean()
        finite_losses = self.outcome is StepOutcome.OPEN
        if finite_losses:
            if self.passes is None and not self.passes_begun:
                raise StepError(f"step {self._position} ends without a backward pass")
            if self.passes not in (None, self.passes_begun):
                raise StepError(
                    f"step {self._position} ends after {self.passes_begun} of {self.passes} passes"
                )
            if self.passes is None:
                parts.experts.end_passes()
            self.grad_norm = gradient_norm(parts.experts.gradients, parts.dense, parts.mesh, parts.ledger)
            self.outcome = StepOutcome.TAKEN if math.isfinite(self.grad_norm) else StepOutcome.SKIPPED
        if self.outcome is StepOutcome.TAKEN:
            self._apply()
            parts.model.end_step()
            parts.state.skipped_in_a_row = 0
            return
        if finite_losses and self._steps_early:
            raise NonFiniteError(
                f"step {self._position}: a gradient is not finite, and without clipping experts have been stepped "
                "already; the last commit stands"
            )
        self._drop()
        self._step.abandon()

    @property
    def _steps_early(self) -> bool:
        return self._parts.timing is StepTiming.IMMEDIATE

    def _apply(self) -> None:
        parts = self._parts
        if not self._steps_early:
            scale = clip_scale(self.grad_norm, self.clip_norm) if self.clip_norm else 1.0
            parts.experts.gradients.apply(scale)
            if scale < 1.0:
                parts.dense.scale_gradients(scale)
        if not parts.queue.optimizer_is_due:  # another forward pass followed the last backward pass
            parts.queue.reset()
            parts.dense.step(self.lr)
            return
        # The queue may gather a stepped parameter group for the next step while later groups are still stepped.
        for group in parts.queue.optimizer_units:
            with parts.queue.during(group, Phase.OPTIMIZER):
                parts.dense.step_unit(group, self.lr)

    def _drop(self) -> None:
        state, most = self._parts.state, self._parts.config.max_skipped
        self._parts.queue.reset()
        # Those of the previous step: maybe no forward pass has reached them yet.
        self._parts.experts.gradients.step_pending()
        self._parts.experts.gradients.discard()
        state.skipped += 1
        if self.outcome is StepOutcome.ABANDONED:
            return
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= most:
            raise NonFiniteError(
                f"step {self._position}: {state.skipped_in_a_row} steps in a row were not finite (max_skipped)"
            )


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor of gradients of norm ``norm``: the formula of torch.nn.utils.clip_grad_norm_."""
    return min(1.0, max_norm / (norm + 1e-6))


def means(values: Sequence[float], world: RankGroup, ledger: StallLedger) -> list[float]:
    """The means over ranks; the same bits on all of them."""
    if world.size == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64)
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        world.all_reduce(sums).wait()
    return [float(total) / world.size for total in sums]


# The norm of a step's gradients -----------------------------------------------------------------------------
#
# Each gradient counts once, however many copies there are: an expert's on the first of its replicas, a dense parameter's
# once for the ranks that hold it whole, each part of a divided one. Sums of squares are in double precision. Those of
# experts are added exactly and rounded once, so that their distribution over ranks does not matter; those of dense
# parameters are added in the order of their groups, which is that of stages. So one process with the same gradients gets
# the same bits.


#: Doubles in which a rank's sum is sent: with four, the error is below 2**-159 of it.
_NORM_PARTS = 4


def gradient_norm(gradients: ExpertGradients, dense: DenseSlices, mesh: Mesh, ledger: StallLedger) -> float:
    """The norm of the experts' and the dense gradients, the same bits on every rank; NaN if any is not finite.

    A collective of all ranks of ``mesh``, whose gradients must be final. Raises PeerError.
    """
    with ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.OPTIMIZER):
        squares = gradients.squares()
    total = _of_experts(squares, mesh, ledger) + _of_groups(dense.squares(), mesh, ledger)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def _of_experts(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    world = mesh.world
    if world.size == 1:
        return math.fsum(squares)
    # Replicas of an expert have the same gradient, which counts once.
    own = torch.tensor(expansion(squares if mesh.replica.rank == 0 else ()), dtype=torch.float64)
    every = own.new_empty(world.size * _NORM_PARTS)
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        world.all_gather(every, own, channel=Channel.EXCHANGE).wait()
    return math.fsum(every.tolist())


def _of_groups(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        stages: list[Sequence[float]] = mesh.pipeline.all_gather_object(squares)
    total = 0.0
    for stage in stages:
        for square in stage:
            total += square
    return total


def expansion(values: Sequence[float]) -> list[float]:
    """Four doubles that add up to the sum of ``values``, each the rounded remainder of those before: the rounded sum
    first, and alone if it is not finite.
    """
    parts = [math.fsum(values)]
    while len(parts) < _NORM_PARTS:
        left = math.fsum([*values, *(-part for part in parts)]) if math.isfinite(parts[0]) else 0.0
        parts.append(left)
    return parts
