"""tierstore itself: with its experts on disk, or (``tierstore-ram``) with a budget for every record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from training import Mixtral, TrainTask

from tierstore.bench.train import in_ram
from tierstore.plan.order import choose_order, in_order, order_lines
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


@contextlib.contextmanager
def opened(task: TrainTask) -> Iterator[tuple[Sequence[str], Callable[[], float]]]:
    """The description and the step. AUTO's choices are those of ``tierstore train``."""
    config, workload = replace(task.config, store=task.directory / "store"), task.workload()
    if isinstance(workload, Mixtral):
        config = workload.imported(config.store)
    config.import_code()
    if task.rival == "tierstore-ram":
        config = in_ram(config)
    order = choose_order(config)
    with open_session(in_order(config, order), Opening.CREATE, trace=task.trace) as trainer:
        yield [*trainer.store.describe(), *order_lines(order)], lambda: trainer.step().loss
