"""Configuration of a run on several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tierstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks that ``torchrun`` started share the work. Without effect in a single process."""

    expert: int = field(
        default=0,
        metadata={"help": "ranks that share one copy of the experts (0: all of a stage; divides them)"},
    )
    tensor: int = field(
        default=1, metadata={"help": "ranks that compute the same tokens with parts of each layer"}
    )
    stages: int = field(default=1, metadata={"help": "pipeline stages, each of some of the layers"})
    stage_blocks: tuple[int, ...] = field(
        default=(), metadata={"help": "blocks of each pipeline stage (none: balanced by their parameters)"}
    )
    timeout_s: float = field(
        default=600.0, metadata={"help": "seconds after which a collective that no one answers fails"}
    )
    grace_s: float = field(
        default=5.0, metadata={"help": "seconds that a rank has to end by itself once another has died"}
    )

    def __post_init__(self) -> None:
        if self.expert < 0:
            raise ConfigError(f"parallel.expert: expected at least 0, got {self.expert}")
        for name in ("tensor", "stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("timeout_s", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"parallel.{name}: expected more than 0, got {value}")
