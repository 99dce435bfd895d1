"""A complete plan: the setting, the results, and both as JSON. Every figure names its evidence.

For an imported model every use is planned, and whether its LoRA pairs fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierstore import machine
from tierstore.decision import Decision
from tierstore.hf.manifest import Weights
from tierstore.hf.spec import HfSpec
from tierstore.machine_profile import ASSUMED, Profile
from tierstore.outputs import to_json
from tierstore.plan.capacity import (
    DEFAULT_RANK,
    TIERS,
    Setting,
    Use,
    capacity,
    imported_spec,
    setting_for,
)
from tierstore.plan.fitting import (
    Change,
    Hardware,
    Limits,
    Remedy,
    Shortfall,
    Verdict,
    hardware_for,
    judge,
    shortest_remedy,
    totals,
)
from tierstore.plan.order import StepProposal, compare_orders, in_order, propose_step
from tierstore.plan.papers import TensorCosts, paper_bytes, tensor_costs
from tierstore.plan.predict import Prediction, predict
from tierstore.plan.presets import Preset
from tierstore.prefetch.operations import Resource
from tierstore.stats import Tier
from tierstore.store.disk.store_extents import extent_bytes
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig, assignment_of
from tierstore.train.files import MicroOrder, byte_files, text_bytes
from tierstore.train.footprint import within_memory
from tierstore.train.tasks import Assignment

#: Bytes of a parameter of pairs in memory: weight, gradient and two moments, fp32.
_STATE_BYTES = 16


@dataclass(frozen=True)
class UsePlan:
    """One use of a model on one rank. ``prediction``: of a step or a forward pass; None if the budgets are too small."""

    setting: Setting
    verdict: Verdict
    prediction: Prediction | None
    #: Serving: a pass over one token of each sequence of the batch.
    token: Prediction | None = None

    @property
    def memory(self) -> int | None:
        """Bytes of memory, the device's included; None if the budgets are too small."""
        taken = self.verdict.capacity
        return None if taken is None else taken.total(Tier.HOST, Tier.DEVICE)

    @property
    def disk(self) -> int | None:
        """Bytes of disk; None if the budgets are too small."""
        taken = self.verdict.capacity
        return None if taken is None else taken.total(Tier.NVME)

    def as_json(self) -> dict[str, object]:
        """The use as JSON, with units in the keys."""
        return {
            "use": self.setting.usage.use,
            "fits": self.verdict.fits,
            "shortfalls": _shortfalls(self.verdict.shortfalls),
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
        **{name: getattr(made, name) for name in ("step_s", "tokens_per_s", "bottleneck", "evidence")},
        "read_bytes": made.traffic.read_bytes,
        "written_bytes": made.traffic.written_bytes,
    }


@dataclass(frozen=True)
class UsesPlan:
    """The plans of every use of one model."""

    spec: HfSpec
    uses: tuple[UsePlan, ...]
    pairs: Mapping[str, int]
    #: Bytes of one read-only copy of the experts on one rank's disk.
    frozen: int

    def as_json(self) -> dict[str, object]:
        manifest = self.spec.manifest
        return {
            "model": {
                "model_type": manifest.model_type,
                "architecture": manifest.architecture,
                "compute_dtype": manifest.compute,
                "quantization": manifest.quantization,
                "expert_ratio": manifest.expert_parameters / manifest.total_parameters,
            },
            "uses": self.uses,
            "pairs": self.pairs,
            "frozen_experts_bytes": self.frozen,
        }


def plan_uses(setting: Setting, limits: Limits, profile: Profile, rank: int) -> UsesPlan:
    """Plan every use of the imported model of ``setting``, with LoRA pairs of ``rank``. Raises ConfigError."""
    spec = imported_spec(setting)
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
        return UsePlan(setting, verdict, None)
    token = None
    if not setting.usage.trains:
        sequences = setting.config.data.batch_size // setting.ranks
        one = replace(setting, usage=replace(setting.usage, tokens=sequences))
        token = predict(one, profile)
    return UsePlan(setting, verdict, predict(setting, profile, verdict.capacity), token)


def _pairs(lora: Setting, limits: Limits) -> dict[str, int]:
    """The LoRA pairs of one rank. ``fits_in_memory``: whether all experts' pairs, with gradients and moments, fit in memory
    in addition to the minimum that LoRA needs.
    """
    usage = lora.usage
    assert usage.pairs is not None
    resident = _STATE_BYTES * usage.pairs.numel * lora.records
    least = replace(lora, config=replace(lora.config, host_budget=lora.least_host_budget, device_budget=0))
    memory, _, _ = totals(least, capacity(least))
    return {
        "rank_count": usage.rank,
        "attention_parameters_count": sum(usage.attention),
        "expert_parameters_count": usage.pairs.numel * lora.model.records,
        "resident_bytes": resident,
        "record_bytes": extent_bytes(usage.pairs, lora.records, lora.config.retain),
        "fits_in_memory": memory + resident <= limits.memory,
    }


@dataclass(frozen=True)
class Plan:
    """What a run takes, whether it fits, the time of a step, and what to change.

    ``prediction`` is None if the budgets are too small to start a run; ``remedy`` is None if the run fits or no change
    helps. In the latter case ``hardware`` is the smallest sufficient machine.
    """

    setting: Setting
    limits: Limits
    verdict: Verdict
    remedy: Remedy | None
    hardware: Hardware | None
    prediction: Prediction | None
    alpha: float
    paper: Mapping[str, int]
    preset: Preset | None
    #: Every use of an imported model.
    uses: UsesPlan | None = None
    #: The order in which several micro-batches pass through the layers.
    order: Decision[MicroOrder] | None = None
    #: The step that the disk would not bound, if this one is bound by it.
    proposed_step: StepProposal | None = None
    #: What the layers of tensor-parallel ranks send.
    tensor: TensorCosts | None = None

    @property
    def tasks(self) -> Assignment | None:
        """Which rank computes which rows of each task; None without tasks."""
        config, count = self.setting.config, self.setting.ranks
        if not config.tasks:
            return None
        parallel = config.parallel
        return assignment_of(config, max(1, count // (parallel.stages * parallel.tensor)))

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON, with units in the keys."""
        model, config, taken = self.setting.model, self.setting.config, self.verdict.capacity
        hardware, made = self.hardware, self.prediction
        found: dict[str, object] = {
            "parameters": model.parameters,
            "dense_parameters_count": model.dense,
            "sparse_parameters_count": model.sparse,
            "active_parameters_count": model.active,
            "experts": model.records,
            "ranks_count": self.setting.ranks,
            "device": self.setting.device,
            "host_budget_bytes": config.host_budget,
            "fits": self.verdict.fits,
            "shortfalls": _shortfalls(self.verdict.shortfalls),
            "remedy": _changes(self.remedy.changes if self.remedy else ()),
            "hardware": hardware
            and {
                "changes": _changes(hardware.changes),
                "shortfalls": _shortfalls(hardware.shortfalls),
                "memory_bytes": hardware.memory,
                "disk_bytes": hardware.disk,
                "device_bytes": hardware.device,
            },
            "terms": [
                {
                    "tier": term.tier,
                    "name": term.name,
                    "term_bytes": term.nbytes,
                    "formula": term.formula,
                    "evidence": term.evidence,
                }
                for term in (taken.terms if taken else ())
            ],
            "totals": {f"{tier.value}_bytes": taken.total(tier) for tier in TIERS} if taken else {},
            "limits": {
                "memory_bytes": self.limits.memory,
                "disk_bytes": self.limits.disk,
                "device_bytes": self.limits.device,
            },
            "paper": {"alpha_ratio": self.alpha, **self.paper},
            "preset": self.preset
            and {
                "source": self.preset.source,
                "published_parameters_count": self.preset.published,
                "note": self.preset.note,
            },
            "prediction": made
            and {
                **(_times(made) or {}),
                "busy": [{"resource": r, "busy_ratio": made.busy_ratio[r]} for r in Resource],
                "path": [{"kind": kind, "path_s": spent} for kind, spent in made.path_s.items()],
                "traffic_evidence": made.traffic.evidence,
                "active_ratio": made.traffic.active,
            },
            "order": self.order
            and {
                "micro_order": self.order.value,
                "reason": self.order.reason,
                **{name: self.order.facts[name] for name in ("micro", "layer", "one_larger")},
            },
            "proposed_step": self.proposed_step,
            "pipeline_degree": made
            and made.degrees
            and {
                **made.degrees.as_json(),
                "step_s": made.step_s,
                "one_chunk_step_s": made.one_chunk_s,
                "saved_s": made.chunks_save_s,
            },
            "vocabulary": self.setting.vocabulary,
            "tensor": self.tensor,
            **({"tasks": self.tasks} if self.tasks else {}),
            **({"use": self.setting.usage.use, **self.uses.as_json()} if self.uses else {}),
        }
        plain: Any = to_json(found)
        return dict(plain)


def plan_run(
    config: TrainConfig,
    limits: Limits | None = None,
    *,
    preset: Preset | None = None,
    ranks: int = 1,
    device: DeviceKind = DeviceKind.CPU,
    profile: Profile = ASSUMED,
    alpha: float | None = None,
    use: Use = Use.FULL,
    lora: int = DEFAULT_RANK,
) -> Plan:
    """The plan of a run of ``config``.

    ``limits`` None: this machine, shared by all ``ranks``. ``preset``: plan this published model instead. ``profile``: costs
    measured by ``tierstore bench machine``. ``alpha``: the share of activated experts in SE-MoE's formulas (None: that of a
    step). ``use``: the use of an imported model to plan in detail, with LoRA pairs of rank ``lora``; its other uses are
    planned as well. Nothing is opened, allocated or measured. Raises ConfigError.
    """
    config.check_length()
    # Of a model outside a store only the configuration is known, not the tokenizer.
    spec = config.spec
    if spec.tokenizer is None and not preset and not (isinstance(spec, HfSpec) and spec.directory is None):
        for data in config.data_by_task.values():
            byte_files(data)  # refuses what needs a tokenizer
    setting = Setting(
        config=config,
        model=preset.architecture if preset else config.model.architecture,
        ranks=ranks,
        expert=config.parallel.expert,
        device=device,
        process_bytes=profile.process_bytes,
        process_evidence=profile.evidence,
        device_memory=None if limits is None else limits.device,
        text_bytes=sum(text_bytes(data, spec.tokenizer) for data in config.data_by_task.values()),
    )
    foreign = isinstance(config.model, HfSpec) and preset is None
    if foreign or use is not Use.FULL:
        setting = setting_for(setting, use, lora)
    order = None
    if setting.usage.trains and config.data.micro_batches > 1:
        order = compare_orders(setting, profile)
        setting = replace(setting, config=in_order(setting.config, order))
    asked = setting
    setting = replace(setting, config=within_memory(setting.config, setting.fixed, device, sums=setting.sums))
    limits = limits or machine_limits(config.store, sharing=ranks)
    verdict = judge(setting, limits)
    remedy = None if verdict.fits else shortest_remedy(setting, limits)
    prediction = predict(setting, profile, verdict.capacity) if verdict.capacity else None
    proposal, staged = None, config.parallel.stages > 1  # pipeline stages have no layer order
    if prediction and setting.usage.trains and prediction.bottleneck is Resource.DISK and not staged:
        proposal = propose_step(asked, profile)
    if alpha is None:
        alpha = prediction.traffic.active if prediction else 1.0
    return Plan(
        setting=setting,
        limits=limits,
        verdict=verdict,
        remedy=remedy,
        hardware=None if verdict.fits or remedy else hardware_for(setting, limits),
        prediction=prediction,
        alpha=alpha,
        paper=paper_bytes(setting.model, alpha),
        preset=preset,
        uses=plan_uses(setting, limits, profile, lora) if foreign else None,
        order=order,
        proposed_step=proposal,
        tensor=tensor_costs(
            config,
            setting.model.top_k,
            ranks=ranks,
            flops=profile.expert_flops.per_s,
            bandwidth=profile.all_to_all.per_s,
        ),
    )


def machine_limits(
    store: Path,
    *,
    sharing: int = 1,
    memory: int | None = None,
    disk: int | None = None,
    device: int | None = None,
) -> Limits:
    """The limits of one of ``sharing`` ranks on a machine with ``memory`` and ``disk`` bytes. None: this machine's memory,
    and the free space under ``store``. ``device``: bytes of one CUDA device.
    """
    if memory is None:
        memory = machine.memory().usable_bytes
    if disk is None:
        disk = machine.disk(machine.existing_parent(store)).free_bytes
    return Limits(memory // sharing, disk // sharing, device, sharing=sharing)


def _shortfalls(shortfalls: Iterable[Shortfall]) -> list[dict[str, object]]:
    return [{"place": s.place, "needed_bytes": s.needed, "limit_bytes": s.limit} for s in shortfalls]


def _changes(changes: Iterable[Change]) -> list[dict[str, str]]:
    return [{"change": change.text, "effect": change.effect} for change in changes]
