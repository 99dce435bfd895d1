"""The training loop of one rank.

A step: for each micro-batch, forward and backward through layers whose experts come and go; then the norm and the
dense step. Without clipping, the backward pass queues an expert's step as soon as its gradient is complete. With
clipping, an expert's step waits for the norm, and is queued before the expert is used again or at the next commit.
Nothing of a step is acknowledged before ``commit``.

On several ranks each takes a contiguous piece of the global batch, and differentiates its share of the mean; losses,
norms and whether to skip are the same on all of them, bit for bit.

A non-finite loss is seen before any state moves, and skips the step; so does a non-finite gradient with clipping. Without
clipping experts have been stepped when the norm is known, so a non-finite gradient stops the run at its last commit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from tierstore.cache.access import Phase
from tierstore.dense import DenseSlices
from tierstore.errors import TierstoreError
from tierstore.model.interface import Batch, Model
from tierstore.parallel import Mesh
from tierstore.prefetch.experts import TieredExperts
from tierstore.prefetch.horizontal import HorizontalQueue
from tierstore.prefetch.plan import StepTiming
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.core import StoreCore
from tierstore.timeline import OperationSpans, TimelineSink, Track
from tierstore.train.config import TrainConfig
from tierstore.train.data import TrainingData
from tierstore.train.ranks import commit_everywhere
from tierstore.train.state import STATE_KEY, TrainState
from tierstore.train.step_time import StepTimer


class NonFiniteError(TierstoreError):
    """A loss or gradient that is not finite, and that the run cannot or must not step over."""


@dataclass(frozen=True)
class StepResult:
    """One step: losses are means over micro-batches, in nats; ``grad_norm`` is before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    seconds: float
    active_experts: int


class Trainer:
    """Steps, validates and commits. It owns nothing: ``tierstore.train.session`` builds and closes the parts."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        store: StoreCore,
        experts: TieredExperts,
        model: Model,
        dense: DenseSlices,
        queue: HorizontalQueue,
        data: TrainingData,
        mesh: Mesh,
        state: TrainState,
        ledger: StallLedger,
        timer: StepTimer,
        timeline: TimelineSink,
    ) -> None:
        self.config = config
        self.store = store
        self.model = model
        self.data = data
        self.state = state
        self.ledger = ledger
        #: Where the time of the last step went, and of all.
        self.timer = timer
        self.experts = experts
        self.dense = dense
        self._queue = queue
        self.mesh = mesh
        self._device = mesh.device
        self._timeline = timeline
        self._operations = OperationSpans(store.engine, timeline)

    def step(self) -> StepResult:
        """One optimizer step. Raises NonFiniteError, ChecksumError, OSError, BudgetError.

        Whatever is raised, the step may have been taken in part: the last commit stands, and no other is possible.
        """
        with self.store.failures.poisoning(f"step {self.state.position} was cut short"), self.timer.step():
            return self._step()

    def _step(self) -> StepResult:
        started = time.monotonic()
        position = self.state.position
        lr = self.config.schedule.lr_at(position)
        with self.store.optimizer_step(lr) as step:
            self._queue.begin(training=True)
            loss, active = self._backward(position)
            every = self.config.cache.write_back_every
            if every and (position + 1) % every == 0:
                # Now, while the disk would rest: dense parameters are stepped, and the next pass has yet to ask.
                self.store.cache.clean()
            norm = math.nan
            if math.isfinite(loss):
                norm = self._norm()
            if math.isfinite(norm):
                self._apply(lr, norm)
                self.model.end_step()
                self.state.skipped_in_a_row = 0
            else:
                self._skip(position, loss)
                step.abandon()
        self.state.position += 1
        if math.isfinite(loss):
            self.state.train_loss = loss
        seconds = time.monotonic() - started
        self._operations.drain()
        return StepResult(position, loss, lr, norm, not math.isfinite(norm), seconds, active)

    def _backward(self, position: int) -> tuple[float, int]:
        """Gradients of all micro-batches; returns the loss (not finite: nothing was stepped) and active experts."""
        count = self.config.data.micro_batches
        self.dense.zero_grad()
        total, reached = 0.0, None
        for micro in range(count):
            with self.ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.DATA):
                batch = self._share(self.data.batch(position, micro))
            self.experts.begin_micro(index=micro, count=count)
            self.dense.begin_micro()
            self.model.set_step(position, micro)
            with self._timeline.span(Track.COMPUTE, f"forward {position}.{micro}"):
                output = self.model.run(batch.to(self._device))
            assert output.loss is not None
            assert output.objective is not None
            loss, objective = self._mean([float(output.loss.detach()), float(output.objective.detach())])
            if not (math.isfinite(loss) and math.isfinite(objective)):
                return math.nan, 0
            total += loss / count
            with self._timeline.span(Track.COMPUTE, f"backward {position}.{micro}"):
                torch.autograd.backward(output.objective / count)
                self.dense.end_micro()
            used = torch.stack(output.loads) > 0
            reached = used if reached is None else reached | used
        assert reached is not None
        return total, int(reached.sum())

    def _share(self, batch: Batch) -> Batch:
        return batch.of_rank(self.mesh.world.rank, self.mesh.world.size)

    def _mean(self, values: list[float]) -> list[float]:
        """The means over ranks; the same bits on all of them."""
        world = self.mesh.world
        if world.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        with self.ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
            world.all_reduce(sums).wait()
        return [float(total) / world.size for total in sums]

    def _norm(self) -> float:
        with self.ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.OPTIMIZER):
            squares = self.experts.gradients.sum_of_squares()
        # Replicas of an expert have the same gradient: it counts once.
        counted = squares if self.mesh.replica.rank == 0 else 0.0
        (mean,) = self._mean([counted])
        squares = mean * self.mesh.world.size
        squares += self.dense.sum_of_squares()
        return math.sqrt(squares) if math.isfinite(squares) else math.nan

    def _apply(self, lr: float, norm: float) -> None:
        if self.config.step_timing is StepTiming.DEFERRED:
            # torch.nn.utils.clip_grad_norm_'s formula.
            scale = min(1.0, self.config.clip_norm / (norm + 1e-6))
            self.experts.gradients.apply(scale)
            if scale < 1.0:
                self.dense.scale_gradients(scale)
        # The queue may gather a stepped unit for the next step while later units are still stepped.
        for unit in self._queue.optimizer_units:
            with self._queue.during(unit, Phase.OPTIMIZER):
                self.dense.step_unit(unit, lr)

    def _skip(self, position: int, loss: float) -> None:
        if self.config.step_timing is StepTiming.IMMEDIATE and math.isfinite(loss):
            raise NonFiniteError(
                f"step {position}: a gradient is not finite, and without clipping experts have been stepped already; "
                "the last commit stands"
            )
        self._queue.reset()
        self.experts.gradients.discard()
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        if self.state.skipped_in_a_row >= self.config.max_skipped:
            raise NonFiniteError(
                f"step {position}: {self.state.skipped_in_a_row} steps in a row were not finite (max_skipped)"
            )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross entropy over the validation batches, in nats a token. Changes no record's logical content."""
        self.experts.begin_evaluation()
        self.model.module.eval()
        total, tokens_seen = 0.0, 0
        with (
            self.store.failures.poisoning("validation was cut short"),
            self._timeline.span(Track.COMPUTE, "validation"),
        ):
            for batch in self.data.validation_batches(self.config.eval_batches):
                own = self._share(batch)
                self._queue.begin(training=False)
                output = self.model.run(own.to(self._device))
                assert output.loss is not None
                (loss,) = self._mean([float(output.loss)])
                counted = batch.counted if batch.step_targets else own.counted
                total += loss * counted
                tokens_seen += counted
        self.model.module.train()
        self.state.val_loss = total / max(tokens_seen, 1)
        return self.state.val_loss

    def sample(self, prompt: str, count: int) -> str:
        """What the model writes after ``prompt``, in ``count`` tokens."""
        self.experts.begin_evaluation()
        with self.store.failures.poisoning("sampling was cut short"):
            self._queue.begin(training=False)
            return self.data.decode(self.model.generate(self.data.encode(prompt), count))

    def commit(self, *, snapshot: str | None = None) -> int:
        """Makes the run durable up to here; returns the generation."""
        with (
            self.store.failures.poisoning("a commit was cut short"),
            self._timeline.span(Track.COMMITS, f"commit {self.state.position}"),
            self.ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.COMMIT),
        ):
            self.experts.gradients.step_pending()
            self.dense.save(self.store, self.store.history.applied)
            state = {**self.model.state(), STATE_KEY: self.state.pack()}
            generation = commit_everywhere(self.store, self.mesh, state, snapshot)
        self._operations.drain()
        return generation
