"""Sampling against transformers' own processors, by seed, and worked by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.serve.text.sampling import SamplingOptions, TokenSampler


def _probability(logits: torch.Tensor, options: SamplingOptions, prompt: list[int]) -> torch.Tensor:
    """By the processors that ``generate`` would put together."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(TopPLogitsWarper(options.top_p))
    scores: torch.Tensor = processors(torch.tensor([prompt]), logits[None].clone())[0]
    return scores.softmax(dim=-1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 4, 40]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_the_tokens_that_transformers_would_allow(
    seed: int, temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
    prompt = [seed % 30, 7]
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty, seed=seed
    )
    allowed = _probability(logits, options, prompt)
    for draw in range(4):
        token = TokenSampler(SamplingOptions(**{**_fields(options), "seed": draw}), prompt)(logits)
        assert allowed[token] > 0
    if (allowed > 0).sum() == 1:
        assert token == int(allowed.argmax())


def _fields(options: SamplingOptions) -> dict[str, float]:
    return {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}


def test_as_often_as_it_is_probable() -> None:
    """By hand: logits log(1), log(2), log(5), log(0.1). Top-p 0.85 keeps 5 and 2 of 8.1: 5 of 7 draws are token 2."""
    logits = torch.tensor([1.0, 2.0, 5.0, 0.1]).log()
    sampler = TokenSampler(SamplingOptions(top_p=0.85, seed=3))
    counts = Counter(sampler(logits) for _ in range(3000))
    assert set(counts) == {1, 2}
    assert abs(counts[2] / 3000 - 5 / 7) < 4 * math.sqrt(5 / 7 * 2 / 7 / 3000)


def test_a_seed_gives_the_same_text() -> None:
    logits = [torch.randn(50, generator=torch.Generator().manual_seed(step)) for step in range(20)]

    def text(seed: int | None) -> list[int]:
        sampler = TokenSampler(SamplingOptions(seed=seed))
        torch.rand(3)  # what others draw is no concern of it
        return [sampler(each) for each in logits]

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(None) != text(None)


def test_greedy_and_its_penalty() -> None:
    """By hand: 4 / 2 is less than 3 for the token of the prompt; then 3 / 2 is less than 2, which 4 / 2 is as well."""
    logits = torch.tensor([1.0, 3.0, 4.0, -1.0])
    assert TokenSampler(SamplingOptions(temperature=0))(logits) == 2
    sampler = TokenSampler(SamplingOptions(temperature=0, repetition_penalty=2.0), [2])
    assert [sampler(logits) for _ in range(2)] == [1, 2]


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        TokenSampler(SamplingOptions())(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1e-40),
        SamplingOptions(temperature=1e-300),
        SamplingOptions(top_p=1e-300),
        SamplingOptions(repetition_penalty=1e-40),
        SamplingOptions(repetition_penalty=1e-300, temperature=1e-300, top_k=2, top_p=0.5),
    ],
)
@pytest.mark.parametrize("shift", [0.0, -10.0])
def test_numbers_that_are_nothing_in_fp32(options: SamplingOptions, shift: float) -> None:
    """By hand: when temperature, nucleus or penalty go to 0, the most probable token is left: 2, which the text has."""
    assert TokenSampler(options, [2])(torch.tensor([1.0, 3.0, 60.0, -1.0]) + shift) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_options_that_cannot_work(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingOptions(**{name: value})  # type: ignore[arg-type]
