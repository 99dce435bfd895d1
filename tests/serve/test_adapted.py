"""A store whose adapter was trained is served with it, without a merge."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora_cases import batch, quiet_peft, session, take
from refusals import refuses
from served_stores import least_budget, memory_choice, serving, store_of
from test_reading import fingerprint

from tierstore.errors import ConfigError
from tierstore.model.store_schema import PAIR_SCHEMA
from tierstore.moe.lora import LoraConfig, LoraTargets
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import open_served
from tierstore.store.reading import read_summary
from tierstore.trace.replay import replay
from tierstore.train.stepping import Stepper

STEPS = 3


def adapted(root: Path, lora: LoraConfig, dtype: torch.dtype) -> tuple[Path, list[float]]:
    """A store whose pairs took some steps, and the trainer's losses of batches that it was not trained with."""
    _, store = store_of(root, "qwen3_moe", dtype)
    with session(store, lora) as parts:
        for step in range(STEPS):
            take(parts, step)
        Stepper(parts).commit()
    losses = []
    with session(store, lora) as parts, torch.no_grad():
        parts.model.module.eval()
        for step in range(STEPS, STEPS + 2):
            Stepper(parts).begin_forward()
            loss = parts.model.run(batch(step)).loss
            losses.append(float(loss))
    return store, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", LoraTargets)
def test_as_the_trainer_computes_it(tmp_path: Path, targets: LoraTargets, dtype: torch.dtype) -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets)
    with quiet_peft():
        store, expected = adapted(tmp_path, lora, dtype)
    before = fingerprint(store)
    if lora.experts:
        assert read_summary(store).missed[PAIR_SCHEMA], "some pairs have missed steps"
    for budget in (least_budget(store), 8 << 20):
        trace = tmp_path / f"trace{budget}"
        config = serving(store, {"host_budget": budget, "prefetch.predictor": "router"})
        with quiet_peft(), open_served(config, trace=trace) as parts:
            found = []
            for step in range(STEPS, STEPS + 2):
                parts.experts.begin(ServingPhase.PREFILL, 24)
                with torch.inference_mode():
                    loss = parts.model.run(batch(step)).loss
                found.append(float(loss))
            live = parts.store.cache.residency.stats()
            assert not any(parameter.requires_grad for parameter in parts.model.module.parameters())
        assert found == expected, budget
        assert replay(trace) == live
    assert fingerprint(store) == before


def test_a_ring_is_refused_where_experts_have_pairs(tmp_path: Path) -> None:
    """Pairs of attention are none of experts: there the ring that is asked for is taken."""
    lora = LoraConfig(rank=2, targets=LoraTargets.EXPERTS)
    with quiet_peft():
        store, _ = adapted(tmp_path / "experts", lora, torch.float32)
    for name, value in (("ring.memory", "ring"), ("ring.layers", 1)):
        config = serving(store, {"host_budget": 64 << 20, name: value})
        with refuses(ConfigError, f"{name}:", store, "tierstore deploy"), open_served(config):
            pass
    with quiet_peft():
        store, _ = adapted(
            tmp_path / "attention", replace(lora, targets=LoraTargets.ATTENTION), torch.float32
        )
        asked = {"host_budget": 64 << 20, "ring.memory": "ring", "ring.layers": 1}
        with open_served(serving(store, asked)) as parts:
            parts.experts.begin(ServingPhase.DECODE, 1)
            assert memory_choice(parts) == "experts on the device: ring (as configured)"
