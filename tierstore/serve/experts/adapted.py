"""Frozen experts served with the low-rank pairs that were trained beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from tierstore._native import HugePages
from tierstore.model.spec import ModelSpec
from tierstore.model.store_schema import expert_key, pair_key
from tierstore.moe.lora import LoraConfig, PairShape
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.schedule import Schedule
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts.gating import served_predictor
from tierstore.serve.experts.opening import CachedExperts
from tierstore.serve.footprint import ServedBudgets
from tierstore.serve.weights import served_records
from tierstore.stats import StallLedger
from tierstore.store.core import StoreCore
from tierstore.tiers import (
    DeviceSlots,
    DeviceTier,
    WeightLoads,
    limited_tier,
    open_device_tier,
    weights_in_place,
)


def open_adapted(
    stack: contextlib.ExitStack,
    *,
    config: ServeConfig,
    store: StoreCore,
    spec: ModelSpec,
    lora: LoraConfig,
    device: torch.device,
    budgets: ServedBudgets,
    ledger: StallLedger,
) -> CachedExperts:
    """As ``open_experts``, for experts whose pairs are records of ``store``. A pass over a layer copies the pairs that it
    needs to memory of its own, beside the budgets, and then walks the experts.
    """
    in_place = weights_in_place(config.weights_in_place, device, config.links.copy)
    loads = WeightLoads.IN_PLACE if in_place else WeightLoads.COPIED

    def tier(slots: DeviceSlots[torch.dtype]) -> DeviceTier:
        opened = open_device_tier(store.engine, slots, device, HugePages.AUTO, loads)
        stack.callback(opened.close)
        return limited_tier(opened, store.engine, config.links.copy)

    def source(slots: DeviceSlots[torch.dtype], key: Callable[[int, int], str]) -> FrozenExperts:
        return FrozenExperts(
            store,
            tier(slots),
            served_records(spec, store, key),
            weight_slots=slots.weights,
            predictor=served_predictor(config, spec),
            schedule=Schedule.of_layers(spec.moe_layers, depth=config.prefetch.depth),
            ledger=ledger,
        )

    assert budgets.pairs is not None
    experts, pairs = budgets.slots, budgets.pairs
    base = source(DeviceSlots(experts.numel, experts.compute.torch, experts.weights, 0), expert_key)
    beside = source(DeviceSlots(pairs.numel, torch.float32, pairs.weights, 0), pair_key)
    shape = PairShape.of(spec.expert_shape, lora)
    return CachedExperts(LoraExperts(base, beside, shape, device=device), store.cache.residency)
