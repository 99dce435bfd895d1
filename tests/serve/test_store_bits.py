"""Models served from stores against transformers' own ``generate``: the same bits whatever memory and guesses there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from served_cases import drawn, generated, greedy
from served_stores import least_budget, least_ring, served_store, store_of
from tiny_families import FAMILIES

from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ExpertMemory

LENGTHS = (7, 3, 12, 1, 5, 20, 9, 2)
PREDICTORS = (PredictorName.NONE, PredictorName.HISTORY, PredictorName.ROUTER)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _budgets(store: Path, plain: Any) -> Sequence[int]:
    """All experts, a quarter of them, one."""
    experts = sum(value.numel() * 4 for name, value in plain.named_parameters() if ".experts." in name)
    least = least_budget(store)
    return 2 * experts + least, max(experts // 4, least), least


def _memory(memory: ExpertMemory, budget: int, store: Path) -> dict[str, Any]:
    """Settings under which ``budget`` is beside the slots of a ring of one layer, or has a few of its own."""
    ring = least_ring(store) if memory is ExpertMemory.RING else 0
    return {"ring__memory": memory.value, "host_budget": budget + ring, "device_budget": ring}


def _assert_same(store: Path, plain: Any, batches: Sequence[list[list[int]]], **settings: Any) -> None:
    expected = [generated(plain, prompts, 4) for prompts in batches]
    with served_store(store, **settings) as (parts, runner):
        for prompts, reference in zip(batches, expected, strict=True):
            for (tokens, logits), (chosen, bits) in zip(greedy(runner, prompts, 4), reference, strict=True):
                assert tokens == chosen, settings
                assert torch.equal(logits, bits), settings
        assert parts.store.cache.residency.stats().misses > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_at_the_least_budget(family: str, tmp_path: Path) -> None:
    plain, store = store_of(tmp_path, family, torch.bfloat16)
    prompts = drawn(LENGTHS)
    _assert_same(store, plain, (prompts[:1], prompts), host_budget=least_budget(store))


@pytest.mark.parametrize("memory", [ExpertMemory.RING, ExpertMemory.SPARSE])
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_same_bits_whatever_is_guessed(
    predictor: PredictorName, memory: ExpertMemory, tmp_path: Path
) -> None:
    plain, store = store_of(tmp_path, "qwen3_moe", num_hidden_layers=3)
    prompts = drawn(LENGTHS)
    for budget in _budgets(store, plain):
        _assert_same(
            store,
            plain,
            (prompts[:1], prompts),
            prefetch__predictor=predictor.value,
            **_memory(memory, budget, store),
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_it(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every budget, predictor and kind of memory for experts."""
    plain, store = store_of(tmp_path, family, dtype)
    prompts = drawn(LENGTHS)
    memories = (ExpertMemory.RING, ExpertMemory.SPARSE)
    for budget, predictor, memory in itertools.product(_budgets(store, plain), PREDICTORS, memories):
        _assert_same(
            store,
            plain,
            (prompts[:1], prompts),
            prefetch__predictor=predictor.value,
            **_memory(memory, budget, store),
        )


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_batch_invariant(family: str, tmp_path: Path) -> None:
    plain, store = store_of(tmp_path, family, torch.bfloat16)
    prompts = drawn((6, 2, 9))
    with served_store(store, host_budget=least_budget(store), batch__invariant=True) as (_, runner):
        found = greedy(runner, prompts, 4)
    for prompt, (tokens, logits) in zip(prompts, found, strict=True):
        ((chosen, bits),) = generated(plain, [prompt], 4)
        assert tokens == chosen
        assert torch.equal(logits, bits)
