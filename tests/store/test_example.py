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
    _runs(tmp_path, said, name)


def test_stress_of_a_disk(tmp_path: Path) -> None:
    lines = _runs(tmp_path, "32 MiB: ", "stress_tiers.py", "0.5").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["32 MiB", "96 MiB", "256 MiB"]
    assert all(line.endswith(" written, all checked") for line in lines)
    assert ", 0 B read, " in lines[2]  # 144 MiB of records
    assert ", 0 B read, " not in lines[0]


def _runs(tmp_path: Path, said: str, name: str, *more: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), str(tmp_path / "given"), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said)
    return done.stdout
