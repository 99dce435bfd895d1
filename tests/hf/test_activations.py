"""The estimate of activations against what torch allocates in a training pass of small wrapped models."""

from typing import Any

import pytest
import torch
from tiny_families import FAMILIES
from torch.profiler import ProfilerActivity, profile

from tierstore.hf.describing import describe_config
from tierstore.hf.spec import HfSpec, hf_spec
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import Batch
from tierstore.moe.config import SaveActivations
from tierstore.moe.source import InMemoryExperts
from tierstore.train.config import FinetuneConfig

_SEQUENCE = 64
_SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_experts_per_tok": 2}
#: Below 1 MiB what a run allocates besides activations shows: one expert with its gradient, and the scratch of a product.
_SLACK = 96 << 10


def _spec(family: str, compute: ComputeDtype, finetune: FinetuneConfig) -> HfSpec:
    config = FAMILIES[family](**_SIZES).to_dict()
    return hf_spec(describe_config(config, compute), config, finetune)


def _peaks(spec: HfSpec) -> tuple[int, int]:
    """The most bytes that are allocated at a time in a training pass, and in a forward pass, beyond what was before."""
    compute = spec.compute_dtype.torch
    source = InMemoryExperts(spec.expert_shape, layers=spec.moe_layers, experts=spec.experts, compute=compute)
    model = spec.build(source)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.dtype)
    model.module.train()
    tokens_BT = torch.randint(0, spec.vocab_size, (2, _SEQUENCE), generator=generator)
    batch = Batch(tokens_BT, tokens_BT)

    def train() -> None:
        model.set_step(0)
        objective = model.run(batch).objective
        objective.backward()  # type: ignore[no-untyped-call]

    train()  # gradients are there from now on

    def infer() -> None:
        with torch.no_grad():
            model.run(batch)

    return _peak(train), _peak(infer)


def _peak(run: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    kineto: Any = profiled.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("compute", ComputeDtype)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_the_estimate_is_above_what_is_measured_and_not_far(family: str, compute: ComputeDtype) -> None:
    for finetune in (
        FinetuneConfig(seq_len=_SEQUENCE),
        FinetuneConfig(seq_len=_SEQUENCE, expert_activations=SaveActivations.RECOMPUTE),
        FinetuneConfig(seq_len=_SEQUENCE, checkpoint_activations=CheckpointActivations.BLOCK),
    ):
        spec = _spec(family, compute, finetune)
        trained, inferred = _peaks(spec)
        estimate = spec.activation_bytes(2 * _SEQUENCE)
        assert estimate >= trained - _SLACK
        assert estimate <= 1.5 * trained + _SLACK
        assert spec.forward_bytes(2 * _SEQUENCE) >= inferred - _SLACK
