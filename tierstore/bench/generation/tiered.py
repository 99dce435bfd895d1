"""tierstore itself: a store opened read only, and its runner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tierstore.bench.generation.contestant import (
    Contestant,
    ContestantTask,
    Continued,
    Generated,
    TierUse,
    timed,
)
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.config import load
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import ServedParts, open_runner, open_served
from tierstore.units import format_bytes


class _Sequences(Continued):
    """The sequences of a runner; ``leave`` ends them all."""

    def __init__(self, parts: ServedParts, runner: BatchRunner) -> None:
        self._parts, self._runner = parts, runner
        self._numbers: list[int] = []
        self._before = self._counts()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        joined = self._runner.join(prompts)
        self._numbers = [one.number for one in joined]
        return [int(one.logits_V.argmax()) for one in joined]

    def step(self, tokens: Sequence[int]) -> list[int]:
        logits = self._runner.step(dict(zip(self._numbers, tokens, strict=True)))
        chosen: list[int] = torch.stack([logits[number] for number in self._numbers]).argmax(-1).tolist()
        return chosen

    def leave(self) -> None:
        for number in self._numbers:
            self._runner.leave(number)

    def tier_use(self) -> TierUse | None:
        before, self._before = self._before, self._counts()
        counted = [now - then for then, now in zip(before, self._before, strict=True)]
        read, speculated, useful, late, hits, misses = counted
        return TierUse(
            nvme_read_bytes=read,
            speculated_bytes=speculated,
            useful_speculated_bytes=useful,
            late_prefetch_bytes=late,
            hits=hits,
            misses=misses,
        )

    def _counts(self) -> tuple[int, ...]:
        stats, late = self._parts.store.cache.residency.stats(), self._parts.experts.late_prefetch_bytes
        speculated, useful = stats.prefetch_read_bytes, stats.useful_prefetch_bytes
        return (stats.read_bytes, speculated, useful, late, stats.hits, stats.misses)


class _Tiered(Contestant):
    def __init__(self, parts: ServedParts) -> None:
        self._parts = parts
        self._runner = open_runner(parts)

    def generate(self, workload: GenerationWorkload) -> Generated:
        sequences = _Sequences(self._parts, self._runner)
        try:
            return timed(sequences, workload)
        finally:
            sequences.leave()

    def runner(self) -> BatchRunner:
        """For open-loop load."""
        return self._runner

    def describe(self) -> Sequence[str]:
        config = self._parts.config
        return [
            f"{format_bytes(config.host_budget)} for experts, policy {config.cache.policy}, predictor "
            f"{config.prefetch.predictor.value}"
        ]


@contextlib.contextmanager
def open_tiered(task: ContestantTask) -> Iterator[Contestant]:
    """The task's store within its budget."""
    with _open(task) as parts:
        yield _Tiered(parts)


@contextlib.contextmanager
def open_in_ram(task: ContestantTask) -> Iterator[Contestant]:
    """The same with a budget for all experts, which are read before anything is timed."""
    with _open(task) as parts:
        parts.experts.begin(ServingPhase.PREFILL, 0)
        for layer in parts.spec.moe_layers:
            for _ in parts.experts.forward(layer, range(parts.spec.experts)):
                continue
        yield _Tiered(parts)


@contextlib.contextmanager
def _open(task: ContestantTask) -> Iterator[ServedParts]:
    given: dict[str, object] = dict(setting.partition("=")[::2] for setting in task.settings)
    overrides: dict[str, object] = {
        "store": task.store,
        "host_budget": task.host_budget,
        "threads": task.threads,
        "batch.sequences": task.sequences,
        "batch.context": task.context,
    }
    with open_served(load(ServeConfig, None, overrides | given), trace=task.trace) as parts:
        yield parts
