"""Configuration of the host cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from tierstore.errors import ConfigError

__all__ = ["CacheConfig", "LfuVariant", "PolicyName", "Scope"]


class PolicyName(Enum):
    """Eviction policies that a live store runs."""

    LRU = "lru"
    LFU_DECAY = "lfu-decay"


class LfuVariant(Enum):
    """Algorithm 1 of SE-MoE as printed, or with its slips mended (see ``native/cache/lfu_decay.hpp``)."""

    PAPER = "paper"
    CORRECTED = "corrected"


class Scope(Enum):
    """Whether all layers share the cache or each has a quota of its own."""

    GLOBAL = "global"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Policy of the host cache (SE-MoE section 2.2, Algorithm 1).

    ``decay`` (the paper's beta) multiplies every hit count once in ``decay_every`` (K) training steps; only
    the half-life that the two give together matters, see ``half_life_steps``.
    """

    policy: PolicyName = field(default=PolicyName.LFU_DECAY, metadata={"help": "eviction policy"})
    variant: LfuVariant = field(default=LfuVariant.CORRECTED, metadata={"help": "variant of Algorithm 1"})
    scope: Scope = field(default=Scope.GLOBAL, metadata={"help": "one cache, or a quota for each layer"})
    layer_shares: tuple[float, ...] = field(
        default=(), metadata={"help": "with scope layer: each layer's part of the cache (empty: equal parts)"}
    )
    threshold: float = field(default=0.0, metadata={"help": "fewest hits that make an entry a victim"})
    decay: float = field(default=0.5, metadata={"help": "beta: what hit counts are multiplied by"})
    decay_every: int = field(default=8, metadata={"help": "K: training steps between two decays"})
    write_back_every: int = field(
        default=0,
        metadata={"help": "update cycle: write dirty entries back every so many steps (0: on eviction)"},
    )

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigError(f"cache.decay: expected a number in (0, 1], got {self.decay}")
        if self.decay_every < 1:
            raise ConfigError(f"cache.decay_every: expected at least 1 step, got {self.decay_every}")
        if self.threshold < 0:
            raise ConfigError(f"cache.threshold: expected at least 0 hits, got {self.threshold}")
        if self.layer_shares and self.scope is not Scope.LAYER:
            raise ConfigError("cache.layer_shares: expected cache.scope = layer, got global")
        if any(not (math.isfinite(share) and share > 0) for share in self.layer_shares):
            raise ConfigError(f"cache.layer_shares: expected numbers above 0, got {list(self.layer_shares)}")
        if self.write_back_every < 0:
            raise ConfigError(f"cache.write_back_every: expected at least 0, got {self.write_back_every}")

    @property
    def half_life_steps(self) -> float:
        """Training steps after which a hit counts half; infinite when nothing decays."""
        return math.inf if self.decay == 1 else self.decay_every * math.log(0.5) / math.log(self.decay)

    @property
    def starvation_warning(self) -> str | None:
        """Why these settings can leave a full cache without a victim, or None.

        Entries whose hits decay below the threshold can no longer be chosen and spoil the cache.
        """
        if self.policy is PolicyName.LFU_DECAY and self.threshold > 0 and self.decay < 1:
            return (
                f"cache.threshold = {self.threshold:g} with cache.decay = {self.decay:g}: entries that decay "
                "below the threshold are kept although nobody asks for them; the fallback victim is the "
                "least hit entry"
            )
        return None
