"""Configuration of serving: one TOML file, or the same names as options. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tierstore.cache.config import CacheConfig
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.links import LinksConfig
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.store.config import IoConfig


class ExpertMemory(Enum):
    """Which experts the device holds (SE-MoE section 3.2)."""

    AUTO = "auto"  # what the plan finds faster for the passes at hand; it may change between prefill and decoding
    RING = "ring"  # all experts of K of the N layers, in slots of fixed addresses
    SPARSE = "sparse"  # experts that were chosen, or are guessed


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """Ring memory on the device."""

    memory: ExpertMemory = field(
        default=ExpertMemory.AUTO, metadata={"help": "whole layers in a ring, or chosen experts"}
    )
    layers: int = field(default=0, metadata={"help": "layers in the ring (0: as many as the budget holds)"})

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise ConfigError(f"ring.layers: expected at least 0, got {self.layers}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sequences that are continued together."""

    sequences: int = field(default=8, metadata={"help": "most sequences of a batch"})
    context: int = field(
        default=0,
        metadata={"help": "most tokens of a sequence, prompt and answer (0: the model's own limit)"},
    )
    invariant: bool = field(
        default=False,
        metadata={"help": "give each request the bits that it gets alone, whoever else is served"},
    )

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ConfigError(f"batch.sequences: expected at least 1, got {self.sequences}")
        if self.context < 0:
            raise ConfigError(f"batch.context: expected at least 0, got {self.context}")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How a store is served. Nothing here changes what a model computes, but for ``batch.invariant``."""

    store: Path = field(default=Path("tierstore-store"), metadata={"help": "store directory"})
    host_budget: int = field(
        default=1 << 30, metadata={"size": True, "help": "memory for experts: cache and CPU device tier"}
    )
    device_budget: int = field(
        default=0, metadata={"size": True, "help": "memory for experts on the device (0: a few slots)"}
    )
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    weights_in_place: Capability = field(
        default=Capability.AUTO,
        metadata={"help": "on the CPU, compute with experts where they lie in the cache, without a copy"},
    )
    threads: int = field(default=0, metadata={"help": "torch's threads (0: one for each core)"})
    batch: BatchConfig = field(default_factory=BatchConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(policy="next-use"))
    prefetch: PrefetchConfig = field(default_factory=lambda: PrefetchConfig(predictor=PredictorName.ROUTER))
    io: IoConfig = field(default_factory=IoConfig)
    links: LinksConfig = field(default_factory=LinksConfig)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads: expected at least 0, got {self.threads}")
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise ConfigError(f"device: expected auto, cpu or cuda, got {self.device!r}")
