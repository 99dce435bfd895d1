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
from tierstore.train.config import RunConfig


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
    profile: Path | None = field(
        default=None,
        metadata={"help": "what bench machine measured: auto chooses by it (none: assumed costs)"},
    )

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
class LimitsConfig:
    """What a server accepts at once, and for how long."""

    queue: int = field(default=64, metadata={"help": "most requests that wait for a place in the batch"})
    queue_tokens: int = field(
        default=65536, metadata={"help": "most tokens of waiting requests, prompts and answers"}
    )
    tokens: int = field(default=0, metadata={"help": "most tokens of an answer (0: what the context leaves)"})
    default_tokens: int = field(
        default=256, metadata={"help": "tokens of an answer where the request names no limit"}
    )
    prefill_tokens: int = field(
        default=4096, metadata={"help": "most tokens of prompts that are computed together"}
    )
    request_s: float = field(default=600.0, metadata={"help": "most seconds of a request, waiting included"})
    drain_s: float = field(
        default=60.0, metadata={"help": "seconds that requests get to end when the server is told to stop"}
    )
    body: int = field(default=4 << 20, metadata={"size": True, "help": "largest body of a request"})
    connections: int = field(default=512, metadata={"help": "most open connections"})
    receive_s: float = field(default=15.0, metadata={"help": "seconds in which a client must send a request"})
    send_s: float = field(
        default=30.0, metadata={"help": "seconds in which a client must take what it was sent"}
    )

    def __post_init__(self) -> None:
        for name in ("queue", "queue_tokens", "default_tokens", "prefill_tokens", "body", "connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}: expected at least 1, got {getattr(self, name)}")
        if self.tokens < 0:
            raise ConfigError(f"limits.tokens: expected at least 0, got {self.tokens}")
        for name in ("request_s", "drain_s", "receive_s", "send_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"limits.{name}: expected seconds above 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class GraphsConfig:
    """Dense parts of decoder blocks as graphs of torch's compiler."""

    compile: Capability = field(
        default=Capability.OFF,
        metadata={"help": "compile the dense parts of blocks; their bits are then not the eager model's"},
    )
    cache: Path | None = field(
        default=None, metadata={"help": "where compiled kernels are kept (none: inductor's own place)"}
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RunConfig):
    """How a store is served. Nothing here changes what a model computes, but for ``batch.invariant`` and ``graphs``."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(policy="learned-use"))
    prefetch: PrefetchConfig = field(default_factory=lambda: PrefetchConfig(predictor=PredictorName.ROUTER))
    io: IoConfig = field(default_factory=IoConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
