"""What a process holds, and whether it grows."""

import os
from pathlib import Path

import numpy as np
import pytest

from tierstore.bench.probes import disk_bytes, process_bytes, trend_of, usage


def test_blocks_are_counted_not_lengths(tmp_path: Path) -> None:
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 20)
    assert disk_bytes(tmp_path) == 0
    (tmp_path / "below").mkdir()
    with open(tmp_path / "below" / "reserved", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    assert 1 << 20 <= disk_bytes(tmp_path) < (1 << 20) + (64 << 10)


def test_a_file_without_a_name_takes_space(tmp_path: Path) -> None:
    before = usage(tmp_path)
    with open(tmp_path / "scratch", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        named = usage(tmp_path)
        (tmp_path / "scratch").unlink()
        nameless = usage(tmp_path)
    assert nameless["disk_bytes"] - before["disk_bytes"] == named["disk_bytes"] >= 1 << 20
    assert disk_bytes(tmp_path) == 0
    assert named["descriptors"] == nameless["descriptors"] == before["descriptors"] + 1
    assert usage(tmp_path)["descriptors"] == before["descriptors"]
    assert before["resident_bytes"] > 1 << 20


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    before = process_bytes()[1]
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert process_bytes()[1] - before in (0, *range(1 << 20, (1 << 20) + (64 << 10)))  # 0: not on a disk


def test_a_straight_line() -> None:
    times = [float(second) for second in range(40)]
    trend = trend_of(times, [100 + 2 * t for t in times], "count", tolerance=50, least_span_s=10)
    assert trend["slope_count_per_s"] == pytest.approx(2)
    assert (trend["first_count"], trend["middle_count"], trend["last_count"]) == (100, 140, 178)
    assert trend["span_s"] == 29
    assert trend["judged"]
    assert trend["grows"]
    assert not trend_of(times, [100 + 2 * t for t in times], "count", tolerance=60, least_span_s=10)["grows"]
    assert not trend_of(times, [100 - 2 * t for t in times], "count", tolerance=0, least_span_s=10)["grows"]


def test_slope_and_error_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    times = np.sort(rng.random(80)) * 100
    values = rng.standard_normal(80) + times * 0.01
    fitted, covariance = np.polyfit(times[20:], values[20:], 1, cov=True)
    trend = trend_of(times.tolist(), values.tolist(), "count", tolerance=0, least_span_s=1)
    assert trend["slope_count_per_s"] == pytest.approx(fitted[0])
    assert trend["grows"] == (fitted[0] > 3 * np.sqrt(covariance[0, 0]))


def test_warming_up_is_no_growth() -> None:
    times = [float(second) for second in range(60)]
    assert not trend_of(times, [min(t, 12.0) for t in times], "count", tolerance=1, least_span_s=10)["grows"]


def test_noise_is_no_growth() -> None:
    rng = np.random.default_rng(0)
    times = [float(second) for second in range(200)]
    noise = (rng.standard_normal(200) * 100).tolist()
    assert not trend_of(times, noise, "count", tolerance=10, least_span_s=10)["grows"]
    leak = [value + 10 * t for value, t in zip(noise, times, strict=True)]
    assert trend_of(times, leak, "count", tolerance=10, least_span_s=10)["grows"]


@pytest.mark.parametrize(("count", "step"), [(12, 10.0), (200, 0.01), (1, 1.0)])
def test_too_little_to_judge(count: int, step: float) -> None:
    times = [index * step for index in range(count)]
    trend = trend_of(times, [1e9 * t for t in times], "bytes", tolerance=0, least_span_s=10)
    assert not trend["judged"]
    assert not trend["grows"]
    assert {"first_bytes", "middle_bytes", "last_bytes", "slope_bytes_per_s"} < set(trend)


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        trend_of([], [], "count", tolerance=0, least_span_s=0)
