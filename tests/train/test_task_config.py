"""Tasks in a configuration: tables by name, rows by share, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import dotted_fields, dump, load
from tierstore.errors import ConfigError
from tierstore.train.config import TrainConfig
from tierstore.train.tasks import TaskConfig, TaskHead, rows_of_tasks


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tasks.a]\npaths = ["x"]\nweight = 0', r"\[tasks.a\] weight: expected more than 0, got 0"),
        ("[tasks.a]", r"\[tasks.a\] paths: expected the task's files or directories, got none"),
        ("tasks.a = 3", r"tasks.a: expected a table, got 3"),
        ("tasks = 3", r"tasks: expected a table, got 3"),
        ('[tasks."a b"]\npaths = ["x"]', "tasks: expected names of letters, digits, - and _, got 'a b'"),
        ('[tasks.a]\npaths = ["x"]\nwieght = 2', "tasks.a.wieght: unknown configuration key; did you mean"),
        ('[tasks.a]\npaths = ["x"]\n[tasks.a]\npaths = ["y"]', "not valid TOML: Cannot declare"),
        (
            '[tasks.a]\npaths = ["x"]\nrows = 17',
            "data.batch_size: expected the rows of all tasks, 17, got 16",
        ),
        (
            '[tasks.a]\npaths = ["x"]\nrows = 16\n[tasks.b]\npaths = ["x"]',
            "data.batch_size: expected the rows of all tasks, 16 and at least one for each of b, got 16",
        ),
        (
            '[data]\npaths = ["x"]\n[tasks.a]\npaths = ["x"]',
            r"data.paths: each task says its own \(tasks.NAME.paths\)",
        ),
    ],
)
def test_bad_input(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, path)


def test_a_setting_of_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"tasks.a.what: unknown configuration key"):
        load(TrainConfig, None, {"tasks.a.what": "1"})


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
