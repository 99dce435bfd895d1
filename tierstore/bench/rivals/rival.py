"""What a rival is: a way to train the workload, step by step, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.bench.rivals.workload import BuiltIn, RivalWorkload
from tierstore.model.interface import Batch
from tierstore.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RivalTask:
    """What a rival is to do.

    ``directory``: its own, for whatever it keeps on disk. ``checkpoint``: the Mixtral to train; None for the built-in model.
    ``trace``: where tierstore records what it accesses. ``settings``: JSON that is laid over a library's own configuration.
    """

    config: TrainConfig
    directory: Path
    checkpoint: Path | None = None
    trace: Path | None = None
    settings: Path | None = None

    def workload(self) -> RivalWorkload:
        """Raises ConfigError, CapabilityError."""
        if self.checkpoint is None:
            return BuiltIn(self.config)
        from tierstore.bench.rivals.wrapped import Mixtral

        return Mixtral(self.config, self.checkpoint)

    def overlaid(self, library: Mapping[str, Any]) -> dict[str, Any]:
        """``library`` with ``settings`` over it, table by table."""
        if self.settings is None:
            return dict(library)
        return _overlaid(library, json.loads(self.settings.read_text()))


def _overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            merged[key] = _overlaid(inner, value)
        else:
            merged[key] = value
    return merged


class Rival(Protocol):
    """One that is ready to train. One thread; steps are numbered from 0."""

    def step(self) -> float:
        """One optimizer step; its loss in nats, the mean over micro-batches."""
        ...

    def describe(self) -> Sequence[str]:
        """What of its configuration matters, a line each."""
        ...


#: Opens a rival, and closes it at exit.
RivalOpener = Callable[[RivalTask], AbstractContextManager[Rival]]


class TorchLoop:
    """The loop that the libraries share: batches, learning rate and clipping are those of ``config``.

    ``optimizer`` needs param_groups, step and zero_grad.
    """

    def __init__(self, task: RivalTask, workload: RivalWorkload, module: nn.Module, optimizer: Any) -> None:
        self.config = task.config
        self.module = module
        self.optimizer = optimizer
        self.steps = 0
        self._data = workload.data(task.directory)

    def step(self) -> float:
        parts, total = self.config.data.micro_batches, 0.0
        for micro in range(parts):
            total += self.micro(self._data.batch(self.steps, micro)) / parts
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.steps)
        self.update()
        self.steps += 1
        return total

    def micro(self, batch: Batch) -> float:
        """Forward and backward of a micro-batch; its loss."""
        objective, loss = self.module(batch.tokens_BT, batch.targets_BT)
        (objective / self.config.data.micro_batches).backward()
        return float(loss.detach())

    def update(self) -> None:
        """Clips and steps."""
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def fused_adamw(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    """torch's fused AdamW over every parameter, one group as tierstore has them."""
    adamw = config.adamw
    return torch.optim.AdamW(
        module.parameters(),
        lr=config.lr_at(0),
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
        fused=True,
    )


def set_threads(config: TrainConfig) -> None:
    """torch's threads as the configuration has them (0: as they are)."""
    if config.threads:
        torch.set_num_threads(config.threads)
