"""Where each task stands in its data: what a commit keeps of it, and what changes from one run to the next.

A position is the number of the task's examples that steps have taken, skipped steps included. It grows with each step by
the task's rows of it, whoever computes them: so it depends on the steps and on the tasks' rows alone, and not on ranks.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tierstore.model.store_schema import TaskProgress
from tierstore.train.tasks.config import TaskHead, Tasks

ProgressByTask = Mapping[str, TaskProgress]


def resumed(tasks: Tasks, before: ProgressByTask) -> dict[str, TaskProgress]:
    """Where ``tasks`` begin after ``before``: a task goes on where it was, a new one at 0; one that is not trained any more
    is kept for when it comes back.
    """
    found = dict(before)
    for name, task in tasks.items():
        known = found.get(name, TaskProgress())
        # Once it has one, its own head is kept, whether it is used or not.
        own = TaskHead.OWN.value in (known.head, task.head.value)
        found[name] = replace(known, head=TaskHead.OWN.value if own else TaskHead.SHARED.value)
    return found


def own_heads(progress: ProgressByTask) -> list[str]:
    """The tasks of which the store keeps a head of their own, in order."""
    return [name for name, known in progress.items() if known.head == TaskHead.OWN.value]


def changes(
    recorded: Mapping[str, object], present: Mapping[str, object], before: ProgressByTask
) -> Iterator[str]:
    """One line for each task that is not as it was; ``recorded`` and ``present``: the tasks of the conditions of the run."""
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
