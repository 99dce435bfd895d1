"""A plan for LoRA divides budgets as a run with LoRA does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_config import SMALL_QWEN3_MOE

from tierstore.config import load
from tierstore.hf.describing import describe_config
from tierstore.hf.spec import hf_spec
from tierstore.model.config import ComputeDtype
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.plan.capacity import Setting, capacity
from tierstore.plan.order import choose_order
from tierstore.plan.uses import Use, usage_of
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import budgets, expert_schema, least_host_budget, pair_schema
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.footprint import fixed_cost


@pytest.mark.parametrize("compute", ComputeDtype)
@pytest.mark.parametrize("device", DeviceKind)
@pytest.mark.parametrize(
    ("use", "targets"), [(Use.LORA, LoraTargets.BOTH), (Use.LORA_ATTENTION, LoraTargets.ATTENTION)]
)
def test_the_same_division(compute: ComputeDtype, device: DeviceKind, use: Use, targets: LoraTargets) -> None:
    lora = LoraConfig(rank=4, targets=targets)
    manifest = describe_config(SMALL_QWEN3_MOE, compute)
    spec, adapted = hf_spec(manifest, SMALL_QWEN3_MOE), hf_spec(manifest, SMALL_QWEN3_MOE, lora=lora)
    run = replace(load(TrainConfig, None, {"data.batch_size": 2}), model=adapted, lora=lora)
    usage = usage_of(spec, use, rank=4)
    setting = Setting(
        config=replace(run, model=spec, lora=LoraConfig()),
        model=spec.architecture,
        device=device,
        usage=usage,
    )
    assert setting.schema == expert_schema(run)
    assert usage.pairs == pair_schema(run)
    assert list(usage.attention) == list(adapted.adapter_units)
    least = least_host_budget(run, device)
    assert setting.least_host_budget == least
    for budget in (least, 2 * least, 20 * least):
        setting = replace(setting, config=replace(setting.config, host_budget=budget))
        planned, divided = capacity(setting).divided, budgets(replace(run, host_budget=budget), device)
        assert (planned.cache, planned.device, planned.lookahead) == (
            divided.cache,
            divided.device,
            divided.lookahead,
        )
        assert planned.slots == divided.slots


def test_layer_order_of_pairs() -> None:
    """A layer's pairs have gradients for each micro-batch; AUTO weighs the orders of the use that the run has."""
    lora = LoraConfig(rank=4)
    spec = hf_spec(describe_config(SMALL_QWEN3_MOE, ComputeDtype.FP32), SMALL_QWEN3_MOE, lora=lora)
    settings = {"data.batch_size": 2, "data.micro_batches": 3, "links.disk.bandwidth": "1KiB"}
    run = replace(load(TrainConfig, None, settings), model=spec, lora=lora)
    run = replace(run, host_budget=least_host_budget(run, DeviceKind.CPU))
    choice = choose_order(run)
    assert choice.order is MicroOrder.LAYER
    assert choice.layer is not None
    assert choice.micro is not None
    assert choice.layer.moved_bytes < choice.micro.moved_bytes
    pairs = pair_schema(run)
    assert pairs is not None
    for config, gradients in ((run, 1), (choice.applied(run), 3)):
        cost = fixed_cost(config, 0, units=spec.architecture.units, text=0)
        assert cost.pairs == 4 * (1 + gradients) * pairs.numel * 8
        setting = Setting(config=config, model=spec.architecture, usage=usage_of(spec, Use.LORA, rank=4))
        assert capacity(setting).term("pairs of a pass").nbytes == cost.pairs
