"""How well each predictor guesses what forward passes will use, and what its guesses cost.

The same steps, and then the same text, from one store that was trained before: once with each predictor, in a session of
its own that ends without a commit, so that all start alike and the store stays as it is. All but the seconds is counted,
and the same on every machine: what is computed does not depend on the predictor.

A guess is *right* if the pass used the expert. Recall is right guesses over what was used, precision over what was guessed.
What a forward pass still reads while it is open was *demanded*: the forward pass waits for these bytes, and the share of
them that a predictor takes away is the share of forward stalls that does not depend on a disk's speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace

from tierstore.bench.checks import at_least
from tierstore.bench.results.document import Better, Measurement, counted, measured
from tierstore.bench.results.figures import Figures
from tierstore.dense.gates import PassListener
from tierstore.moe.source import ExpertLease, JointSource
from tierstore.prefetch.horizontal import HorizontalQueue
from tierstore.prefetch.predictor import PredictorName
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import Loop, open_parts
from tierstore.train.step_time import StepTimer
from tierstore.train.stepping import SessionParts
from tierstore.train.thread_times import ThreadTimes, stolen_while_running
from tierstore.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class GuessBench:
    """``steps`` after ``warmup`` count; then ``tokens`` that follow a prompt of ``prompt`` tokens (0: none)."""

    predictors: Sequence[PredictorName] = (PredictorName.NONE, PredictorName.HISTORY, PredictorName.ROUTER)
    warmup: int = 3
    steps: int = 8
    prompt: int = 16
    tokens: int = 32

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, prompt=self.prompt)
        at_least(0, warmup=self.warmup, tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class Guessed(Figures):
    """Of one predictor, in training steps or in generated tokens; sums, forward passes and backward ones."""

    used_count: int
    guessed_count: int
    right_count: int
    misses_count: int
    read_bytes: int
    speculative_read_bytes: int
    wasted_read_bytes: int
    forward_demanded_bytes: int
    forward_stall_s: float

    @property
    def recall(self) -> float:
        return self.right_count / max(self.used_count, 1)

    @property
    def precision(self) -> float:
        return self.right_count / max(self.guessed_count, 1)

    def __sub__(self, other: Guessed) -> Guessed:
        names = [field.name for field in fields(self)]
        return Guessed(**{name: getattr(self, name) - getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class PredictorGuesses(Figures):
    """What one predictor did."""

    predictor: PredictorName
    training: Guessed
    decoding: Guessed | None


@dataclass(frozen=True, kw_only=True)
class GuessResult(Figures):
    """What ``run`` found."""

    bench: str = "guesses"
    steps: int
    generated_tokens_count: int
    step_tokens_count: int
    experts: int
    top_k_count: int
    layers_count: int
    host_budget_bytes: int
    predictors: Sequence[PredictorGuesses]


def run(config: TrainConfig, asked: GuessBench, announce: Callable[[str], None]) -> GuessResult:
    """Measures each predictor on ``config.store``. Raises what opening a session does."""
    found = []
    for name in asked.predictors:
        announce(f"predictor {name.value}: {asked.steps} steps, {asked.tokens} tokens")
        found.append(_one(replace(config, prefetch=replace(config.prefetch, predictor=name)), asked))
    model = config.model
    return GuessResult(
        steps=asked.steps,
        generated_tokens_count=asked.tokens,
        step_tokens_count=config.tokens_per_step,
        experts=model.experts,
        top_k_count=model.architecture.top_k,
        layers_count=len(model.moe_layers),
        host_budget_bytes=config.host_budget,
        predictors=found,
    )


def measurements(result: GuessResult) -> list[Measurement]:
    """What ``run`` found, for a document."""
    made = []
    for one in result.predictors:
        for part, found in (("training", one.training), ("decoding", one.decoding)):
            if found is None:
                continue
            of: dict[str, float | str] = {"predictor": one.predictor.value, "of": part}
            made += [
                counted("recall", found.recall, "ratio", Better.HIGHER, parameters=of),
                counted("precision", found.precision, "ratio", Better.HIGHER, parameters=of),
                counted("read", found.read_bytes, "bytes", Better.LOWER, parameters=of),
                counted("wasted", found.wasted_read_bytes, "bytes", Better.LOWER, parameters=of),
                counted("demanded", found.forward_demanded_bytes, "bytes", Better.LOWER, parameters=of),
                measured("forward stalls", [found.forward_stall_s], "s", Better.LOWER, parameters=of),
            ]
    return made


def _one(config: TrainConfig, asked: GuessBench) -> PredictorGuesses:
    watch = _ForwardWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is computed here is not kept
        with (
            open_parts(config, Opening.RESUME, loop=Loop.OWN, watch=watch) as parts,
            closing(ThreadTimes()) as threads,
        ):
            assert parts.data is not None
            watch.parts = parts
            trainer = Trainer(parts, parts.data, StepTimer(parts.ledger, threads, stolen_while_running()))
            for _ in range(asked.warmup):
                trainer.step()
            before = watch.counts()
            for _ in range(asked.steps):
                trainer.step()
            between = watch.counts()
            if not asked.tokens:
                return PredictorGuesses(
                    predictor=config.prefetch.predictor, training=between - before, decoding=None
                )
            batch = next(iter(parts.data.validation_batches(1)))
            trainer.generate(batch.tokens_BT[0, : asked.prompt].tolist(), asked.tokens)
            decoding = watch.counts() - between
    return PredictorGuesses(predictor=config.prefetch.predictor, training=between - before, decoding=decoding)


class _ForwardWatch:
    """The session's expert source, and what was read and waited for while its forward passes were open."""

    def __init__(self) -> None:
        self.parts: SessionParts | None = None
        self._target: JointSource | None = None
        self._demanded = 0
        self._stall_ns = 0

    def listener(self, queue: PassListener) -> PassListener:
        assert isinstance(queue, HorizontalQueue)
        return queue

    def source(self, experts: JointSource) -> JointSource:
        self._target = experts
        return self

    def counts(self) -> Guessed:
        """All so far."""
        assert self.parts is not None
        stats, guesses = self.parts.store.cache.residency.stats(), self.parts.experts.guesses
        return Guessed(
            used_count=guesses.used,
            guessed_count=guesses.guessed,
            right_count=guesses.right,
            misses_count=stats.misses,
            read_bytes=stats.read_bytes,
            speculative_read_bytes=stats.prefetch_read_bytes,
            wasted_read_bytes=stats.wasted_prefetch_bytes,
            forward_demanded_bytes=self._demanded,
            forward_stall_s=self._stall_ns / 1e9,
        )

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        assert self._target is not None
        demanded, stall_ns = self._position()
        yield from self._target.forward(layer, experts)
        now = self._position()
        self._demanded += now[0] - demanded
        self._stall_ns += now[1] - stall_ns

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        assert self._target is not None
        return self._target.backward(layer, experts)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        assert self._target is not None
        return self._target.backward_each(layer, asked)

    def _position(self) -> tuple[int, int]:
        assert self.parts is not None
        stats = self.parts.store.cache.residency.stats()
        return stats.read_bytes - stats.prefetch_read_bytes, self.parts.ledger.total_ns
