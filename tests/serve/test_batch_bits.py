"""Batches of wrapped models against transformers' own ``generate``, with its ``grouped_mm``: the same tokens, and the same
logits bit for bit. Experts are in memory; ``test_store_bits.py`` has them in a store.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from served_cases import drawn, generated, greedy, wrapped
from tiny_families import FAMILIES

from tierstore.serve.batch import InvariantRunner, PaddedRunner

DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (7, 3, 12, 1, 5, 20, 9, 2)  # gpt-oss has a window of 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_generate(family: str, dtype: torch.dtype) -> None:
    plain, served = wrapped(family, dtype)
    prompts = drawn(LENGTHS)
    for batch in (prompts[:1], prompts):
        found = greedy(served.runner(PaddedRunner), batch, 5)
        for (tokens, logits), (expected, bits) in zip(found, generated(plain, batch, 5), strict=True):
            assert tokens == expected
            assert torch.equal(logits, bits)
    together = greedy(served.runner(InvariantRunner), prompts[:4], 4)
    for prompt, (tokens, logits) in zip(prompts[:4], together, strict=True):
        ((expected, bits),) = generated(plain, [prompt], 4)
        assert tokens == expected
        assert torch.equal(logits, bits)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_joined_between_steps(family: str) -> None:
    """Sequences that join one under way, in another batch and with other padding: what they get alone, within rounding."""
    plain, served = wrapped(family)
    prompts = drawn((5, 9, 3))
    runner = served.runner(PaddedRunner)
    (first,) = runner.join(prompts[:1])
    found = {first.number: [first.logits_V]}
    for waiting in ([], [prompts[1], prompts[2]], [], []):
        tokens = {number: int(each[-1].argmax()) for number, each in found.items()}
        for number, logits_V in runner.step(tokens).items():
            found[number].append(logits_V)
        for joined in runner.join(waiting) if waiting else []:
            found[joined.number] = [joined.logits_V]
    assert runner.numbers == tuple(found)
    for prompt, logits in zip(prompts, found.values(), strict=True):
        ((expected, bits),) = generated(plain, [prompt], len(logits))
        assert [int(each.argmax()) for each in logits] == expected
        torch.testing.assert_close(torch.stack(logits), bits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next"])
def test_leaving_changes_nobody(family: str) -> None:
    """A row that leaves takes its columns of padding along; the others go on as they would have, within rounding."""
    plain, served = wrapped(family)
    prompts = drawn((20, 4, 6))
    runner = served.runner(PaddedRunner)
    found = {each.number: [each.logits_V] for each in runner.join(prompts)}
    for leaving in (None, 0, None):
        if leaving is not None:
            runner.leave(leaving)
        tokens = {number: int(found[number][-1].argmax()) for number in runner.numbers}
        for number, logits_V in runner.step(tokens).items():
            found[number].append(logits_V)
    for number in (1, 2):
        ((expected, bits),) = generated(plain, [prompts[number]], 4)
        assert [int(each.argmax()) for each in found[number]] == expected
        torch.testing.assert_close(torch.stack(found[number]), bits, rtol=1e-4, atol=1e-4)
