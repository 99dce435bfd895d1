"""One rank of ``bench layouts``, in a process of its own: real training sessions in several layouts, one after another.

The protocol is one JSON object a line. The parent sends requests (the same to all ranks of the world), then closes the
pipe: ``open`` names a session, with its settings and directory; ``step`` names one to take ``steps`` steps, answered with
their seconds. Sessions stay open until the end. A failure is ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tierstore.bench.layouts.device import EmulatedModel
from tierstore.bench.processes.spawn import serve
from tierstore.config import load
from tierstore.model.config import ModelConfig
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.parallel.choosing import GroupMaker, with_exchange
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import limited_groups
from tierstore.parallel.mesh import build_mesh
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import Loop, open_parts
from tierstore.train.step_time import StepTimer
from tierstore.train.thread_times import ThreadTimes, stolen_while_running
from tierstore.train.trainer import Trainer


def laid_out(config: TrainConfig, joined: Mesh) -> Mesh:
    """The mesh that ``config`` asks for, over the ranks that have ``joined``, and with its limited links. A collective."""
    if joined.world.size == 1:
        return joined
    groups, parallel = limited_groups(config.links), config.parallel
    mesh, communicators = build_mesh(
        parallel, RankEnvironment.from_environment(), joined.device, make_group=groups, blame=lambda: None
    )
    mesh = replace(mesh, job_store=joined.job_store)
    maker = GroupMaker(
        make=groups, blame=lambda: None, communicators=communicators, timeout_s=parallel.timeout_s
    )
    return with_exchange(parallel, mesh, maker)


def _open(request: Mapping[str, Any], joined: Mesh, stack: contextlib.ExitStack) -> Trainer:
    settings = {**request["settings"], "store": Path(request["store"])}
    config = load(TrainConfig, None, settings)
    assert isinstance(config.model, ModelConfig)
    mesh = laid_out(config, joined)
    device = EmulatedModel(config.model, config.parallel.tensor)
    parts = stack.enter_context(open_parts(config, Opening.CREATE, loop=Loop.OWN, watch=device, mesh=mesh))
    assert parts.data is not None
    threads = stack.enter_context(contextlib.closing(ThreadTimes()))
    trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
    device.slow_down(trainer.model.module)
    trainer.step()  # first touch
    return trainer


def _steps(trainer: Trainer, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        trainer.mesh.world.barrier()
        started = time.perf_counter()
        trainer.step()
        taken.append(time.perf_counter() - started)
    return taken


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    torch.set_num_threads(1)
    trainers: dict[str, Trainer] = {}
    with launch(ParallelConfig(timeout_s=120.0), device="cpu") as joined, contextlib.ExitStack() as stack:
        for request in requests:
            if "open" in request:
                trainers[request["open"]] = _open(request, joined, stack)
                yield {}
            else:
                yield {"step_s": _steps(trainers[request["step"]], request["steps"])}


if __name__ == "__main__":
    serve(_answers)
