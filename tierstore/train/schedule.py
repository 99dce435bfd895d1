"""Learning rates over time, and the numbers that one AdamW step needs.

Steps count from 0. Everything here is a pure function in double precision, rounded to float32 once, at the
end: so a resumed run, and a replay of missed steps, see the very numbers that the first run saw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tierstore.errors import ConfigError

__all__ = ["AdamWConfig", "AdamWStep", "Schedule", "ScheduleConfig", "adamw_step"]


class Schedule(StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """A learning rate for each step. Raises ConfigError naming the field.

    Warm-up: ``lr * (step + 1) / warmup_steps`` for the first ``warmup_steps`` steps. Then from ``lr`` at step
    ``warmup_steps`` to ``lr * min_lr_fraction`` at step ``total_steps`` and ever after.
    """

    kind: Schedule = Schedule.COSINE
    lr: float = 1e-3
    warmup_steps: int = 10
    total_steps: int = 100
    min_lr_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in tuple(Schedule):
            raise ConfigError(f"schedule: expected one of {', '.join(Schedule)}, got {self.kind!r}")
        object.__setattr__(self, "kind", Schedule(self.kind))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr: expected more than 0, got {self.lr}")
        if self.total_steps < 1:
            raise ConfigError(f"total_steps: expected at least 1, got {self.total_steps}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: expected at least 0, got {self.warmup_steps}")
        if not 0 <= self.min_lr_fraction <= 1:
            raise ConfigError(f"min_lr_fraction: expected 0 to 1, got {self.min_lr_fraction}")

    def lr_at(self, step: int) -> float:
        """The learning rate of ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == Schedule.CONSTANT:
            return self.lr
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        left = 1.0 - done if self.kind == Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_fraction + (1.0 - self.min_lr_fraction) * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter 2019) with torch's names. Raises ConfigError naming the field."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: expected two numbers from 0 to below 1, got {self.betas}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ConfigError(f"eps: expected more than 0, got {self.eps}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"weight_decay: expected at least 0, got {self.weight_decay}")


class AdamWStep(NamedTuple):
    """What one step of AdamW needs; each value is a float32, exactly."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction1: float
    bias_correction2_sqrt: float


def adamw_step(config: AdamWConfig, lr: float, step: int) -> AdamWStep:
    """The numbers of step ``step``, from 1 as torch's ``state["step"]`` counts. Raises ValueError below 1."""
    if step < 1:
        raise ValueError(f"AdamW counts its steps from 1, got {step}")
    beta1, beta2 = config.betas
    values = (
        lr,
        beta1,
        beta2,
        config.eps,
        config.weight_decay,
        1.0 - beta1**step,
        math.sqrt(1.0 - beta2**step),
    )
    return AdamWStep(*(float(np.float32(value)) for value in values))
