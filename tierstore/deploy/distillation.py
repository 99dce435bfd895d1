"""Stage 2: reduces the experts, distils the smaller model from the original, and quantises its experts.

Shapes: B windows, T tokens of each, V vocabulary.

Durable results, in order: ``calibration.json``, the student's checkpoint, its training store with the committed steps, the
checkpoint of the distilled student, the frozen store. Each gets its name only when it is complete, and its predecessors are
then not made again.

The student learns from its teacher's logits. The objective is the divergence of the student's distribution of the next token
from the teacher's, at temperature 1, plus the loss of the text's own next token. An interrupted run resumes from its
last commit: the windows of a step depend on its number, and the learning rate on the finished share of the steps or, if
their number is not set, of the time.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tierstore.deploy.compression import LayerUse, calibrate, check_count, groups_of, write_student
from tierstore.deploy.records import DeployConfig, DistillationConfig, JsonRecord, StageContext, StageOutput
from tierstore.deploy.stages import checked, exported, imported, product_dtype
from tierstore.deploy.teacher import Teacher, Windows, open_teacher, read_windows
from tierstore.errors import StoreFormatError
from tierstore.hf.importing import imported_state
from tierstore.hf.manifest import ImportProgress, Weights
from tierstore.hf.spec import imported_spec
from tierstore.hf.tiered import open_model
from tierstore.machine import MemoryAccount, bytes_on_disk
from tierstore.quant.layout import CodeFormat
from tierstore.store.disk.home import IDENTITY
from tierstore.units import format_bytes

_CALIBRATED_WINDOWS = 16
_STORE, _CHECKPOINT, _TRAINING, _EXPORTED = "store", "checkpoint", "training", "distilled"
_PLAIN, _QUANTIZED = "plain", "quantized"
#: The learning rate rises for 8 steps, then falls to this fraction of its largest value.
_WARM_STEPS, _LEAST_RATE = 8, 0.05
_CLIP_NORM = 1.0
#: Windows in one pass of a loss measurement.
_JUDGED_ROWS = 2


def distillation_settings(config: DeployConfig) -> Mapping[str, object]:
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


def compress(context: StageContext) -> StageOutput:
    if context.config.threads:
        torch.set_num_threads(context.config.threads)
    count = context.config.compression.experts
    spec = imported_spec(context.input_store)
    if count is not None and count != spec.experts:
        check_count(spec.manifest, spec.config, count)
        made = _compressed(context, count)
    else:
        made = _as_it_is(context)
    weights = context.config.compression.weights
    if weights is None or not weights.quantized:
        return made
    return _quantized(context, made, CodeFormat(weights.value))


def _as_it_is(context: StageContext) -> StageOutput:
    windows, store = _windows(context), context.input_store
    figures: dict[str, object] = {"bytes_before": bytes_on_disk(store)}
    if windows is not None:
        with _opened(store, context) as teacher:
            figures["teacher_loss"] = held_out_loss(teacher.logits, windows.held)
    return StageOutput(figures=figures)


def _quantized(context: StageContext, made: StageOutput, codes: CodeFormat) -> StageOutput:
    """Quantises the experts of ``made``, and measures the loss with them."""
    source, store = context.directory / _PLAIN, context.directory / _QUANTIZED
    if not _imported(store):
        if not source.exists():
            plain = made.store or context.input_store
            exported(plain, source, context, product_dtype(plain))
        imported(source, store, context, codes=codes)
    shutil.rmtree(source, ignore_errors=True)
    figures = dict(made.figures)
    windows = _windows(context)
    if windows is not None:
        with _opened(store, context) as teacher:
            figures["quantized_loss"] = held_out_loss(teacher.logits, windows.held)
        context.say(f"distillation: held-out loss {figures['quantized_loss']:.4f} in {codes.value}")
    figures["bytes_after"] = bytes_on_disk(store)
    return StageOutput(store=store, checks=checked(store, context), figures=figures)


def _compressed(context: StageContext, count: int) -> StageOutput:
    config, directory, store = context.config, context.directory, context.directory / _STORE
    windows = _windows(context)
    assert windows is not None  # a configuration that reduces experts names a text
    with _opened(context.input_store, context) as teacher:
        found = _calibrated(context, teacher, windows)
    progress = None
    if not _imported(store):
        source = directory / (_EXPORTED if config.distillation.trains else _CHECKPOINT)
        if config.distillation.trains:
            progress = _distilled(context, count, found, windows)
        elif not source.exists():
            _write_student(context, count, found)
        imported(source, store, context)
    progress = progress or DistillProgress.read(directory)
    with _opened(store, context) as student:
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
        checks=checked(store, context),
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


def _distilled(context: StageContext, count: int, found: Calibration, windows: Windows) -> DistillProgress:
    """Writes the checkpoint of the distilled student."""
    config, directory = context.config, context.directory
    training, checkpoint = directory / _TRAINING, directory / _EXPORTED
    if checkpoint.exists():
        progress = DistillProgress.read(directory)
        if progress is None:
            raise StoreFormatError(f"{checkpoint}: the progress record of its distillation is missing")
        return progress
    if not _imported(training):
        if not (directory / _CHECKPOINT).exists():
            _write_student(context, count, found)
        imported(directory / _CHECKPOINT, training, context, weights=Weights.TRAINABLE)
    shutil.rmtree(directory / _CHECKPOINT, ignore_errors=True)
    with open_teacher(context.input_store, host_budget=config.host_budget) as teacher:
        progress = _distil(context, training, teacher, windows)
    exported(training, checkpoint, context, product_dtype(training))
    return progress


@contextlib.contextmanager
def _opened(store: Path, context: StageContext) -> Iterator[Teacher]:
    """The model of ``store``, for the held-out loss."""
    with open_teacher(store, host_budget=context.config.host_budget) as opened:
        context.announced(opened.account(_JUDGED_ROWS, context.config.distillation.length))
        yield opened


def recovered_fraction(teacher: float, before: float, after: float) -> float | None:
    """The recovered share of the loss that compression added to the ``teacher``'s; None if it added none."""
    return (before - after) / (before - teacher) if before > teacher else None


# Calibration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration(JsonRecord):
    """Measurements of the teacher on the text: its held-out ``loss``, in nats, and the use of its experts by layer."""

    NAME, WHAT = "calibration.json", "a calibration"

    loss: float
    uses: Mapping[int, LayerUse]


def _calibrated(context: StageContext, teacher: Teacher, windows: Windows) -> Calibration:
    found = Calibration.read(context.directory)
    if found is None:
        loss = held_out_loss(teacher.logits, windows.held)
        context.check()
        uses = calibrate(teacher, windows.train[:_CALIBRATED_WINDOWS], passed=context.check)
        found = Calibration(loss, uses)
        found.write(context.directory)
    return found


def _write_student(context: StageContext, count: int, found: Calibration) -> None:
    method = context.config.compression.method
    groups = {layer: groups_of(use, count, method) for layer, use in found.uses.items()}
    checkpoint = context.directory / _CHECKPOINT
    with context.passing("compress") as progress:
        write_student(context.input_store, checkpoint, groups, found.uses, progress)
    context.say(f"distillation: wrote {count} experts a layer, {format_bytes(bytes_on_disk(checkpoint))}")


# The stores -------------------------------------------------------------------------------------------------


def _windows(context: StageContext) -> Windows | None:
    how = context.config.distillation
    if not how.text:
        return None
    tokenizer = imported_spec(context.input_store).tokenizer
    return read_windows(how.text, tokenizer, length=how.length, held_out=how.held_out)


def _imported(store: Path) -> bool:
    """Whether an import to ``store`` is complete."""
    found = imported_state(store) if (store / IDENTITY).exists() else None
    return found is not None and found.progress is ImportProgress.COMPLETE


@dataclass(frozen=True, kw_only=True)
class DistillProgress(JsonRecord):
    """The progress of a distillation. ``before``: the student's held-out loss before the first step, in nats.
    ``trained_s``: seconds of steps in all runs; ``ended``: whether no further steps follow.
    """

    NAME, WHAT = "distillation.json", "the progress of a distillation"

    before: float
    steps: int = 0
    trained_s: float = 0.0
    ended: bool = False


def objective(student_BTV: Tensor, teacher_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """The loss of the student, a scalar, in nats a token."""
    own = functional.log_softmax(student_BTV.flatten(0, 1).float(), dim=-1)
    taught = functional.log_softmax(teacher_BTV.flatten(0, 1).float(), dim=-1)
    divergence = functional.kl_div(own, taught, reduction="batchmean", log_target=True)
    targets = tokens_BT[:, 1:].flatten()
    mine = own.view(*tokens_BT.shape, -1)[:, :-1].flatten(0, 1)
    return divergence + functional.nll_loss(mine, targets)


@torch.no_grad()
def held_out_loss(logits: Callable[[Tensor], Tensor], held: Tensor) -> float:
    """The mean loss of the next token over the windows ``held`` (W, T), in nats."""
    total, count = 0.0, 0
    for tokens_BT in torch.split(held, _JUDGED_ROWS):
        given = logits(tokens_BT)[:, :-1].flatten(0, 1).float()
        targets = tokens_BT[:, 1:].flatten()
        total += float(functional.cross_entropy(given, targets, reduction="sum").double())
        count += targets.numel()
    return total / count


def learning_rate(config: DistillationConfig, step: int, trained_s: float) -> float:
    """The learning rate of step ``step``: rises first, then falls linearly until the end of the steps, or of the time."""
    done = step / config.steps if config.steps else trained_s / (60 * config.minutes)
    return config.rate * min(1.0, (step + 1) / _WARM_STEPS) * max(_LEAST_RATE, 1.0 - done)


def _distil(context: StageContext, store: Path, teacher: Teacher, windows: Windows) -> DistillProgress:
    """Trains the student in ``store``, an import, until the steps or the time are used up."""
    config, directory = context.config.distillation, context.directory
    progress = DistillProgress.read(directory)
    if progress is not None and progress.ended:
        return progress
    settings = {"adamw.weight_decay": 0.0, "threads": context.config.threads, "device": "cpu"}
    with open_model(store, host_budget=context.config.host_budget, settings=settings) as tiered:
        model = tiered.model
        parts = dict(tiered.account(config.rows, config.length).parts)
        for part, nbytes in teacher.account(config.rows, config.length).parts.items():
            if part in ("experts", "activations"):
                parts[f"the teacher's {part}"] = nbytes
        context.announced(MemoryAccount(parts))
        if progress is None:
            model.eval()
            progress = DistillProgress(
                before=held_out_loss(lambda tokens: _logits(model, tokens), windows.held)
            )
            progress.write(directory)
            context.check()
        model.train()
        before, trained_s, committed_s = progress.before, progress.trained_s, time.monotonic()
        while trained_s < 60 * config.minutes and not 0 < config.steps <= tiered.position:
            began_s, step = time.monotonic(), tiered.position
            tokens_BT = windows.batch(step, config.rows, config.seed)
            taught = teacher.logits(tokens_BT)
            rate = learning_rate(config, step, trained_s)
            with tiered.step(rate, max_grad_norm=_CLIP_NORM, backward_passes=1) as taken:
                taken.backward(objective(_logits(model, tokens_BT), taught, tokens_BT))
            trained_s += time.monotonic() - began_s
            context.say(f"distillation: step {step + 1} after {trained_s:.0f} s: objective {taken.loss:.4f}")
            if time.monotonic() - committed_s >= config.commit_s:
                tiered.commit()
                progress = DistillProgress(before=before, steps=tiered.position, trained_s=trained_s)
                progress.write(directory)
                context.check()
                committed_s = time.monotonic()
        tiered.commit()
        progress = DistillProgress(before=before, steps=tiered.position, trained_s=trained_s, ended=True)
    progress.write(directory)
    return progress


def _logits(model: torch.nn.Module, tokens_BT: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits
