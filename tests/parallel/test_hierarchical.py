"""Exchanges in two steps against the flat one: rows to the bit, messages and bytes to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import Ranks
from torch import Tensor

from tierstore.parallel import ExchangeMode, FlatExchange, Mesh

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

    @settings(max_examples=25, deadline=None)
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
