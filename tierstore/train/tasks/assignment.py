"""Which rows of the global batch each rank computes: contiguous pieces of equal cost (SE-MoE section 4.1).

Rows lie task by task. A cut between any two of them is possible, so a light task shares a rank with its neighbours and
a heavy one spans several: tasks of 1, 1 and 2 rows give two ranks 2 and 2 (figure 6b) and four ranks 1 each (figure 6c).
Imports no torch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.train.tasks.config import rows_of_tasks

if TYPE_CHECKING:
    from tierstore.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class TaskRows:
    """``rows`` of a micro-batch, all of one task, each of which costs ``cost`` tokens."""

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
        """The rows of ``rank`` among those of the micro-batch."""
        return range(self.cuts[rank], self.cuts[rank + 1])

    def spans(self) -> dict[str, range]:
        """The rows of each task among those of the micro-batch."""
        found, start = {}, 0
        for task in self.tasks:
            found[task.name] = range(start, start + task.rows)
            start += task.rows
        return found

    def of_task(self, name: str) -> dict[int, int]:
        """By rank: how many rows of task ``name`` it computes, of the ranks that have any."""
        span = self.spans()[name]
        own = {rank: len(overlap(self.piece(rank), span)) for rank in range(self.ranks)}
        return {rank: count for rank, count in own.items() if count}

    def costs(self) -> list[int]:
        """What each rank's rows cost."""
        cost = {task.name: task.cost for task in self.tasks}
        spans = self.spans().items()
        return [
            sum(len(overlap(self.piece(rank), span)) * cost[name] for name, span in spans)
            for rank in range(self.ranks)
        ]

    @property
    def balance(self) -> float:
        """The mean cost of a rank over the largest: 1 where all have the same."""
        costs = self.costs()
        return sum(costs) / (len(costs) * max(costs))

    def as_json(self) -> dict[str, object]:
        """What each task has where, and what ranks' rows cost."""
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
    """What two ranges of step 1 have in common."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def assignment_of(config: TrainConfig, ranks: int) -> Assignment:
    """Which of ``ranks`` data ranks computes which rows of a micro-batch of the tasks of ``config``."""
    rows = rows_of_tasks(config.tasks, config.data.batch_size)
    tasks = [
        TaskRows(name, count, config.tasks[name].cost or config.model.seq_len) for name, count in rows.items()
    ]
    return assign(tuple(tasks), ranks)


def assign(tasks: tuple[TaskRows, ...], ranks: int) -> Assignment:
    """The rows of ``tasks`` in ``ranks`` contiguous pieces, of which the most expensive one is as cheap as it can be.

    Of all such cuts each is the one nearest to where an equal share would end, the earlier of two. No rank is without a row
    unless there are fewer rows than ranks. A function of its arguments alone: all ranks find the same. Raises ValueError
    for no task, rank, row or cost.
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
    # From behind: the earliest row from which the ranks that are left can take all.
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
