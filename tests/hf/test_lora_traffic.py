"""What a plan says that pairs beside frozen experts read and write, against the expert source that a run has."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES

from tierstore._native import HugePages
from tierstore.hf.describing import describe_config
from tierstore.hf.spec import HfSpec
from tierstore.model.config import ComputeDtype
from tierstore.moe.lora import PairShape
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.foreign import setting_for
from tierstore.plan.traffic import step_traffic
from tierstore.plan.uses import Use
from tierstore.prefetch import Schedule, TieredExperts, make_predictor
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.stats import StallLedger
from tierstore.store import NewRecord, ParameterStore, StoreConfig
from tierstore.tiers import DeviceSlots, open_device_tier
from tierstore.train.config import TrainConfig
from tierstore.train.finetune import FinetuneConfig

_EXPERTS, _RANK = 8, 4


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [96 << 10, 1 << 20])
def test_lora_reads_and_writes_what_its_plan_says(tmp_path: Path, depth: int, budget: int) -> None:
    config = FAMILIES["qwen3_moe"](num_experts_per_tok=_EXPERTS).to_dict()
    spec = HfSpec(
        manifest=describe_config(config, ComputeDtype.FP32),
        finetune=FinetuneConfig(seq_len=32),
        config=config,
    )
    run = TrainConfig(model=spec, host_budget=budget)
    run = replace(run, prefetch=replace(run.prefetch, depth=depth))
    setting = setting_for(Setting(config=run, model=spec.architecture), Use.LORA, _RANK)
    taken = capacity(setting)
    traffic = step_traffic(setting, taken)
    assert traffic.active == 1.0
    store = StoreConfig(
        host_budget=taken.divided.cache,
        lookahead=taken.divided.lookahead,
        layers=spec.moe_layers,
        cache=run.cache,
    )
    with ExitStack() as stack:
        opened = ParameterStore.create(tmp_path / "store", setting.schemas, store)
        stack.callback(opened.close)
        for schema in setting.schemas:
            opened.register_many(
                NewRecord(
                    f"{schema.name}.{layer}.{e}", schema.name, layer, np.zeros(schema.numel, np.float32)
                )
                for layer in spec.moe_layers
                for e in range(_EXPERTS)
            )
            opened.commit()
        core = opened.core
        sources: list[Any] = []
        for schema, kind in zip(setting.schemas, (FrozenExperts, TieredExperts), strict=True):
            slots = DeviceSlots(schema.numel, torch.float32, weights=2, gradients=0 if schema.frozen else 2)
            tier = open_device_tier(core.engine, slots, torch.device("cpu"), HugePages.OFF)
            stack.callback(tier.close)
            made: Any = kind
            sources.append(
                made(
                    core,
                    tier,
                    {
                        layer: {e: core.record(f"{schema.name}.{layer}.{e}") for e in range(_EXPERTS)}
                        for layer in spec.moe_layers
                    },
                    weight_slots=2,
                    predictor=make_predictor(run.prefetch.predictor, range(_EXPERTS)),
                    schedule=Schedule.of_layers(spec.moe_layers, depth=depth),
                    ledger=StallLedger(),
                    **({} if schema.frozen else {"timing": run.step_timing}),
                )
            )
        shape = PairShape(spec.expert_shape, _RANK, 4.0)
        experts = LoraExperts(*sources, shape, device=torch.device("cpu"))
        every = list(range(_EXPERTS))
        moved = []
        for steps in (6, 8):
            for _ in range(steps):
                with core.optimizer_step(1e-3):
                    experts.begin_micro(index=0, count=1)
                    for layer in spec.moe_layers:
                        for _lease in experts.forward(layer, every):
                            pass
                    for layer in reversed(spec.moe_layers):
                        for lease in experts.backward(layer, every):
                            lease.zero_gradients()
            stats = core.cache.residency.stats()
            moved.append([getattr(stats, key) for key in ("read_bytes", "written_bytes", "hits", "misses")])
    step = [(after - before) / 8 for before, after in zip(*moved, strict=True)]
    assert step[:2] == pytest.approx([traffic.read_bytes, traffic.written_bytes], abs=1)
    assert step[2:] == [traffic.hits, traffic.misses]
