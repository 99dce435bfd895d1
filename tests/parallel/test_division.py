"""How a parameter is divided over tensor-parallel ranks: parts, pieces, and the whole again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.parallel.layout import Division
from tierstore.parallel.tensor import part_of, whole_of


def test_by_hand() -> None:
    """Queries, keys and values of two heads of width 1: rank 0 has the first row of each."""
    qkv = torch.tensor([[0], [1], [10], [11], [20], [21]])
    assert part_of(qkv, Division(0, blocks=3), 0, 2).flatten().tolist() == [0, 10, 20]
    assert part_of(qkv, Division(0, blocks=3), 1, 2).flatten().tolist() == [1, 11, 21]
    down = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert part_of(down, Division(1), 1, 2).tolist() == [[2, 3], [6, 7]]


@given(st.integers(0, 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_parts_make_the_whole(dimension: int, blocks: int, ranks: int, piece: int, other: int) -> None:
    division = Division(dimension, blocks)
    shape = [other, other]
    shape[dimension] = blocks * ranks * piece
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    parts = [part_of(whole, division, rank, ranks) for rank in range(ranks)]
    assert {tuple(part.shape) for part in parts} == {division.part_shape(shape, ranks)}
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == list(range(whole.numel()))
    assert torch.equal(whole_of(parts, division), whole)


def test_a_length_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"multiple of 2 x 3 in dimension 0 of \(8, 4\)"):
        Division(0, blocks=2).part_shape((8, 4), 3)
