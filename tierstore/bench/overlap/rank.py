"""One rank of ``bench overlap``, in a process of its own.

The protocol is one JSON object a line. The parent sends any number of measurements (``RankRequest``, the same
to all ranks), then closes the pipe. Each is answered with one line (``RankSteps``); a failure is ``{"error": text}``.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.bench.overlap.stack import StackShape, open_stack
from tierstore.bench.processes.spawn import serve
from tierstore.config import from_dict
from tierstore.links import CollectiveLink, LinksConfig, open_link
from tierstore.parallel import Mesh
from tierstore.parallel.collectives import Group
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import LimitedGroup
from tierstore.stats import StallLedger
from tierstore.store.core import StoreCore
from tierstore.timeline import open_timeline
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

#: Steps that are not measured once computation was measured alone: meanwhile the links have caught up with what was
#: asked of them, and a first step would find all that it needs.
CAUGHT_UP = 1


class Stack(StrEnum):
    """What steps."""

    SYNTHETIC = "synthetic"  # layers that do nothing but take time: tierstore.bench.overlap.stack
    TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """What a rank runs and measures; it makes ``directory`` and removes it. ``shape`` is for the synthetic
    stack, ``train`` for the trainer.
    """

    directory: Path
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    stack: Stack = Stack.SYNTHETIC
    shape: StackShape = field(default_factory=StackShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    links: LinksConfig = field(default_factory=LinksConfig)


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured: seconds of each step, and what a step moved and was stalled, in the mean.

    ``computing_s``: the computation of a step alone. ``stalls``: seconds by dimension and cause.
    """

    step_samples_s: Sequence[float]
    computing_s: float
    disk_bytes: float
    disk_transfers: float
    sent_bytes: float
    collectives: float
    stalls: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.step_samples_s)

    @staticmethod
    def slowest(ranks: Sequence[RankSteps]) -> RankSteps:
        """Of each figure the greatest: a step is over when all ranks have done it."""
        means = ("computing_s", "disk_bytes", "disk_transfers", "sent_bytes", "collectives")
        causes = {cause for rank in ranks for cause in rank.stalls}
        return RankSteps(
            step_samples_s=[max(each) for each in zip(*(rank.step_samples_s for rank in ranks), strict=True)],
            stalls={cause: max(rank.stalls.get(cause, 0.0) for rank in ranks) for cause in causes},
            **{name: max(getattr(rank, name) for rank in ranks) for name in means},
        )


def _measure(asked: RankRequest, world: Group, link: CollectiveLink) -> RankSteps:
    link.link = open_link(asked.links.gather)
    directory = asked.directory / str(world.rank)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_stack(
                asked.shape,
                directory,
                world,
                link,
                disk=asked.links.disk,
                copy=asked.links.copy,
                timeline=timeline,
            ) as stack,
        ):
            world.barrier()
            for _ in range(asked.warmup):
                stack.step()
            computing = [stack.compute_only()]
            for _ in range(CAUGHT_UP):
                stack.step()
            found = _steps(stack.step, asked.steps, stack.store, stack.ledger, link)
            world.barrier()
            computing += [stack.compute_only() for _ in range(2)]
            stack.drain()
        return replace(found, computing_s=statistics.median(computing))
    finally:
        link.link = None
        shutil.rmtree(directory, ignore_errors=True)


def _steps(
    step: Callable[[], float], count: int, store: StoreCore, ledger: StallLedger, link: CollectiveLink
) -> RankSteps:
    """Measures ``count`` calls of ``step``, which returns its seconds. Takes all of a step for computation."""
    before, stalls = _counts(store, link), _stalls(ledger)
    seconds = [step() for _ in range(count)]
    after, stalled = _counts(store, link), _stalls(ledger)
    return RankSteps(
        step_samples_s=seconds,
        computing_s=statistics.median(seconds),
        stalls={name: (spent - stalls.get(name, 0.0)) / count for name, spent in stalled.items()},
        **{name: (after[name] - before[name]) / count for name in after},
    )


def _counts(store: StoreCore, link: CollectiveLink) -> dict[str, float]:
    """Bytes of experts as they are asked for: some are always under way, at both ends of what is measured."""
    engine, residency = store.engine.stats(), store.cache.residency.stats()
    return {
        "disk_bytes": float(residency.read_bytes + residency.written_bytes),
        "disk_transfers": engine["reads"] + engine["writes"],
        "sent_bytes": link.sent_bytes,
        "collectives": link.messages,
    }


def _stalls(ledger: StallLedger) -> dict[str, float]:
    """Seconds by dimension and cause."""
    totals = ledger.totals(lambda key: f"{key.tier.dimension.value}: {key.cause.value}")
    return {str(name): spent / 1e9 for name, spent in totals.items()}


def _measure_training(asked: RankRequest, mesh: Mesh, link: CollectiveLink) -> RankSteps:
    """Measures the trainer as ``_measure`` does the synthetic stack. The trainer's computation cannot run alone: the
    step over unlimited links stands for it.
    """
    link.link = open_link(asked.links.gather)
    config = replace(asked.train, store=asked.directory, links=asked.links)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_session(config, Opening.CREATE, mesh=mesh, timeline=timeline) as trainer,
        ):
            for _ in range(asked.warmup):
                trainer.step()
            found = _steps(lambda: trainer.step().seconds, asked.steps, trainer.store, trainer.ledger, link)
        # No rank begins the next measurement, in the same directory, before all have ended this one.
        mesh.world.barrier()
        if mesh.world.rank == 0:
            shutil.rmtree(asked.directory)
        mesh.world.barrier()
        return found
    finally:
        link.link = None


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    import torch

    torch.set_num_threads(1)
    # The exchanges' link is never the gathers': what is measured is the overlap of the queues.
    link, exchange = CollectiveLink(None), CollectiveLink(None)
    groups = partial(LimitedGroup, link=link, exchange=exchange)
    with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
        for request in requests:
            asked = from_dict(RankRequest, request)
            if asked.stack is Stack.TRAINER:
                yield asdict(_measure_training(asked, mesh, link))
            else:
                yield asdict(_measure(asked, mesh.world, link))


if __name__ == "__main__":
    serve(_answers)
