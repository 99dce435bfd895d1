"""Configuration of the host cache, and of a device's slots, which are a cache over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tierstore import _native
from tierstore.config import check_least, key
from tierstore.errors import ConfigError

_LFU_DECAY = "lfu-decay"
_LEARNED_USE = "learned-use"


class Scope(Enum):
    """Whether all layers share the cache or each has a quota of its own."""

    GLOBAL = "global"
    LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Policies of the host cache and of a device's slots, by name, with their options (docs/CACHE.md lists both).

    ``policy`` may also be a class of your own, ``"package.module:Class"`` (see ``tierstore.cache.policy``).
    Raises ConfigError for a policy or an option that does not exist, naming those that do.
    """

    policy: str = key(_LFU_DECAY, "eviction policy")
    scope: Scope = key(Scope.GLOBAL, "one cache, or a quota for each layer")
    layer_shares: tuple[float, ...] = key(
        (), "with scope layer: each layer's part of the cache (empty: equal)"
    )
    write_back_every: int = key(0, "steps between writes of dirty entries (0: on eviction)")
    options: Mapping[str, float | str] = field(default_factory=dict, metadata={"help": "options of policy"})
    device_policy: str = key("", "eviction policy of a device's slots (empty: as policy)")
    device_options: Mapping[str, float | str] = field(
        default_factory=dict, metadata={"help": "options of device_policy"}
    )

    def __post_init__(self) -> None:
        if self.layer_shares and self.scope is not Scope.LAYER:
            raise ConfigError("cache.layer_shares: expected cache.scope = layer, got global")
        if any(not (math.isfinite(share) and share > 0) for share in self.layer_shares):
            raise ConfigError(f"cache.layer_shares: expected numbers above 0, got {list(self.layer_shares)}")
        check_least(self, 0, "write_back_every", table="cache.")
        if self.device_options and not self.device_policy:
            raise ConfigError("cache.device_options: expected cache.device_policy, whose options they are")
        _check("policy", self.policy, self.options)
        if self.device_policy:
            _check("device_policy", self.device_policy, self.device_options)

    @property
    def of_device(self) -> CacheConfig:
        """The configuration of a device's slots."""
        if not self.device_policy:
            return self
        return CacheConfig(policy=self.device_policy, options=self.device_options)

    @property
    def headroom_frames(self) -> int:
        """Frames that the policy leaves empty."""
        return _native.policy_headroom_frames(self.policy, dict(self.options))

    @property
    def tells_sequences_apart(self) -> bool:
        """Whether the policy uses which sequences request a record (``Need.FIRST_SEQUENCE``)."""
        return _LEARNED_USE in (self.policy, self.device_policy)

    @property
    def _lfu_decay(self) -> _native.LfuDecayOptions | None:
        """The options of LFU-decay with its defaults; None for another policy."""
        return _native.lfu_decay_options(dict(self.options)) if self.policy == _LFU_DECAY else None

    @property
    def counts_steps(self) -> bool:
        """Whether the policy counts steps: LFU-decay except for the paper's variant, and a policy of your own."""
        known = self._lfu_decay
        return ":" in self.policy if known is None else known.variant != "paper"

    @property
    def half_life(self) -> float | None:
        """LFU-decay: steps (requests, for the paper variant) after which a hit counts half."""
        known = self._lfu_decay
        return None if known is None else known.half_life

    @property
    def summary(self) -> str:
        """The policy and its options in a few words."""
        known = self._lfu_decay
        if known is None:
            return ", ".join([self.policy, *(f"{name} {value}" for name, value in self.options.items())])
        unit = "requests" if known.variant == "paper" else "steps"
        return (
            f"{self.policy} ({known.variant}), threshold {known.threshold:g}, "
            f"half-life {known.half_life:g} {unit}{', remembers evicted hits' * known.remember}"
        )

    @property
    def starvation_warning(self) -> str | None:
        """Why these settings can leave a full cache without a victim, or None.

        Entries whose hits decay below the threshold can no longer be chosen and spoil the cache.
        """
        known = self._lfu_decay
        if known is None or known.threshold == 0 or known.beta == 1:
            return None
        return (
            f"cache.options.threshold = {known.threshold:g} with a half-life of {known.half_life:g}: entries that "
            "decay below the threshold are kept although nothing requests them; the fallback victim is the "
            "least-hit entry"
        )


def _check(name: str, policy: str, options: Mapping[str, float | str]) -> None:
    try:
        _native.check_policy(policy, dict(options))
    except ValueError as error:
        raise ConfigError(f"cache.{name}: {error}") from error
