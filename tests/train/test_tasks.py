"""Tasks: their configuration, and which rank computes which rows."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import dotted_fields, dump, load
from tierstore.train.config import TrainConfig
from tierstore.train.tasks import Assignment, TaskConfig, TaskHead, TaskRows, assign, rows_of_tasks


def shares(*values: float, rows: tuple[int, ...] = ()) -> dict[str, TaskConfig]:
    given_rows = rows or (0,) * len(values)
    return {
        f"t{n}": TaskConfig(paths=("x",), share=share, rows=count)
        for n, (share, count) in enumerate(zip(values, given_rows, strict=True))
    }


def test_tables_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[tasks.code]\npaths = ["a"]\nweight = 2.0\n[tasks.prose]\npaths = ["b"]\nrows = 4\nhead = "own"\n'
    )
    loaded = load(TrainConfig, path, {"tasks.code.share": "3", "tasks.more.paths": "c,d"})
    assert list(loaded.tasks) == ["code", "prose", "more"]
    assert loaded.tasks["code"] == TaskConfig(paths=("a",), weight=2.0, share=3.0)
    assert loaded.tasks["prose"] == TaskConfig(paths=("b",), rows=4, head=TaskHead.OWN)
    assert loaded.tasks["more"].paths == ("c", "d")
    (tmp_path / "again.toml").write_text(dump(loaded))
    assert load(TrainConfig, tmp_path / "again.toml") == loaded
    assert "tasks.NAME.weight" in [info.name for info in dotted_fields(TrainConfig)]
    # Of the 16 rows 4 are prose's, and of the 12 that are left code has three quarters.
    assert rows_of_tasks(loaded.tasks, 16) == {"code": 9, "prose": 4, "more": 3}


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 40))
def test_rows_add_up_and_follow_shares(drawn: list[tuple[float, int]], more: int) -> None:
    values, rows = zip(*drawn, strict=True)
    tasks = shares(*values, rows=rows)
    sharing = [name for name, task in tasks.items() if not task.rows]
    size = sum(rows) + (len(sharing) + more if sharing else 0)
    found = rows_of_tasks(tasks, size)
    assert sum(found.values()) == size
    assert all(found[name] == task.rows for name, task in tasks.items() if task.rows)
    assert all(count >= 1 for count in found.values())
    left, whole = size - sum(rows), sum(tasks[name].share for name in sharing)
    exact = {name: left * tasks[name].share / whole for name in sharing}
    if all(value >= 1 for value in exact.values()):
        # By largest remainders: nobody is a row or more from its share.
        assert all(abs(found[name] - exact[name]) < 1 for name in sharing)
    by_share = sorted(sharing, key=lambda name: tasks[name].share)
    counts = [found[name] for name in by_share]
    assert counts == sorted(counts) or len(set(values)) < len(values)


# Which rank computes which rows -----------------------------------------------------------------------------


def task_rows(*rows: int, costs: tuple[int, ...] = ()) -> tuple[TaskRows, ...]:
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
    found = assign(task_rows(*rows), ranks)
    assert ranks_of(found) == wanted
    assert [len(found.piece(rank)) for rank in range(ranks)] == pieces
    assert found.balance == 1.0


def test_unequal_costs_and_uneven_rows() -> None:
    # Rows cost 3 3 1 1 1 1: halves of 5 cannot be cut; 6 | 4 and 7 | 3 can, and 6 is the least that is.
    found = assign(task_rows(2, 4, costs=(3, 1)), 2)
    assert found.cuts == (0, 2, 6)
    assert found.costs() == [6, 4]
    assert found.balance == pytest.approx(10 / 12)
    assert found.of_task("t0") == {0: 2}
    assert found.of_task("t1") == {1: 4}
    # Of ten rows on four ranks three is the most; all have two or three.
    assert sorted(len(assign(task_rows(10), 4).piece(rank)) for rank in range(4)) == [2, 2, 3, 3]
    # Of three rows on two ranks cuts 1 and 2 are as near to the middle: the earlier one.
    assert assign(task_rows(3), 2).cuts == (0, 1, 3)


def test_more_ranks_than_rows() -> None:
    found = assign(task_rows(1, 1), 4)
    assert [len(found.piece(rank)) for rank in range(4)] == [0, 1, 0, 1]


def test_what_is_said_of_it() -> None:
    found = assign(task_rows(6, 2), 4)
    assert found.describe() == "t0 6 rows on ranks 0 to 2; t1 2 rows on rank 3; expected balance 100.0%"
    assert found.as_json() == {
        "tasks": [
            {"name": "t0", "rows": 6, "row_cost": 1, "rows_by_rank": {0: 2, 1: 2, 2: 2}},
            {"name": "t1", "rows": 2, "row_cost": 1, "rows_by_rank": {3: 2}},
        ],
        "rank_costs": [2, 2, 2, 2],
        "balance_ratio": 1.0,
    }


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3), st.integers(1, 4))
def test_no_contiguous_cut_is_better(drawn: list[tuple[int, int]], ranks: int) -> None:
    rows, costs = zip(*drawn, strict=True)
    found = assign(task_rows(*rows, costs=costs), ranks)
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
