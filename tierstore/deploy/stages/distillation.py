"""Stage 2: fewer experts, distilled from the model that they were made of; and their weights in fewer bits.

What is durable, in order: ``calibration.json``, the student's checkpoint, its store for training with the steps that it
has committed, the checkpoint of what was distilled, the frozen store. Each is whole when it has its name, and what comes
before it is not made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tierstore.deploy.checking import bytes_on_disk, store_checks, verify_checks
from tierstore.deploy.compress.calibration import calibrate
from tierstore.deploy.compress.distilling import DistillProgress, distil, held_out_loss
from tierstore.deploy.compress.grouping import LayerUse, groups_of
from tierstore.deploy.compress.student import check_count, write_student
from tierstore.deploy.config import DeployConfig, StageName
from tierstore.deploy.records import StageRecord
from tierstore.deploy.stage import StageContext, StageOutput
from tierstore.deploy.stages.fusion import refrozen
from tierstore.deploy.teacher import Teacher, open_teacher
from tierstore.deploy.text import Windows, read_windows
from tierstore.errors import StoreFormatError
from tierstore.hf.exports.exporting import export
from tierstore.hf.exports.outline import ExportDtype
from tierstore.hf.imports.importing import ImportOptions, import_model
from tierstore.hf.manifest import ImportProgress, ImportState, Manifest, write_durably
from tierstore.hf.stored import stored_spec
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import IMPORT_KEY
from tierstore.quant.layout import CodeFormat
from tierstore.store.disk.home import IDENTITY, fsync_directory
from tierstore.store.reading import OpenAt, read_states
from tierstore.train.config import FinetuneConfig
from tierstore.units import format_bytes

_CALIBRATED_WINDOWS = 16
_STORE, _CHECKPOINT, _TRAINING, _EXPORTED = "store", "checkpoint", "training", "distilled"
_PLAIN, _QUANTIZED = "plain", "quantized"


class DistillationStage:
    """See the module."""

    name = StageName.DISTILLATION

    def settings(self, config: DeployConfig) -> Mapping[str, object]:
        compression, how = config.compression, config.distillation
        settings: dict[str, object] = {
            "experts": compression.experts,
            "weights": None if compression.weights is None else compression.weights.value,
            "text": [str(path) for path in how.text],
            "length": how.length,
            "held_out": how.held_out,
        }
        if compression.experts is not None:
            settings |= {"method": compression.method.value, "minutes": how.minutes, "steps": how.steps}
            settings |= {"rate": how.rate, "rows": how.rows, "seed": how.seed}
        return settings

    def run(self, context: StageContext) -> StageOutput:
        if context.config.threads:
            torch.set_num_threads(context.config.threads)
        count = context.config.compression.experts
        if count is not None and count != _experts_of(context.input_store):
            made = self._compressed(context, count)
        else:
            made = self._as_it_is(context)
        weights = context.config.compression.weights
        if weights is None or not weights.quantized:
            return made
        return self._quantized(context, made, CodeFormat(weights.value))

    def verify(self, root: Path, record: StageRecord) -> None:
        verify_checks(root / record.store, record.checks)

    def _as_it_is(self, context: StageContext) -> StageOutput:
        windows, store = _windows(context), context.input_store
        figures: dict[str, object] = {"bytes_before": bytes_on_disk(store)}
        if windows is not None:
            with open_teacher(store, host_budget=context.config.host_budget) as teacher:
                figures["teacher_loss"] = held_out_loss(teacher.logits, windows.held)
        return StageOutput(store=store, checks=context.before[-1].checks, figures=figures)

    def _quantized(self, context: StageContext, made: StageOutput, codes: CodeFormat) -> StageOutput:
        """The experts of ``made`` in fewer bits, and the loss with them."""
        source, store = context.directory / _PLAIN, context.directory / _QUANTIZED
        if not _imported(store):
            if not source.exists():
                export(made.store, source, dtype=_dtype(made.store))
                context.check()
            refrozen(source, store, context, codes=codes)
        shutil.rmtree(source, ignore_errors=True)
        figures = dict(made.figures)
        windows = _windows(context)
        if windows is not None:
            with open_teacher(store, host_budget=context.config.host_budget) as teacher:
                figures["quantized_loss"] = held_out_loss(teacher.logits, windows.held)
            context.say(f"distillation: held-out loss {figures['quantized_loss']:.4f} in {codes.value}")
        figures["bytes_after"] = bytes_on_disk(store)
        return StageOutput(store=store, checks=store_checks(store), figures=figures)

    def _compressed(self, context: StageContext, count: int) -> StageOutput:
        config, directory, store = context.config, context.directory, context.directory / _STORE
        windows = _windows(context)
        assert windows is not None  # a configuration with fewer experts names a text
        _check(context.input_store, count)
        with open_teacher(context.input_store, host_budget=config.host_budget) as teacher:
            found = _calibrated(context, teacher, windows)
        progress = None
        if not _imported(store):
            source = directory / (_EXPORTED if config.distillation.trains else _CHECKPOINT)
            if config.distillation.trains:
                progress = self._distilled(context, count, found, windows)
            elif not source.exists():
                _write_student(context, count, found)
            refrozen(source, store, context)
        progress = progress or DistillProgress.read(directory)
        with open_teacher(store, host_budget=config.host_budget) as student:
            after = held_out_loss(student.logits, windows.held)
        before = after if progress is None else progress.before
        context.say(
            f"distillation: held-out loss {found.loss:.4f} of the teacher, {before:.4f} with {count} experts, "
            f"{after:.4f} distilled"
        )
        for name in (_CHECKPOINT, _TRAINING, _EXPORTED):
            shutil.rmtree(directory / name, ignore_errors=True)
        return StageOutput(
            store=store,
            checks=store_checks(store),
            figures={
                "teacher_loss": found.loss,
                "compressed_loss": before,
                "distilled_loss": after,
                "recovered_fraction": recovered_fraction(found.loss, before, after),
                "distillation_steps": 0 if progress is None else progress.steps,
                "distillation_s": 0.0 if progress is None else progress.trained_s,
                "held_out_tokens": windows.held.numel(),
                "bytes_before": bytes_on_disk(context.input_store),
                "bytes_after": bytes_on_disk(store),
            },
        )

    def _distilled(
        self, context: StageContext, count: int, found: Calibration, windows: Windows
    ) -> DistillProgress:
        """Leaves the checkpoint of the distilled student."""
        config, directory = context.config, context.directory
        training, exported = directory / _TRAINING, directory / _EXPORTED
        if exported.exists():
            progress = DistillProgress.read(directory)
            if progress is None:
                raise StoreFormatError(f"{exported}: there is no progress of the distillation it came of")
            return progress
        if not _imported(training):
            if not (directory / _CHECKPOINT).exists():
                _write_student(context, count, found)
            import_model(
                directory / _CHECKPOINT,
                training,
                ImportOptions(commit_bytes=256 << 20),
                progress=lambda done, total, fields: context.check(),
            )
        shutil.rmtree(directory / _CHECKPOINT, ignore_errors=True)
        with open_teacher(context.input_store, host_budget=config.host_budget) as teacher:
            progress = distil(
                training,
                teacher,
                windows,
                config.distillation,
                directory=directory,
                host_budget=config.host_budget,
                threads=config.threads,
                say=context.say,
                check=context.check,
            )
        export(training, exported, dtype=_dtype(training))
        return progress


def recovered_fraction(teacher: float, before: float, after: float) -> float | None:
    """Of the loss that compression added to that of the ``teacher``; None where it added nothing."""
    return (before - after) / (before - teacher) if before > teacher else None


# Calibration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What the text showed of the teacher: its held-out ``loss``, in nats, and by layer how its experts are used."""

    loss: float
    uses: dict[int, LayerUse]

    def write(self, path: Path) -> None:
        uses = {str(layer): asdict(use) for layer, use in self.uses.items()}
        write_durably(path, (json.dumps({"loss": self.loss, "uses": uses}) + "\n").encode())
        fsync_directory(path.parent)

    @classmethod
    def read(cls, path: Path) -> Calibration | None:
        """None where there is none. Raises StoreFormatError."""
        try:
            table = json.loads(path.read_bytes())
            uses = {
                int(layer): LayerUse(tuple(use["uses"]), tuple(tuple(row) for row in use["alike"]))
                for layer, use in table["uses"].items()
            }
            return cls(float(table["loss"]), uses)
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{path}: not a calibration: {error}") from error


def _calibrated(context: StageContext, teacher: Teacher, windows: Windows) -> Calibration:
    path = context.directory / "calibration.json"
    found = Calibration.read(path)
    if found is None:
        loss = held_out_loss(teacher.logits, windows.held)
        context.check()
        uses = calibrate(teacher, windows.train[:_CALIBRATED_WINDOWS], passed=context.check)
        found = Calibration(loss, uses)
        found.write(path)
    return found


def _write_student(context: StageContext, count: int, found: Calibration) -> None:
    method = context.config.compression.method
    groups = {layer: groups_of(use, count, method) for layer, use in found.uses.items()}
    checkpoint = context.directory / _CHECKPOINT
    write_student(context.input_store, checkpoint, groups, found.uses)
    context.say(f"distillation: wrote {count} experts a layer, {format_bytes(bytes_on_disk(checkpoint))}")
    context.check()


# The stores -------------------------------------------------------------------------------------------------


def _windows(context: StageContext) -> Windows | None:
    how = context.config.distillation
    if not how.text:
        return None
    spec = stored_spec(context.input_store, FinetuneConfig())
    tokenizer = None if spec is None else spec.tokenizer
    return read_windows(how.text, tokenizer, length=how.length, held_out=how.held_out)


def _experts_of(store: Path) -> int:
    spec = stored_spec(store, FinetuneConfig())
    if spec is None:
        raise StoreFormatError(f"{store}: no imported model")
    return spec.experts


def _dtype(store: Path) -> ExportDtype:
    """That of the products."""
    narrow = Manifest.read(store).compute is ComputeDtype.BF16
    return ExportDtype.BF16 if narrow else ExportDtype.FP32


def _check(store: Path, count: int) -> None:
    spec = stored_spec(store, FinetuneConfig())
    if spec is not None:
        check_count(spec.manifest, spec.config, count)


def _imported(store: Path) -> bool:
    """Whether an import to ``store`` has ended."""
    if not (store / IDENTITY).exists():
        return False
    state = read_states(store, IMPORT_KEY).get(OpenAt.LAST)
    if state is None:
        return False
    return ImportState.unpack(state, where=str(store)).progress is ImportProgress.COMPLETE
