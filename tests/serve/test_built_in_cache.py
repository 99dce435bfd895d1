"""The built-in model with a cache of keys and values against running its whole window again.

The products of a window have more rows and round otherwise, so that fp32 and bf16 differ in the last digits; in fp64 they
agree to its precision.
"""

from __future__ import annotations

import torch
from served_cases import built_in, drawn, greedy

from tierstore.model.config import ComputeDtype
from tierstore.model.kv_cache import KeyValueCache, visible_tokens
from tierstore.model.transformer import Transformer
from tierstore.moe.source import InMemoryExperts, SourceSlot
from tierstore.serve.batch import PaddedRunner


def _again(model: Transformer, tokens: list[int], count: int) -> torch.Tensor:
    """The logits of the last ``count`` tokens, each of a window of its own."""
    with torch.inference_mode():
        windows = [torch.tensor([tokens[: len(tokens) - left]]) for left in reversed(range(count))]
        return torch.stack([model(window).logits[0, -1] for window in windows])


def test_cache_equals_the_window_again() -> None:
    for compute, close in ((ComputeDtype.FP32, 1e-5), (ComputeDtype.BF16, 2e-2)):
        model, served = built_in(compute)
        prompts = drawn((1, 17, 6), vocabulary=61)
        found = greedy(served.runner(PaddedRunner), prompts, 10)
        for prompt, (tokens, logits) in zip(prompts, found, strict=True):
            expected = _again(model, prompt + tokens[:-1], 10)
            torch.testing.assert_close(logits, expected, rtol=0, atol=close)


def test_in_fp64() -> None:
    model, _ = built_in()
    config = model.config
    slot = SourceSlot()
    wide = Transformer(config, slot).double().eval()
    slot.target = InMemoryExperts(
        config.expert_shape, layers=config.moe_layers, experts=config.experts, compute=torch.float64
    )
    tokens = torch.tensor(drawn((20,), vocabulary=61))
    with torch.inference_mode():
        cache = KeyValueCache.of(config.n_layers)
        ones = torch.ones(1, 20, dtype=torch.long)
        positions = torch.arange(20)[None]
        wide.follow(tokens[:, :7], cache, ones[:, :7], positions[:, :7])
        wide.follow(tokens[:, 7:19], cache, ones[:, :19], positions[:, 7:19])
        last = wide.follow(tokens[:, 19:], cache, ones, positions[:, 19:])
        expected = wide(tokens).logits[:, -1]
    torch.testing.assert_close(last, expected, rtol=1e-12, atol=1e-13)


def test_which_tokens_are_visible() -> None:
    """By hand: one row of four tokens, one of two behind two of padding; the last two are this pass's."""
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = visible_tokens(mask, 2)
    assert found is not None
    assert found.int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[0, 0, 1, 0], [0, 0, 1, 1]]]
    padded = visible_tokens(mask, 4)
    assert padded is not None
    assert padded[1].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert visible_tokens(mask[:1], 1) is None
