"""How fast a store is served on this machine: prefill, decoding, what a token reads, what it takes in memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from tierstore.capabilities import Capability
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import PredictorName
from tierstore.serve.batch.interface import BatchRunner
from tierstore.serve.batch.opening import open_runner
from tierstore.serve.config import BatchConfig, GraphsConfig, ServeConfig
from tierstore.serve.opening import ServedParts, open_served

#: A sequence: tokens of its prompt, and tokens that are decoded behind it. The first round is not counted.
PROMPT_TOKENS, DECODED_TOKENS, ROUNDS = 64, 16, 3


@dataclass(frozen=True, kw_only=True)
class ServedSettings:
    """A way of serving that can be chosen without changing what is computed; names are those of ``ServeConfig``."""

    threads: int
    predictor: PredictorName
    host_budget: int
    graphs: Capability = Capability.OFF

    def config(self, store: Path) -> ServeConfig:
        return ServeConfig(
            store=store,
            device="cpu",
            host_budget=self.host_budget,
            threads=self.threads,
            batch=BatchConfig(sequences=1, context=PROMPT_TOKENS + DECODED_TOKENS + 1),
            prefetch=PrefetchConfig(predictor=self.predictor),
            graphs=GraphsConfig(compile=self.graphs),
        )

    def as_json(self) -> dict[str, object]:
        """Keys of ``ServeConfig`` by dotted name."""
        return {
            "threads": self.threads,
            "prefetch.predictor": self.predictor.value,
            "host_budget": self.host_budget,
            "graphs.compile": self.graphs.value,
        }


@dataclass(frozen=True, kw_only=True)
class ServingProfile:
    """What was measured of one way: medians over the rounds of one sequence. ``load``: processes that ran, on average, in
    the minute before.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_read_bytes_per_token: float
    resident_bytes: int
    load: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure(store: Path, settings: ServedSettings) -> ServingProfile:
    """Serves one sequence of the model at ``store`` a few times. Raises StoreError, BudgetError, OSError."""
    gc.collect()  # models of earlier stages lie in cycles: their memory is not this one's
    with open_served(settings.config(store)) as parts:
        runner = open_runner(parts)
        rounds = [_round(parts, runner, number) for number in range(1 + ROUNDS)][1:]
        resident = psutil.Process().memory_info().rss
    prefill, decode, read = (statistics.median(values) for values in zip(*rounds, strict=True))
    return ServingProfile(
        prefill_tokens_per_s=PROMPT_TOKENS / prefill,
        decode_tokens_per_s=DECODED_TOKENS / decode,
        decode_read_bytes_per_token=read / DECODED_TOKENS,
        resident_bytes=resident,
        load=os.getloadavg()[0],
    )


def _round(parts: ServedParts, runner: BatchRunner, number: int) -> tuple[float, float, float]:
    """Seconds of the prefill and of decoding, and bytes that decoding read."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(0, parts.spec.vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
    began = time.perf_counter()
    (joined,) = runner.join([prompt])
    prefilled, before = time.perf_counter(), _read_bytes(parts)
    logits_V = joined.logits_V
    for _ in range(DECODED_TOKENS):
        logits_V = runner.step({joined.number: int(logits_V.argmax())})[joined.number]
    ended = time.perf_counter()
    runner.leave(joined.number)
    return prefilled - began, ended - prefilled, float(_read_bytes(parts) - before)


def _read_bytes(parts: ServedParts) -> int:
    return sum(drive.read_bytes for drive in parts.store.extents.drive_reports())


def fastest(found: Sequence[tuple[ServedSettings, ServingProfile]]) -> tuple[ServedSettings, ServingProfile]:
    """Where decoding is fastest; of equals, the first."""
    return max(found, key=lambda each: each[1].decode_tokens_per_s)


def rows(found: Sequence[tuple[ServedSettings, ServingProfile]]) -> list[Mapping[str, object]]:
    """Every way that was measured, for the record."""
    return [{**settings.as_json(), **profile.as_json()} for settings, profile in found]
