"""Losses by task, over all micro-batches and ranks of a step or a validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierstore.model.interface import ModelOutput


class TaskLosses:
    """Adds up what ranks have agreed on. A task's loss is the mean over all of its targets, in nats."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self._tasks = tuple(tasks)
        self._sum = dict.fromkeys(self._tasks, 0.0)
        self._counted = dict.fromkeys(self._tasks, 0.0)

    def own(self, output: ModelOutput) -> list[float]:
        """What this rank has of a pass, for a sum over ranks: of each task the sum of its losses, and how many they are."""
        sums, counts = dict.fromkeys(self._tasks, 0.0), dict.fromkeys(self._tasks, 0.0)
        for segment in output.segments:
            sums[segment.task] += float(segment.loss.detach()) * segment.counted
            counts[segment.task] += segment.counted
        return [value for name in self._tasks for value in (sums[name], counts[name])]

    def add(self, agreed: Sequence[float]) -> None:
        """The sums over ranks of what ``own`` gave of one pass."""
        for place, name in enumerate(self._tasks):
            self._sum[name] += agreed[2 * place]
            self._counted[name] += agreed[2 * place + 1]

    def tokens(self) -> dict[str, int]:
        """How many targets of each task have counted."""
        return {name: round(count) for name, count in self._counted.items()}

    def losses(self) -> dict[str, float]:
        """The loss of each task that has had targets."""
        return {
            name: self._sum[name] / self._counted[name] for name in self._tasks if self._counted[name] > 0
        }
