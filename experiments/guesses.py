"""How well each predictor guesses what forward passes will use, and what its guesses cost.

    python experiments/guesses.py --store DIR [--config CONFIG.toml] [--predictors none history router]

The same steps, and then the same text, from one store that ``tierstore train`` made: once with each predictor, in a
session of its own that ends without a commit, so that all start alike and the store stays as it is. All but the seconds
is counted, and is the same on every machine: what is computed does not depend on the predictor.

A guess is *right* if the pass used the expert. Recall is right guesses over what was used, precision over what was
guessed. What a forward pass still reads while it is open was *demanded*: the pass waits for these bytes, and the share
of them that a predictor takes away is the share of forward stalls that does not depend on a disk's speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulation import finish, options, start, table

from tierstore.cli.options import config_overrides, with_stored_model
from tierstore.config import load
from tierstore.dense.gates import PassListener
from tierstore.errors import ConfigError
from tierstore.moe.source import ExpertLease, JointSource
from tierstore.prefetch.horizontal import HorizontalQueue
from tierstore.prefetch.predictor import PredictorName
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts
from tierstore.train.setup import Loop
from tierstore.train.step_time import StepTimer, ThreadTimes, stolen_while_running
from tierstore.train.stepping import SessionParts
from tierstore.train.trainer import Trainer
from tierstore.units import format_bytes


class ForwardWatch:
    """The session's expert source, which also notes what is read and waited for while its forward passes are open."""

    parts: SessionParts
    _target: JointSource

    def __init__(self) -> None:
        self._demanded = 0
        self._stall_ns = 0

    def listener(self, queue: PassListener) -> PassListener:
        assert isinstance(queue, HorizontalQueue)
        return queue

    def source(self, experts: JointSource) -> JointSource:
        self._target = experts
        return self

    def counts(self) -> dict[str, float]:
        """All so far."""
        stats, guesses = self.parts.store.cache.residency.stats(), self.parts.experts.guesses
        return {
            "used_count": guesses.used,
            "guessed_count": guesses.guessed,
            "right_count": guesses.right,
            "misses_count": stats.misses,
            "read_bytes": stats.read_bytes,
            "speculative_read_bytes": stats.prefetch_read_bytes,
            "wasted_read_bytes": stats.wasted_prefetch_bytes,
            "forward_demanded_bytes": self._demanded,
            "forward_stall_s": self._stall_ns / 1e9,
        }

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        demanded, stall_ns = self._position()
        yield from self._target.forward(layer, experts)
        now = self._position()
        self._demanded += now[0] - demanded
        self._stall_ns += now[1] - stall_ns

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._target.backward(layer, experts)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        return self._target.backward_each(layer, asked)

    def _position(self) -> tuple[int, int]:
        stats = self.parts.store.cache.residency.stats()
        return stats.read_bytes - stats.prefetch_read_bytes, self.parts.ledger.total_ns


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was counted between two moments, with recall and precision."""
    found = {name: after[name] - before[name] for name in after}
    return {
        **found,
        "recall_ratio": found["right_count"] / max(found["used_count"], 1),
        "precision_ratio": found["right_count"] / max(found["guessed_count"], 1),
    }


def measure(config: TrainConfig, warmup: int, steps: int, prompt: int, tokens: int) -> dict[str, Any]:
    """What the predictor of ``config`` does in ``steps`` steps after ``warmup``, and then in ``tokens`` tokens."""
    watch = ForwardWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is computed here is not kept
        with (
            open_parts(config, Opening.RESUME, loop=Loop.OWN, watch=watch) as parts,
            closing(ThreadTimes()) as threads,
        ):
            assert parts.data is not None
            watch.parts = parts
            trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
            for _ in range(warmup):
                trainer.step()
            before = watch.counts()
            for _ in range(steps):
                trainer.step()
            trained = watch.counts()
            found = {"predictor": config.prefetch.predictor.value, "training": between(before, trained)}
            if tokens:
                batch = next(iter(parts.data.validation_batches(1)))
                trainer.generate(batch.tokens_BT[0, :prompt].tolist(), tokens)
                found["decoding"] = between(trained, watch.counts())
    return found


def main() -> None:
    asked = options(
        __doc__, store=None, config=None, predictors=("none", "history", "router"), steps=8, warmup=3, prompt=16, tokens=32,
        host_budget=0, set=("",),
    )  # fmt: skip
    if asked.store is None:
        raise ConfigError("--store: expected the directory of a trained store")
    given = {"host_budget": asked.host_budget or None, "store": Path(asked.store)}
    overrides = config_overrides(tuple(each for each in asked.set if each), given)
    config = with_stored_model(load(TrainConfig, Path(asked.config) if asked.config else None, overrides))
    found = []
    for name in asked.predictors:
        chosen = replace(config, prefetch=replace(config.prefetch, predictor=PredictorName(name)))
        found.append(measure(chosen, asked.warmup, asked.steps, asked.prompt, asked.tokens))
    for part in ("training", "decoding"):
        rows = [{"predictor": one["predictor"], **one[part]} for one in found if part in one]
        if rows:
            table(
                f"{part}; host budget {format_bytes(config.host_budget)}", rows, "predictor", "recall_ratio",
                "precision_ratio", "misses_count", "read_bytes", "speculative_read_bytes", "wasted_read_bytes",
                "forward_demanded_bytes", "forward_stall_s", forward_demanded_bytes="demanded in forward passes",
            )  # fmt: skip
    finish({"host_budget_bytes": config.host_budget, "predictors": found})


if __name__ == "__main__":
    start(main)
