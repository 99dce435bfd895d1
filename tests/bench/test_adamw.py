"""bench adamw: complete figures that agree with each other, JSON last. Nothing here asserts a speed."""

import pytest
import torch

from tierstore.bench import adamw
from tierstore.bench.results.figures import to_json
from tierstore.cli.bench.group import show_adamw
from tierstore.cli.output import Output
from tierstore.errors import ConfigError


@pytest.fixture(scope="module")
def result():
    return adamw.run(parameters=10_001, threads=2, repeats=3)


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
    figures = adamw.figures(samples, 10, threads=1)
    assert figures.speed_to_torch_ratio == (2 + 1) / 2
    assert figures.speed_to_copy_ratio == pytest.approx((0.5 + 0.25) / 2 * 3.5)
    assert figures.replay_to_step_ratio == (10 + 5) / 2
    assert figures.subnormal_to_replay_ratio == (1 + 1.5) / 2
    assert figures.bf16_speed_to_copy_ratio == pytest.approx((1 + 0.25) / 2 * 2.5)
    assert figures.int8_speed_to_copy_ratio == pytest.approx(0.5 * (2 + 2 / 256))
    assert (figures.bf16_to_step_ratio, figures.int8_to_step_ratio) == (0.75, 0.75)
    assert (figures.bf16_replay_to_replay_ratio, figures.int8_replay_to_replay_ratio) == (1.25, 2)
    assert figures.programs["copy"].median_bytes_per_s == pytest.approx(80 / 1.5)
    assert figures.programs["step"].median_bytes_per_s == pytest.approx(280 / 5)
    assert figures.programs["replay"].median_bytes_per_s == pytest.approx(240 / 30)
    plain = to_json(figures)["torch"]
    assert plain.pop("samples_s") == samples["torch"]
    assert plain == pytest.approx(
        {"median_s": 6, "min_s": 4, "max_s": 8, "median_bytes_per_s": 280 / 6, "s_per_parameter": 0.6}
    )


def test_every_program_is_measured(result):
    narrow = ("bf16", "bf16_replay", "int8", "int8_replay")
    for name in ("copy", "torch", "step", "replay", "subnormal", *narrow):
        times = result.programs[name]
        assert 0 < times.min_s <= times.median_s <= times.max_s
        assert times.median_bytes_per_s > 0
    for key in ("speed_to_torch", "speed_to_copy", "replay_to_step", "subnormal_to_replay"):
        assert getattr(result, f"{key}_ratio") > 0
    assert result.torch_version == torch.__version__
    assert result.instruction_set in ("scalar", "avx2", "avx512")


def test_the_table_names_every_program(result, capsys):
    show_adamw(result, Output.for_option(False))
    out = capsys.readouterr().out
    assert "torch fused AdamW" in out
    assert "missed steps, int8 moments" in out
    assert "replay / read" not in out


def test_a_record_is_read_where_the_directory_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(adamw, "RECORD_PARAMETERS", 4096)
    monkeypatch.setattr(adamw, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(adamw, "_READ_BYTES", 1 << 20)
    result = adamw.run(parameters=1000, threads=1, repeats=2, directory=tmp_path)
    assert result.record.bytes == 4096 * 12
    assert result.record.replay_to_read_ratio > 0
    assert not list(tmp_path.iterdir())
    show_adamw(result, Output.for_option(False))
    assert "replay / read" in capsys.readouterr().out


def test_torch_keeps_its_thread_count():
    before = torch.get_num_threads()
    adamw.run(parameters=100, threads=before + 1, repeats=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("option", ["parameters", "threads", "repeats"])
def test_impossible_options_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option}: expected at least 1, got 0"):
        adamw.run(**{option: 0})
