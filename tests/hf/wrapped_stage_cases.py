"""What ranks run in tests of pipeline stages of imported models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stage_cases import contents, killed_before, noted_step, sends
from stage_runs import StageRun
from stored_runs import configuration

from tierstore.hf.spec import stored_spec
from tierstore.parallel import Mesh
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.session import open_session

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
            noted_step(trainer, run)
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


def dying_wrapped(mesh: Mesh, whole: Path, settings: Settings, victim: int, passes: int) -> None:
    """One step and its commit; in the second step rank ``victim`` is killed by itself before pass number ``passes``."""
    made_over(mesh, whole, settings)
    with open_session(configuration(settings), Opening.RESUME, mesh=mesh) as trainer:
        trainer.step()
        trainer.commit()
        with killed_before(trainer, mesh.world.rank == victim, passes):
            trainer.step()
