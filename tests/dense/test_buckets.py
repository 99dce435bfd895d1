"""Gradient buckets: what they hold, and that neither order of arrival nor their size changes a bit."""

import random

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import Ranks
from torch import nn

from tierstore.dense.buckets import GradientExchange, buckets_of
from tierstore.dense.fusion import DenseMessages, DenseTraffic
from tierstore.dense.layout import UnitLayout, unit_layouts
from tierstore.dense.slices import UnitSlices
from tierstore.errors import BudgetError
from tierstore.parallel import Mesh, RankGroup
from tierstore.store.adamw import AdamWConfig

CPU = torch.device("cpu")
SHAPES = [
    [(40, 4)],
    [(6, 8), (30,), (3, 5)],
    [(6, 8), (30,), (3, 5)],
    [(6, 8), (30,), (3, 5)],
    [(11,), (40, 4)],
]


def layouts_of(ranks: int, narrow: bool = False) -> list[UnitLayout]:
    units = [(f"u{i}", [nn.Parameter(torch.empty(s)) for s in shapes]) for i, shapes in enumerate(SHAPES)]
    cast = [unit[0] for _, unit in units[1:4]] if narrow else []
    return unit_layouts(units, ranks=ranks, narrow=cast)


def exchange_of(
    group: RankGroup, bucket_bytes: int, buffers: int
) -> tuple[GradientExchange, list[UnitSlices], DenseTraffic]:
    slices = [UnitSlices(layout, group.rank, CPU, AdamWConfig()) for layout in layouts_of(group.size)]
    messages = DenseMessages()
    exchange = GradientExchange(
        slices, group, CPU, bucket_bytes=bucket_bytes, buffers=buffers, messages=messages
    )
    return exchange, slices, messages.traffic


def gradient(rank: int, micro: int, unit: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * micro + 10 * unit + index)
    return torch.randn(SHAPES[unit][index], generator=generator) * 10.0 ** (rank - micro)


def expected(layout: UnitLayout, unit: int, ranks: int, micros: int) -> torch.Tensor:
    """The whole unit's gradient: summed over ranks, then added to what earlier micro-batches left."""
    total = torch.zeros(layout.padded_numel)
    for micro in range(micros):
        base = 0
        for region in layout.regions:
            for span in region.spans:
                part = sum(gradient(rank, micro, unit, span.index) for rank in range(ranks))
                start = base + span.offset
                total[start : start + span.numel] += part.flatten()
            base += region.padded_numel
    return total


def test_buckets_by_hand() -> None:
    # Unit 1, one rank: parameters of 48, 30 and 15 elements at 0, 48 and 78; 93 padded to 96. From the back, closed at
    # 70 bytes: [78, 96) has 72 bytes, [48, 78) 120, [0, 48) 192. At 100 bytes the last two elements join.
    layout = layouts_of(1)[1]
    assert [(b.begin, b.end) for b in buckets_of(layout, 70)] == [(78, 96), (48, 78), (0, 48)]
    assert [(b.begin, b.end) for b in buckets_of(layout, 100)] == [(48, 96), (0, 48)]
    assert [(b.begin, b.end) for b in buckets_of(layout, 1 << 30)] == [(0, 96)]
    # On 2 ranks slices have 48 elements: bucket [48, 96) is all of rank 1's, [0, 48) all of rank 0's.
    first, second = buckets_of(layouts_of(2)[1], 100)
    assert [first.part(rank) for rank in range(2)] == [(48, 48), (48, 96)]
    assert [second.part(rank) for rank in range(2)] == [(0, 48), (48, 48)]
    # What may travel narrow is a region of its own, sent first, since it is the larger one.
    assert [(b.base, b.begin, b.end) for b in buckets_of(layouts_of(1, narrow=True)[1], 1 << 30)] == [
        (48, 0, 48),
        (0, 0, 48),
    ]


@settings(max_examples=share(40))
@given(st.integers(0, 800), st.integers(1, 4), st.integers(0, 2**16), st.integers(1, 3))
def test_one_rank_in_any_order(bucket_bytes: int, buffers: int, seed: int, micros: int) -> None:
    exchange, slices, _ = exchange_of(RankGroup.alone(), bucket_bytes, buffers)
    shuffled = random.Random(seed)
    for micro in range(micros):
        exchange.begin()
        for unit in reversed(range(len(SHAPES))):
            for index in shuffled.sample(range(len(SHAPES[unit])), len(SHAPES[unit])):
                exchange.arrive(unit, index, gradient(0, micro, unit, index))
        exchange.flush(0)
    exchange.finish()
    for unit, held in enumerate(slices):
        assert torch.equal(held.gradient, expected(held.layout, unit, 1, micros))


def _reduced(mesh: Mesh, bucket_bytes: int, buffers: int) -> tuple[list[torch.Tensor], DenseTraffic]:
    """Each rank in an order of its own; two micro-batches."""
    group = mesh.world
    exchange, slices, traffic = exchange_of(group, bucket_bytes, buffers)
    shuffled = random.Random(group.rank)
    for micro in range(2):
        exchange.begin()
        for unit in reversed(range(len(SHAPES))):
            indexes = list(range(len(SHAPES[unit])))
            for index in shuffled.sample(indexes, len(indexes)):
                exchange.arrive(unit, index, gradient(group.rank, micro, unit, index))
            exchange.flush(unit)
    exchange.finish()
    return [held.gradient for held in slices], traffic


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [0, 100, 1 << 30])
def test_ranks_hold_their_slices_of_the_sums(ranks: Ranks, size: int, bucket_bytes: int) -> None:
    outcomes = ranks.run(size, _reduced, bucket_bytes, 2)
    for unit, layout in enumerate(layouts_of(size)):
        found = torch.cat([gradients[unit] for gradients, _ in outcomes])
        assert torch.equal(found, expected(layout, unit, size, 2))
    padded = sum(layout.padded_numel for layout in layouts_of(size))
    buckets = sum(len(buckets_of(layout, bucket_bytes)) for layout in layouts_of(size))
    assert buckets == {0: 12, 1 << 30: 5}.get(bucket_bytes, buckets)
    for _, traffic in outcomes:
        assert traffic.reductions == 2 * buckets
        assert traffic.reduction_bytes == 2 * 4 * padded * (size - 1) // size


def test_misuse() -> None:
    exchange, _, _ = exchange_of(RankGroup.alone(), 0, 1)
    exchange.begin()
    exchange.begin()  # nothing has arrived: a loss that was not finite
    exchange.flush(3)
    with pytest.raises(RuntimeError, match="after its group's backward pass"):
        exchange.arrive(4, 0, gradient(0, 0, 4, 0))
    exchange.arrive(2, 0, gradient(0, 0, 2, 0))
    with pytest.raises(RuntimeError, match="before their backward pass has ended"):
        exchange.finish()
    with pytest.raises(RuntimeError, match="before the last one has ended"):
        exchange.begin()
    with pytest.raises(BudgetError, match=r"gradient_buffers: gradients of u1 arrive"):
        exchange.arrive(1, 0, gradient(0, 0, 1, 0))
