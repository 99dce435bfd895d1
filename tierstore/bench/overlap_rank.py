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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tierstore._native import Link
from tierstore.bench.overlap_rig import Rig, RigShape, open_rig
from tierstore.config import from_dict
from tierstore.errors import TierstoreError
from tierstore.links import CollectiveLink, LinksConfig
from tierstore.parallel.collectives import Group
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.stats import StallLedger
from tierstore.timeline import open_timeline
from tierstore.train.session import stall_spans

__all__ = ["Measurement"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a rank is to run and measure; ``place`` is a directory to make, use and remove."""

    place: Path
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    shape: RigShape = field(default_factory=RigShape)
    links: LinksConfig = field(default_factory=LinksConfig)


def _measure(asked: Measurement, world: Group, link: CollectiveLink) -> dict[str, Any]:
    link.link = asked.links.gather.open()
    place = asked.place / str(world.rank)
    try:
        with open_timeline(asked.timeline) as timeline:
            ledger = StallLedger(listener=stall_spans(timeline) if timeline.enabled else None)
            with open_rig(
                asked.shape,
                place,
                world,
                link,
                disk=asked.links.disk,
                copy=asked.links.copy,
                timeline=timeline,
                ledger=ledger,
            ) as rig:
                world.barrier()
                found = _steps(rig, asked, world, link.link)
                rig.drain()
        return found
    finally:
        link.link = None
        shutil.rmtree(place, ignore_errors=True)


def _steps(rig: Rig, asked: Measurement, world: Group, link: Link | None) -> dict[str, Any]:
    for _ in range(asked.warmup):
        rig.step()
    computing = [rig.compute_only()]
    before, stalls = _counts(rig, world), _stalls(rig)
    seconds = [rig.step() for _ in range(asked.steps)]
    after, stalled = _counts(rig, world), _stalls(rig)
    world.barrier()
    computing += [rig.compute_only() for _ in range(2)]
    return {
        "step_s": seconds,
        "computing_s": statistics.median(computing),
        **{name: (after[name] - before[name]) / asked.steps for name in after},
        "stalls": {name: (spent - stalls.get(name, 0.0)) / asked.steps for name, spent in stalled.items()},
    }


def _counts(rig: Rig, world: Group) -> dict[str, float]:
    engine = rig.store.engine.stats()
    return {
        "disk_bytes": engine["read_bytes"] + engine["written_bytes"],
        "disk_transfers": engine["reads"] + engine["writes"],
        "sent_bytes": sum(traffic.sent_bytes for traffic in world.traffic.values()),
        "collectives": sum(traffic.calls for traffic in world.traffic.values()),
    }


def _stalls(rig: Rig) -> dict[str, float]:
    """Seconds by dimension and cause."""
    totals = rig.ledger.totals(lambda key: f"{key.tier.dimension.value}: {key.cause.value}")
    return {str(name): spent / 1e9 for name, spent in totals.items()}


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    import torch

    torch.set_num_threads(1)
    link = CollectiveLink(None)
    try:
        with launch(ParallelConfig(timeout_s=60.0), device="cpu", link=link) as mesh:
            for line in requests:
                answer(_measure(from_dict(Measurement, json.loads(line)), mesh.world, link))
    except (TierstoreError, OSError) as error:
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    # Answers have a descriptor of their own: whatever a library prints goes to stderr.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
