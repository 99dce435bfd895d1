"""What ranks run in tests of pipeline stages of imported models."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from stage_cases import contents, sends
from stage_runs import StageRun
from stored_runs import configuration

from tierstore.hf.spec import stored_spec
from tierstore.parallel import Mesh
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session
from tierstore.train.trainer import Trainer

Settings = Mapping[str, Any]


def made_over(mesh: Mesh, whole: Path, settings: Settings) -> None:
    """The store of a run is what one rank imported into ``whole``, for the ranks of ``mesh``."""
    store, blocks = settings["store"], settings.get("parallel.stage_blocks", ())
    if mesh.world.rank == 0 and not store.exists():
        spec = stored_spec(whole)
        reshard(whole, store, mesh.layout, model=spec, stage_blocks=blocks)
    mesh.world.barrier()


def wrapped(mesh: Mesh, whole: Path, settings: Settings, steps: int) -> StageRun:
    """A run to ``steps`` steps in all, committed, validated and sampled."""
    made_over(mesh, whole, settings)
    run = StageRun()
    before = sends(mesh)
    with open_session(configuration(settings), Opening.RESUME, mesh=mesh) as trainer:
        while trainer.state.position < steps:
            _step(trainer, run)
        trainer.commit()
        run.validation = trainer.evaluate()
        trainer._stepper.begin_forward()
        run.sample = str(trainer.model.generate([5, 6, 7], 4, temperature=0.0))
        run.weights = contents(trainer)
        run.skipped = trainer.state.skipped
        if trainer.stages is not None:
            run.log, run.most_held = trainer.stages.log, trainer.stages.most_held
    run.sends = sends(mesh)[0] - before[0], sends(mesh)[1] - before[1]
    return run


def _step(trainer: Trainer, run: StageRun) -> None:
    result = trainer.step()
    run.losses.append(result.loss)
    run.norms.append(result.grad_norm)
    run.active.append(result.active_experts)


def dying_wrapped(mesh: Mesh, whole: Path, settings: Settings, victim: int, passes: int) -> None:
    """One step and its commit; in the second step rank ``victim`` is killed by itself before pass number ``passes``."""
    made_over(mesh, whole, settings)
    with open_session(configuration(settings), Opening.RESUME, mesh=mesh) as trainer:
        trainer.step()
        trainer.commit()
        stages = trainer.stages
        begin = stages.during

        def during(*arguments: Any) -> Any:
            if mesh.world.rank == victim and len(stages.log) == passes:
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(*arguments)

        with mock.patch.object(stages, "during", during):
            trainer.step()
