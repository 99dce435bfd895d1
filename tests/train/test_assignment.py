"""Pieces of equal cost: the paper's two figures and its table by hand, and every small case against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.train.tasks import Assignment, TaskRows, assign


def tasks(*rows: int, costs: tuple[int, ...] = ()) -> tuple[TaskRows, ...]:
    given_costs = costs or (1,) * len(rows)
    return tuple(
        TaskRows(f"t{n}", count, cost) for n, (count, cost) in enumerate(zip(rows, given_costs, strict=True))
    )


def ranks_of(assignment: Assignment) -> list[int]:
    """How many ranks compute rows of each task."""
    return [len(assignment.of_task(task.name)) for task in assignment.tasks]


@pytest.mark.parametrize(
    ("rows", "ranks", "wanted", "pieces"),
    [
        ((512, 256, 128, 128), 8, [4, 2, 1, 1], [128] * 8),  # SE-MoE, table 3
        ((1, 1, 2), 4, [1, 1, 2], [1, 1, 1, 1]),  # figure 6c
        ((1, 1, 2), 2, [1, 1, 1], [2, 2]),  # figure 6b
    ],
)
def test_the_papers_examples(rows: tuple[int, ...], ranks: int, wanted: list[int], pieces: list[int]) -> None:
    found = assign(tasks(*rows), ranks)
    assert ranks_of(found) == wanted
    assert [len(found.piece(rank)) for rank in range(ranks)] == pieces
    assert found.balance == 1.0


def test_unequal_costs_and_uneven_rows() -> None:
    # Rows cost 3 3 1 1 1 1: halves of 5 cannot be cut; 6 | 4 and 7 | 3 can, and 6 is the least that is.
    found = assign(tasks(2, 4, costs=(3, 1)), 2)
    assert found.cuts == (0, 2, 6)
    assert found.costs() == [6, 4]
    assert found.balance == pytest.approx(10 / 12)
    assert found.of_task("t0") == {0: 2}
    assert found.of_task("t1") == {1: 4}
    # Of ten rows on four ranks three is the most; all have two or three.
    assert sorted(len(assign(tasks(10), 4).piece(rank)) for rank in range(4)) == [2, 2, 3, 3]
    # Of three rows on two ranks cuts 1 and 2 are as near to the middle: the earlier one.
    assert assign(tasks(3), 2).cuts == (0, 1, 3)


def test_more_ranks_than_rows() -> None:
    found = assign(tasks(1, 1), 4)
    assert [len(found.piece(rank)) for rank in range(4)] == [0, 1, 0, 1]


def test_what_is_said_of_it() -> None:
    found = assign(tasks(6, 2), 4)
    assert found.describe() == "t0 6 rows on ranks 0 to 2; t1 2 rows on rank 3; expected balance 100.0%"
    assert found.as_json() == {
        "tasks": [
            {"name": "t0", "rows": 6, "row_cost": 1, "rows_by_rank": {0: 2, 1: 2, 2: 2}},
            {"name": "t1", "rows": 2, "row_cost": 1, "rows_by_rank": {3: 2}},
        ],
        "rank_costs": [2, 2, 2, 2],
        "balance_ratio": 1.0,
    }


@pytest.mark.parametrize(("of", "ranks"), [((), 2), (tasks(1), 0), (tasks(0), 1), (tasks(1, costs=(0,)), 1)])
def test_nothing_to_assign(of: tuple[TaskRows, ...], ranks: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        assign(of, ranks)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_no_contiguous_cut_is_better(drawn: list[tuple[int, int]], ranks: int) -> None:
    rows, costs = zip(*drawn, strict=True)
    found = assign(tasks(*rows, costs=costs), ranks)
    each = [cost for count, cost in drawn for _ in range(count)]
    best = min(
        max(sum(each[start:stop]) for start, stop in itertools.pairwise((0, *cuts, len(each))))
        for cuts in itertools.combinations_with_replacement(range(len(each) + 1), ranks - 1)
    )
    assert max(found.costs()) == best
    # Contiguous, and every row once.
    assert [row for rank in range(ranks) for row in found.piece(rank)] == list(range(len(each)))
    assert sum(found.costs()) == sum(each)
    assert all(len(found.piece(rank)) for rank in range(ranks)) or len(each) < ranks
    for task in found.tasks:
        assert sum(found.of_task(task.name).values()) == task.rows
