"""What a tuner tries: settings of the cache that ``tierstore train`` has, and how they are written there.

The half-life is what matters of LFU-decay's K and beta (they act through it alone), so that is what is
searched: whole half-lives as ``decay = 0.5`` every so many steps, shorter ones as a decay at every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.cache.config import CacheConfig, PolicyName
from tierstore.cache.config import Scope as CacheScope
from tierstore.config import dump
from tierstore.lab.quotas import least_quotas
from tierstore.lab.requests import Requests
from tierstore.lab.simulate import Contract, PolicySpec, Scope, Setting
from tierstore.units import format_bytes

__all__ = [
    "SIMPLEST_FIRST",
    "Candidate",
    "cache_configuration",
    "configuration_text",
    "default_candidate",
    "half_lives",
    "lfu_decay",
    "live_policies",
    "neighbours",
    "starting_grid",
]

SIMPLEST_FIRST = (
    *("fifo", "clock", "sieve", "lru", "lfu", "slru", "s3-fifo", "2q", "w-tinylfu", "arc", "lirs"),
    *("lfu-decay", "next-use"),
)
"""Policies by what they cost to run and to understand; among equals the first is taken. Then one cache comes
before a quota for each layer, equal quotas before tuned ones, and fewer options before more."""

_COARSE = 4.0  # between half-lives of the grid
_THRESHOLDS = (1.0, 2.0)
_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with its options, scope and, with layer scope, quotas (empty: equal ones)."""

    policy: PolicySpec
    scope: Scope = Scope.GLOBAL
    layer_quotas: tuple[int, ...] = ()

    def setting(self, capacity_frames: int, contract: Contract) -> Setting:
        """This candidate at a capacity."""
        return Setting(self.policy, capacity_frames, self.scope, contract, self.layer_quotas)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that do the same."""
        return (self.policy.name, tuple(sorted(self.policy.options.items())), self.scope, self.layer_quotas)

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Less is simpler."""
        known = SIMPLEST_FIRST.index(self.policy.name) if self.policy.name in SIMPLEST_FIRST else 99
        layered = int(self.scope is Scope.LAYER)
        return (known, layered, int(bool(self.layer_quotas)), len(self.policy.options))


def live_policies() -> tuple[str, ...]:
    """Policies that ``tierstore train`` runs, in the order of ``SIMPLEST_FIRST``."""
    live = {policy.value for policy in PolicyName}
    return tuple(name for name in SIMPLEST_FIRST if name in live)


def lfu_decay(half_life: float, threshold: float = 0.0) -> PolicySpec:
    """LFU-decay (corrected) with a half-life in steps; infinite: hits count for ever."""
    options: dict[str, float | str] = {}
    if math.isinf(half_life):
        options = {"beta": 1.0, "interval": 1.0}
    else:
        options = {"half_life": half_life, "interval": max(1.0, math.floor(half_life))}
    if threshold:
        options["threshold"] = threshold
    return PolicySpec("lfu-decay", options)


def default_candidate() -> Candidate:
    """What ``tierstore train`` does when nothing is configured."""
    config = CacheConfig()
    if config.policy is not PolicyName.LFU_DECAY:
        return Candidate(PolicySpec(config.policy.value), Scope(config.scope.value))
    return Candidate(lfu_decay(config.half_life_steps, config.threshold), Scope(config.scope.value))


def half_lives(steps: int) -> list[float]:
    """The grid: from a step up to the length of the trace, and never."""
    grid = [1.0]
    while grid[-1] * _COARSE <= max(steps, 1):
        grid.append(grid[-1] * _COARSE)
    return [*grid, _NEVER]


def starting_grid(
    requests: Requests, capacity_frames: int, policies: Sequence[str], scopes: Sequence[Scope]
) -> list[Candidate]:
    """Every policy with its defaults, LFU-decay over half-lives; layer scope where every layer's share fits."""
    specs: list[PolicySpec] = []
    for name in policies:
        if name == "lfu-decay":
            specs += [lfu_decay(half_life) for half_life in half_lives(requests.step_count)]
        else:
            specs.append(PolicySpec(name))
    candidates = [Candidate(spec, scope) for scope in scopes for spec in specs]
    return [one for one in candidates if _fits(requests, one, capacity_frames)]


def _fits(requests: Requests, candidate: Candidate, capacity_frames: int) -> bool:
    if candidate.scope is Scope.GLOBAL:
        return True
    quotas = np.array(candidate.setting(capacity_frames, Contract.ATOMIC).quotas(requests))
    layers = int(np.count_nonzero(requests.layer_frames))
    return layers > 1 and bool((quotas >= least_quotas(requests, headroom=1)).all())


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Settings around ``candidate`` that the grid skipped: half-lives between its points, thresholds."""
    if candidate.policy.name != "lfu-decay":
        return
    half_life = _half_life(candidate.policy.options)
    if math.isfinite(half_life):
        for factor in (0.25 * _COARSE**0.5, 0.5 * _COARSE**0.5, _COARSE**0.5, 0.75 * _COARSE):
            yield Candidate(lfu_decay(half_life * factor), candidate.scope)
    for threshold in _THRESHOLDS:
        yield Candidate(lfu_decay(half_life, threshold), candidate.scope)


def _half_life(options: Mapping[str, float | str]) -> float:
    return float(options["half_life"]) if "half_life" in options else _NEVER


def cache_configuration(candidate: Candidate) -> CacheConfig | None:
    """The candidate as ``tierstore train`` takes it, or None for a policy that it does not run."""
    if candidate.policy.name not in live_policies():
        return None
    settings: dict[str, object] = {
        "policy": PolicyName(candidate.policy.name),
        "scope": CacheScope(candidate.scope.value),
    }
    options = candidate.policy.options
    if candidate.policy.name == "lfu-decay":
        half_life = _half_life(options)
        interval = int(float(options.get("interval", 1)))
        settings["decay"] = 1.0 if math.isinf(half_life) else 0.5 ** (interval / half_life)
        settings["decay_every"] = interval
        settings["threshold"] = float(options.get("threshold", 0.0))
    if candidate.layer_quotas:
        quotas = [quota for quota in candidate.layer_quotas if quota]
        settings["layer_shares"] = tuple(round(quota / sum(quotas), 9) for quota in quotas)
    return CacheConfig(**settings)  # type: ignore[arg-type]


def configuration_text(requests: Requests, candidate: Candidate, capacity_frames: int) -> str:
    """TOML to paste into a configuration of ``tierstore train``: its ``[cache]`` table, as far as it matters."""
    capacity = format_bytes(capacity_frames * requests.frame_bytes)
    share = capacity_frames / requests.total_frames
    head = f"# for a cache of {capacity}, {share:.1%} of what {requests.name} asks for\n"
    config = cache_configuration(candidate)
    if config is None:
        return head + f"# {candidate.policy.name} is not a policy of tierstore train: nothing to configure\n"
    matters = {"policy", "scope"}
    if candidate.policy.name == "lfu-decay":
        matters |= {"variant", "threshold", "decay", "decay_every"}
    if candidate.layer_quotas:
        matters.add("layer_shares")
    lines = [line for line in dump(config).splitlines() if line.partition(" ")[0] in matters]
    return head + "[cache]\n" + "\n".join(lines) + "\n"
