"""Batches of several tasks: the rows of each micro-batch are ordered by task, and each rank takes its piece of them.

An example is one sequence. A task's examples come in the order of its own data, each once an epoch. A step's examples
depend only on the task's position (``tierstore.train.tasks``), not on ranks or other tasks.

Shapes: B sequences of T positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from tierstore.model.interface import Batch, ModelOutput, TaskSegment
from tierstore.train.data import TrainingData
from tierstore.train.tasks import Assignment, ProgressByTask, Tasks, overlap


class TaskExamples(TrainingData, Protocol):
    """The data of one task, by example number: epoch n begins at ``n * examples``."""

    @property
    def examples(self) -> int:
        """Examples in an epoch."""
        ...

    def take(self, numbers: Sequence[int]) -> Batch:
        """The examples ``numbers``, one a row."""
        ...

    def targets(self, numbers: Sequence[int]) -> int:
        """The number of their counted targets."""
        ...


class TaskData:
    """The training data of a run of ``tasks``: ``sources`` has the data of each, ``assignment`` the rows of each rank.
    Call ``begin`` before taking the first batch.
    """

    def __init__(
        self,
        tasks: Tasks,
        sources: Mapping[str, TaskExamples],
        assignment: Assignment,
        *,
        micro_batches: int,
    ) -> None:
        self.tasks = tasks
        self.sources = sources
        self.assignment = assignment
        self.crc32 = 0
        for name, source in sources.items():
            self.crc32 = zlib.crc32(f"{name} {source.crc32}".encode(), self.crc32)
        self._micro_batches = micro_batches
        weights = sum(task.weight for task in tasks.values())
        self._weight = {name: task.weight / weights for name, task in tasks.items()}
        self._rows = {name: len(span) for name, span in assignment.spans().items()}
        self._first_step = 0
        self._first = dict.fromkeys(tasks, 0)
        self._targets: tuple[int, dict[str, int]] = (-1, {})

    def begin(self, step: int, progress: ProgressByTask) -> None:
        """Sets the next step to ``step``, and each task's position to that in ``progress``."""
        self._first_step = step
        self._first = {name: progress[name].position for name in self.tasks}
        self._targets = (-1, {})

    def positions(self, step: int) -> dict[str, int]:
        """The number of examples of each task taken by the steps before ``step``."""
        steps = step - self._first_step
        return {
            name: first + steps * self._micro_batches * self._rows[name]
            for name, first in self._first.items()
        }

    def step_targets(self, step: int) -> dict[str, int]:
        """The counted targets of each task in step ``step``, over all micro-batches and ranks."""
        if self._targets[0] != step:
            positions = self.positions(step)
            found = {}
            for name, source in self.sources.items():
                count = self._micro_batches * self._rows[name]
                found[name] = source.targets(range(positions[name], positions[name] + count))
            self._targets = (step, found)
        return self._targets[1]

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Micro-batch ``micro`` of step ``step``, of all ranks."""
        return self._cut(step, micro, range(self.assignment.rows))

    def piece(self, step: int, micro: int, rank: int) -> Batch:
        """The rows of the micro-batch that rank ``rank`` computes; possibly none."""
        batch = self._cut(step, micro, self.assignment.piece(rank))
        return replace(batch, parts=batch.parts * self.assignment.ranks)

    def _cut(self, step: int, micro: int, rows: range) -> Batch:
        if not 0 <= micro < self._micro_batches:
            raise ValueError(f"micro-batch {micro} of {self._micro_batches}")
        positions, targets = self.positions(step), self.step_targets(step)
        taken: list[Batch] = []
        segments: list[TaskSegment] = []
        for name, span in self.assignment.spans().items():
            own = overlap(rows, span)
            if own:
                # The examples of earlier micro-batches, and the task's rows before this piece.
                first = positions[name] + micro * len(span) + own.start - span.start
                taken.append(self.sources[name].take(range(first, first + len(own))))
                at = range(own.start - rows.start, own.stop - rows.start)
                segments.append(TaskSegment(name, at, self._weight[name], max(targets[name], 1)))
        return _joined(taken, segments, parts=self._micro_batches, like=self._any_source)

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """At most ``count`` held-out batches of each task, task by task."""
        for name, source in self.sources.items():
            for batch in source.validation_batches(count):
                whole = TaskSegment(name, range(len(batch.tokens_BT)), 1.0, 1)
                counted = replace(whole, step_targets=max(batch.counted_of(whole), 1))
                yield replace(batch, segments=(counted,), step_targets=0, parts=1)

    def weighted(self, losses: Mapping[str, float]) -> float:
        """The sum of ``losses`` times the tasks' weights, which add up to 1."""
        return sum(self._weight[name] * losses[name] for name in self.tasks)

    @property
    def _any_source(self) -> TaskExamples:
        return next(iter(self.sources.values()))

    def describe(self) -> str:
        """One line for the head of a run."""
        texts = [f"{name}: {source.describe()}" for name, source in self.sources.items()]
        return f"{len(texts)} tasks; {' | '.join(texts)}"

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``."""
        return self._any_source.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        return self._any_source.decode(tokens)


def _joined(
    batches: Sequence[Batch], segments: Sequence[TaskSegment], *, parts: int, like: TaskExamples
) -> Batch:
    """``batches`` concatenated by rows; without any, zero rows of the shape of ``like``."""
    if not batches:
        none = like.take(range(0))
        return replace(none, step_targets=0, parts=parts)
    tokens = [batch.tokens_BT for batch in batches]
    positions, mask = [batch.positions_BT for batch in batches], [batch.mask_BT for batch in batches]
    return Batch(
        torch.cat(tokens),
        torch.cat([batch.targets_BT for batch in batches]),
        _filled(positions, [torch.arange(each.shape[1]).expand(each.shape) for each in tokens]),
        parts=parts,
        segments=tuple(segments),
        mask_BT=_filled(mask, [torch.ones_like(each, dtype=torch.bool) for each in tokens]),
    )


def _filled(given: Sequence[torch.Tensor | None], implied: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``given`` concatenated by rows, with the ``implied`` tensors in place of None; None if all are None."""
    if all(each is None for each in given):
        return None
    return torch.cat([own if each is None else each for each, own in zip(given, implied, strict=True)])


# Losses by task ---------------------------------------------------------------------------------------------


class TaskLosses:
    """Adds up the agreed losses of ranks. A task's loss is the mean over all of its targets, in nats."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._tasks = tuple(tasks)
        self._sum = dict.fromkeys(self._tasks, 0.0)
        self._counted = dict.fromkeys(self._tasks, 0.0)

    def own(self, output: ModelOutput) -> list[float]:
        """This rank's part of a pass, for a sum over ranks: for each task the sum of its losses, and their count."""
        sums, counts = dict.fromkeys(self._tasks, 0.0), dict.fromkeys(self._tasks, 0.0)
        for segment in output.segments:
            sums[segment.task] += float(segment.loss.detach()) * segment.counted
            counts[segment.task] += segment.counted
        return [value for name in self._tasks for value in (sums[name], counts[name])]

    def add(self, agreed: Sequence[float]) -> None:
        """Adds the sums over ranks of ``own``'s results for one pass."""
        for place, name in enumerate(self._tasks):
            self._sum[name] += agreed[2 * place]
            self._counted[name] += agreed[2 * place + 1]

    def tokens(self) -> dict[str, int]:
        """The number of counted targets of each task."""
        return {name: round(count) for name, count in self._counted.items()}

    def losses(self) -> dict[str, float]:
        """The loss of each task that had targets."""
        return {
            name: self._sum[name] / self._counted[name] for name in self._tasks if self._counted[name] > 0
        }
