"""What a session does for tasks before its store is touched: refusals, and the data of each task."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.dense import OptimizerState
from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.train.config import TrainConfig
from tierstore.train.files import DataConfig
from tierstore.train.tasks.assignment import assignment_of
from tierstore.train.tasks.config import TaskHead
from tierstore.train.tasks.data import TaskData, TaskExamples


def own_head_tasks(config: TrainConfig) -> list[str]:
    """The tasks that are trained with an output head of their own."""
    return [name for name, task in config.tasks.items() if task.head is TaskHead.OWN]


def refuse_tasks(config: TrainConfig, ranks: int) -> None:
    """Raises ConfigError for what tasks on ``ranks`` data ranks do not go together with."""
    if not config.tasks:
        return
    own, built_in = own_head_tasks(config), isinstance(config.model, ModelConfig)
    if own and not built_in:
        raise ConfigError(
            f"tasks.{own[0]}.head: expected shared: an imported model has one output head, in its own module"
        )
    if own and config.dense.optimizer_state is OptimizerState.NVME:
        raise ConfigError(
            f"tasks.{own[0]}.head: expected shared with dense.optimizer_state = nvme, which keeps one record a unit"
        )
    if not built_in and config.data.batch_size < ranks:
        raise ConfigError(
            f"data.batch_size: expected a row for each of the {ranks} data ranks: modules of an imported model take no "
            f"empty batch, got {config.data.batch_size}"
        )


def open_tasks(
    config: TrainConfig, ranks: int, open_source: Callable[[DataConfig], TaskExamples]
) -> TaskData:
    """The data of all tasks of ``config``, for ``ranks`` data ranks. Raises what ``open_source`` raises."""
    sources = {name: open_source(data) for name, data in config.data_by_task.items()}
    return TaskData(
        config.tasks, sources, assignment_of(config, ranks), micro_batches=config.data.micro_batches
    )
