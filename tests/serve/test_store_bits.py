"""Models served from stores against transformers' own ``generate``: the same bits whatever memory and guesses there are."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from served_cases import drawn, generated, greedy
from served_stores import least_budget, least_ring, served_store, store_of
from slowness import in_turns
from tiny_families import FAMILIES

from tierstore.model.config import ComputeDtype
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.config import ExpertMemory

LENGTHS = (7, 3, 12, 1, 5, 20, 9, 2)
PREDICTORS = (PredictorName.NONE, PredictorName.HISTORY, PredictorName.ROUTER)
MEMORIES = (ExpertMemory.RING, ExpertMemory.SPARSE)


class _Case:
    """A model and its store, two batches of prompts, and what transformers generates for them."""

    def __init__(
        self, directory: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.plain, self.store = store_of(directory, family, dtype, **options)
        prompts = drawn(LENGTHS)
        self._batches = [(batch, generated(self.plain, batch, 4)) for batch in (prompts[:1], prompts)]

    def check(self, **settings: Any) -> None:
        with served_store(self.store, **settings) as (parts, runner):
            for prompts, expected in self._batches:
                for (tokens, logits), (chosen, bits) in zip(
                    greedy(runner, prompts, 4), expected, strict=True
                ):
                    assert tokens == chosen, settings
                    assert torch.equal(logits, bits), settings
            assert parts.store.cache.residency.stats().misses > 0

    def check_all(self, predictors: Sequence[PredictorName], memories: Sequence[ExpertMemory]) -> None:
        """With memory for all experts, for a quarter of them, and for one; with a ring of one layer its slots are beside
        that. Kinds of memory take turns, so that every two of the three meet.
        """
        experts = sum(
            value.numel() * 4 for name, value in self.plain.named_parameters() if ".experts." in name
        )
        least, ring = least_budget(self.store), least_ring(self.store)
        budgets = 2 * experts + least, max(experts // 4, least), least
        for (budget, predictor), memory in in_turns(itertools.product(budgets, predictors), memories):
            slots = ring if memory is ExpertMemory.RING else 0
            self.check(
                prefetch__predictor=predictor.value,
                ring__memory=memory.value,
                host_budget=budget + slots,
                device_budget=slots,
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_at_the_least_budget(family: str, tmp_path: Path) -> None:
    case = _Case(tmp_path, family, torch.bfloat16)
    case.check(host_budget=least_budget(case.store))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_same_bits_whatever_is_guessed(
    predictor: PredictorName, memory: ExpertMemory, tmp_path: Path
) -> None:
    _Case(tmp_path, "qwen3_moe", num_hidden_layers=3).check_all([predictor], [memory])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), in_turns(FAMILIES, ComputeDtype))
def test_all_of_it(family: str, dtype: ComputeDtype, tmp_path: Path) -> None:
    """Every budget, predictor and kind of memory for experts."""
    _Case(tmp_path, family, dtype.torch).check_all(PREDICTORS, MEMORIES)


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
