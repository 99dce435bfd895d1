"""Sampling without a cache of keys, over logits that are known."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tierstore.model.transformer import sample_tokens


def after(tokens: Sequence[int]) -> Tensor:
    """What follows token t is t + 1 of five, all but surely."""
    logits = torch.zeros(5)
    logits[(tokens[-1] + 1) % 5] = 50.0
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_tokens_follow_one_another(temperature: float) -> None:
    assert sample_tokens(after, [2], 4, temperature=temperature, seed=0) == [3, 4, 0, 1]


def test_the_end_of_a_text_is_its_last_token() -> None:
    assert sample_tokens(after, [2], 4, temperature=0.0, seed=0, ends=[0]) == [3, 4, 0]


def test_a_seed_gives_the_same_tokens() -> None:
    drawn = [
        sample_tokens(lambda _: torch.zeros(50), [0], 8, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_a_prompt_has_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        sample_tokens(after, [], 1, temperature=0.0, seed=0)
