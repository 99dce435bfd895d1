"""Configuration of tasks: their data, weights, rows of the global batch, and heads. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tierstore.errors import ConfigError
from tierstore.train.files import DataConfig, DataFormat, Packing

#: Settings of ``data`` that each task has of its own.
_OF_A_TASK = ("paths", "suffixes", "format", "column", "separator", "packing")


class TaskHead(Enum):
    """Which output head a task's logits come from: the model's, or one that only this task trains."""

    SHARED = "shared"
    OWN = "own"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One of several tasks. Raises ConfigError naming the field.

    Either ``rows`` of each micro-batch are its own, or it gets them by its ``share`` of those that are left.
    """

    paths: tuple[str, ...] = field(default=(), metadata={"help": "the task's files and directories"})
    suffixes: tuple[str, ...] = field(
        default=(), metadata={"help": "endings of files taken from directories (empty: all)"}
    )
    format: DataFormat = field(default=DataFormat.AUTO, metadata={"help": "as data.format"})
    column: str = field(default="", metadata={"help": "as data.column"})
    separator: str = field(default="", metadata={"help": "as data.separator"})
    packing: Packing = field(default=Packing.AUTO, metadata={"help": "as data.packing"})
    weight: float = field(default=1.0, metadata={"help": "of the task's mean loss among those of all tasks"})
    rows: int = field(default=0, metadata={"help": "sequences of each micro-batch (0: by its share)"})
    share: float = field(
        default=1.0, metadata={"help": "part of the sequences that no task's rows take, to those of others"}
    )
    cost: int = field(
        default=0,
        metadata={
            "help": "of a sequence, in tokens, for sharing them out (0: seq_len, padding is computed too)"
        },
    )
    head: TaskHead = field(
        default=TaskHead.SHARED,
        metadata={"help": "shared, or own: an output head that only this task trains"},
    )

    def __post_init__(self) -> None:
        for name in ("weight", "share"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: expected more than 0, got {value}")
        for name in ("rows", "cost"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not self.paths:
            raise ConfigError("paths: expected the task's files or directories, got none")

    def data(self, common: DataConfig) -> DataConfig:
        """What the task trains on: its own files, and of ``data`` what all tasks share."""
        own = {name: getattr(self, name) for name in _OF_A_TASK}
        return replace(common, **own)


Tasks = Mapping[str, TaskConfig]


def check_tasks(tasks: Tasks, data: DataConfig) -> None:
    """Raises ConfigError, naming the setting, where ``tasks`` and ``data`` do not go together."""
    if not tasks:
        return
    defaults = DataConfig()
    for name in _OF_A_TASK:
        if getattr(data, name) != getattr(defaults, name):
            raise ConfigError(f"data.{name}: each task says its own (tasks.NAME.{name})")
    rows_of_tasks(tasks, data.batch_size)


def rows_of_tasks(tasks: Tasks, batch_size: int) -> dict[str, int]:
    """How many of the ``batch_size`` rows of a micro-batch are each task's, in order: its ``rows``, or by its ``share`` of
    the rest by largest remainders (the earlier task of equal ones), at least one.

    Raises ConfigError where they are not ``batch_size`` in all.
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
    spare = left - len(sharing)  # beyond the one that each has
    exact = {name: max(0.0, left * share / whole - 1) for name, share in sharing.items()}
    scale = spare / max(sum(exact.values()), 1e-300)
    exact = {name: value * scale for name, value in exact.items()}
    found |= {name: 1 + int(value) for name, value in exact.items()}
    missing = batch_size - sum(found.values())
    by_remainder = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in by_remainder[:missing]:
        found[name] += 1
    return found
