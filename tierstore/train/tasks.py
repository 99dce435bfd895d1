"""Elastic multi-task training (SE-MoE section 4.1): several tasks in one global batch, in pieces of equal cost over the
data ranks.

The rows of the global batch are ordered by task, and cut into one contiguous piece for each rank: several light tasks
share a rank, and a heavy one takes several, which are the paper's two ways (figures 6b and 6c). Tasks of 1, 1 and 2 rows
give two ranks 2 and 2, and four ranks 1 each. Each rank's piece follows from the configuration alone.

Here are the configuration of tasks, the rows of each rank, and the progress of each task. Imports no torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum

from tierstore.config import check_least, check_positive, key
from tierstore.errors import ConfigError
from tierstore.model.store_schema import TaskProgress
from tierstore.train.files import DataConfig, SourceConfig


class TaskHead(Enum):
    """The output head of a task's logits: the model's, or one that only this task trains."""

    SHARED = "shared"
    OWN = "own"


@dataclass(frozen=True, kw_only=True)
class TaskConfig(SourceConfig):
    """One of several tasks. Raises ConfigError naming the field.

    It has either ``rows`` of each micro-batch, or a ``share`` of the remaining rows.
    """

    paths: tuple[str, ...] = key((), "the task's files and directories")
    weight: float = key(1.0, "weight of the task's mean loss")
    rows: int = key(0, "sequences in each micro-batch (0: by share)")
    share: float = key(1.0, "share of the sequences left by tasks with rows, relative to other tasks")
    cost: int = key(0, "cost of a sequence in tokens, to balance ranks (0: seq_len)")
    head: TaskHead = key(TaskHead.SHARED, "own: an output head that only this task trains")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "weight", "share")
        check_least(self, 0, "rows", "cost")
        if not self.paths:
            raise ConfigError("paths: expected the task's files or directories, got none")

    def data(self, common: DataConfig) -> DataConfig:
        """The task's data: its own files, with the shared settings of ``data``."""
        return replace(common, **{each.name: getattr(self, each.name) for each in fields(SourceConfig)})


Tasks = Mapping[str, TaskConfig]


def own_head_tasks(tasks: Tasks) -> list[str]:
    """The tasks trained with their own output head."""
    return [name for name, task in tasks.items() if task.head is TaskHead.OWN]


def check_tasks(tasks: Tasks, data: DataConfig) -> None:
    """Raises ConfigError naming the setting if ``tasks`` and ``data`` contradict each other."""
    if not tasks:
        return
    for each in fields(SourceConfig):
        if getattr(data, each.name) != each.default:
            raise ConfigError(f"data.{each.name}: each task sets its own (tasks.NAME.{each.name})")
    rows_of_tasks(tasks, data.batch_size)


def rows_of_tasks(tasks: Tasks, batch_size: int) -> dict[str, int]:
    """Each task's number of the ``batch_size`` rows of a micro-batch, in order: its ``rows``, or by its ``share`` of the
    rest by largest remainders (ties to the earlier task), at least one.

    Raises ConfigError if they do not add up to ``batch_size``.
    """
    found = {name: task.rows for name, task in tasks.items()}
    sharing = {name: task.share for name, task in tasks.items() if not task.rows}
    left = batch_size - sum(found.values())
    if left < len(sharing) or (left and not sharing):
        needed = f"{sum(found.values())} and at least one for each of {', '.join(sharing)}"
        raise ConfigError(
            f"data.batch_size: expected the rows of all tasks, "
            f"{needed if sharing else sum(found.values())}, got {batch_size}"
        )
    whole = sum(sharing.values())
    spare = left - len(sharing)  # beyond the guaranteed one each
    exact = {name: max(0.0, left * share / whole - 1) for name, share in sharing.items()}
    scale = spare / max(sum(exact.values()), 1e-300)
    exact = {name: value * scale for name, value in exact.items()}
    found |= {name: 1 + int(value) for name, value in exact.items()}
    missing = batch_size - sum(found.values())
    by_remainder = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in by_remainder[:missing]:
        found[name] += 1
    return found


# The rows of each rank --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskRows:
    """``rows`` of a micro-batch, all of one task, each at a cost of ``cost`` tokens."""

    name: str
    rows: int
    cost: int


@dataclass(frozen=True)
class Assignment:
    """``tasks`` in order, and ``cuts``: rank r computes the rows from ``cuts[r]`` to ``cuts[r + 1]``."""

    tasks: tuple[TaskRows, ...]
    cuts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, of all tasks."""
        return self.cuts[-1]

    @property
    def most_rows(self) -> int:
        """The most rows that one rank has."""
        return max(stop - start for start, stop in itertools.pairwise(self.cuts))

    def piece(self, rank: int) -> range:
        """The range of rows of ``rank`` in the micro-batch."""
        return range(self.cuts[rank], self.cuts[rank + 1])

    def spans(self) -> dict[str, range]:
        """The range of rows of each task in the micro-batch."""
        found, start = {}, 0
        for task in self.tasks:
            found[task.name] = range(start, start + task.rows)
            start += task.rows
        return found

    def of_task(self, name: str) -> dict[int, int]:
        """The number of rows of task ``name`` by rank, for the ranks that have any."""
        span = self.spans()[name]
        own = {rank: len(overlap(self.piece(rank), span)) for rank in range(self.ranks)}
        return {rank: count for rank, count in own.items() if count}

    def costs(self) -> list[int]:
        """The cost of each rank's rows."""
        cost = {task.name: task.cost for task in self.tasks}
        spans = self.spans().items()
        return [
            sum(len(overlap(self.piece(rank), span)) * cost[name] for name, span in spans)
            for rank in range(self.ranks)
        ]

    @property
    def balance(self) -> float:
        """The mean cost of a rank over the largest: 1 if all are equal."""
        costs = self.costs()
        return sum(costs) / (len(costs) * max(costs))

    def as_json(self) -> dict[str, object]:
        """Each task's rows by rank, and the cost of each rank's rows."""
        return {
            "tasks": [
                {
                    "name": task.name,
                    "rows": task.rows,
                    "row_cost": task.cost,
                    "rows_by_rank": self.of_task(task.name),
                }
                for task in self.tasks
            ],
            "rank_costs": self.costs(),
            "balance_ratio": self.balance,
        }

    def describe(self) -> str:
        """One line for the head of a run."""
        parts = []
        for task in self.tasks:
            held = list(self.of_task(task.name))
            where = f"rank {held[0]}" if len(held) == 1 else f"ranks {held[0]} to {held[-1]}"
            parts.append(f"{task.name} {task.rows} row{'s' * (task.rows != 1)} on {where}")
        return f"{'; '.join(parts)}; expected balance {self.balance:.1%}"


def overlap(one: range, other: range) -> range:
    """The intersection of two ranges of step 1."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def assign(tasks: tuple[TaskRows, ...], ranks: int) -> Assignment:
    """Cuts the rows of ``tasks`` into ``ranks`` contiguous pieces, minimising the cost of the most expensive one.

    Of all optimal cuts it chooses each nearest to the end of an equal share, the earlier of two. No rank is without a row
    unless there are fewer rows than ranks. Depends only on its arguments: all ranks find the same. Raises ValueError
    without a task or a rank, or for a task without rows or cost.
    """
    if ranks < 1 or not tasks or any(task.rows < 1 or task.cost < 1 for task in tasks):
        raise ValueError("expected at least one rank, one task, and of each task at least one row of cost 1")
    sums = list(itertools.accumulate((task.cost for task in tasks for _ in range(task.rows)), initial=0))
    rows, total = len(sums) - 1, sums[-1]
    dearest = max(task.cost for task in tasks)

    def reach(start: int, bound: int) -> int:
        """The last row (exclusive) of a piece from ``start`` that costs at most ``bound``."""
        return bisect_right(sums, sums[start] + bound) - 1

    def feasible(bound: int) -> bool:
        at = 0
        for _ in range(ranks):
            at = reach(at, bound)
        return at == rows

    low, high = max(dearest, -(-total // ranks)), total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle + 1, high)
    # From the end: the earliest row from which the remaining ranks can take all.
    earliest = [rows]
    for _ in range(ranks - 1):
        earliest.append(next_start(sums, earliest[-1], low))
    earliest.reverse()
    least = 1 if rows >= ranks else 0
    cuts = [0]
    for rank in range(1, ranks):
        first = max(earliest[rank - 1], cuts[-1] + least)
        last = min(reach(cuts[-1], low), rows - least * (ranks - rank))
        # In whole numbers: sums[cut] against rank * total / ranks.
        cuts.append(min(range(first, last + 1), key=lambda cut: (abs(sums[cut] * ranks - rank * total), cut)))
    return Assignment(tasks, (*cuts, rows))


def next_start(sums: list[int], stop: int, bound: int) -> int:
    """The first row of the longest piece up to ``stop`` (exclusive) that costs at most ``bound``."""
    start = bisect_right(sums, sums[stop] - bound - 1)
    return max(start, 0)


# The progress of each task ----------------------------------------------------------------------------------
#
# The state of a task in a commit, and its changes from one run to the next. A task's position is the number of its
# examples that steps have taken, skipped steps included. Each step adds the task's rows, whichever ranks compute them:
# the position depends only on the steps and on the tasks' rows.


ProgressByTask = Mapping[str, TaskProgress]


def resumed(tasks: Tasks, before: ProgressByTask) -> dict[str, TaskProgress]:
    """The progress at which ``tasks`` begin after ``before``: a known task continues, a new one begins at 0; a task that
    is no longer trained is kept for its return.
    """
    found = dict(before)
    for name, task in tasks.items():
        known = found.get(name, TaskProgress())
        # A task's own head is kept, whether it is used or not.
        own = TaskHead.OWN.value in (known.head, task.head.value)
        found[name] = replace(known, head=TaskHead.OWN.value if own else TaskHead.SHARED.value)
    return found


def own_heads(progress: ProgressByTask) -> list[str]:
    """The tasks whose own head the store keeps, in order."""
    return [name for name, known in progress.items() if known.head == TaskHead.OWN.value]


def changes(
    recorded: Mapping[str, object], present: Mapping[str, object], before: ProgressByTask
) -> Iterator[str]:
    """One line for each changed task; ``recorded`` and ``present``: the tasks in the conditions of the run."""
    for name in sorted(present.keys() - recorded.keys()):
        known = before.get(name)
        yield f"task {name}: added, from its {'beginning' if known is None else f'example {known.position} on'}"
    for name in sorted(recorded.keys() - present.keys()):
        kept = before.get(name, TaskProgress()).position
        yield f"task {name}: removed, kept at example {kept} for when it comes back"
    for name in sorted(present.keys() & recorded.keys()):
        was, now = recorded[name], present[name]
        if was == now or not (isinstance(was, Mapping) and isinstance(now, Mapping)):
            continue
        parts = [
            f"{key} was {was.get(key)}, is {now.get(key)}"
            for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)
        ]
        yield f"task {name}: {', '.join(parts)}"
