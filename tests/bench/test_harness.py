"""What is refused before anything is measured, and the work directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.bench.harness import FigureTable, at_least, more_than_0, require_free, work_directory
from tierstore.errors import ConfigError
from tierstore.machine import existing_parent


def test_numbers() -> None:
    at_least(2, ranks=2, steps=3)
    more_than_0(seconds=0.1)
    with pytest.raises(ConfigError, match=r"^steps: expected at least 2, got 1$"):
        at_least(2, ranks=2, steps=1)
    with pytest.raises(ConfigError, match=r"^seconds: expected more than 0, got 0$"):
        more_than_0(seconds=0)


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


def test_free_disk_is_that_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    assert existing_parent(directory) == tmp_path
    require_free(directory, 1, "it takes")
    with pytest.raises(
        ConfigError, match=f"^store: it takes {1 << 60} bytes of {tmp_path}, which has [0-9]+ free$"
    ):
        require_free(directory, 1 << 60, "it takes")


def test_columns_by_their_keys() -> None:
    """Under the key without its unit, or under a heading of its own."""
    row = {"took_s": 0.5, "of": {"read_bytes_per_s": 2048}, "error_ratio": 0.25, "n_count": 3}
    found = FigureTable.of_keys(
        "", [row], "took_s", "of.read_bytes_per_s", "error_ratio", "n_count", n_count="N"
    )
    assert list(found.columns) == ["took", "read", "error", "N"]
    assert found.cells == [["500 ms", "2 KiB/s", "0.250", "3"]]
