"""The work directory of a benchmark."""

from pathlib import Path

import pytest

from tierstore.bench.harness import work_directory
from tierstore.errors import ConfigError


def test_a_work_directory_is_removed_whatever_happens(tmp_path: Path) -> None:
    directory = tmp_path / "one" / "two"

    def fail() -> None:
        with work_directory(directory):
            (directory / "file").write_bytes(b"x")
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        fail()
    assert not directory.exists()
    with (
        pytest.raises(ConfigError, match="exists; the benchmark needs a directory of its own"),
        work_directory(tmp_path),
    ):
        pass
    assert tmp_path.exists()
