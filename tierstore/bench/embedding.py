"""A tied table over the vocabulary, gathered and partitioned (SE-MoE section 4.3): bytes, memory and time of a step.

The two ways take turns, each round in fresh ranks, over the same model: two blocks, without experts, between the embedding
and the head that is it. A rank counts what it sends in a step, and how far its resident memory rises above what it had
before the model; both stand beside what the formulas say. For the large vocabulary the difference of the two peaks is held
against the calculated one; what both have in common (the blocks, their activations, the allocator) cancels out. Then the
same for a small vocabulary, where partitioned rows lose, and what AUTO makes of either. The first losses differ by rounding
alone.

The gathered table of 151,936 rows of 512 takes about 2.4 GiB on each of 4 ranks; partitioned it takes .6.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore import machine
from tierstore.bench.checks import at_least
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named, prefixed, ratios
from tierstore.config import load
from tierstore.dense.config import DenseConfig
from tierstore.dense.footprint import dense_bytes
from tierstore.dense.layout import Narrow, UnitLayout, layouts_of_shapes
from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig, TieEmbeddings
from tierstore.model.vocabulary.cost import VocabularyCost
from tierstore.model.vocabulary.partition import VocabularyPartition
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.rows import TableRows
from tierstore.train.config import TrainConfig
from tierstore.train.vocabulary import SMALL_TABLE_BYTES, choose_vocabulary
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from tierstore.parallel import RankGroup

_TIMEOUT_S = 600.0
_WAYS = (RowPlacement.GATHERED, RowPlacement.PARTITIONED)
#: Measured bytes and memory may be so far from the calculated ones.
_TOLERANCE = 0.05
_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class EmbeddingBench(Figures):
    """What to measure: tables of ``vocab`` and ``small_vocab`` rows of width ``d_model``, ``tokens`` of a step on each rank
    (one sequence) for the first, ``small_tokens`` for the second.
    """

    ranks: int = field(default=4, metadata=named("ranks_count"))
    vocab: int = field(default=151_936, metadata=named("vocab_count"))
    d_model: int = field(default=512, metadata=named("d_model_count"))
    tokens: int = field(default=64, metadata=named("tokens_count"))
    small_vocab: int = field(default=256, metadata=named("small_vocab_count"))
    small_tokens: int = field(default=256, metadata=named("small_tokens_count"))
    rounds: int = field(default=3, metadata=named("rounds_count"))
    steps: int = field(default=3, metadata=INTERNAL)

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"ranks: expected at least 2, got {self.ranks}: one divides nothing")
        at_least(2, vocab=self.vocab, small_vocab=self.small_vocab)
        at_least(1, tokens=self.tokens, small_tokens=self.small_tokens, rounds=self.rounds, steps=self.steps)
        if self.d_model < 1 or self.d_model % (2 * _HEADS):
            raise ConfigError(f"d_model: expected a multiple of {2 * _HEADS}, got {self.d_model}")


@dataclass(frozen=True, kw_only=True)
class TableWay(Figures):
    """Steps of one way, over rounds. ``sent_bytes``: of one rank in a step. ``risen_bytes``: the median over ranks and
    rounds of how far resident memory rose. ``calculated_bytes``: buffers and gradients of dense parameters.
    """

    step_samples_s: Sequence[float]
    step_s: float
    sent_bytes: int
    calculated_sent_bytes: int
    risen_samples_bytes: Sequence[float]
    risen_bytes: int
    calculated_bytes: int
    first_loss: float

    @property
    def sent_error(self) -> float:
        return self.sent_bytes / self.calculated_sent_bytes - 1.0


@dataclass(frozen=True, kw_only=True)
class TableResult(Figures):
    """Both ways with one vocabulary. ``saved_bytes``: the difference of their peaks; ratios are partitioned over gathered,
    of times the median of rounds. ``noise_ratio``: by how much steps of one way differ from round to round.
    """

    vocab: int = field(metadata=named("vocab_count"))
    gathered: TableWay
    partitioned: TableWay
    saved_bytes: int
    calculated_saved_bytes: int
    sent_ratio: float
    step_ratio: float
    noise_ratio: float
    auto: str
    auto_reason: str

    @property
    def saved_error(self) -> float:
        return self.saved_bytes / self.calculated_saved_bytes - 1.0


@dataclass(frozen=True, kw_only=True)
class EmbeddingResult(Figures):
    """What ``run`` found."""

    bench: str = "embedding"
    backend: str = "gloo"
    asked: EmbeddingBench = field(metadata=prefixed(""))
    large: TableResult
    small: TableResult

    @property
    def failures(self) -> list[str]:
        """What is not as calculated, or as AUTO has it."""
        found = []
        for table in (self.large, self.small):
            for way in (table.gathered, table.partitioned):
                if abs(way.sent_error) > _TOLERANCE:
                    found.append(f"vocabulary {table.vocab}: sent {way.sent_error:+.1%} of the calculated")
            if not math.isclose(table.gathered.first_loss, table.partitioned.first_loss, rel_tol=1e-5):
                found.append(f"vocabulary {table.vocab}: the first losses differ by more than rounding")
        if abs(self.large.saved_error) > _TOLERANCE:
            found.append(f"memory saved: {self.large.saved_error:+.1%} of the calculated")
        for table in (self.large, self.small):
            partitioned = table.auto == RowPlacement.PARTITIONED.value
            small = 4 * table.vocab * self.asked.d_model < SMALL_TABLE_BYTES  # bytes do not decide
            if partitioned is not (table.sent_ratio < 1.0) and (partitioned or not small):
                found.append(f"vocabulary {table.vocab}: AUTO is {table.auto}, which sends more")
        return found


def run(bench: EmbeddingBench, say: Callable[[str], None] = lambda _: None) -> EmbeddingResult:
    """Measures. Raises ConfigError (too little memory), WorkerError."""
    needed = bench.ranks * _calculated(bench, bench.vocab, RowPlacement.GATHERED)
    available = machine.memory().available_bytes
    if needed > available:
        raise ConfigError(
            f"vocab: {bench.ranks} ranks that gather {bench.vocab} rows of {bench.d_model} need "
            f"{format_bytes(needed)} of memory, and {format_bytes(available)} are available"
        )
    return EmbeddingResult(
        asked=bench,
        large=_table(bench, bench.vocab, bench.tokens, say),
        small=_table(bench, bench.small_vocab, bench.small_tokens, say),
    )


def measurements(result: EmbeddingResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for table in (result.large, result.small):
        rows: Mapping[str, float | str] = {"vocabulary": table.vocab}
        for name, way in (("gathered", table.gathered), ("partitioned", table.partitioned)):
            how = {**rows, "rows": name}
            yield measured("step", way.step_samples_s, "s", Better.LOWER, parameters=how)
            yield counted("sent a step", way.sent_bytes, "bytes", Better.LOWER, parameters=how)
            yield measured("resident rise", way.risen_samples_bytes, "bytes", Better.LOWER, parameters=how)
        to_gathered = ratios(table.partitioned.step_samples_s, table.gathered.step_samples_s)
        yield derived("step partitioned to gathered", to_gathered, "ratio", parameters=rows)
        yield derived("sent partitioned to gathered", table.sent_ratio, "ratio", parameters=rows)
    saved = 1.0 + abs(result.large.saved_error)
    yield derived("memory saved to calculated", saved, "ratio", Better.LOWER, target=1.0 + _TOLERANCE)


# What is calculated -----------------------------------------------------------------------------------------


def _model(bench: EmbeddingBench, vocab: int, tokens: int) -> ModelConfig:
    """A dense block, and one whose experts are left out: a model has at least one of those."""
    return ModelConfig(
        vocab_size=vocab,
        d_model=bench.d_model,
        n_layers=2,
        moe_every=2,
        n_heads=_HEADS,
        seq_len=tokens,
        tie_embeddings=TieEmbeddings.TIED,
    )


def _layouts(bench: EmbeddingBench, vocab: int, placement: RowPlacement) -> list[UnitLayout]:
    d, no = bench.d_model, Narrow.NO
    shapes = ((d,), (3 * d, d), (d, d), (d,), (8 * d, d), (d, 4 * d))
    block: list[tuple[Narrow, tuple[int, ...]]] = [(no, shape) for shape in shapes]
    units: list[tuple[str, list[tuple[Narrow, tuple[int, ...]]]]] = [
        ("embedding", [(no, (vocab, d))]),
        ("block.0", block),
        ("block.1", block[:4]),
        ("head", [(no, (d,))]),
    ]
    partition = _partition(bench, vocab, placement)
    return layouts_of_shapes(units, ranks=bench.ranks, tables=partition.tables(tied=True).keys())


def _partition(bench: EmbeddingBench, vocab: int, placement: RowPlacement) -> VocabularyPartition:
    if placement is RowPlacement.GATHERED:
        return VocabularyPartition()
    table = TableRows(vocab, bench.d_model, bench.ranks)
    return VocabularyPartition(table, table)


def _cost(bench: EmbeddingBench, vocab: int, tokens: int) -> VocabularyCost:
    table = TableRows(vocab, bench.d_model, bench.ranks)
    return VocabularyCost(table=table, tokens=tokens, micro_batches=1, value_bytes=4)


def _calculated_sent(bench: EmbeddingBench, vocab: int, tokens: int, placement: RowPlacement) -> int:
    """What a rank sends in a step: blocks are gathered twice, embedding and head once, and all are reduced once."""
    layouts, others = _layouts(bench, vocab, placement), bench.ranks - 1
    ends = (0, len(layouts) - 1)
    sent = 0
    for number, layout in enumerate(layouts):
        gathered = layout.exchanged_numel // bench.ranks * 4 * others
        sent += gathered * (2 if number in ends else 3)
    if placement is RowPlacement.PARTITIONED:
        cost = _cost(bench, vocab, tokens)
        sent += cost.embedding_sent + cost.head_sent
    return sent


def _calculated(bench: EmbeddingBench, vocab: int, placement: RowPlacement) -> int:
    """Bytes of one rank at the peak of a step: buffers and slices; the gradients of the table as the head and as the
    embedding, and their sum, which autograd makes beside them. The logits are gone by then.
    """
    layouts = _layouts(bench, vocab, placement)
    held = dense_bytes(layouts, DenseConfig(), ranks=bench.ranks).total
    own = TableRows(vocab, bench.d_model, 1 if placement is RowPlacement.GATHERED else bench.ranks).each
    return held + 3 * 4 * own * bench.d_model


# Both ways --------------------------------------------------------------------------------------------------


def _table(bench: EmbeddingBench, vocab: int, tokens: int, say: Callable[[str], None]) -> TableResult:
    answers: dict[RowPlacement, list[list[_Found]]] = {way: [] for way in _WAYS}
    for turn in range(bench.rounds):
        for way in _WAYS:
            given = json.dumps({**asdict(bench), "vocab": vocab, "tokens": tokens})
            found = run_ranks(
                "tierstore.bench.embedding", [given, way.value], ranks=bench.ranks, timeout_s=_TIMEOUT_S
            )
            answers[way].append([_Found(**each) for each in found])
        medians = ", ".join(
            f"{way.value} {statistics.median(found[-1][0].step_samples_s):.3f} s"
            for way, found in answers.items()
        )
        say(f"vocabulary {vocab}, round {turn + 1} of {bench.rounds}: {medians}")
    gathered, partitioned = (_way(bench, vocab, tokens, way, answers[way]) for way in _WAYS)
    settings = {
        **{f"model.{name}": value for name, value in _settings(bench, vocab, tokens).items()},
        "data.batch_size": bench.ranks,
    }
    choice = choose_vocabulary(load(TrainConfig, None, settings), ranks=bench.ranks)
    rounds = ratios(partitioned.step_samples_s, gathered.step_samples_s)
    spreads = [
        (max(way.step_samples_s) - min(way.step_samples_s)) / way.step_s for way in (gathered, partitioned)
    ]
    calculated = gathered.calculated_bytes - partitioned.calculated_bytes
    return TableResult(
        vocab=vocab,
        gathered=gathered,
        partitioned=partitioned,
        saved_bytes=gathered.risen_bytes - partitioned.risen_bytes,
        calculated_saved_bytes=calculated,
        sent_ratio=partitioned.sent_bytes / gathered.sent_bytes,
        step_ratio=statistics.median(rounds),
        noise_ratio=max(spreads),
        auto=choice.embedding.placement.value,
        auto_reason=choice.embedding.reason,
    )


def _settings(bench: EmbeddingBench, vocab: int, tokens: int) -> dict[str, object]:
    model = _model(bench, vocab, tokens)
    names = ("vocab_size", "d_model", "n_layers", "moe_every", "n_heads", "seq_len")
    return {**{name: getattr(model, name) for name in names}, "tie_embeddings": "tied"}


def _way(
    bench: EmbeddingBench, vocab: int, tokens: int, way: RowPlacement, rounds: Sequence[Sequence[_Found]]
) -> TableWay:
    steps = [statistics.median(found[0].step_samples_s) for found in rounds]
    risen = [float(rank.risen_bytes) for found in rounds for rank in found]
    return TableWay(
        step_samples_s=steps,
        step_s=statistics.median(steps),
        sent_bytes=round(statistics.mean(rank.sent_bytes for rank in rounds[0])),
        calculated_sent_bytes=_calculated_sent(bench, vocab, tokens, way),
        risen_samples_bytes=risen,
        risen_bytes=round(statistics.median(risen)),
        calculated_bytes=_calculated(bench, vocab, way),
        first_loss=statistics.mean(rank.first_loss for rank in rounds[0]),
    )


# One rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """One rank's answer. ``sent_bytes``: of the last step."""

    step_samples_s: list[float]
    sent_bytes: int
    risen_bytes: int
    first_loss: float


def _rank(bench: EmbeddingBench, placement: RowPlacement) -> _Found:
    import torch

    from tierstore.parallel import ParallelConfig, launch
    from tierstore.train.footprint import peak_resident_bytes, resident_bytes

    torch.set_num_threads(1)
    with launch(ParallelConfig(timeout_s=_TIMEOUT_S), device="cpu") as mesh:
        group = mesh.data
        steps = _Steps(bench, mesh, placement)
        before = resident_bytes()
        steps.build()
        first_loss, times, sent = 0.0, [], 0
        for number in range(bench.steps + 1):
            group.barrier()
            counted_before = _sent(group)
            started = time.perf_counter()
            loss = steps.step(number)
            group.barrier()
            if number == 0:
                first_loss = loss
            else:
                times.append(time.perf_counter() - started)
            sent = _sent(group) - counted_before
        return _Found(times, sent, peak_resident_bytes() - before, first_loss)


def _sent(group: RankGroup) -> int:
    return sum(traffic.sent_bytes for traffic in group.traffic.values())


class _Steps:
    """The model of one way, its slices, and steps of them."""

    def __init__(self, bench: EmbeddingBench, mesh: Any, placement: RowPlacement) -> None:
        # What is imported here is not counted as the model's.
        from tierstore.dense import DenseSlices, GatherOnDemand
        from tierstore.model import Transformer
        from tierstore.store.adamw import AdamWConfig

        self._bench, self._mesh, self._placement = bench, mesh, placement
        self._slices, self._listener, self._transformer = DenseSlices, GatherOnDemand, Transformer
        self._adamw = AdamWConfig()

    def build(self) -> None:
        import torch

        bench, mesh = self._bench, self._mesh
        partition = _partition(bench, bench.vocab, self._placement)
        self._model = self._transformer(
            _model(bench, bench.vocab, bench.tokens),
            None,
            mixture=lambda layer: _no_experts(),
            mesh=mesh,
            vocabulary=partition,
        )
        config = DenseConfig()
        self._dense = self._slices(
            self._model.dense_units(),
            _layouts(bench, bench.vocab, self._placement),
            group=mesh.data,
            device=torch.device("cpu"),
            adamw=self._adamw,
            config=config,
        )
        self._dense.attach(self._model, self._listener(self._dense, config.reshard))

    def step(self, number: int) -> float:
        import torch

        seed = number * self._bench.ranks + self._mesh.data.rank
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self._bench.vocab, (1, self._bench.tokens + 1), generator=generator)
        self._dense.zero_grad()
        self._dense.begin_micro()
        output = self._model(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(output.objective)
        self._dense.end_micro()
        self._dense.finish()
        self._dense.step(1e-3)
        return float(output.loss.detach())


def _no_experts() -> nn.Module:
    """Adds its input, and routes nothing."""
    from torch import nn

    class NoExperts(nn.Module):
        def forward(self, x_TD: Any, key: object) -> tuple[Any, None]:
            return x_TD, None

    return NoExperts()


if __name__ == "__main__":
    asked = EmbeddingBench(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(_rank(asked, RowPlacement(sys.argv[2])))), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
