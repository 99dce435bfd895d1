"""bench commit: a tiny run. Nothing here asserts a speed."""

from pathlib import Path

from tiny import TinyBench


def test_a_tiny_run(tmp_path: Path, tiny_bench: TinyBench) -> None:
    sizes = ["--records=3", "--record-bytes=48KiB", "--rounds=4"]
    found = tiny_bench("commit", *sizes, f"--store={tmp_path / 'b'}")
    figures = found.figures
    assert figures["dirty_bytes"] == 3 * 48 * 1024
    assert 0 < figures["commit_least_s"] <= figures["commit_median_s"] <= figures["commit_greatest_s"]
    for loop in ("heartbeat_late", "heartbeat_late_idle"):
        assert 0 < figures[f"{loop}_median_s"] < 60
        assert len(figures[f"{loop}_samples_s"]) == 4
    commits, writes, late, late_idle, ratio, dirty = found.document.measurements
    assert (commits.name, commits.count, commits.unit) == ("commit", 4, "s")
    assert (late.count, late_idle.count) == (4, 4)
    assert ratio.samples == tuple(a / b for a, b in zip(commits.samples, writes.samples, strict=True))
    assert ratio.target == 1.2
    assert dirty.median == figures["dirty_bytes"]
    assert not (tmp_path / "b").exists()
