"""A smaller model learns from its teacher's logits, over its tiers, and the teacher answers from its own.

Shapes: B windows, T tokens of each, V vocabulary.

The objective is the divergence of the student's distribution of the next token from the teacher's, at temperature 1, plus
the loss of the text's own next token. A run that was cut short goes on from its last commit: the windows of a step
depend on its number, and the learning rate on what is done of the steps or, without a number of them, of the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tierstore.deploy.config import DistillationConfig
from tierstore.deploy.teacher import Teacher
from tierstore.deploy.text import Windows
from tierstore.errors import StoreFormatError
from tierstore.hf.loop.tiered import open_model
from tierstore.hf.manifest import write_durably
from tierstore.store.disk.home import fsync_directory

_PROGRESS_NAME = "distillation.json"
#: The learning rate climbs for so many steps, and falls to this part of its largest value.
_WARM_STEPS, _LEAST_RATE = 8, 0.05
_CLIP_NORM = 1.0
#: Windows of a pass that measures a loss.
_JUDGED_ROWS = 2


@dataclass(frozen=True, kw_only=True)
class DistillProgress:
    """How far a distillation has come. ``before``: the student's loss on held-out text before the first step, in nats.
    ``trained_s`` counts the seconds of steps, in all runs; ``ended``: whether no further step is taken.
    """

    before: float
    steps: int = 0
    trained_s: float = 0.0
    ended: bool = False

    def write(self, directory: Path) -> None:
        write_durably(directory / _PROGRESS_NAME, (json.dumps(asdict(self)) + "\n").encode())
        fsync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> DistillProgress | None:
        """None where no step was prepared. Raises StoreFormatError."""
        path = directory / _PROGRESS_NAME
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError) as error:
            raise StoreFormatError(f"{path}: not the progress of a distillation: {error}") from error


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
    """Of step ``step``: climbing first, then falling in a straight line to the end of the steps, or of the time."""
    done = step / config.steps if config.steps else trained_s / (60 * config.minutes)
    return config.rate * min(1.0, (step + 1) / _WARM_STEPS) * max(_LEAST_RATE, 1.0 - done)


def distil(
    store: Path,
    teacher: Teacher,
    windows: Windows,
    config: DistillationConfig,
    *,
    directory: Path,
    host_budget: int,
    threads: int,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> DistillProgress:
    """Trains the student in ``store``, an import, until the steps or the time are used up; notes its progress in
    ``directory``. ``check`` is called behind each step that is durable.

    Raises what ``check`` does, StoreError, OSError.
    """
    progress = DistillProgress.read(directory)
    if progress is not None and progress.ended:
        return progress
    settings = {"adamw.weight_decay": 0.0, "threads": threads, "device": "cpu"}
    with open_model(store, host_budget=host_budget, settings=settings) as tiered:
        model = tiered.model
        if progress is None:
            model.eval()
            progress = DistillProgress(
                before=held_out_loss(lambda tokens: _logits(model, tokens), windows.held)
            )
            progress.write(directory)
            check()
        model.train()
        before, trained_s, committed_s = progress.before, progress.trained_s, time.monotonic()
        while not _ended(config, tiered.position, trained_s):
            began_s, step = time.monotonic(), tiered.position
            tokens_BT = windows.batch(step, config.rows, config.seed)
            taught = teacher.logits(tokens_BT)
            rate = learning_rate(config, step, trained_s)
            with tiered.step(rate, max_grad_norm=_CLIP_NORM, backward_passes=1) as taken:
                taken.backward(objective(_logits(model, tokens_BT), taught, tokens_BT))
            trained_s += time.monotonic() - began_s
            say(f"distillation: step {step + 1} after {trained_s:.0f} s: objective {taken.loss:.4f}")
            if time.monotonic() - committed_s >= config.commit_s:
                tiered.commit()
                progress = DistillProgress(before=before, steps=tiered.position, trained_s=trained_s)
                progress.write(directory)
                check()
                committed_s = time.monotonic()
        tiered.commit()
        progress = DistillProgress(before=before, steps=tiered.position, trained_s=trained_s, ended=True)
    progress.write(directory)
    return progress


def _ended(config: DistillationConfig, step: int, trained_s: float) -> bool:
    return trained_s >= 60 * config.minutes or 0 < config.steps <= step


def _logits(model: torch.nn.Module, tokens_BT: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits
