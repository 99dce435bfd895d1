"""Each Python script of scripts/ starts, and tells how it is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_starts(script: Path) -> None:
    # As a user calls it: with the script's directory on the path, which the suite's environment keeps off.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, script, "--help"]
    made = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"usage: {script.name}")
