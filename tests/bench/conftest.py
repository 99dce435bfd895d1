"""The fixture that runs a benchmark's command at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import TinyBench, TinyRun, run_tiny


@pytest.fixture
def tiny_bench(tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> TinyBench:
    """Runs ``tierstore bench NAME ARGUMENTS`` with --json and --save; see ``run_tiny``."""

    def run(name: str, *arguments: str | Path, status: int = 0) -> TinyRun:
        saved = tmp_path_factory.mktemp("saved") / "saved.json"
        return run_tiny(saved, capfd, name, *arguments, status=status)

    return run
