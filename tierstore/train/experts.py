"""The experts of a training session: their records by key, and the sources that the model leases them from.

Experts are trained; or they are frozen, and with LoRA pairs beside them are trained in their place. A pair's record has
its expert's number and layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tierstore._native import HugePages
from tierstore.model.store_schema import EXPERT_SCHEMA, PAIR_SCHEMA, expert_key, pair_key
from tierstore.moe.lora import PairShape
from tierstore.moe.low_rank import initial_pair
from tierstore.parallel import Mesh
from tierstore.prefetch.experts import ExpertTiers, FrozenExperts, TieredExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.predictor import Predictor, make_predictor
from tierstore.prefetch.schedule import Schedule
from tierstore.stats import StallLedger
from tierstore.store.core import StoreCore
from tierstore.store.index.live import LiveRecord
from tierstore.store.registering import NewRecord, register_many
from tierstore.tiers import (
    DeviceSlots,
    DeviceTier,
    WeightLoads,
    limited_tier,
    open_device_tier,
    weights_in_place,
)
from tierstore.train.budgets import Budgets
from tierstore.train.config import TrainConfig


def register_experts(config: TrainConfig, store: StoreCore, owned: range) -> None:
    """Adds the records of a model that is made, not imported."""
    spec = config.spec
    register_many(
        store,
        (
            NewRecord(
                expert_key(layer, expert), EXPERT_SCHEMA, layer, partial(spec.first_weights, layer, expert)
            )
            for layer in spec.moe_layers
            for expert in owned
        ),
    )


def register_pairs(config: TrainConfig, store: StoreCore, owned: range) -> None:
    """Adds the records of the experts' pairs, if the run trains any."""
    if not (config.lora.enabled and config.lora.experts):
        return
    shape, seed = PairShape.of(config.model.expert_shape, config.lora), config.lora.seed

    def values_of(layer: int, expert: int) -> Callable[[], npt.NDArray[np.float32]]:
        return lambda: np.asarray(initial_pair(shape, seed=seed, layer=layer, expert=expert).numpy())

    register_many(
        store,
        (
            NewRecord(pair_key(layer, expert), PAIR_SCHEMA, layer, values_of(layer, expert))
            for layer in config.model.moe_layers
            for expert in owned
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOpener:
    """Opens the sources of a session's experts, of which this rank owns ``owned`` in each layer."""

    config: TrainConfig
    store: StoreCore
    mesh: Mesh
    owned: range
    budgets: Budgets
    timing: StepTiming
    schedule: Schedule
    ledger: StallLedger

    def open(self, stack: contextlib.ExitStack) -> ExpertTiers:
        """What the model leases its experts from; ``stack`` closes the device tiers."""
        lora, slots = self.config.lora, self.budgets.slots
        compute = self.config.model.compute_dtype.torch
        tier = self._tier(
            stack, DeviceSlots(slots.numel, compute, slots.weights, slots.gradients, slots.quantized)
        )
        if not lora.enabled:
            return self._trained(tier, expert_key)
        base = FrozenExperts(
            self.store,
            tier,
            self._records(expert_key),
            weight_slots=slots.weights,
            predictor=self._predictor(),
            schedule=self.schedule,
            ledger=self.ledger,
        )
        beside = self.budgets.pairs
        if beside is None:
            return base
        tier = self._tier(stack, DeviceSlots(beside.numel, torch.float32, beside.weights, beside.gradients))
        shape = PairShape.of(self.config.model.expert_shape, lora)
        return LoraExperts(base, self._trained(tier, pair_key), shape, device=self.mesh.device)

    def _trained(self, tier: DeviceTier, key: Callable[[int, int], str]) -> TieredExperts:
        return TieredExperts(
            self.store,
            tier,
            self._records(key),
            weight_slots=tier.slots.weights,
            timing=self.timing,
            predictor=self._predictor(),
            schedule=self.schedule,
            ledger=self.ledger,
            replicas=self.mesh.replica,
        )

    def _records(self, key: Callable[[int, int], str]) -> Mapping[int, Mapping[int, LiveRecord]]:
        return {
            layer: {expert: self.store.record(key(layer, expert)) for expert in self.owned}
            for layer in self.config.model.moe_layers
        }

    def _predictor(self) -> Predictor:
        prefetch = self.config.prefetch
        return make_predictor(prefetch.predictor, self.owned, most=prefetch.guesses)

    def _tier(self, stack: contextlib.ExitStack, slots: DeviceSlots[torch.dtype]) -> DeviceTier:
        device, link = self.mesh.device, self.config.links.copy
        in_place = weights_in_place(self.config.weights_in_place, device, link)
        loads = WeightLoads.IN_PLACE if in_place else WeightLoads.COPIED
        tier = open_device_tier(self.store.engine, slots, device, HugePages.AUTO, loads)
        stack.callback(tier.close)
        return limited_tier(tier, self.store.engine, link)
