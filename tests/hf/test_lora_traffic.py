"""The bytes that a run with LoRA moves are those that its plan counted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import imported
from lora_cases import LR, configured
from tiny_families import make_config, plain_model

from tierstore.hf.manifest import Weights
from tierstore.hf.spec import stored_spec
from tierstore.model.interface import Batch
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.plan.capacity import Setting, Use, capacity, usage_of
from tierstore.plan.traffic import step_traffic
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import least_host_budget
from tierstore.train.config import FinetuneConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop
from tierstore.train.stepping import SessionParts, Stepper

WARM_UP, STEPS = 3, 2
TOKENS = 128


def step(parts: SessionParts, number: int) -> None:
    tokens = torch.randint(128, (2, TOKENS), generator=torch.Generator().manual_seed(number))
    with Stepper(parts).step(LR, passes=1) as opened:
        opened.begin_pass()
        output = parts.model.run(Batch(tokens, tokens))
        opened.backward(output.objective)
    assert all(bool((load > 0).all()) for load in output.loads), "every expert is reached"


@pytest.mark.parametrize(
    ("use", "targets"), [(Use.LORA, LoraTargets.BOTH), (Use.LORA_ATTENTION, LoraTargets.ATTENTION)]
)
def test_bytes_of_a_step(tmp_path: Path, use: Use, targets: LoraTargets) -> None:
    model = make_config("qwen3_moe", num_hidden_layers=3, max_position_embeddings=256)
    plain_model(model).save_pretrained(tmp_path / "model")
    imported(tmp_path / "model", tmp_path / "store", weights=Weights.FROZEN)
    lora = LoraConfig(rank=4, targets=targets)
    config = configured(tmp_path / "store", lora, clip=1.0)
    finetune = FinetuneConfig(seq_len=TOKENS, aux_loss_weight=0.0)
    spec = stored_spec(tmp_path / "store", finetune)
    budget = 6 * least_host_budget(config, DeviceKind.CPU)
    config = replace(config, host_budget=budget, model=stored_spec(tmp_path / "store", finetune, lora))
    planned = Setting(
        config=replace(config, model=spec, lora=LoraConfig()),
        model=spec.architecture,
        usage=usage_of(spec, use, rank=4),
    )
    expected = step_traffic(planned, capacity(planned), (WARM_UP, STEPS))
    with open_parts(config, Opening.RESUME, loop=Loop.EXTERNAL) as parts:
        Stepper(parts).commit()
        for number in range(WARM_UP):
            step(parts, number)
        before = parts.store.cache.residency.stats()
        for number in range(STEPS):
            step(parts, number)
        after = parts.store.cache.residency.stats()
    assert expected.read_bytes > 0
    assert (expected.written_bytes > 0) == (use is Use.LORA)
    assert (after.read_bytes - before.read_bytes) / STEPS == expected.read_bytes
    assert (after.written_bytes - before.written_bytes) / STEPS == expected.written_bytes
