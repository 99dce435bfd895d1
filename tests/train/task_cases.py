"""What ranks run in tests of tasks, and the settings of three unequal ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[..., dict[str, Any]]


def write_texts(directory: Path, text: Path) -> dict[str, str]:
    """A third of ``text`` for each of three tasks."""
    content = text.read_bytes()
    found = {}
    for number, name in enumerate("abc"):
        path = directory / f"{name}.txt"
        path.write_bytes(content[number * 20_000 : (number + 1) * 20_000])
        found[name] = str(path)
    return found


def three_tasks(texts: dict[str, str]) -> dict[str, Any]:
    """Rows 5, 3 and 1 of 9, of which no number of ranks but 1, 3 and 9 gets equal parts; c has a head of its own."""
    return {
        "data.batch_size": 9,
        "data.paths": (),
        **{f"tasks.{name}.paths": (path,) for name, path in texts.items()},
        "tasks.a.rows": 5,
        "tasks.b.rows": 3,
        "tasks.b.weight": 2.0,
        "tasks.c.rows": 1,
        "tasks.c.head": "own",
    }
