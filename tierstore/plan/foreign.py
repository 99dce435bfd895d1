"""Plans of a model that comes with a config.json: what each use of it takes, and whether its pairs fit in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import ConfigError
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import HfSpec
from tierstore.machine_profile import Profile
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.fitting import Limits, Verdict, judge
from tierstore.plan.predict import Prediction, predict
from tierstore.plan.uses import Use, usage_of
from tierstore.stats import Tier
from tierstore.store.disk.store_extents import extent_bytes
from tierstore.tiers.slots import DeviceKind

#: What pairs in memory take: weight, gradient and two moments, fp32.
_STATE_BYTES = 16


@dataclass(frozen=True)
class UsePlan:
    """One use of a model on one rank. ``prediction``: of a step, or of a forward pass; None without budgets that start."""

    use: Use
    setting: Setting
    verdict: Verdict
    prediction: Prediction | None
    #: Serving: one token for each sequence of a batch.
    token: Prediction | None = None

    @property
    def memory(self) -> int | None:
        """Bytes of memory, the device's included; None without budgets that start."""
        taken = self.verdict.capacity
        return None if taken is None else taken.total(Tier.HOST, Tier.DEVICE)

    @property
    def disk(self) -> int | None:
        """Bytes of disk; None without budgets that start."""
        taken = self.verdict.capacity
        return None if taken is None else taken.total(Tier.NVME)

    def as_json(self) -> dict[str, Any]:
        """Numbers by keys that say their unit."""
        return {
            "use": self.use.value,
            "fits": self.verdict.fits,
            "shortfalls": [
                {"place": s.place, "needed_bytes": s.needed, "limit_bytes": s.limit}
                for s in self.verdict.shortfalls
            ],
            "memory_bytes": self.memory,
            "disk_bytes": self.disk,
            "host_budget_bytes": self.setting.config.host_budget,
            "least_host_budget_bytes": self.setting.least_host_budget,
            "step": _times(self.prediction),
            "token": _times(self.token),
        }


def _times(made: Prediction | None) -> dict[str, object] | None:
    if made is None:
        return None
    return {
        "step_s": made.step_s,
        "tokens_per_s": made.tokens_per_s,
        "read_bytes": made.traffic.read_bytes,
        "written_bytes": made.traffic.written_bytes,
        "bottleneck": made.bottleneck.value,
        "evidence": made.evidence.value,
    }


@dataclass(frozen=True)
class PairsPlan:
    """The low-rank pairs of one rank. ``in_memory``: whether all of the experts' pairs, with their gradients and moments,
    fit beside what LoRA needs at least.
    """

    rank: int
    attention: int
    experts: int
    resident: int
    records: int
    in_memory: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "rank_count": self.rank,
            "attention_parameters_count": self.attention,
            "expert_parameters_count": self.experts,
            "resident_bytes": self.resident,
            "record_bytes": self.records,
            "fits_in_memory": self.in_memory,
        }


@dataclass(frozen=True)
class UsesPlan:
    """Every use of one model."""

    spec: HfSpec
    uses: tuple[UsePlan, ...]
    pairs: PairsPlan
    #: One copy of the experts, read only, on one rank's disk.
    frozen: int

    def as_json(self) -> dict[str, Any]:
        manifest = self.spec.manifest
        return {
            "model": {
                "model_type": manifest.model_type,
                "architecture": manifest.architecture,
                "compute_dtype": manifest.compute.value,
                "quantization": manifest.quantization.value,
                "expert_ratio": manifest.expert_parameters / manifest.total_parameters,
            },
            "uses": [use.as_json() for use in self.uses],
            "pairs": self.pairs.as_json(),
            "frozen_experts_bytes": self.frozen,
        }


def setting_for(setting: Setting, use: Use, rank: int) -> Setting:
    """``setting`` for another use. Raises ConfigError where the store that holds the model does not allow it."""
    spec = _spec(setting)
    if use is Use.FULL and spec.manifest.weights is Weights.FROZEN:
        raise ConfigError(
            f"{spec.directory}: its experts were imported frozen; --for: expected lora, lora-attention or serve"
        )
    return replace(setting, usage=usage_of(spec, use, rank, setting.config.adamw.moments))


def as_configured(setting: Setting) -> Setting:
    """``setting`` for the use that its configuration trains the model, or a stage of it, for. Raises ConfigError."""
    lora, spec = setting.config.lora, setting.config.model
    if not (lora.enabled and isinstance(spec, HfSpec)):
        return setting
    use = Use.LORA if lora.experts else Use.LORA_ATTENTION
    usage = usage_of(spec, use, lora.rank, setting.config.adamw.moments)
    return replace(setting, usage=replace(usage, attention=spec.own(usage.attention, 0)))


def plan_uses(setting: Setting, limits: Limits, profile: Profile, rank: int) -> UsesPlan:
    """What each use of the imported model of ``setting`` takes, with pairs of ``rank``. Raises ConfigError."""
    spec = _spec(setting)
    frozen_only = spec.manifest.weights is Weights.FROZEN
    uses = [
        _plan_use(setting_for(setting, use, rank), limits, profile)
        for use in Use
        if not (use is Use.FULL and frozen_only)
    ]
    lora = setting_for(setting, Use.LORA, rank)
    return UsesPlan(spec, tuple(uses), _pairs(lora, limits), extent_bytes(lora.schema, lora.records, 0))


def _plan_use(setting: Setting, limits: Limits, profile: Profile) -> UsePlan:
    verdict = judge(setting, limits)
    if verdict.capacity is None:
        return UsePlan(setting.usage.use, setting, verdict, None)
    token = None
    if not setting.usage.trains:
        sequences = setting.config.data.batch_size // setting.ranks.count
        one = replace(setting, usage=replace(setting.usage, tokens=sequences))
        token = predict(one, profile)
    return UsePlan(setting.usage.use, setting, verdict, predict(setting, profile, verdict.capacity), token)


def _pairs(lora: Setting, limits: Limits) -> PairsPlan:
    usage = lora.usage
    assert usage.pairs is not None
    resident = _STATE_BYTES * usage.pairs.numel * lora.records
    least = replace(lora, config=replace(lora.config, host_budget=lora.least_host_budget, device_budget=0))
    taken = capacity(least)
    tiers = (Tier.HOST, Tier.DEVICE) if lora.device is DeviceKind.CPU else (Tier.HOST,)
    return PairsPlan(
        rank=usage.rank,
        attention=sum(usage.attention),
        experts=usage.pairs.numel * lora.model.records,
        resident=resident,
        records=extent_bytes(usage.pairs, lora.records, lora.config.retain),
        in_memory=taken.total(*tiers) + resident <= limits.memory,
    )


def _spec(setting: Setting) -> HfSpec:
    spec = setting.config.model
    if not isinstance(spec, HfSpec):
        raise ConfigError("--for, --lora: expected an imported model, got the built-in one")
    return spec
