"""Wrapped models of all tested families against transformers' own, with its ``grouped_mm``: the same bits.

==============================  ==============================================================
what                            equal
==============================  ==============================================================
logits, loss                    bit for bit: all families, fp32 and bf16, top-2 and top-4
gradients, dense and experts    bit for bit: likewise, with and without gradient checkpointing
gradients, several threads      bf16 bit for bit; fp32 within rounding, where transformers' own
                                differ from run to run (torch adds with atomics)
==============================  ==============================================================

The order in which a source gives experts changes nothing.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, TOP_KS, FusedExperts, copy_dense, flat_expert, make_config, plain_model

from tierstore.hf.experts import ExpertLayer, ExpertLoads, bind, experts_modules
from tierstore.hf.loading import LoadedModule, build_module, checkpoint_activations
from tierstore.moe.config import SaveActivations

CASES = [(family, top_k) for family in FAMILIES for top_k in TOP_KS.get(family, (2, 4))]
DTYPES = (torch.float32, torch.bfloat16)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))


def _wrapped(
    family: str, top_k: int, plain: Any, dtype: torch.dtype, source: Any, save: SaveActivations
) -> tuple[LoadedModule, ExpertLoads]:
    loaded = build_module(make_config(family, num_experts_per_tok=top_k), dtype)
    copy_dense(plain, loaded)
    loads = ExpertLoads()
    for number, module in loaded.experts_at.items():
        bind(module, ExpertLayer(number, loaded.shape, loaded.experts, source, loads=loads, save=save))
    loaded.module.train()
    return loaded, loads


def _pass(model: Any, tokens: torch.Tensor) -> Any:
    """A training pass, with the auxiliary loss of families that have one."""
    options = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}
    model.zero_grad()
    torch.manual_seed(5)  # Phi-MoE draws
    output = model(input_ids=tokens, labels=tokens, use_cache=False, **options)
    output.loss.backward()
    return output


def _expert_gradients(plain: Any) -> dict[tuple[int, int], torch.Tensor]:
    return {
        (layer, expert): flat_expert(module, expert, gradients=True)
        for layer, module in experts_modules(plain)
        for expert in range(module.num_experts)
    }


def _assert_gradients(plain: Any, loaded: LoadedModule, source: FusedExperts) -> None:
    theirs = dict(plain.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter.grad, theirs[name].grad), name
    for key, gradient in _expert_gradients(plain).items():
        assert torch.equal(source.grads.get(key, torch.zeros_like(gradient)), gradient), key


def _backwards(experts: Sequence[int]) -> Sequence[int]:
    return list(reversed(experts))


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize(("family", "top_k"), CASES)
def test_same_bits(family: str, top_k: int, dtype: torch.dtype) -> None:
    plain = plain_model(make_config(family, num_experts_per_tok=top_k), dtype).train()
    for save, checkpointing in ((SaveActivations.SAVE, False), (SaveActivations.RECOMPUTE, True)):
        source = FusedExperts(plain, order=_backwards, gradients=dtype)
        loaded, loads = _wrapped(family, top_k, plain, dtype, source, save)
        if checkpointing:
            for model in (plain, loaded.module):
                checkpoint_activations(model)
        theirs, ours = _pass(plain, _tokens()), _pass(loaded.module, _tokens())
        assert torch.equal(theirs.logits, ours.logits)
        assert torch.equal(theirs.loss, ours.loss)
        _assert_gradients(plain, loaded, source)
        # A layer that was computed again is counted once.
        assert [int(load.sum()) for load in loads.all()] == [48 * top_k] * len(loaded.experts_at)
        forward = [layer for phase, layer, _ in source.asked if phase == "forward"]
        assert len(forward) == len(loaded.experts_at) * (2 if checkpointing else 1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("save", list(SaveActivations))
def test_any_order_of_experts(family: str, save: SaveActivations) -> None:
    plain = plain_model(make_config(family, num_experts_per_tok=4)).train()
    shuffling = random.Random(3)

    def shuffled(experts: Sequence[int]) -> Sequence[int]:
        return shuffling.sample(experts, len(experts))

    found = []
    for order in (tuple, _backwards, shuffled, shuffled):
        source = FusedExperts(plain, order=order)
        loaded, _ = _wrapped(family, 4, plain, torch.float32, source, save)
        output = _pass(loaded.module, _tokens())
        dense = [parameter.grad for parameter in loaded.module.parameters()]
        found.append([output.logits, *dense, *(source.grads[key] for key in sorted(source.grads))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_swapped_gate_and_up_are_another_model(family: str) -> None:
    plain = plain_model(make_config(family)).eval()
    source = FusedExperts(plain)
    loaded, _ = _wrapped(family, 2, plain, torch.float32, source, SaveActivations.SAVE)
    loaded.module.eval()
    with torch.no_grad():
        expected = plain(input_ids=_tokens()).logits
        assert torch.equal(loaded.module(input_ids=_tokens()).logits, expected)
        for flat in source.weights.values():
            inner = loaded.shape.views(flat).inner
            halves = (inner[:, ::2], inner[:, 1::2]) if family == "gpt_oss" else inner.chunk(2)
            first = halves[0].clone()
            halves[0].copy_(halves[1])
            halves[1].copy_(first)
        swapped = loaded.module(input_ids=_tokens()).logits
    assert (swapped - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("save", list(SaveActivations))
def test_frozen_experts(family: str, save: SaveActivations) -> None:
    """Leases without gradients: what comes before the experts gets the same gradients."""
    plain = plain_model(make_config(family)).train()
    source = FusedExperts(plain, gradients=None)
    loaded, _ = _wrapped(family, 2, plain, torch.float32, source, save)
    _pass(plain, _tokens())
    _pass(loaded.module, _tokens())
    theirs = dict(plain.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter.grad, theirs[name].grad), name
    assert not source.grads


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_greedy_text(family: str) -> None:
    plain = plain_model(make_config(family)).eval()
    loaded, _ = _wrapped(family, 2, plain, torch.float32, FusedExperts(plain), SaveActivations.SAVE)
    loaded.module.eval()
    prompt = _tokens()[:1, :6]
    options = {
        "max_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(prompt),
    }
    assert torch.equal(plain.generate(prompt, **options), loaded.module.generate(prompt, **options))
