"""The example runs as it says."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_store.py"


def test_example(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("8 experts at commit 2, checksum ")
