"""Models as batches see them: transformers' own beside ``generate``, and the built-in one beside running its window again.

The products of a window have more rows and round otherwise, so that fp32 and bf16 differ in the last digits; in fp64 they
agree to its precision.
"""

from typing import Any

import pytest
import torch
from served_cases import built_in, drawn, generated, greedy, wrapped
from tiny_families import FAMILIES

from tierstore.model.attention import KeyValueCache, visible_tokens
from tierstore.model.config import ComputeDtype
from tierstore.model.transformer import Transformer
from tierstore.moe.source import ExpertSourceRef, InMemoryExperts
from tierstore.serve.batch import BatchRunner, InvariantRunner

#: Each of them other than it is by default.
OUTPUTS: dict[str, Any] = {
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "return_dict": False,
    "torchscript": True,
    "use_cache": False,
    "use_return_dict": False,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_outputs_change_nothing(family: str) -> None:
    """Two prompts of unequal lengths, as transformers generates without these keys."""
    plain, served = wrapped(family, written=OUTPUTS)
    prompts = drawn([5, 3])
    for kind in (BatchRunner, InvariantRunner):
        runner = served.runner(kind)
        if kind is BatchRunner:
            expected = generated(plain, prompts, 3)
        else:
            expected = [made for prompt in prompts for made in generated(plain, [prompt], 3)]
        for (tokens, logits), (their_tokens, theirs) in zip(
            greedy(runner, prompts, 3), expected, strict=True
        ):
            assert tokens == their_tokens
            assert torch.equal(logits, theirs)


@pytest.mark.parametrize(
    ("written", "pad"),
    [
        ({"pad_token_id": -1, "eos_token_id": 7}, 7),
        ({"pad_token_id": -1, "eos_token_id": [-1, 9]}, 9),
        ({"pad_token_id": -1, "eos_token_id": -1}, 0),
        ({"pad_token_id": None, "eos_token_id": []}, 0),
        ({"pad_token_id": None, "eos_token_id": 128}, 0),
        ({"pad_token_id": 127}, 127),
    ],
)
def test_padding_is_a_token_of_the_vocabulary(written: dict[str, Any], pad: int) -> None:
    """No token sees it: whichever it is, the answers are those of transformers, which pads with 0 here."""
    plain, served = wrapped("mixtral", written=written)
    assert served.model.pad_token == pad
    prompts = drawn([5, 2])
    for (tokens, _), (theirs, _) in zip(
        greedy(served.runner(BatchRunner), prompts, 3), generated(plain, prompts, 3), strict=True
    ):
        assert tokens == theirs


def test_yarn_stretches_the_context() -> None:
    """Four times the original 32, with ``max_position_embeddings`` as it was; the tokens are those of transformers."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    plain, served = wrapped("qwen3_moe", max_position_embeddings=32, rope_parameters=yarn)
    assert served.model.context == 128
    prompts = drawn([100])
    ((tokens, logits),) = greedy(served.runner(BatchRunner), prompts, 4)
    ((their_tokens, theirs),) = generated(plain, prompts, 4)
    assert tokens == their_tokens
    assert torch.equal(logits, theirs)


def _again(model: Transformer, tokens: list[int], count: int) -> torch.Tensor:
    """The logits of the last ``count`` tokens, each of a window of its own."""
    with torch.inference_mode():
        windows = [torch.tensor([tokens[: len(tokens) - left]]) for left in reversed(range(count))]
        return torch.stack([model(window).logits[0, -1] for window in windows])


def test_cache_equals_the_window_again() -> None:
    for compute, close in ((ComputeDtype.FP32, 1e-5), (ComputeDtype.BF16, 2e-2)):
        model, served = built_in(compute)
        prompts = drawn((1, 17, 6), vocabulary=61)
        found = greedy(served.runner(BatchRunner), prompts, 10)
        for prompt, (tokens, logits) in zip(prompts, found, strict=True):
            expected = _again(model, prompt + tokens[:-1], 10)
            torch.testing.assert_close(logits, expected, rtol=0, atol=close)


def test_in_fp64() -> None:
    model, _ = built_in()
    config = model.config
    slot = ExpertSourceRef()
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
    assert found.int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[0, 0, 1, 0], [0, 0, 1, 1]]]
    padded = visible_tokens(mask, 4)
    assert padded[1].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert visible_tokens(mask[:1], 1) is None
