"""Where nodes end, and which layouts can be exchanged in two steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.parallel import ParallelConfig, RankEnvironment
from tierstore.parallel.config import ExchangeMode
from tierstore.parallel.launching import check_exchange, expert_grid
from tierstore.parallel.layout import NodeGrid, node_grid, ranks_of_a_node


def test_by_hand() -> None:
    grid = node_grid([[0, 1, 2, 3, 4, 5]], 2)
    assert grid == NodeGrid(nodes=3, each=2)
    assert isinstance(grid, NodeGrid)
    assert grid.neighbours((10, 11, 12, 13, 14, 15)) == [[10, 11], [12, 13], [14, 15]]
    assert grid.rails((10, 11, 12, 13, 14, 15)) == [[10, 12, 14], [11, 13, 15]]
    assert node_grid([[0, 1, 2, 3], [4, 5, 6, 7]], 2) == NodeGrid(2, 2)
    assert node_grid([[0, 1], [2, 3]], 4) == "each expert group of 2 is within one node of 4 ranks"
    assert node_grid([[0, 1]], 1) == "each node has one rank of an expert group of 2"
    uneven = "nodes of 4 ranks do not divide the expert groups of 6 evenly"
    assert node_grid([list(range(6)), list(range(6, 12))], 4) == uneven
    # One group within a node, one over two: what one can do, the other cannot.
    assert node_grid([[0, 1], [2, 3]], 3) == "nodes of 3 ranks do not divide the expert groups of 2 evenly"


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
def test_a_grid_is_what_nodes_hold(groups: int, size: int, node_ranks: int) -> None:
    rows = [list(range(first * size, (first + 1) * size)) for first in range(groups)]
    grid = node_grid(rows, node_ranks)
    by_node = [
        [len(list(ranks)) for _, ranks in itertools.groupby(row, lambda rank: rank // node_ranks)]
        for row in rows
    ]
    possible = all(len(counts) > 1 and set(counts) == {by_node[0][0]} and counts[0] > 1 for counts in by_node)
    assert isinstance(grid, NodeGrid) is possible
    if isinstance(grid, NodeGrid):
        assert all(
            len({rank // node_ranks for rank in part}) == 1 for row in rows for part in grid.neighbours(row)
        )
        assert all(
            len({rank // node_ranks for rank in rail}) == grid.nodes
            for row in rows
            for rail in grid.rails(row)
        )


def test_who_says_where_nodes_end() -> None:
    alone, told = RankEnvironment(world=4), RankEnvironment(world=4, local_world=2)
    assert ranks_of_a_node(ParallelConfig(), alone) == 4
    assert ranks_of_a_node(ParallelConfig(), told) == 2
    assert ranks_of_a_node(ParallelConfig(node_ranks=3), told) == 3
    assert expert_grid(ParallelConfig(), told) == NodeGrid(2, 2)
    assert expert_grid(ParallelConfig(), alone) == (
        "each expert group of 4 is within one node of 4 ranks (neither parallel.node_ranks nor LOCAL_WORLD_SIZE says "
        "where nodes end)"
    )


@pytest.mark.parametrize(
    ("world", "settings", "reason"),
    [
        (1, {}, "each expert group of 1 is within one node"),
        (4, {"node_ranks": 4}, "each expert group of 4 is within one node of 4 ranks"),
        (4, {"node_ranks": 1}, "each node has one rank of an expert group of 4"),
        (4, {"node_ranks": 3}, "nodes of 3 ranks do not divide the expert groups of 4 evenly"),
        (8, {"node_ranks": 4, "expert": 2}, "each expert group of 2 is within one node of 4 ranks"),
        (8, {"node_ranks": 4, "tensor": 8}, "parallel.tensor does not support an exchange in two steps"),
    ],
)
def test_hierarchical_where_it_cannot_be(world: int, settings: dict[str, int], reason: str) -> None:
    asked = ParallelConfig(exchange=ExchangeMode.HIERARCHICAL, **settings)
    with pytest.raises(ConfigError, match=rf"^parallel\.exchange: hierarchical is impossible: {reason}"):
        check_exchange(asked, RankEnvironment(world=world))
    check_exchange(ParallelConfig(**settings), RankEnvironment(world=world))
    check_exchange(ParallelConfig(exchange=ExchangeMode.HIERARCHICAL, node_ranks=2), RankEnvironment(world=4))


def test_ranks_of_a_node_are_none_or_more() -> None:
    with pytest.raises(ConfigError, match=r"^parallel\.node_ranks: expected at least 0, got -1"):
        ParallelConfig(node_ranks=-1)
