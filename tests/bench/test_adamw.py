"""bench adamw: figures by hand, and a tiny run. Nothing here asserts a speed."""

import pytest
import torch

from tierstore.bench import adamw


def test_figures_by_hand():
    # Two rounds of 10 parameters: ratios are taken within rounds, then their median.
    samples = {
        "copy": [1.0, 2.0],
        "torch": [4.0, 8.0],
        "step": [2.0, 8.0],
        "replay": [20.0, 40.0],
        "subnormal": [20.0, 60.0],
        "bf16": [1.0, 8.0],
        "bf16_replay": [30.0, 40.0],
        "int8": [2.0, 4.0],
        "int8_replay": [60.0, 40.0],
    }
    record = {"replay": [1.0, 3.0], "read": [2.0, 2.0]}
    found = adamw.found_in(samples, 10, threads=1, record=record)
    figures = dict(found.figures)
    assert figures["speed_to_torch_ratio"] == (2 + 1) / 2
    assert figures["speed_to_copy_ratio"] == pytest.approx((0.5 + 0.25) / 2 * 3.5)
    assert figures["replay_to_step_ratio"] == (10 + 5) / 2
    assert figures["subnormal_to_replay_ratio"] == (1 + 1.5) / 2
    assert figures["bf16_speed_to_copy_ratio"] == pytest.approx((1 + 0.25) / 2 * 2.5)
    assert figures["int8_speed_to_copy_ratio"] == pytest.approx(0.5 * (2 + 2 / 256))
    assert (figures["bf16_to_step_ratio"], figures["int8_to_step_ratio"]) == (0.75, 0.75)
    assert (figures["bf16_replay_to_replay_ratio"], figures["int8_replay_to_replay_ratio"]) == (1.25, 2)
    assert figures["copy"]["median_bytes_per_s"] == pytest.approx(80 / 1.5)
    assert figures["step"]["median_bytes_per_s"] == pytest.approx(280 / 5)
    assert figures["replay"]["median_bytes_per_s"] == pytest.approx(240 / 30)
    assert (figures["record_replay_s"], figures["record_replay_to_read_ratio"]) == (2, 1)
    plain = dict(figures["torch"])
    assert plain.pop("samples_s") == samples["torch"]
    assert plain == pytest.approx(
        {"median_s": 6, "min_s": 4, "max_s": 8, "median_bytes_per_s": 280 / 6, "s_per_parameter": 0.6}
    )
    listed = {one.label: one for one in found.measurements}
    assert listed["speed to torch's"].samples == (2, 1)
    assert listed["record (operation=read)"].count == 2


def test_a_tiny_run(tmp_path, monkeypatch, tiny_bench):
    monkeypatch.setattr(adamw, "RECORD_PARAMETERS", 4096)
    monkeypatch.setattr(adamw, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(adamw, "_READ_BYTES", 1 << 20)
    before = torch.get_num_threads()
    sizes = ["--parameters=10001", f"--threads={before + 1}", "--repeats=2"]
    found = tiny_bench("adamw", *sizes, f"--store={tmp_path}")
    assert torch.get_num_threads() == before
    assert not list(tmp_path.iterdir())
    figures = found.figures
    for name in (
        "copy",
        "torch",
        "step",
        "replay",
        "subnormal",
        "bf16",
        "bf16_replay",
        "int8",
        "int8_replay",
    ):
        times = figures[name]
        assert 0 < times["min_s"] <= times["median_s"] <= times["max_s"]
        assert times["median_bytes_per_s"] > 0
        assert f"pass over all parameters (contestant={name})" in found.table
    for key in ("speed_to_torch", "speed_to_copy", "replay_to_step", "subnormal_to_replay"):
        assert figures[f"{key}_ratio"] > 0
    assert figures["torch_version"] == torch.__version__
    assert figures["instruction_set"] in ("scalar", "avx2", "avx512")
    assert figures["record_bytes"] == 4096 * 12
    assert "at least 0.950" in found.table
