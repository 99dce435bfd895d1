"""Exchanges in two steps against the flat one: rows to the bit, messages and bytes to the byte."""

from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import Ranks
from torch import Tensor

from tierstore.parallel import (
    Collective,
    CollectiveTraffic,
    ExchangeMode,
    FlatExchange,
    HierarchicalExchange,
    Mesh,
    SizedExchange,
)
from tierstore.parallel.launching import exchange_decision

HIERARCHICAL: dict[str, Any] = {"exchange": ExchangeMode.HIERARCHICAL}


def _rows(rank: int, rows_SS: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows that say where they come from and in which order."""
    count = int(rows_SS[rank].sum())
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 256, (count, *shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return values.view(dtype).view(count, *shape)


def _by_hand(mesh: Mesh) -> list[list[str]]:
    rows_SS = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 1], [2, 0, 0, 0]])
    rank = mesh.exchange.rank
    given = torch.tensor([[rank, to] for to in range(4) for _ in range(int(rows_SS[rank, to]))])
    out = given.new_empty((int(rows_SS[:, rank].sum()), 2))
    mesh.exchange.all_to_all(out, given.view(-1, 2), rows_SS).wait()
    return [[f"{source}>{to}" for source, to in out.tolist()]]


def test_by_hand(ranks: Ranks) -> None:
    """Rank 0 has a row for itself, two for rank 2 and one for rank 3; ranks 0 and 1 are one node, 2 and 3 the other.

    Within the node, rank 0 gives rank 1, whose place is that of rank 3, its row for rank 3; it keeps those for ranks 0 and
    2, and gets nothing for rank 0 and one row for rank 2 from rank 1. Then it sends rank 2 three rows: two of its own and
    rank 1's. Rank 2 has them by source: 0, 0, 1.
    """
    assert ranks.run(4, _by_hand, node_ranks=2, **HIERARCHICAL) == [
        [["0>0", "2>0", "3>0", "3>0"]],
        [["1>1", "2>1"]],
        [["0>2", "0>2", "1>2"]],
        [["0>3", "2>3"]],
    ]


def _against_flat(
    mesh: Mesh, cases: list[tuple[list[list[int]], tuple[int, ...], torch.dtype]]
) -> list[bool]:
    """Whether each case's rows arrive as the flat exchange brings them, and come back as they were."""
    flat, exchange = FlatExchange(mesh.expert), mesh.exchange
    found = []
    for splits, shape, dtype in cases:
        rows_SS = torch.tensor(splits)
        given = _rows(exchange.rank, rows_SS, shape, dtype)
        expected, out = (given.new_empty((int(rows_SS[:, exchange.rank].sum()), *shape)) for _ in range(2))
        flat.all_to_all(expected, given, rows_SS).wait()
        exchange.all_to_all(out, given, rows_SS).wait()
        back = torch.empty_like(given)
        exchange.all_to_all(back, out, rows_SS.t()).wait()
        found.append(all(_same(a, b) for a, b in ((out, expected), (back, given))))
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Of any bytes: NaNs are equal to themselves."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize(("size", "node_ranks"), [(4, 2), (6, 2), (6, 3)])
def test_rows_arrive_as_those_of_the_flat_exchange(ranks: Ranks, size: int, node_ranks: int) -> None:
    counts = st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=size, max_size=size), min_size=size, max_size=size
    )
    case = st.tuples(
        counts,
        st.sampled_from([(), (1,), (3,), (2, 5)]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]),
    )

    @settings(max_examples=share(25))
    @given(st.lists(case, min_size=1, max_size=4))
    def check(cases: list[Any]) -> None:
        found = ranks.run(size, _against_flat, cases, node_ranks=node_ranks, **HIERARCHICAL)
        assert found == [[True] * len(cases)] * size

    check()
    none = [[0] * size for _ in range(size)]
    assert (
        ranks.run(size, _against_flat, [(none, (3,), torch.float32)], node_ranks=node_ranks, **HIERARCHICAL)
        == [[True]] * size
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"stages": 2}], ids=["replicas", "stages"])
def test_every_expert_group_exchanges_by_itself(ranks: Ranks, layout: dict[str, int]) -> None:
    """Eight ranks on four nodes, in two groups of four."""
    cases = [([[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 1], [2, 0, 0, 0]], (3,), torch.float32)]
    found = ranks.run(8, _against_flat, cases, expert=4, node_ranks=2, **layout, **HIERARCHICAL)
    assert found == [[True]] * 8


def _in_any_order(mesh: Mesh, orders: list[list[int]]) -> list[bool]:
    """Several exchanges under way, which each rank waits for in an order of its own."""
    exchange, size = mesh.exchange, mesh.expert.size
    generator = torch.Generator().manual_seed(7)
    works, pairs = [], []
    for number in range(len(orders[0])):
        rows_SS = torch.randint(0, 4, (size, size), generator=generator)
        given = torch.tensor(
            [
                [number, exchange.rank, to]
                for to in range(size)
                for _ in range(int(rows_SS[exchange.rank, to]))
            ]
        ).view(-1, 3)
        out = given.new_full((int(rows_SS[:, exchange.rank].sum()), 3), -1)
        works.append(exchange.all_to_all(out, given, rows_SS))
        wanted = [
            [number, source, exchange.rank]
            for source in range(size)
            for _ in range(int(rows_SS[source, exchange.rank]))
        ]
        pairs.append((out, torch.tensor(wanted).view(-1, 3)))
    for number in orders[exchange.rank]:
        works[number].wait()
        works[number].wait()
        assert works[number].done()
    return [torch.equal(out, wanted) for out, wanted in pairs]


def test_ranks_may_wait_in_any_order(ranks: Ranks) -> None:
    """Second steps are issued in the order of the exchanges, whichever a rank waits for first."""
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]]
    for shift in range(4):
        turned = orders[shift:] + orders[:shift]
        assert ranks.run(4, _in_any_order, turned, node_ranks=2, **HIERARCHICAL) == [[True] * 4] * 4


def _sent(mesh: Mesh, row_bytes: int) -> tuple[CollectiveTraffic, CollectiveTraffic]:
    """What a flat and a hierarchical exchange send, of a row from each rank to each."""
    size = mesh.expert.size
    once_SS = torch.ones((size, size), dtype=torch.int64)
    given = torch.zeros((size, row_bytes), dtype=torch.uint8)
    found = []
    for exchange in (FlatExchange(mesh.expert), mesh.exchange):
        before = mesh.traffic()[Collective.ALL_TO_ALL]
        exchange.all_to_all(torch.empty_like(given), given, once_SS).wait()
        after = mesh.traffic()[Collective.ALL_TO_ALL]
        names = ("calls", "sent_bytes", "messages", "node_messages", "node_bytes")
        found.append(CollectiveTraffic(*(getattr(after, name) - getattr(before, name) for name in names)))
    return found[0], found[1]


@pytest.mark.parametrize(("m", "p"), [(2, 2), (3, 2), (2, 3)])
def test_messages_and_bytes_are_those_of_the_formulas(ranks: Ranks, m: int, p: int) -> None:
    """Between nodes (m - 1) p messages become m - 1 of the same bytes; within the node, p - 1 of m times the bytes."""
    b = 24
    between = (m - 1) * p * b
    flat = CollectiveTraffic(1, (p - 1) * b + between, m * p - 1, (m - 1) * p, between)
    two_steps = CollectiveTraffic(2, m * (p - 1) * b + between, (p - 1) + (m - 1), m - 1, between)
    assert ranks.run(m * p, _sent, b, node_ranks=p, **HIERARCHICAL) == [(flat, two_steps)] * (m * p)


def _misfits(mesh: Mesh) -> list[str]:
    exchange = mesh.exchange
    once_SS = torch.ones((4, 4), dtype=torch.int64)
    rows = torch.zeros(4, 6)
    said = []
    for out, leaving in [
        (rows[:3], rows),
        (rows.double(), rows),
        (torch.zeros(4, 5), rows),
        (rows, torch.zeros(6, 4).t()),
    ]:
        with pytest.raises(ValueError, match=r"expected|rows") as error:
            exchange.all_to_all(out, leaving, once_SS)
        said.append(str(error.value))
    return said


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    assert (
        ranks.run(4, _misfits, node_ranks=2, **HIERARCHICAL)
        == [
            [
                "splits of 4 and 4 rows do not fit tensors of 3 and 4",
                "rows must be alike: torch.float64 (6,) and torch.float32 (6,)",
                "rows must be alike: torch.float32 (5,) and torch.float32 (6,)",
                "expected contiguous tensors",
            ]
        ]
        * 4
    )


def _by_size(mesh: Mesh) -> list[int]:
    """How many messages go to other nodes, by the bytes of a row, where AUTO's threshold is 100 bytes."""
    hierarchical = mesh.exchange
    assert isinstance(hierarchical, HierarchicalExchange)
    exchange = SizedExchange(FlatExchange(mesh.expert), hierarchical, 100.0)
    assert exchange.rank == mesh.expert.rank
    assert exchange.groups == (mesh.expert, *hierarchical.groups)
    once_SS = torch.ones((4, 4), dtype=torch.int64)
    found = []
    for row_bytes in (99, 100):
        before = mesh.traffic()[Collective.ALL_TO_ALL].node_messages
        given = torch.arange(4 * row_bytes).view(4, row_bytes).to(torch.uint8)
        out = torch.empty_like(given)
        exchange.all_to_all(out, given, once_SS).wait()
        assert torch.equal(out, given[mesh.expert.rank].expand_as(out))
        found.append(mesh.traffic()[Collective.ALL_TO_ALL].node_messages - before)
    return found


def test_small_messages_go_in_two_steps(ranks: Ranks) -> None:
    assert ranks.run(4, _by_size, node_ranks=2, **HIERARCHICAL) == [[1, 2]] * 4


@pytest.mark.parametrize(
    ("below_bytes", "said"),
    [
        (0.0, "exchange: auto, flat (why)"),
        (float("inf"), "exchange: auto, hierarchical (why)"),
        (2048.0, "exchange: auto, hierarchical for messages below 2 KiB, flat above (why)"),
    ],
)
def test_a_choice_says_what_it_came_to(below_bytes: float, said: str) -> None:
    assert exchange_decision(ExchangeMode.AUTO, below_bytes, "why").describe() == said
