"""Profiles of a machine and of its disks."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from effort import share, with_fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import theilslopes

from tierstore import machine_profile as io_profile
from tierstore.errors import DataError
from tierstore.machine_profile import (
    ASSUMED,
    Cost,
    Evidence,
    IoPoint,
    device_name,
    find_profile,
    fit_cost,
    fit_errors,
    load_io_point,
    load_profile,
    profile_path,
    save_io_point,
    save_profile,
)

# Fitted lines, and profiles as files ------------------------------------------------------------------------


def test_a_line_by_hand() -> None:
    """1 ms and 100 bytes a second, with one wild measurement a size: medians do not see it."""
    sizes = [100.0, 100.0, 100.0, 200.0, 200.0, 200.0, 400.0, 400.0, 400.0]
    times = [1.001, 1.001, 9.0, 2.001, 2.001, 0.1, 4.001, 4.001, 30.0]
    found = fit_cost(sizes, times)
    assert found.latency_s == pytest.approx(0.001)
    assert found.per_s == pytest.approx(100.0)
    assert found.seconds(300) == pytest.approx(3.001)
    assert found.seconds(0) == 0.0


@settings(max_examples=share(50))
@given(st.integers(0, 2**32 - 1))
def test_the_slope_is_theil_and_sens(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.sort(random.choice(1000, 9, replace=False) + 1.0)
    times = 0.5 + sizes / 50 + random.normal(0, 0.5, 9)
    slope = theilslopes(times, sizes).slope
    assert slope > 0
    assert 1 / fit_cost(sizes.tolist(), times.tolist()).per_s == pytest.approx(slope)


def test_two_points_by_hand() -> None:
    """As the probe of chunks has them."""
    assert fit_cost((10.0, 20.0), (3.0, 5.0)) == Cost(1.0, 5.0)
    assert fit_cost((10.0, 20.0), (3.0, 2.0)) == Cost(2.5, math.inf)  # faster for more: noise
    assert fit_cost((10.0, 11.0), (1.0, 9.0)) == Cost(0.0, 0.125)


def test_what_is_all_latency() -> None:
    found = fit_cost([1.0, 2.0, 3.0], [5.0, 5.0, 4.0])
    assert found.latency_s == 5.0
    assert math.isinf(found.per_s)
    with pytest.raises(ValueError, match="two different"):
        fit_cost([1.0, 1.0], [1.0, 2.0])


def test_a_limited_link_is_as_slow_as_the_slower() -> None:
    real, link = Cost(0.0, 100.0), Cost(1.0, 1000.0)
    assert real.slower(link, 100) == pytest.approx(1.1)
    assert real.slower(link, 1000) == pytest.approx(10.0)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measured = replace(ASSUMED, evidence=Evidence.MEASURED, copy=Cost(0.0, math.inf), machine="two cores")
    save_profile(measured, path)
    assert load_profile(path) == measured
    json.loads(path.read_text(), parse_constant=pytest.fail)  # every number is one that JSON has


def test_exchanges_by_ranks_come_back_and_older_profiles_have_none(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(ASSUMED, path)
    assert "exchanges" not in path.read_text()  # as before there were any
    assert load_profile(path).exchange(8) == ASSUMED.all_to_all
    two, four = Cost(0.001, 1e9), Cost(0.002, math.inf)
    measured = replace(ASSUMED, exchanges={2: two, 4: four}, expert_forward=Cost(0.0, math.inf))
    save_profile(measured, path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert load_profile(path) == measured
    assert [measured.exchange(ranks) for ranks in (2, 3, 4, 8)] == [two, two, four, four]


def test_a_gpu_by_its_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_profile(Path("A100"))
    # 40% of 312 TFLOP/s; 80% of 32 GB/s to the host, and of 12 NVLinks of 25 GB/s in each direction.
    assert found.expert_flops.per_s == pytest.approx(124.8e12)
    assert found.copy.per_s == pytest.approx(25.6e9)
    assert found.gather.per_s == pytest.approx(240e9)
    assert found.evidence is Evidence.ASSUMED
    assert found.machine.startswith("A100 by its data sheet (40% ")
    with pytest.raises(DataError, match=r"^A1000: expected a machine profile, .*: V100, A100, .*RTX4090$"):
        find_profile(Path("A1000"))
    # A file of that name is meant.
    save_profile(replace(ASSUMED, machine="mine"), tmp_path / "A100")
    assert find_profile(Path("A100")).machine == "mine"


def test_errors_of_a_fit_by_hand() -> None:
    """1 s and 1 byte a second: 3 and 5 s predicted, 2 and 5 s measured in the median."""
    assert fit_errors(Cost(1.0, 1.0), [2, 2, 2, 4], [2.0, 1.0, 9.0, 5.0]) == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"exchanges": {"two": {}}}, "exchanges"),
        ({"exchanges": {"2": {"latency_s": 0.0}}}, "exchanges.2"),
        ({"expert_forward": 1}, "expert_forward"),
        ({"profile_version": 2}, "version 1"),
        ({"copy": None}, "copy"),
        ({"copy": {"latency_s": 0.0}}, "copy"),
        ({"copy": {"latency_s": "fast", "per_s": 1.0}}, "copy"),
        ({"copy": {"latency_s": -1.0, "per_s": 1.0}}, "copy.*at least 0"),
        ({"copy": {"latency_s": 0.0, "per_s": 0}}, "copy.*more than 0"),
        ({"evidence": "felt"}, "evidence"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"process_bytes": 1.5}, "process_bytes"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_malformed_profile_is_refused_by_name(
    change: dict[str, object], wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    save_profile(ASSUMED, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=f"profile.json.*{wrong}"):
        load_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"profile_version": 1}', "\x80"])
def test_what_is_no_profile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="profile"):
        load_profile(path)


# The profile of disks: what is written is read, by device, and what is wrong is named -----------------------


POINT = IoPoint(
    chunk_bytes=1 << 19, queue_depth=8, read_bytes_per_s=2.5e9, write_bytes_per_s=1.5e9, measured="2026-01-02"
)
POINTS = st.builds(
    IoPoint,
    chunk_bytes=st.integers(1, 16384).map(lambda pages: pages * 4096),
    queue_depth=st.integers(1, 1024),
    read_bytes_per_s=st.floats(1, 1e12),
    write_bytes_per_s=st.floats(1, 1e12),
    measured=st.dates().map(str),
)


@with_fixtures(20)
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
