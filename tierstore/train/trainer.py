"""The training loop of one rank.

A step: for each micro-batch, a forward and a backward pass with leased experts; then the norm and the optimizer
(``tierstore.train.stepping``). No step is acknowledged before ``commit``.

On several ranks each takes a contiguous piece of the global batch, and differentiates its share of the mean; losses,
norms and whether to skip are the same on all of them, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from tierstore import _native
from tierstore.accelerator import read
from tierstore.model.interface import Batch, ModelOutput, active_experts
from tierstore.model.stage import StageModule
from tierstore.stats import Cause, OnProgress, Tier, no_progress
from tierstore.tiers import describe_weights, weights_in_place
from tierstore.timeline import Track
from tierstore.train.data import TrainingData
from tierstore.train.layer_order import LayerOrder
from tierstore.train.ranks import work_apart
from tierstore.train.step_time import StepTimer
from tierstore.train.stepping import OpenStep, SessionParts, StepOutcome, Stepper, means
from tierstore.train.task_data import TaskData, TaskLosses

if TYPE_CHECKING:  # torch's pipelining takes a while to import
    from tierstore.train.stage_pipeline import StagePipeline


@dataclass(frozen=True)
class StepResult:
    """One step. Losses are means over micro-batches, in nats; ``grad_norm`` is before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    seconds: float
    active_experts: int
    #: By task, means over its targets.
    task_losses: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Steps, validates and commits. Owns nothing: ``tierstore.train.session`` builds and closes the parts."""

    def __init__(self, parts: SessionParts, data: TrainingData, timer: StepTimer) -> None:
        self._stepper = Stepper(parts)
        self.config = parts.config
        self.account = parts.account
        self.store = parts.store
        self.model = parts.model
        self.data = data
        #: If the data is that of several tasks.
        self.tasks = data if isinstance(data, TaskData) else None
        self._task_losses = TaskLosses(())
        self.resharded_from = parts.resharded_from
        self.state = parts.state
        self.ledger = parts.ledger
        #: The time of the last step and of all steps, by part.
        self.timer = timer
        self.experts = parts.experts
        #: The store of block inputs in layer order.
        self.boundaries = None if parts.layers is None else parts.layers.boundaries
        self.dense = parts.dense
        self.mesh = parts.mesh
        self.vocabulary = parts.vocabulary
        self._timeline = parts.timeline
        #: The control of the number of chunks in passes over experts.
        self.chunks = parts.chunks
        self._layers = parts.layers
        #: With pipeline stages: the runner of micro-batches through this one.
        self.stages: StagePipeline | None = None
        if parts.mesh.stages > 1:
            from tierstore.train.stage_pipeline import StagePipeline

            self.stages = StagePipeline(
                cast(StageModule, parts.model),  # a stage's specification builds only this
                parts.mesh.pipeline,
                parts.mesh.device,
                ledger=parts.ledger,
                timeline=parts.timeline,
                agree=self._agreed_loss,
            )

    def describe_weights(self) -> str:
        """One line: where experts are computed, and why."""
        config = self.config
        return describe_weights(
            weights_in_place(config.weights_in_place, self.mesh.device, config.links.copy)
        )

    def step(self) -> StepResult:
        """One optimizer step. Raises NonFiniteError, ChecksumError, OSError, BudgetError.

        After an exception the step may have been taken in part: the last commit stands, and no other is possible.
        """
        with self.timer.step():
            started = time.monotonic()
            position = self.state.position
            lr = self.config.lr_at(position)
            self._task_losses = TaskLosses(self.config.tasks)
            with self._stepper.step(lr, passes=self.config.data.passes) as step:
                if self.stages is not None:
                    loss, active = self._backward_by_stages(self.stages, step, position)
                elif self._layers is None:
                    loss, active = self._backward(step, position)
                else:
                    loss, active = self._backward_by_layers(self._layers, step, position)
            if math.isfinite(loss):
                self.state.train_loss = loss
            by_task = self._follow_tasks(step.outcome)
            seconds = time.monotonic() - started
            skipped = step.outcome is not StepOutcome.TAKEN
            return StepResult(position, loss, lr, step.grad_norm, skipped, seconds, active, by_task)

    def _follow_tasks(self, outcome: StepOutcome) -> dict[str, float]:
        """Records the tasks' progress after a step in the state; returns their losses, none if the step was not taken."""
        if self.tasks is None:
            return {}
        known, losses = self.state.tasks, {}
        for name, position in self.tasks.positions(self.state.position).items():
            known[name] = replace(known[name], position=position)
        if outcome is StepOutcome.TAKEN:
            losses, tokens = self._task_losses.losses(), self._task_losses.tokens()
            for name, loss in losses.items():
                before = known[name]
                known[name] = replace(before, train_loss=loss, tokens=before.tokens + tokens[name])
        return losses

    def _backward(self, step: OpenStep, position: int) -> tuple[float, int]:
        """Gradients of all micro-batches; returns the loss (not finite: nothing was stepped) and active experts."""
        count = self.config.data.micro_batches
        losses, loads = [], []
        for micro in range(count):
            batch = self._batch(position, micro)
            step.begin_pass()
            with self._timeline.span(Track.COMPUTE, f"forward {position}.{micro}"):
                output = self.model.run(batch)
            loss = self._agreed_loss(output)
            if loss is None:
                step.skip()
                return math.nan, 0
            losses.append(loss)
            assert output.objective is not None
            step.backward(output.objective / count)
            loads.append(output.loads)
        return _mean(losses), active_experts(loads)

    def _backward_by_layers(self, layers: LayerOrder, step: OpenStep, position: int) -> tuple[float, int]:
        """The same, with each layer taking all micro-batches at once."""
        count = self.config.data.micro_batches
        batches = [self._batch(position, micro) for micro in range(count)]
        losses: list[float] = []

        def accept(output: ModelOutput) -> bool:
            loss = self._agreed_loss(output)
            losses.extend([] if loss is None else [loss])
            return loss is not None

        step.begin_pass()
        with self._timeline.span(Track.COMPUTE, f"forward and backward {position}"):
            outputs = layers.run(position, batches, accept)
            step.end_pass()
        if len(outputs) < count:
            step.skip()
            return math.nan, 0
        return _mean(losses), active_experts(output.loads for output in outputs)

    def _backward_by_stages(self, stages: StagePipeline, step: OpenStep, position: int) -> tuple[float, int]:
        """The same, through this rank's pipeline stage."""
        count = self.config.data.micro_batches
        losses, active = stages.run(step, position, [self._batch(position, micro) for micro in range(count)])
        if losses is None:
            step.skip()
            return math.nan, 0
        return _mean(losses), active

    def _batch(self, position: int, micro: int) -> Batch:
        """This rank's part of a micro-batch, on its device."""
        with self.ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.DATA):
            if self.tasks is None:
                batch = self.data.batch(position, micro).of_rank(self.mesh.data.rank, self.mesh.data.size)
            else:
                batch = self.tasks.piece(position, micro, self.mesh.data.rank)
        return batch.to(self.mesh.device)

    def _agreed_loss(self, output: ModelOutput, finite: bool = True) -> float | None:
        """The loss over all ranks; None if it, or the objective, is not finite. A collective.

        ``finite``: whether all other losses known to this rank are.
        """
        assert output.loss is not None
        assert output.objective is not None
        scalars = read(output.loss.detach(), output.objective.detach())
        own = [float(scalar) for scalar in scalars]
        if not finite:
            own[1] = math.nan
        own += self._task_losses.own(output)
        loss, objective, *by_task = means(own, self.mesh.data, self.ledger)
        self._task_losses.add([value * self.mesh.data.size for value in by_task])
        return loss if math.isfinite(loss) and math.isfinite(objective) else None

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross entropy over the validation batches, in nats a token; of several tasks the sum of their weights times
        their means. Changes no record's logical content.
        """
        self.model.module.eval()
        total, tokens_seen = 0.0, 0
        by_task = TaskLosses(self.config.tasks)
        with (
            self.store.failures.poisoning("validation was cut short"),
            self._timeline.span(Track.COMPUTE, "validation"),
        ):
            for batch in self.data.validation_batches(self.config.eval_batches):
                own = batch.of_rank(self.mesh.data.rank, self.mesh.data.size)
                self._stepper.begin_forward()
                output = self.model.run(own.to(self.mesh.device))
                assert output.loss is not None
                losses = [float(output.loss), *by_task.own(output)]
                loss, *agreed = means(losses, self.mesh.data, self.ledger)
                by_task.add(agreed)
                counted = batch.counted if batch.step_targets else own.counted
                total += loss * counted
                tokens_seen += counted
        self.model.module.train()
        self.state.val_loss = total / max(tokens_seen, 1)
        if self.tasks is not None:
            task_losses = by_task.losses()
            for name, value in task_losses.items():
                self.state.tasks[name] = replace(self.state.tasks[name], val_loss=value)
            self.state.val_loss = self.tasks.weighted(task_losses)
        return self.state.val_loss

    def sample(self, prompt: str, count: int) -> str:
        """The model's continuation of ``prompt``, of ``count`` tokens."""
        return self.data.decode(self.generate(self.data.encode(prompt), count))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """At most ``count`` tokens that continue ``prompt``."""
        with self.store.failures.poisoning("sampling was cut short"):
            self._stepper.begin_forward()
            return self.model.generate(prompt, count)

    def commit(self, *, snapshot: str | None = None) -> int:
        """Makes the run durable up to this step; returns the generation."""
        return self._stepper.commit(snapshot=snapshot)


def _mean(losses: Sequence[float]) -> float:
    """The mean over the micro-batches of a step, in their order: ``sum`` would round differently."""
    total = 0.0
    for loss in losses:
        total += loss / len(losses)
    return total


# The checksum over the records of all ranks: it reads whole stores, so it is computed only on request ---------


def records_checksum(
    trainer: Trainer,
    *,
    progress: OnProgress = no_progress,
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """CRC-32C over every record's content in key order; for several ranks, the CRC-32C of their checksums in rank order.

    A collective: all ranks get the same result, None if ``stopped`` was true on one of them. ``progress`` is called with
    this rank's bytes done and in all. Raises ChecksumError, PeerError, OSError.
    """

    def checksum(meet: Callable[[], None]) -> int:
        def done(nbytes: int, total: int) -> None:
            progress(nbytes, total)
            meet()

        return trainer.store.records_crc32c(done)

    crcs = work_apart(trainer.mesh.world, checksum, stopped)
    if crcs is None:
        return None
    return crcs[0] if len(crcs) == 1 else _native.crc32c(np.array(crcs, "<u4"))
