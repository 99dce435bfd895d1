"""tierstore itself: with its experts on disk, and with the budget of ``bench train``'s run in RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tierstore.bench.rivals.rival import Rival, RivalTask
from tierstore.bench.training.run import in_ram
from tierstore.plan.order import OrderChoice, choose_order
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.trainer import Trainer


class _Tiered:
    def __init__(self, trainer: Trainer, order: OrderChoice) -> None:
        self._trainer = trainer
        self._order = order

    def step(self) -> float:
        return self._trainer.step().loss

    def describe(self) -> Sequence[str]:
        order = self._order.describe()
        return [*self._trainer.store.describe(), *([] if order is None else [order])]


@contextlib.contextmanager
def _open(task: RivalTask, budgeted: Callable[[TrainConfig], TrainConfig]) -> Iterator[Rival]:
    config = replace(task.config, store=task.directory / "store")
    if task.checkpoint is not None:
        from tierstore.bench.rivals.wrapped import wrapped_config

        config = wrapped_config(config, task.checkpoint, config.store)
    config.model.import_code()
    config = budgeted(config)
    order = choose_order(config)
    with open_session(order.applied(config), Opening.CREATE, trace=task.trace) as trainer:
        yield _Tiered(trainer, order)


def open_tiered(task: RivalTask) -> contextlib.AbstractContextManager[Rival]:
    """The run of the task's configuration."""
    return _open(task, lambda config: config)


def open_in_ram(task: RivalTask) -> contextlib.AbstractContextManager[Rival]:
    """The same with a budget for every record, in which nothing moves."""
    return _open(task, in_ram)
