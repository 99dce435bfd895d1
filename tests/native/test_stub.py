"""The committed stub of the extension is the one that the extension gives (scripts/stub writes it)."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_that_of_the_extension(tmp_path: Path) -> None:
    made = tmp_path / "_native.pyi"
    subprocess.run([ROOT / "scripts" / "stub", made], check=True)
    committed = (ROOT / "tierstore" / "_native.pyi").read_text()
    assert made.read_text() == committed, "run scripts/stub and commit what it writes"
