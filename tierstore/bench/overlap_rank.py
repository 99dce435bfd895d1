"""One rank of ``bench overlap``, in a process of its own.

The protocol is one JSON object a line. The parent sends any number of measurements (``Measurement``, the same
to all ranks), then closes the pipe. Each is answered with one line; a failure is ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from tierstore.bench.overlap_rig import Rig, RigShape, open_rig
from tierstore.config import from_dict
from tierstore.errors import TierstoreError
from tierstore.links import CollectiveLink, LinksConfig
from tierstore.parallel import Mesh
from tierstore.parallel.collectives import Group
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.stats import StallLedger
from tierstore.store.parameter_store import ParameterStore
from tierstore.timeline import open_timeline
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

__all__ = ["CAUGHT_UP", "Measurement", "Stack"]

#: Steps that are not measured once computation was measured alone: meanwhile the links have caught up with what was
#: asked of them, and a first step would find all that it needs.
CAUGHT_UP = 1


class Stack(StrEnum):
    """What steps."""

    SYNTHETIC = "synthetic"  # layers that do nothing but take time: tierstore.bench.overlap_rig
    TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a rank is to run and measure; ``place`` is a directory to make, use and remove. ``shape`` is for the synthetic
    stack, ``train`` for the trainer.
    """

    place: Path
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    stack: Stack = Stack.SYNTHETIC
    shape: RigShape = field(default_factory=RigShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    links: LinksConfig = field(default_factory=LinksConfig)


def _measure(asked: Measurement, world: Group, link: CollectiveLink) -> dict[str, Any]:
    link.link = asked.links.gather.open()
    place = asked.place / str(world.rank)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_rig(
                asked.shape,
                place,
                world,
                link,
                disk=asked.links.disk,
                copy=asked.links.copy,
                timeline=timeline,
            ) as rig,
        ):
            world.barrier()
            found = _steps(rig, asked, world, link)
            rig.drain()
        return found
    finally:
        link.link = None
        shutil.rmtree(place, ignore_errors=True)


def _steps(rig: Rig, asked: Measurement, world: Group, link: CollectiveLink) -> dict[str, Any]:
    for _ in range(asked.warmup):
        rig.step()
    computing = [rig.compute_only()]
    for _ in range(CAUGHT_UP):
        rig.step()
    before, stalls = _counts(rig.store, link), _stalls(rig.ledger)
    seconds = [rig.step() for _ in range(asked.steps)]
    after, stalled = _counts(rig.store, link), _stalls(rig.ledger)
    world.barrier()
    computing += [rig.compute_only() for _ in range(2)]
    return {
        "step_s": seconds,
        "computing_s": statistics.median(computing),
        **{name: (after[name] - before[name]) / asked.steps for name in after},
        "stalls": {name: (spent - stalls.get(name, 0.0)) / asked.steps for name, spent in stalled.items()},
    }


def _counts(store: ParameterStore, link: CollectiveLink) -> dict[str, float]:
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


def _measure_training(asked: Measurement, mesh: Mesh, link: CollectiveLink) -> dict[str, Any]:
    """As ``_measure``, of the trainer. Its computation cannot be had alone: it is taken to be the step over unlimited
    links.
    """
    link.link = asked.links.gather.open()
    config = replace(asked.train, store=asked.place, links=asked.links)
    try:
        with (
            open_timeline(asked.timeline) as timeline,
            open_session(config, Opening.CREATE, mesh=mesh, timeline=timeline) as trainer,
        ):
            for _ in range(asked.warmup):
                trainer.step()
            before, stalls = _counts(trainer.store, link), _stalls(trainer.ledger)
            seconds = [trainer.step().seconds for _ in range(asked.steps)]
            after, stalled = _counts(trainer.store, link), _stalls(trainer.ledger)
        spent = {name: (total - stalls.get(name, 0.0)) / asked.steps for name, total in stalled.items()}
        # Nobody begins the next measurement, in the same place, before all have ended this one.
        mesh.world.barrier()
        if mesh.world.rank == 0:
            shutil.rmtree(asked.place)
        mesh.world.barrier()
        return {
            "step_s": seconds,
            "computing_s": statistics.median(seconds),
            **{name: (after[name] - before[name]) / asked.steps for name in after},
            "stalls": spent,
        }
    finally:
        link.link = None


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    import torch

    torch.set_num_threads(1)
    # The exchanges' link is never the gathers': what is measured is the overlap of the queues.
    link, exchange = CollectiveLink(None), CollectiveLink(None)
    try:
        with launch(ParallelConfig(timeout_s=60.0), device="cpu", link=link, exchange=exchange) as mesh:
            for line in requests:
                asked = from_dict(Measurement, json.loads(line))
                if asked.stack is Stack.TRAINER:
                    answer(_measure_training(asked, mesh, link))
                else:
                    answer(_measure(asked, mesh.world, link))
    except (TierstoreError, OSError) as error:
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    # Answers have a descriptor of their own: whatever a library prints goes to stderr.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
