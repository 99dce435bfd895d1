"""What ranks run in tests of pipeline stages."""

import contextlib
import math
import os
import signal
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rank_cases import TINY, Settings
from stage_runs import StageRun

from tierstore.config import load
from tierstore.moe.computing import _Experts
from tierstore.parallel import Collective, Mesh
from tierstore.store import ParameterStore
from tierstore.timeline import open_timeline
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.trainer import Trainer

#: Four blocks and four micro-batches; ``parallel.stages`` is up to the case.
STAGED: Settings = {"model.n_layers": 4, "data.micro_batches": 4}


def configured(settings: Settings, **changes: Any) -> TrainConfig:
    return load(TrainConfig, None, {**TINY, **STAGED, **settings, **changes})


def staged(mesh: Mesh, settings: Settings, steps: int, opening: Opening = Opening.CREATE) -> StageRun:
    """A run to ``steps`` steps in all, committed, validated and sampled."""
    run = StageRun()
    before = sends(mesh)
    with open_session(configured(settings), opening, mesh=mesh) as trainer:
        while trainer.state.position < steps:
            noted_step(trainer, run)
        _ended(trainer, run)
    run.sends = sends(mesh)[0] - before[0], sends(mesh)[1] - before[1]
    return run


def sends(mesh: Mesh) -> tuple[int, int]:
    """Messages from one stage to another so far, and their bytes."""
    sent = mesh.pipeline.traffic[Collective.SEND]
    return sent.calls, sent.sent_bytes


def spoiled(mesh: Mesh, settings: Settings, where: str, micro: int) -> StageRun:
    """Three steps, of which the second has a loss that is not finite: of micro-batch ``micro``, the last stage's cross
    entropy or ("balance") what balances the first stage's experts.
    """
    run = StageRun()
    with open_session(configured(settings), Opening.CREATE, mesh=mesh) as trainer:
        noted_step(trainer, run)
        with contextlib.ExitStack() as stack:
            if where == "loss":
                stack.enter_context(mock.patch.object(torch.nn.functional, "cross_entropy", _Nth(micro)))
            elif trainer.model.begins:
                router = trainer.model.routers()[0].router
                stack.enter_context(mock.patch.object(router, "forward", _Balance(micro, router.forward)))
            noted_step(trainer, run)
        noted_step(trainer, run)
        _ended(trainer, run)
    return run


class _Nth:
    """Cross entropy, which is NaN in its call number ``micro``."""

    def __init__(self, micro: int) -> None:
        self._left = micro
        self._real = torch.nn.functional.cross_entropy

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        loss = self._real(*arguments, **options)
        return loss * math.nan if self._left == -1 else loss


class _Balance:
    """A router's forward pass, whose balance loss is infinite in call number ``micro``."""

    def __init__(self, micro: int, real: Any) -> None:
        self._left = micro
        self._real = real

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        routing = self._real(*arguments)
        return replace(routing, aux_loss=routing.aux_loss * math.inf) if self._left == -1 else routing


def noted_step(trainer: Trainer, run: StageRun) -> None:
    result = trainer.step()
    run.losses.append(result.loss)
    run.norms.append(result.grad_norm)
    run.active.append(result.active_experts)


def _ended(trainer: Trainer, run: StageRun) -> None:
    trainer.commit()
    run.validation = trainer.evaluate()
    run.sample = trainer.sample("store", 5)
    run.skipped = trainer.state.skipped
    run.weights = contents(trainer)
    if trainer.stages is not None:
        run.log, run.most_held = trainer.stages.log, trainer.stages.most_held


def contents(trainer: Trainer) -> dict[str, int]:
    """Checksums of expert weights by record, and of the whole weights of each dense unit."""
    found = {}
    for key in trainer.store.records.keys:
        if key.startswith("expert"):
            with ParameterStore(trainer.store).fetch([key]) as lease:
                record = lease[key]
                found[key] = zlib.crc32(b"".join(record.copy(name).tobytes() for name in record.sections))
    for unit, layout in enumerate(trainer.dense.layouts):
        if not layout.empty:
            whole = b"".join(weight.numpy().tobytes() for weight in trainer.dense.whole(unit))
            found[layout.key] = zlib.crc32(whole)
    return found


def graphs_alive(mesh: Mesh, settings: Settings) -> int:
    """The most micro-batches whose graphs were alive at a time in one step: of each, the experts' node of the first layer is
    watched, which holds what the layer has saved.
    """
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Seen:
        """Lives as long as the node."""

    forward = _Experts.forward

    def watched(ctx: Any, x: Any, weight: Any, anchor: Any, call: Any) -> Any:
        nonlocal most
        if call.layer == first:
            ctx.seen = Seen()
            alive.add(ctx.seen)
            most = max(most, len(alive))
        return forward(ctx, x, weight, anchor, call)

    with open_session(configured(settings), Opening.CREATE, mesh=mesh) as trainer:
        first = trainer.config.model.moe_layers[0]
        with mock.patch.object(_Experts, "forward", watched):
            trainer.step()
            trainer.step()
    return most


def drawn(mesh: Mesh, settings: Settings, path: Path) -> None:
    """Two steps on a timeline."""
    file = path.with_name(f"{path.name}.{mesh.world.rank}")
    with (
        open_timeline(file) as sink,
        open_session(configured(settings), Opening.CREATE, mesh=mesh, timeline=sink) as trainer,
    ):
        trainer.step()
        trainer.step()


@contextlib.contextmanager
def killed_before(trainer: Trainer, victim: bool, passes: int) -> Iterator[None]:
    """A ``victim`` is killed by itself at the begin of its pass number ``passes``."""
    stages = trainer.stages
    begin = stages.during

    def during(*arguments: Any) -> Any:
        if victim and len(stages.log) == passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(*arguments)

    with mock.patch.object(stages, "during", during):
        yield


def dying(mesh: Mesh, settings: Settings, victim: int, passes: int) -> None:
    with (
        open_session(configured(settings), Opening.CREATE, mesh=mesh) as trainer,
        killed_before(trainer, mesh.world.rank == victim, passes),
    ):
        while True:
            trainer.step()
