"""Settings of tiny runs of three tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from task_cases import three_tasks, write_texts


@pytest.fixture
def tasks(
    text: Path, tmp_path: Path, settings: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """Settings of three tasks with ``changes``, and a store of their own."""
    of_tasks = three_tasks(write_texts(tmp_path, text))

    def make(changes: dict[str, Any] | None = None) -> dict[str, Any]:
        return settings({**of_tasks, **(changes or {})})

    return make
