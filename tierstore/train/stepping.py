"""One optimizer step of a model whose experts are leased from a store, for any loop that drives its passes.

::

    with stepper.step(lr, passes=count) as step:
        for each micro-batch:
            step.begin_pass()
            output = model.run(batch)
            step.backward(output.objective / count)

The end of the block finishes the gradients, takes the norm over dense parameters and experts together, and then either
steps everything or skips the step. Without clipping, and with the number of passes known, an expert is stepped in its
last backward pass, as soon as its gradient is complete. Otherwise its step waits for the norm, and is queued before the
expert is used again or at the next commit.

A non-finite loss is seen before any state moves, and skips the step; so does a non-finite gradient where steps wait for
the norm. Where they do not, experts have been stepped when the norm is known: then a non-finite gradient stops the run
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
from tierstore.train.elastic import drop_before
from tierstore.train.layer_order import LayerOrder
from tierstore.train.pipelining import PipelineControl
from tierstore.train.ranks import commit_everywhere
from tierstore.train.setup import Setup


class NonFiniteError(TierstoreError):
    """A loss or gradient that is not finite, and that the run cannot or must not step over."""


class StepError(TierstoreError, RuntimeError):
    """A training loop left something out, or did it twice. The message says what."""


@dataclass(frozen=True, kw_only=True)
class SessionParts(Setup):
    """The open parts of a training session: ``tierstore.train.session`` makes and closes them, a ``Stepper`` drives them.
    ``layers``: what takes micro-batches in layer order; None in micro order.
    """

    store: StoreCore
    experts: ExpertTiers
    model: Model
    dense: DenseSlices
    queue: HorizontalQueue
    state: TrainState
    pipeline: PipelineControl
    layers: LayerOrder | None


class StepOutcome(Enum):
    """What becomes of a step."""

    OPEN = "open"
    TAKEN = "taken"
    SKIPPED = "skipped"  # a loss or a gradient was not finite
    ABANDONED = "abandoned"  # by its loop


class Stepper:
    """Takes steps, and commits them. It owns nothing. One thread at a time."""

    def __init__(self, parts: SessionParts) -> None:
        self.parts = parts
        self._operations = OperationSpans(parts.store.engine, parts.timeline)

    @contextlib.contextmanager
    def step(self, lr: float, *, passes: int | None = None) -> Iterator[OpenStep]:
        """One optimizer step with learning rate ``lr`` of ``passes`` forward and backward passes (None: any number).

        If the block raises, the step may have been taken in part: the last commit stands, and no other is possible.
        Raises StepError, and nothing has changed, if a step is open or ``passes`` cannot be; at the end of the block
        StepError, NonFiniteError, ChecksumError, OSError, BudgetError, PeerError.
        """
        parts = self.parts
        if parts.store.history.is_open:
            raise StepError("a step is open already: it ends before the next one begins")
        if passes is None and parts.timing is StepTiming.IMMEDIATE:
            raise StepError(
                "passes: where experts are stepped in their last backward pass, it must be known which it is"
            )
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
        """Makes the run durable up to here; returns the generation."""
        parts = self.parts
        with (
            parts.store.failures.poisoning("a commit was cut short"),
            parts.timeline.span(Track.COMMITS, f"commit {parts.state.position}"),
            parts.ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.COMMIT),
        ):
            parts.experts.gradients.step_pending()
            parts.dense.save(parts.store, parts.store.history.applied)
            parts.state.chunks = parts.pipeline.at_commit(parts.state.position)
            state = {**parts.model.state(), STATE_KEY: parts.state.pack()}
            generation = commit_everywhere(parts.store, parts.mesh, state, snapshot)
            if parts.config.parallel.elastic is Elastic.RESHARD and parts.mesh.world.rank == 0:
                drop_before(parts.config.store)
        self._operations.drain()
        return generation

    def begin_forward(self) -> None:
        """A forward pass follows that no backward pass belongs to."""
        self.parts.experts.begin_evaluation()
        self.parts.queue.begin(training=False)


class OpenStep:
    """A step in progress. Its passes come one after another, each forward and then backward."""

    def __init__(self, parts: SessionParts, step: OptimizerStep, passes: int | None) -> None:
        self._parts = parts
        self._step = step
        #: How many there will be; None where it is not known.
        self.passes = passes
        self._position = parts.state.position
        self._begun = 0
        self.lr = step.lr
        self.outcome = StepOutcome.OPEN
        #: Of all gradients, before clipping; not finite where the step was not taken.
        self.grad_norm = math.nan
        #: The largest norm that gradients keep (0: any).
        self.clip_norm = parts.config.clip_norm
        parts.queue.begin(training=True)
        parts.dense.zero_grad()

    @property
    def passes_begun(self) -> int:
        return self._begun

    def begin_pass(self) -> None:
        """A forward pass follows, and then its backward pass."""
        if self._begun == self.passes:
            raise StepError(f"step {self._position}: a further forward pass in a step of {self.passes}")
        parts, index = self._parts, self._begun
        if index % parts.queue.micro_batches == 0:
            # Its schedule is for as many as it knew of; and other forward passes may have come between.
            parts.queue.begin(training=True)
        parts.experts.begin_micro(index=index, count=self.passes)
        parts.dense.begin_micro()
        parts.model.set_step(self._position, index)
        self._begun += 1

    def resume_pass(self, index: int, finals: Finals) -> None:
        """The backward pass of forward pass number ``index`` follows, where those of several micro-batches interleave."""
        self._parts.experts.resume_micro(index=index, finals=finals)
        self._parts.dense.resume_micro()

    def backward(self, objective: Tensor) -> None:
        """The backward pass of the last forward pass."""
        with self._parts.timeline.span(Track.COMPUTE, f"backward {self._position}.{self._begun - 1}"):
            torch.autograd.backward(objective)
            self.end_pass()

    def end_pass(self) -> None:
        """The backward pass has returned."""
        self._parts.dense.end_micro()

    def skip(self) -> None:
        """A loss is not finite: the step is not taken, and counts as a skipped one."""
        self.outcome = StepOutcome.SKIPPED

    def abandon(self) -> None:
        """The step is not taken; its loop has decided so."""
        self.outcome = StepOutcome.ABANDONED

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes the step, or skips it. Only ``Stepper`` calls it."""
        parts, config = self._parts, self._parts.config
        every = config.cache.write_back_every
        if every and (self._position + 1) % every == 0:
            # Now, while the disk is idle: dense parameters are stepped, and the next pass has requested nothing yet.
            parts.store.cache.clean()
        finite_losses = self.outcome is StepOutcome.OPEN
        if finite_losses:
            self._check_passes()
            self.grad_norm = self._norm()
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

    def _check_passes(self) -> None:
        if self.passes is None and not self._begun:
            raise StepError(f"step {self._position} ends without a backward pass")
        if self.passes not in (None, self._begun):
            raise StepError(f"step {self._position} ends after {self._begun} of {self.passes} passes")

    def _norm(self) -> float:
        parts = self._parts
        if self.passes is None:
            parts.experts.end_passes()
        return gradient_norm(parts.experts.gradients, parts.dense, parts.mesh, parts.ledger)

    def _apply(self) -> None:
        parts = self._parts
        if not self._steps_early:
            scale = clip_scale(self.grad_norm, self.clip_norm) if self.clip_norm else 1.0
            parts.experts.gradients.apply(scale)
            if scale < 1.0:
                parts.dense.scale_gradients(scale)
        if not parts.queue.optimizer_is_due:  # another forward pass came after the last backward pass
            parts.queue.reset()
            parts.dense.step(self.lr)
            return
        # The queue may gather a stepped unit for the next step while later units are still stepped.
        for unit in parts.queue.optimizer_units:
            with parts.queue.during(unit, Phase.OPTIMIZER):
                parts.dense.step_unit(unit, self.lr)

    def _drop(self) -> None:
        state, most = self._parts.state, self._parts.config.max_skipped
        self._parts.queue.reset()
        # Those of the step before: no forward pass may have come to them yet.
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
# Each gradient counts once, wherever copies of it are: an expert's on the first of its replicas, a dense parameter's once
# for the ranks that hold it whole, each part of a divided one. Sums of squares are in double precision. Those of experts
# are added without rounding but the last, so that it does not matter which rank holds which; those of dense units are added
# in the order of units, which is that of stages. So the bits are those of one process with the same gradients.


#: Doubles that a rank's sum travels in: with four of them what is cut off is below 2**-159 of it.
_NORM_PARTS = 4


def gradient_norm(gradients: ExpertGradients, dense: DenseSlices, mesh: Mesh, ledger: StallLedger) -> float:
    """Of the experts' gradients and the dense ones, on every rank the same bits; NaN where any is not finite.

    A collective of all ranks of ``mesh``, all of whose gradients are final. Raises PeerError.
    """
    with ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.OPTIMIZER):
        squares = gradients.squares()
    total = _of_experts(squares, mesh, ledger) + _of_units(dense.squares(), mesh, ledger)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def _of_experts(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    world = mesh.world
    if world.size == 1:
        return math.fsum(squares)
    # Replicas of an expert have the same gradient: it counts once.
    own = torch.tensor(expansion(squares if mesh.replica.rank == 0 else ()), dtype=torch.float64)
    every = own.new_empty(world.size * _NORM_PARTS)
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        world.all_gather(every, own, channel=Channel.EXCHANGE).wait()
    return math.fsum(every.tolist())


def _of_units(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        stages: list[Sequence[float]] = mesh.pipeline.all_gather_object(squares)
    total = 0.0
    for stage in stages:
        for square in stage:
            total += square
    return total


def expansion(values: Sequence[float]) -> list[float]:
    """Four doubles, each the rounding of what those before leave of the sum of ``values``; the sum itself first, and alone
    where it is not finite.
    """
    parts = [math.fsum(values)]
    while len(parts) < _NORM_PARTS:
        left = math.fsum([*values, *(-part for part in parts)]) if math.isfinite(parts[0]) else 0.0
        parts.append(left)
    return parts
