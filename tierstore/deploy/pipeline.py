"""Runs the stages in order, from a store to a directory that can be served; they can be stopped and resumed at any moment.

Each stage works in its own directory below ``DIR.partial``. It is complete once its ``stage.json`` exists. A later run skips
stages that completed with the same settings, verifies that their output still matches its record, and resumes the stage
that was interrupted. When all are complete, the last one's directory is renamed to ``DIR``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.deploy.compression import check_count
from tierstore.deploy.distillation import compress, distillation_settings
from tierstore.deploy.optimisation import conversion_settings, convert, optimisation_settings, optimise
from tierstore.deploy.records import (
    DeployConfig,
    DeployInterrupted,
    Deployment,
    ShowPass,
    StageContext,
    StageName,
    StageOutput,
    StageRecord,
    fingerprint,
    stage_directory,
)
from tierstore.deploy.stages import (
    assemble,
    check_ranks,
    cut,
    fuse,
    fusion_settings,
    segment,
    segmentation_settings,
    verify_checks,
)
from tierstore.deploy.teacher import read_windows
from tierstore.errors import ConfigError, StoreExistsError, StoreMissingError
from tierstore.hf.spec import stored_spec
from tierstore.machine import MemoryAccount
from tierstore.stats import OnProgress, no_progress
from tierstore.store.disk.home import building, building_directory, fsync_directory
from tierstore.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class DeployStage:
    """One of the six stages. It resumes from the files that an earlier run left in its directory.

    ``settings``: the JSON form of the configuration that its output depends on. ``run`` does the work, or the rest of it;
    it raises DeployInterrupted at a durable point, TierstoreError, OSError. ``verify`` compares the store with the checks
    of its record, and raises ChecksumError naming the first difference.
    """

    name: StageName
    settings: Callable[[DeployConfig], Mapping[str, object]]
    run: Callable[[StageContext], StageOutput]
    verify: Callable[[Path, Mapping[str, object], OnProgress], None] = verify_checks


STAGES = (
    DeployStage(name=StageName.FUSION, settings=fusion_settings, run=fuse),
    DeployStage(name=StageName.DISTILLATION, settings=distillation_settings, run=compress),
    DeployStage(name=StageName.CONVERSION, settings=conversion_settings, run=convert),
    DeployStage(name=StageName.SEGMENTATION, settings=segmentation_settings, run=segment),
    DeployStage(name=StageName.OPTIMISATION, settings=optimisation_settings, run=optimise),
    DeployStage(name=StageName.DEPLOYMENT, settings=lambda config: {}, run=assemble),
)
#: Marks the directory of all stages: a directory of that name without it is not touched.
MARKER = ".tierstore-deploy"


@dataclass(frozen=True)
class Deployed:
    """The outcome of a run: the stages' records in order, and ``directory``: the result, or the stages' directory."""

    directory: Path
    records: tuple[StageRecord, ...]

    @property
    def complete(self) -> bool:
        return self.records[-1].stage is StageName.DEPLOYMENT


def deploy(
    config: DeployConfig,
    *,
    until: StageName = StageName.DEPLOYMENT,
    say: Callable[[str], None] = lambda text: None,
    show: ShowPass = lambda name: contextlib.nullcontext(no_progress),
    announced: Callable[[MemoryAccount], None] = lambda account: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    stages: Sequence[DeployStage] = STAGES,
) -> Deployed:
    """Runs the stages up to ``until``, or all that remain; the last one's output becomes ``config.target``.

    ``show`` shows the progress of each pass over a store; ``announced`` receives what the process will hold, by part of a
    stage. Raises ConfigError, DataError, StoreError, StoreExistsError for a target that exists, StoreInUseError where
    another process deploys to it, DeployInterrupted, OSError. A target that the same stages have made is left as it is.
    """
    target, root = config.target, building_directory(config.target)
    if os.path.lexists(target):
        return _found(config, stages, root)
    _refuse_early(config)
    with _working(root):
        records: list[StageRecord] = []
        for stage in stages:
            context = StageContext(
                config=config,
                root=root,
                stage=stage.name,
                before=tuple(records),
                say=say,
                show=show,
                announced=announced,
                asked_to_stop=asked_to_stop,
            )
            record, ran = _stage(stage, context)
            records.append(record)
            if stage.name is until or stage is stages[-1]:
                break
            if ran:
                _verify(stage, context, record)
        if records[-1].stage is not StageName.DEPLOYMENT:
            return Deployed(root, tuple(records))
        finished = root / records[-1].store
        chosen = next(record for record in records if record.stage is StageName.OPTIMISATION)
        settings: Any = chosen.figures["settings"]
        Deployment(settings=settings, profile=records[-1].figures, stages=tuple(records)).write(finished)
        finished.rename(target)
        fsync_directory(target.absolute().parent)
        _remove(root)
    return Deployed(target, tuple(records))


def _refuse_early(config: DeployConfig) -> None:
    """Checks ``config`` against an imported model; a built-in one is known only after fusion, and the stages check it.

    Raises ConfigError for numbers of experts, blocks and positions that the model does not have, DataError for a text that
    is too short or cannot be read, StoreFormatError, OSError.
    """
    spec = stored_spec(config.store)
    if spec is None:
        return
    count, placement, how = config.compression.experts, config.placement, config.distillation
    if count is not None:
        check_count(spec.manifest, spec.config, count)
    check_ranks(placement.ranks, count or spec.manifest.experts.count)
    if placement.segments:
        cut([(0, 0)] * spec.manifest.layers, placement.segments)
    if how.text:
        read_windows(how.text, spec.tokenizer, length=how.length, held_out=how.held_out)
        if how.length > spec.positions > 0:
            raise ConfigError(
                f"--length: expected at most {spec.positions}, the positions of the model, got {how.length}"
            )


def _found(config: DeployConfig, stages: Sequence[DeployStage], root: Path) -> Deployed:
    """The target, if these stages made it of ``config``; a killed run may have left their directory beside it.

    Raises StoreExistsError for any other target.
    """
    deployment = Deployment.read(config.target)
    wanted = ""
    for stage in stages:
        wanted = fingerprint(stage.name, stage.settings(config), wanted)
    if deployment is None or not deployment.stages or deployment.stages[-1].fingerprint != wanted:
        raise StoreExistsError(f"{config.target}: there is something here already")
    if (root / MARKER).exists():
        with building(root):
            _remove(root)
    return Deployed(config.target, deployment.stages)


def _remove(root: Path) -> None:
    """Removes the stages; the marker last, so that the next run recognises the remains if this one is killed."""
    for child in list(root.iterdir()):
        if child.is_dir():
            shutil.rmtree(child)
    shutil.rmtree(root)


def stage_records(directory: Path) -> tuple[StageRecord, ...]:
    """The completed stages of the deployment at ``directory``, in order, whether or not it is finished.

    Raises StoreMissingError, StoreFormatError.
    """
    finished = Deployment.read(directory)
    if finished is not None:
        return finished.stages
    for root in (directory, building_directory(directory)):
        if (root / MARKER).exists():
            found = (StageRecord.read(stage_directory(root, stage)) for stage in StageName)
            return tuple(record for record in found if record is not None)
    raise StoreMissingError(f"{directory}: no deployment found, finished or unfinished")


@contextlib.contextmanager
def _working(root: Path) -> Iterator[None]:
    """Locks the directory of all stages against other processes. Raises OSError, StoreInUseError."""
    if root.exists() and not (root / MARKER).exists() and any(root.iterdir()):
        raise OSError(
            errno.EEXIST, "this name is needed for the stages, but it exists and is not theirs", str(root)
        )
    root.mkdir(parents=True, exist_ok=True)
    with building(root):
        (root / MARKER).touch()
        fsync_directory(root)
        yield


def _verify(stage: DeployStage, context: StageContext, record: StageRecord) -> None:
    with context.passing("verify") as progress:
        stage.verify(context.root / record.store, record.checks, progress)


def _stage(stage: DeployStage, context: StageContext) -> tuple[StageRecord, bool]:
    """Runs ``stage``, or verifies it if it is complete. Returns its record and whether it ran."""
    settings = stage.settings(context.config)
    wanted = fingerprint(stage.name, settings, context.before[-1].fingerprint if context.before else "")
    directory = context.directory
    found = StageRecord.read(directory)
    if found is not None and found.fingerprint == wanted:
        _verify(stage, context, found)
        context.say(f"{stage.name.value}: complete, verified")
        return found, False
    _clear(directory, wanted)
    if context.asked_to_stop():
        raise DeployInterrupted(f"stopped before stage {stage.name.value}; the same command resumes here")
    began = time.monotonic()
    output = stage.run(context)
    given = output.store is None
    record = StageRecord(
        stage=stage.name,
        fingerprint=wanted,
        settings=settings,
        store=str((output.store or context.input_store).relative_to(context.root)),
        checks=context.before[-1].checks if given else output.checks,
        figures=output.figures,
        notes=output.notes,
        elapsed_s=time.monotonic() - began,
    )
    record.write(directory)
    context.say(f"{stage.name.value}: done in {format_seconds(record.elapsed_s)}")
    return record, True


_UNDER_WAY = "under-way"


def _clear(directory: Path, wanted: str) -> None:
    """Empties ``directory`` unless a run with the fingerprint ``wanted`` began it."""
    mark = directory / _UNDER_WAY
    if directory.exists() and not (mark.exists() and mark.read_text() == wanted):
        mark.unlink(missing_ok=True)  # removed first: after a kill, no run takes the rest for its own
        shutil.rmtree(directory)
    directory.mkdir(exist_ok=True)
    if not mark.exists():
        mark.write_text(wanted)
        fsync_directory(directory)
    fsync_directory(directory.parent)
