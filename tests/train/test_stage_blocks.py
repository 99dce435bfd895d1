"""Which blocks a stage has: by hand, against all ways to cut, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.train.stages import balanced_blocks, block_costs, stage_blocks


def test_blocks_are_cut_where_the_most_expensive_stage_costs_least() -> None:
    """3 + 1 + 1 against 1 + 4: 5 at most; any other cut has 6 or more."""
    assert balanced_blocks([3, 1, 1, 1, 4], 2) == [range(3), range(3, 5)]


def test_of_equal_cuts_the_later_stages_have_more_blocks() -> None:
    assert balanced_blocks([2, 1, 1], 2) == [range(1), range(1, 3)]
    assert balanced_blocks([0, 0, 0], 2) == [range(1), range(1, 3)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balanced_blocks(costs, stages)
    assert [block for blocks in found for block in blocks] == list(range(len(costs)))
    assert all(found)

    def worst(cuts: Sequence[int]) -> int:
        return max(sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, len(costs))))

    best = min(worst(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert worst([blocks.stop for blocks in found[:-1]]) == best


def test_a_block_costs_what_a_token_passes() -> None:
    """Two norms, attention and either a router with top-k experts or a dense network; the head falls to the last block."""
    model = ModelConfig(
        d_model=8, n_layers=2, n_heads=1, d_ff=4, experts=3, top_k=2, moe_every=2, vocab_size=10
    )
    dense = 4 * 64 + 2 * 8 + 3 * 8 * 32
    mixture = 4 * 64 + 2 * 8 + 3 * 8 + 2 * (3 * 8 * 4)
    assert block_costs(model.architecture) == [dense, mixture + 8 + 80]


def test_given_numbers_of_blocks_are_taken() -> None:
    model = ModelConfig(n_layers=4)
    assert stage_blocks(model.architecture, 2, (1, 3)) == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    ("stages", "given_", "moe_every", "complaint"),
    [
        (5, (), 1, "parallel.stages: expected 1 to 4 stages of 4 blocks, got 5"),
        (2, (1, 2), 1, "parallel.stage_blocks: expected 2 numbers .* 4 blocks"),
        (2, (4,), 1, "parallel.stage_blocks: expected 2 numbers"),
        (2, (0, 4), 1, "parallel.stage_blocks: expected 2 numbers of at least 1"),
        (4, (), 2, "stage 0 would have blocks 0 to 0, none of them with experts"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    stages: int, given_: tuple[int, ...], moe_every: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        stage_blocks(ModelConfig(n_layers=4, moe_every=moe_every).architecture, stages, given_)
