"""Transfer size and depth: the configuration, else the profile, else what is built in, and why it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tierstore.errors import ConfigError
from tierstore.io_profile import IoPoint, save_io_point
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.store.config import IoConfig, tune

POINT = IoPoint(
    chunk_bytes=256 << 10, queue_depth=5, read_bytes_per_s=1e9, write_bytes_per_s=1e9, measured="2026-01-02"
)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TIERSTORE_IO_PROFILE", str(path))
    return path


def test_built_in_without_a_profile(profile: Path, tmp_path: Path) -> None:
    found = tune(IoConfig(), tmp_path)
    assert (found.chunk_bytes, found.queue_depth) == (1 << 20, 32)
    assert str(found).startswith("1 MiB, 32 in flight (built in, for ")
    assert "has not measured this disk" in str(found)
    assert str(tune(IoConfig(), None)) == "1 MiB, 32 in flight (built in)"


def test_as_measured(profile: Path, tmp_path: Path) -> None:
    save_io_point(tmp_path, POINT)
    assert str(tune(IoConfig(), tmp_path)) == "256 KiB, 5 in flight (measured 2026-01-02)"


def test_what_is_configured_wins_each_for_itself(profile: Path, tmp_path: Path) -> None:
    save_io_point(tmp_path, POINT)
    deep = tune(IoConfig(queue_depth=9), tmp_path)
    assert str(deep) == "256 KiB (measured 2026-01-02), 9 in flight (as configured)"
    large = tune(IoConfig(chunk_bytes=8192), tmp_path)
    assert (large.chunk_bytes, large.queue_depth) == (8192, 5)
    both = tune(IoConfig(chunk_bytes=8192, queue_depth=9), tmp_path)
    assert str(both) == "8 KiB, 9 in flight (as configured)"


def test_a_broken_profile_is_said_and_does_no_harm(profile: Path, tmp_path: Path) -> None:
    profile.write_text("{")
    found = tune(IoConfig(), tmp_path)
    assert (found.chunk_bytes, found.queue_depth) == (1 << 20, 32)
    assert f"the profile cannot be read: {profile}: not an I/O profile: not JSON" in str(found)
    # Who has said everything needs no profile.
    assert (
        str(tune(IoConfig(chunk_bytes=8192, queue_depth=9), tmp_path)) == "8 KiB, 9 in flight (as configured)"
    )


def test_a_store_uses_it_and_holds_the_same_bytes(profile: Path, tmp_path: Path) -> None:
    weight = np.arange(30_000, dtype=np.float32)
    checksums = set()
    points = [None, POINT, replace(POINT, chunk_bytes=4096, queue_depth=1)]
    for number, point in enumerate(points):
        if point is not None:
            save_io_point(tmp_path, point)
        config = StoreConfig(host_budget=8 << 20)
        with ParameterStore.create(tmp_path / str(number), [RecordSchema("r", weight.size)], config) as store:
            (line,) = [line for line in store.status().effective if line.startswith("transfers: ")]
            assert ("built in" if point is None else f"{point.queue_depth} in flight (measured") in line
            for key in "abcd":
                store.register(key, "r", weight=weight)
            store.commit()
            checksums.add(store.records_crc32c())
            assert store.verify().failures == []
    assert len(checksums) == 1


@pytest.mark.parametrize("wrong", [{"queue_depth": -1}, {"chunk_bytes": 1000}, {"chunk_bytes": -4096}])
def test_bad_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        IoConfig(**wrong)
