"""Wrapped models: keys of outputs and padding in config.json change nothing; rotary embeddings may stretch the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from served_cases import drawn, generated, greedy, wrapped
from tiny_families import FAMILIES

from tierstore.serve.batch import InvariantRunner, PaddedRunner

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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_outputs_change_nothing(family: str) -> None:
    """Two prompts of unequal lengths, as transformers generates without these keys."""
    plain, served = wrapped(family, written=OUTPUTS)
    prompts = drawn([5, 3])
    for runner in (served.runner(PaddedRunner), served.runner(InvariantRunner)):
        if isinstance(runner, PaddedRunner):
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
        greedy(served.runner(PaddedRunner), prompts, 3), generated(plain, prompts, 3), strict=True
    ):
        assert tokens == theirs


def test_yarn_stretches_the_context() -> None:
    """Four times the original 32, with ``max_position_embeddings`` as it was; the tokens are those of transformers."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    plain, served = wrapped("qwen3_moe", max_position_embeddings=32, rope_parameters=yarn)
    assert served.model.context == 128
    prompts = drawn([100])
    ((tokens, logits),) = greedy(served.runner(PaddedRunner), prompts, 4)
    ((their_tokens, theirs),) = generated(plain, prompts, 4)
    assert tokens == their_tokens
    assert torch.equal(logits, theirs)
