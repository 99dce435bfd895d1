"""tierstore itself: a store opened read only, within a budget; or (``tierstore-ram``) with one for all experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from generating import Generated, GenerateTask, Load, LoadResult, Workload, serve_load, timed

from tierstore.config import load
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import ServingPhase
from tierstore.serve.opening import open_runner, open_served
from tierstore.units import format_bytes


class _Sequences:
    """The sequences of a runner; ``leave`` ends them all."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._numbers: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        joined = self._runner.join(prompts)
        self._numbers = list(joined)
        return [int(logits_V.argmax()) for logits_V in joined.values()]

    def step(self, tokens: Sequence[int]) -> list[int]:
        logits = self._runner.step(dict(zip(self._numbers, tokens, strict=True)))
        return torch.stack([logits[number] for number in self._numbers]).argmax(-1).tolist()

    def leave(self) -> None:
        for number in self._numbers:
            self._runner.leave(number)


@contextlib.contextmanager
def opened(
    task: GenerateTask,
) -> Iterator[tuple[Sequence[str], Callable[[Workload], Generated], Callable[[Load], LoadResult]]]:
    """The description, what generates a workload, and what serves a load."""
    overrides: dict[str, object] = {
        "store": task.store,
        "host_budget": task.host_budget,
        "threads": task.threads,
        "batch.sequences": task.sequences,
        "batch.context": task.context,
    }
    with open_served(load(ServeConfig, None, overrides | {**task.settings}), trace=task.trace) as parts:
        if task.rival == "tierstore-ram":  # all experts are read before anything is timed
            parts.experts.begin(ServingPhase.PREFILL, 0)
            for layer in parts.spec.moe_layers:
                for _ in parts.experts.forward(layer, range(parts.spec.experts)):
                    continue
        runner, config = open_runner(parts), parts.config

        def counts() -> Mapping[str, int]:
            stats = parts.store.cache.residency.stats()
            return {
                "nvme_read": stats.read_bytes,
                "speculated": stats.prefetch_read_bytes,
                "useful_speculated": stats.useful_prefetch_bytes,
                "late_prefetch": parts.experts.late_prefetch_bytes,
                "hits": stats.hits,
                "misses": stats.misses,
            }

        def generate(workload: Workload) -> Generated:
            sequences = _Sequences(runner)
            try:
                return timed(sequences, workload, counts)
            finally:
                sequences.leave()

        described = (
            f"{format_bytes(config.host_budget)} for experts, policy {config.cache.policy}, predictor "
            f"{config.prefetch.predictor.value}"
        )
        yield [described], generate, lambda asked: serve_load(runner, asked)
