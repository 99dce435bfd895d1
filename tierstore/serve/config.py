"""Configuration of serving: one TOML file, or the same names as options. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar

from tierstore.cache.config import CacheConfig
from tierstore.capabilities import Capability
from tierstore.config import check_least, check_positive, key
from tierstore.errors import ConfigError
from tierstore.links import LinksConfig
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.store.config import IoConfig
from tierstore.train.config import RunConfig


class ExpertMemory(Enum):
    """Which experts the device holds (SE-MoE section 3.2)."""

    AUTO = "auto"  # whichever is predicted to be faster, chosen before each pass
    RING = "ring"  # all experts of K of the N layers, in slots of fixed addresses
    SPARSE = "sparse"  # recently chosen and guessed experts


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """Ring memory on the device."""

    memory: ExpertMemory = key(ExpertMemory.AUTO, "ring: whole layers; sparse: chosen experts")
    layers: int = key(0, "layers in the ring (0: all that fit)")
    profile: Path | None = key(
        None,
        "profile of bench machine, or a GPU's name, for auto (none: assumed costs)",
    )

    def __post_init__(self) -> None:
        check_least(self, 0, "layers", table="ring.")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of sequences."""

    sequences: int = key(8, "most sequences in the batch")
    context: int = key(0, "most tokens of a sequence, prompt and answer (0: what model and memory allow)")
    invariant: bool = key(False, "compute each request with the bits that it has alone")

    def __post_init__(self) -> None:
        check_least(self, 1, "sequences", table="batch.")
        check_least(self, 0, "context", table="batch.")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits of a server: its queue, the sizes of requests and answers, and times."""

    queue: int = key(64, "most waiting requests")
    queue_tokens: int = key(65536, "most tokens of all waiting requests, prompts and answers")
    tokens: int = key(0, "most tokens of an answer (0: what the context leaves)")
    default_tokens: int = key(256, "most tokens of an answer if its request sets no limit")
    prefill_tokens: int = key(4096, "most prompt tokens in one prefill (a longer prompt runs alone)")
    request_s: float = key(600.0, "most seconds of a request, waiting included")
    drain_s: float = key(60.0, "seconds for accepted requests to finish after a signal")
    body: int = key(4 << 20, "largest request body", size=True)
    connections: int = key(512, "most open connections")
    receive_s: float = key(15.0, "seconds for a client to send a request")
    send_s: float = key(30.0, "seconds for a client to accept data")

    def __post_init__(self) -> None:
        counts = ("queue", "queue_tokens", "default_tokens", "prefill_tokens", "body", "connections")
        check_least(self, 1, *counts, table="limits.")
        check_least(self, 0, "tokens", table="limits.")
        check_positive(self, "request_s", "drain_s", "receive_s", "send_s", table="limits.")


@dataclass(frozen=True, kw_only=True)
class GraphsConfig:
    """Compilation of the dense parts of decoder blocks by ``torch.compile``."""

    compile: Capability = key(Capability.OFF, "compile dense parts of blocks, which then round otherwise")
    cache: Path | None = key(None, "directory of compiled kernels (none: inductor's default)")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(RunConfig):
    """Configuration of serving. Only ``batch.invariant`` and ``graphs`` change what a model computes."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(policy="learned-use"))
    prefetch: PrefetchConfig = field(default_factory=lambda: PrefetchConfig(predictor=PredictorName.ROUTER))
    io: IoConfig = field(default_factory=IoConfig)
    links: LinksConfig = field(default_factory=LinksConfig)

    #: Fields of its tables that nothing in serving reads: other values than their defaults are refused.
    training_only: ClassVar = (
        *("cache.write_back_every", "prefetch.gather_depth"),
        *("links.gather", "links.exchange", "links.node"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for dotted in self.training_only:
            table, name = dotted.split(".")
            given = getattr(self, table)
            if getattr(given, name) != getattr(type(given)(), name):
                raise ConfigError(f"{dotted}: has effect in training only; serving does not take it")
