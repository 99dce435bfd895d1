"""One rank of ``bench layouts``, in a process of its own: real training sessions in several layouts, one after another.

The protocol is one JSON object a line. The parent sends any number of requests (the same to all ranks of the world), then
closes the pipe. Each names the settings and the directory of a session, and is answered with the seconds of its ``steps``
steps, behind a first one. A session is closed before the next one is opened: the threads of idle ones take time, too. A
failure is ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


@contextlib.contextmanager
def laid_out(config: TrainConfig, joined: Mesh) -> Iterator[Mesh]:
    """The mesh that ``config`` asks for, over the ranks that have ``joined``, and with its limited links. A collective."""
    if joined.world.size == 1:
        yield joined
        return
    groups, parallel = limited_groups(config.links), config.parallel
    mesh, communicators = build_mesh(
        parallel, RankEnvironment.from_environment(), joined.device, make_group=groups, blame=lambda: None
    )
    mesh = replace(mesh, job_store=joined.job_store)
    maker = GroupMaker(
        make=groups, blame=lambda: None, communicators=communicators, timeout_s=parallel.timeout_s
    )
    mesh = with_exchange(parallel, mesh, maker)
    yield mesh
    joined.world.barrier()
    mesh.close()
    for made in communicators:
        if made is not dist.group.WORLD:  # which others will use
            dist.destroy_process_group(made)


def _measured(request: Mapping[str, Any], joined: Mesh) -> list[float]:
    """Seconds of the steps of a new session."""
    config = load(TrainConfig, None, {**request["settings"], "store": Path(request["store"])})
    assert isinstance(config.model, ModelConfig)
    device = EmulatedModel(config.model, config.parallel.tensor)
    with (
        laid_out(config, joined) as mesh,
        open_parts(config, Opening.CREATE, loop=Loop.OWN, watch=device, mesh=mesh) as parts,
        contextlib.closing(ThreadTimes()) as threads,
    ):
        assert parts.data is not None
        trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
        device.slow_down(trainer.model.module)
        trainer.step()  # first touch
        return _steps(trainer, request["steps"])


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
    with launch(ParallelConfig(timeout_s=120.0), device="cpu") as joined:
        for request in requests:
            yield {"step_s": _measured(request, joined)}


if __name__ == "__main__":
    serve(_answers)
