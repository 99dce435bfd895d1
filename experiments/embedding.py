"""A tied table over the vocabulary, gathered and partitioned (SE-MoE, section 4.3): bytes, memory and time of a step.

    python experiments/embedding.py [--ranks 4] [--vocab 151936] [--d-model 512] [--rounds 3]

Both ways take turns, each round in fresh ranks, over the same model: two blocks without experts between the embedding
and the head that is the same table. A rank counts what it sends in a step, and how far its resident memory rises above
what it had before the model. Both stand beside what the formulas give. For the large vocabulary the difference of the
two peaks is compared with the calculated one; what both have in common (blocks, activations, the allocator) cancels
out. A small vocabulary follows, where partitioned rows lose, and what AUTO chooses for either. The first losses differ
by rounding alone.

The gathered table of 151,936 rows of 512 takes about 2.4 GiB on each of 4 ranks; partitioned it takes 0.6.

Exit status 1: bytes or memory are not as calculated, losses differ, or AUTO chose what sends more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from emulation import OUTPUT, TIMEOUT_S, DenseTraining, finish, options, run_ranks, start, table, timed
from torch import Tensor, nn

from tierstore.config import load
from tierstore.dense.config import DenseConfig
from tierstore.dense.layout import Narrow, UnitLayout, dense_bytes, layouts_of_shapes
from tierstore.machine import peak_resident_bytes, resident_bytes
from tierstore.model import Transformer
from tierstore.model.config import ModelConfig, TieEmbeddings
from tierstore.model.vocabulary import VocabularyCost, VocabularyPartition
from tierstore.parallel import ParallelConfig, launch
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import TableRows
from tierstore.train.config import TrainConfig
from tierstore.train.vocabulary import SMALL_TABLE_BYTES, choose_vocabulary
from tierstore.units import format_bytes

WAYS = (RowPlacement.GATHERED, RowPlacement.PARTITIONED)
#: Measured bytes and memory may differ from the calculated ones by this part.
TOLERANCE = 0.05
HEADS = 4
COLUMNS = ("sent_bytes", "calculated_sent_bytes", "risen_bytes", "calculated_bytes")


@dataclass(frozen=True)
class Case:
    """A table of ``vocab`` rows, and the step whose ranks each have ``tokens`` tokens (one sequence)."""

    ranks: int
    vocab: int
    d_model: int
    tokens: int
    steps: int

    @property
    def model(self) -> ModelConfig:
        """A dense block, and one whose experts are left out: a model has at least one of those."""
        return ModelConfig(
            vocab_size=self.vocab, d_model=self.d_model, n_layers=2, moe_every=2, n_heads=HEADS, seq_len=self.tokens,
            tie_embeddings=TieEmbeddings.TIED,
        )  # fmt: skip

    def partition(self, way: RowPlacement) -> VocabularyPartition:
        if way is RowPlacement.GATHERED:
            return VocabularyPartition()
        table = TableRows(self.vocab, self.d_model, self.ranks)
        return VocabularyPartition(table, table)

    def layouts(self, way: RowPlacement) -> list[UnitLayout]:
        d, no = self.d_model, Narrow.NO
        shapes = ((d,), (3 * d, d), (d, d), (d,), (8 * d, d), (d, 4 * d))
        block: list[tuple[Narrow, tuple[int, ...]]] = [(no, shape) for shape in shapes]
        units: list[tuple[str, list[tuple[Narrow, tuple[int, ...]]]]] = [
            ("embedding", [(no, (self.vocab, d))]),
            ("block.0", block),
            ("block.1", block[:4]),
            ("head", [(no, (d,))]),
        ]
        return layouts_of_shapes(units, ranks=self.ranks, tables=self.partition(way).tables(tied=True).keys())

    def sent(self, way: RowPlacement) -> int:
        """Bytes that a rank sends in a step: blocks are gathered twice, embedding and head once, all are reduced once."""
        layouts, sent = self.layouts(way), 0
        for number, layout in enumerate(layouts):
            gathered = layout.exchanged_numel // self.ranks * 4 * (self.ranks - 1)
            sent += gathered * (2 if number in (0, len(layouts) - 1) else 3)
        if way is RowPlacement.PARTITIONED:
            table = TableRows(self.vocab, self.d_model, self.ranks)
            cost = VocabularyCost(table=table, tokens=self.tokens, micro_batches=1, value_bytes=4)
            sent += cost.embedding_sent + cost.head_sent
        return sent

    def held(self, way: RowPlacement) -> int:
        """Bytes of one rank at the peak of a step: buffers and slices; the gradients of the table as the head and as the
        embedding, and their sum, which autograd makes beside them. The logits are gone by then.
        """
        own = TableRows(self.vocab, self.d_model, 1 if way is RowPlacement.GATHERED else self.ranks).each
        return (
            dense_bytes(self.layouts(way), DenseConfig(), ranks=self.ranks).total + 3 * 4 * own * self.d_model
        )


class NoExperts(nn.Module):
    """Adds its input, and routes nothing."""

    def forward(self, x_TD: Any, key: object) -> tuple[Any, None]:
        return x_TD, None


def rank(case: Case, way: RowPlacement) -> dict[str, Any]:
    """Steps of one way on one rank: their seconds, bytes sent in the last, how far memory rose, the first loss."""
    with launch(ParallelConfig(timeout_s=TIMEOUT_S), device="cpu") as mesh:
        group, before = mesh.data, resident_bytes()
        model = Transformer(
            case.model, None, mixture=lambda layer: NoExperts(), mesh=mesh, vocabulary=case.partition(way)
        )
        training = DenseTraining(model, model.dense_units(), case.layouts(way), group, DenseConfig())
        losses: list[float] = []
        seconds, sent = [], [0]

        def take(tokens: Tensor) -> None:
            losses.append(training.step(tokens))

        for number in range(case.steps + 1):
            generator = torch.Generator().manual_seed(number * case.ranks + group.rank)
            tokens = torch.randint(case.vocab, (1, case.tokens + 1), generator=generator)
            seconds.append(timed(group, partial(take, tokens)))
            sent.append(sum(traffic.sent_bytes for traffic in group.traffic.values()))
        risen = peak_resident_bytes() - before
        return {
            "step_s": seconds[1:],
            "sent_bytes": sent[-1] - sent[-2],
            "risen_bytes": risen,
            "loss": losses[0],
        }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Both ways in turns; a row of the table."""
    answers: dict[RowPlacement, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            answers[way].append(run_ranks(rank, case.ranks, case, way))
    ways = {}
    for way, found in answers.items():
        steps = [statistics.median(ranks[0]["step_s"]) for ranks in found]
        ways[way.value] = {
            "step_samples_s": steps,
            "step_s": statistics.median(steps),
            "sent_bytes": round(statistics.mean(each["sent_bytes"] for each in found[0])),
            "calculated_sent_bytes": case.sent(way),
            "risen_bytes": round(statistics.median(each["risen_bytes"] for ranks in found for each in ranks)),
            "calculated_bytes": case.held(way),
            "first_loss": statistics.mean(each["loss"] for each in found[0]),
        }
    settings = {
        f"model.{name}": getattr(case.model, name)
        for name in ("vocab_size", "d_model", "n_layers", "moe_every", "n_heads", "seq_len")
    }
    settings |= {"model.tie_embeddings": "tied", "data.batch_size": case.ranks}
    choice = choose_vocabulary(load(TrainConfig, None, settings), ranks=case.ranks).embedding
    gathered, partitioned = ways.values()
    return {
        "vocab_count": case.vocab,
        **ways,
        "saved_bytes": gathered["risen_bytes"] - partitioned["risen_bytes"],
        "calculated_saved_bytes": gathered["calculated_bytes"] - partitioned["calculated_bytes"],
        "sent_ratio": partitioned["sent_bytes"] / gathered["sent_bytes"],
        "step_ratio": partitioned["step_s"] / gathered["step_s"],
        "auto": choice.value.value,
        "auto_reason": choice.reason,
    }


def failures(large: Mapping[str, Any], small: Mapping[str, Any], d_model: int) -> Iterator[str]:
    """What is not as calculated, or as AUTO has it."""
    for of in (large, small):
        name = f"vocabulary {of['vocab_count']}"
        for way in WAYS:
            error = of[way.value]["sent_bytes"] / of[way.value]["calculated_sent_bytes"] - 1
            if abs(error) > TOLERANCE:
                yield f"{name}, {way.value}: sent bytes differ by {error:+.1%} from the calculated"
        losses = [of[way.value]["first_loss"] for way in WAYS]
        if not math.isclose(*losses, rel_tol=1e-5):
            yield f"{name}: the first losses differ by more than rounding: {losses}"
        partitioned = of["auto"] == RowPlacement.PARTITIONED.value
        by_bytes = partitioned or 4 * of["vocab_count"] * d_model >= SMALL_TABLE_BYTES
        if by_bytes and partitioned is not (of["sent_ratio"] < 1):
            yield f"{name}: AUTO chose {of['auto']}, which sends more"
    error = large["saved_bytes"] / large["calculated_saved_bytes"] - 1
    if abs(error) > TOLERANCE:
        yield f"saved memory differs by {error:+.1%} from the calculated"


def main() -> None:
    asked = options(
        __doc__, ranks=4, vocab=151_936, d_model=512, tokens=64, small_vocab=256, small_tokens=256, rounds=3, steps=3
    )  # fmt: skip
    case = Case(asked.ranks, asked.vocab, asked.d_model, asked.tokens, asked.steps)
    large = measure(case, asked.rounds)
    small = measure(replace(case, vocab=asked.small_vocab, tokens=asked.small_tokens), asked.rounds)
    for of in (large, small):
        title = f"{of['vocab_count']:,} rows of {asked.d_model}, tied, {asked.ranks} ranks on gloo"
        table(title, [{"rows": way.value, **of[way.value]} for way in WAYS], "rows", "step_s", *COLUMNS)
        OUTPUT.line(
            f"saved {format_bytes(of['saved_bytes'])}, calculated {format_bytes(of['calculated_saved_bytes'])}; "
            f"partitioned / gathered: sent {of['sent_ratio']:.3f}, step {of['step_ratio']:.3f}; "
            f"AUTO: {of['auto']} ({of['auto_reason']})"
        )
    finish({"large": large, "small": small}, list(failures(large, small, asked.d_model)))


if __name__ == "__main__":
    start(main)
