"""Learning rates over time, and the numbers that one AdamW step needs.

Steps count from 0. Everything here is a pure function in double precision, rounded to float32 once, at the
end: so a resumed run, and a replay of missed steps, see the very numbers that the first run saw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tierstore.errors import ConfigError

#: Steps of a run that names no others.
RUN_STEPS = 60


class LearningRateDecay(StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """A learning rate for each step. Raises ConfigError naming the field.

    Warm-up: ``lr * (step + 1) / warmup_steps`` for the first ``warmup_steps`` steps. Then from ``lr`` at step
    ``warmup_steps`` to ``lr * min_lr_fraction`` at step ``total_steps`` and ever after. ``total_steps`` None: those with
    which a run begins (``over``), and ``RUN_STEPS`` where there is none.
    """

    kind: LearningRateDecay = field(
        default=LearningRateDecay.COSINE, metadata={"help": "how the learning rate falls"}
    )
    lr: float = field(default=2e-3, metadata={"help": "highest learning rate"})
    warmup_steps: int = field(default=10, metadata={"help": "steps in which it rises"})
    total_steps: int | None = field(
        default=None,
        metadata={"help": "step at which it has fallen (none: the steps with which the run began)"},
    )
    min_lr_fraction: float = field(default=0.1, metadata={"help": "what is left of it then"})

    def __post_init__(self) -> None:
        if self.kind not in tuple(LearningRateDecay):
            raise ConfigError(f"schedule: expected one of {', '.join(LearningRateDecay)}, got {self.kind!r}")
        object.__setattr__(self, "kind", LearningRateDecay(self.kind))
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr: expected more than 0, got {self.lr}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ConfigError(f"total_steps: expected at least 1, got {self.total_steps}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: expected at least 0, got {self.warmup_steps}")
        if not 0 <= self.min_lr_fraction <= 1:
            raise ConfigError(f"min_lr_fraction: expected 0 to 1, got {self.min_lr_fraction}")

    def over(self, steps: int) -> ScheduleConfig:
        """This schedule, with ``total_steps`` of ``steps`` where it names none."""
        return self if self.total_steps is not None else replace(self, total_steps=steps)

    @property
    def lowest_from(self) -> int | None:
        """The first step (from 0) of those that have the lowest rate; None where it never falls."""
        if self.kind == LearningRateDecay.CONSTANT or self.min_lr_fraction == 1:
            return None
        return self.warmup_steps + self._span

    @property
    def _span(self) -> int:
        """Steps in which the rate falls."""
        total = RUN_STEPS if self.total_steps is None else self.total_steps
        return max(1, total - self.warmup_steps)

    def lr_at(self, step: int) -> float:
        """The learning rate of ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == LearningRateDecay.CONSTANT:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / self._span)
        left = 1.0 - done if self.kind == LearningRateDecay.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_fraction + (1.0 - self.min_lr_fraction) * left)
