"""The examples run as they say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("parameter_store.py", "8 experts at commit 2, checksum "),
        ("async_updates.py", "12 updates in commit 2; the largest weight of expert.0 is 0.00"),
    ],
)
def test_example(name: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), str(tmp_path / "given")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
