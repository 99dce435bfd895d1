"""Sampling against transformers' own processors, by seed, and worked by hand."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import make_config, plain_model

from tierstore.serve.sampling import PROCESSED, SamplingOptions, TokenSampler, sampling_defaults


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


@settings(max_examples=share(60))
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


#: A value of each key that transformers' processors apply, which changes what follows.
_PROCESSED: dict[str, Any] = {
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[9], [8, 3]],
    "min_length": 9,
    "min_new_tokens": 7,
    "exponential_decay_length_penalty": [2, 1.5],
    "suppress_tokens": [3, 4, 5],
    "begin_suppress_tokens": [6, 7],
    "min_p": 0.3,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.04,
    "eta_cutoff": 0.09,
}


@pytest.mark.parametrize(
    "values",
    [{key: value} for key, value in _PROCESSED.items()]
    + [{}, {"top_k": 0}, {"top_p": 0.7}, {"repetition_penalty": 1.4, "temperature": 0.5}, _PROCESSED],
    ids=lambda values: ",".join(values),
)
def test_generation_config_as_generate_has_it(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: transformers' ``generate``, its logits before and its scores behind all processors, step by step."""
    plain = plain_model(make_config("mixtral", vocab_size=90), torch.float32).eval()
    with torch.no_grad():
        plain.lm_head.weight *= 60  # probabilities that differ
    values = {"do_sample": True, "eos_token_id": [1, 2], **values}
    prompt = [5, 9, 5]
    torch.manual_seed(0)
    made = plain.generate(
        torch.tensor([prompt]),
        **values,
        max_new_tokens=10,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    tokens = made.sequences[0, len(prompt) :].tolist()
    sampler = TokenSampler(
        sampling_defaults(values, where="m", vocabulary=90, ends=frozenset({1, 2})), prompt
    )
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch, "multinomial", lambda probability, *_, **__: drawn.append(probability) or chosen
    )
    for logits, token in zip(made.logits, tokens, strict=True):
        chosen = torch.tensor([token])
        assert sampler(logits[0]) == token
    for probability, scores in zip(drawn, made.scores, strict=True):
        expected = scores[0].softmax(dim=-1)
        torch.testing.assert_close(probability / probability.sum(), expected, rtol=1e-4, atol=1e-7)


def test_every_processed_key_is_compared() -> None:
    assert set(PROCESSED) == set(_PROCESSED)


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
