"""Blocks cut into segments."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.deploy.stages import Segment, balanced, cut, fewest
from tierstore.errors import BudgetError, ConfigError


def _largest(sizes: list[int], firsts: list[int]) -> int:
    return max(sum(sizes[one:other]) for one, other in pairwise([*firsts, len(sizes)]))


def test_worked_by_hand() -> None:
    """9 | 1 1 1 | 9 has segments of 9, 3 and 9; two segments are 9 1 1 1 and 9, or 9 1 1 and 1 9, or worse."""
    assert balanced([9, 1, 1, 1, 9], 1) == [0]
    assert _largest([9, 1, 1, 1, 9], balanced([9, 1, 1, 1, 9], 2)) == 11
    assert _largest([9, 1, 1, 1, 9], balanced([9, 1, 1, 1, 9], 3)) == 9


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.data())
def test_no_other_cut_is_better(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    firsts = balanced(sizes, count)
    assert len(firsts) == count
    assert firsts == sorted(set(firsts))
    assert firsts[0] == 0
    every = ([0, *others] for others in combinations(range(1, len(sizes)), count - 1))
    assert _largest(sizes, firsts) == min(_largest(sizes, each) for each in every)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(50, 400))
def test_the_fewest_segments_fit_and_fewer_do_not(sizes: list[int], memory: int) -> None:
    count = fewest(sizes, memory)
    assert _largest(sizes, balanced(sizes, count)) <= memory
    if count > 1:
        assert _largest(sizes, balanced(sizes, count - 1)) > memory


def test_a_block_that_does_not_fit_is_named() -> None:
    with pytest.raises(BudgetError, match="the minimum is 7 bytes"):
        fewest([3, 7], 6)


def test_given_segments() -> None:
    blocks = [(1, 10), (2, 20), (3, 30)]
    assert cut(blocks, [0, 2]) == [Segment(0, 1, 3, 30), Segment(2, 2, 3, 30)]
    with pytest.raises(ConfigError, match="below 3"):
        cut(blocks, [0, 3])


@pytest.mark.parametrize("count", [0, 4])
def test_more_segments_than_blocks_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 3"):
        balanced([1, 2, 3], count)
