"""What a deployment is told. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tierstore.capabilities import Capability
from tierstore.errors import ConfigError


class StageName(StrEnum):
    """The six stages, in their order."""

    FUSION = "fusion"
    DISTILLATION = "distillation"
    CONVERSION = "conversion"
    SEGMENTATION = "segmentation"
    OPTIMISATION = "optimisation"
    DEPLOYMENT = "deployment"


class ExpertWeights(StrEnum):
    """How the weights of the deployed experts are kept."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def quantized(self) -> bool:
        return self in (ExpertWeights.INT8, ExpertWeights.INT4)


class Method(StrEnum):
    """How a layer comes to have fewer experts."""

    MERGE = "merge"  # similar ones become one, weighted by their use
    PRUNE = "prune"  # the least used ones are left out


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What becomes of the experts. None leaves them as they are."""

    experts: int | None = field(
        default=None, metadata={"help": "experts of a layer after compression (default: all)"}
    )
    method: Method = field(
        default=Method.MERGE, metadata={"help": "merge similar experts, or prune the least used ones"}
    )
    weights: ExpertWeights | None = field(
        default=None, metadata={"help": "format of the experts' weights (default: as in the store)"}
    )

    def __post_init__(self) -> None:
        if self.experts is not None and self.experts < 1:
            raise ConfigError(f"--experts: expected at least 1, got {self.experts}")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How a compressed model learns from its teacher, and the text for it."""

    text: tuple[Path, ...] = field(
        default=(), metadata={"help": "text file to calibrate, distil and evaluate with; repeat for several"}
    )
    minutes: float = field(default=30.0, metadata={"help": "time for distillation (0: none)"})
    steps: int = field(default=0, metadata={"help": "steps of distillation (0: as the time allows)"})
    rate: float = field(default=3e-4, metadata={"help": "largest learning rate"})
    rows: int = field(default=4, metadata={"help": "windows of a step"})
    length: int = field(default=256, metadata={"help": "tokens of a window"})
    held_out: int = field(default=16, metadata={"help": "most windows that the losses are measured on"})
    seed: int = field(default=0, metadata={"help": "which windows come in which order"})
    commit_s: float = field(default=60.0, metadata={"help": "seconds between two commits"})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise ConfigError(f"--minutes: expected at least 0, got {self.minutes}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"--rate: expected more than 0, got {self.rate}")
        for name, least in (("steps", 0), ("rows", 1), ("length", 2), ("held_out", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")

    @property
    def trains(self) -> bool:
        """Whether there is any time for it."""
        return self.minutes > 0


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Where the model will run. ``segments``: first block of each, given by hand; empty for automatic ones."""

    memory: int | None = field(
        default=None, metadata={"size": True, "help": "memory of a rank (default: what the machine has)"}
    )
    ranks: int = field(
        default=1, metadata={"help": "ranks that share the experts: one, until several can serve"}
    )
    segments: tuple[int, ...] = field(
        default=(),
        metadata={"help": "first block of each segment, such as 0,8,16 (default: by the memory)"},
    )

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"--memory: expected more than 0, got {self.memory}")
        if self.ranks != 1:
            raise ConfigError(
                f"--ranks: expected 1, got {self.ranks}: several ranks cannot serve a model yet"
            )
        if self.segments and (self.segments[0] != 0 or list(self.segments) != sorted(set(self.segments))):
            raise ConfigError(
                f"--segments: expected the first block of each segment, ascending from 0, got {self.segments}"
            )


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """A deployment of ``store`` to the new directory ``target``."""

    store: Path
    target: Path
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    graphs: Capability = field(
        default=Capability.AUTO, metadata={"help": "compile the dense segments to graphs"}
    )
    host_budget: int = field(
        default=1 << 30,
        metadata={"size": True, "help": "memory for experts of each model that a stage has open"},
    )
    threads: int = field(default=0, metadata={"help": "torch's threads (0: one for each core)"})

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"--threads: expected at least 0, got {self.threads}")
        if self.compression.experts is not None and not self.distillation.text:
            raise ConfigError(
                "--text: fewer experts are chosen by their use on a text, and judged by their loss on it: name one"
            )
