"""The profile of disks: what is written is read, by device, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore import io_profile
from tierstore.errors import DataError
from tierstore.io_profile import IoPoint, device_name, load_io_point, profile_path, save_io_point

POINT = IoPoint(
    chunk_bytes=1 << 19,
    queue_depth=8,
    read_bytes_per_s=2.5e9,
    write_bytes_per_s=1.5e9,
    measured="2026-01-02",
)
POINTS = st.builds(
    IoPoint,
    chunk_bytes=st.integers(1, 16384).map(lambda pages: pages * 4096),
    queue_depth=st.integers(1, 1024),
    read_bytes_per_s=st.floats(1, 1e12),
    write_bytes_per_s=st.floats(1, 1e12),
    measured=st.dates().map(str),
)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state/profile.json"
    monkeypatch.setenv("TIERSTORE_IO_PROFILE", str(path))
    return path


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(point=POINTS)
def test_a_point_comes_back(profile: Path, tmp_path: Path, point: IoPoint) -> None:
    assert save_io_point(tmp_path, point) == profile
    assert load_io_point(tmp_path) == point
    assert list(profile.parent.iterdir()) == [profile]


def test_disks_have_points_of_their_own(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_io_point(tmp_path, POINT)
    monkeypatch.setattr(io_profile, "block_device", lambda directory: "another")
    assert load_io_point(tmp_path) is None
    other = replace(POINT, queue_depth=2)
    save_io_point(tmp_path, other)
    assert load_io_point(tmp_path) == other
    monkeypatch.undo()
    monkeypatch.setenv("TIERSTORE_IO_PROFILE", str(profile))
    assert load_io_point(tmp_path) == POINT
    assert json.loads(profile.read_text())["version"] == 1


def test_the_name_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    assert device_name(inside) == device_name(tmp_path)
    monkeypatch.setattr(io_profile, "block_device", lambda directory: "unknown")
    assert device_name(Path("/proc")).endswith(" at /proc")
    with pytest.raises(FileNotFoundError):
        device_name(tmp_path / "nowhere")


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for none in ("", "none"):
        monkeypatch.setenv("TIERSTORE_IO_PROFILE", none)
        assert profile_path() is None
        assert load_io_point(tmp_path) is None
        assert save_io_point(tmp_path, POINT) is None
    monkeypatch.delenv("TIERSTORE_IO_PROFILE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "tierstore/io-profile.json"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".local/state/tierstore/io-profile.json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an I/O profile"),
        ('{"format": "other"}', "not an I/O profile"),
        ('{"format": "tierstore-io-profile", "version": 2}', "expected an I/O profile of version 1, got 2"),
        ('{"format": "tierstore-io-profile", "version": 1}', "devices: expected a table"),
    ],
)
def test_another_file(profile: Path, tmp_path: Path, text: str, says: str) -> None:
    profile.parent.mkdir()
    profile.write_text(text)
    for act in (lambda: load_io_point(tmp_path), lambda: save_io_point(tmp_path, POINT)):
        with pytest.raises(DataError, match=says) as raised:
            act()
        assert str(profile) in str(raised.value)
    assert profile.read_text() == text  # it is not ours to overwrite
    assert list(profile.parent.iterdir()) == [profile]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("chunk_bytes", value) for value in (0, 1000, 128 << 20, "1MiB", True, 4096.0)),
        *(("queue_depth", value) for value in (0, 4096, None, False)),
        *(("read_bytes_per_s", value) for value in (0, "fast", True)),
        ("write_bytes_per_s", -1),
    ],
)
def test_a_point_that_cannot_be(profile: Path, tmp_path: Path, key: str, value: object) -> None:
    save_io_point(tmp_path, POINT)
    plain = json.loads(profile.read_text())
    plain["devices"][device_name(tmp_path)][key] = value
    profile.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=f"{key}: expected"):
        load_io_point(tmp_path)


def test_a_point_of_other_keys(profile: Path, tmp_path: Path) -> None:
    save_io_point(tmp_path, POINT)
    plain = json.loads(profile.read_text())
    plain["devices"][device_name(tmp_path)] = {**asdict(POINT), "more": 1}
    profile.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="bench io"):
        load_io_point(tmp_path)


def test_a_write_that_fails_leaves_the_old_one(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_io_point(tmp_path, POINT)

    def refuse(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io_profile.os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        save_io_point(tmp_path, replace(POINT, queue_depth=1))
    assert load_io_point(tmp_path) == POINT
    assert list(profile.parent.iterdir()) == [profile]
