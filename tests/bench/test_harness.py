"""The work directory of a benchmark."""

from pathlib import Path

import pytest

from tierstore.bench.harness import FigureTable, work_directory
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


def test_columns_by_their_keys() -> None:
    """Under the key without its unit, or under a heading of its own."""
    row = {"took_s": 0.5, "of": {"read_bytes_per_s": 2048}, "error_ratio": 0.25, "n_count": 3}
    found = FigureTable.of_keys(
        "", [row], "took_s", "of.read_bytes_per_s", "error_ratio", "n_count", n_count="N"
    )
    assert list(found.columns) == ["took", "read", "error", "N"]
    assert found.cells == [["500 ms", "2 KiB/s", "0.250", "3"]]
