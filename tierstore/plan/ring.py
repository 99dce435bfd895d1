"""Ring memory against chosen experts: what a forward pass takes with either (SE-MoE section 3.2). Imports no torch.

A pass of T tokens computes N layers of E experts, of which a token goes to k. A layer reaches, where its router is even,

    d(T) = E (1 - (1 - k / E)^T)

of them, and computes for C seconds. Bringing one expert to the device takes b: the slower of its copy and of its share of
the disk, (1 - h) of a read, where the host cache holds the part h of all experts.

* **Ring** of K layers: a layer's experts are all loaded, while layers before it compute, so a pass takes N max(C, E b). With
  K = 1 there is nothing to compute meanwhile: N (C + E b). With K = N nothing moves: N C.
* **Sparse**: of the d(T) experts the device has the part a, or they were guessed in time, the part g of the rest; these are
  loaded during the layer before, and what is left is waited for: with m = (1 - a) d(T), N (max(C, g m b) + (1 - g) m b).
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.machine_profile import Cost, Profile


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many of a layer's ``experts`` so many tokens are expected to reach."""
    if not 1 <= top_k <= experts:
        raise ConfigError(f"top_k: expected 1 to {experts}, got {top_k}")
    return float(experts * (1.0 - (1.0 - top_k / experts) ** tokens))


@dataclass(frozen=True, kw_only=True)
class ServedLayers:
    """The MoE layers of a model: ``expert_bytes`` of one expert on the device, ``dense_numel`` parameters beside the experts
    of a layer.
    """

    layers: int
    experts: int
    top_k: int
    expert_numel: int
    expert_bytes: int
    dense_numel: int = 0

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts


@dataclass(frozen=True, kw_only=True)
class ExpertMemorySizes:
    """Experts that ``device`` and ``host`` hold, and how many layers the ring has (0: too few for a layer)."""

    device: int
    host: int
    ring_layers: int


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """Of a pass to come: its ``tokens``; and what passes like it have shown, in parts from 0 to 1 (None: nothing yet).

    ``reached``: experts that a layer reached, over those that an even router would; it may be above 1. ``resident``: of the
    experts that were asked for, those that the device had. ``guessed``: of the others, those that were on their way.
    """

    tokens: int
    reached: float | None = None
    resident: float | None = None
    guessed: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a forward pass. ``ring_s`` is None where the device cannot hold a layer."""

    distinct: float
    compute_s: float
    ring_s: float | None
    sparse_s: float

    @property
    def ring_is_faster(self) -> bool:
        return self.ring_s is not None and self.ring_s <= self.sparse_s


def pass_times(
    model: ServedLayers,
    sizes: ExpertMemorySizes,
    facts: PassFacts,
    profile: Profile,
    copy: Cost | None = None,
) -> PassTimes:
    """What a pass takes with a ring and without. ``copy``: of one expert to the device (default: the profile's)."""
    count, tokens = model.layers, facts.tokens
    distinct = distinct_experts(model.experts, model.top_k, tokens) * (facts.reached or 1.0)
    distinct = min(distinct, float(model.experts))
    compute_s = (
        profile.dense_flops.seconds(2.0 * model.dense_numel * tokens)
        + distinct * profile.expert_flops.latency_s
        + 2.0 * model.expert_numel * tokens * model.top_k / profile.expert_flops.per_s
    )
    load_s = _load_s(model, sizes, profile, copy or profile.copy)
    resident = min(1.0, sizes.device / model.total) if facts.resident is None else facts.resident
    missing_s = (1.0 - resident) * distinct * load_s
    guessed = facts.guessed or 0.0
    sparse_s = count * (max(compute_s, guessed * missing_s) + (1.0 - guessed) * missing_s)
    return PassTimes(
        distinct=distinct,
        compute_s=count * compute_s,
        ring_s=_ring_s(model, sizes.ring_layers, compute_s, model.experts * load_s),
        sparse_s=sparse_s,
    )


def _load_s(model: ServedLayers, sizes: ExpertMemorySizes, profile: Profile, copy: Cost) -> float:
    """Of one expert."""
    missed = 1.0 - min(1.0, sizes.host / model.total)
    return max(copy.seconds(model.expert_bytes), missed * profile.disk_read.seconds(model.expert_bytes))


def _ring_s(model: ServedLayers, ring_layers: int, compute_s: float, layer_s: float) -> float | None:
    if ring_layers < 1:
        return None
    if ring_layers >= model.layers:
        return model.layers * compute_s
    each = compute_s + layer_s if ring_layers == 1 else max(compute_s, layer_s)
    return model.layers * each
