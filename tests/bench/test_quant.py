"""bench quant: figures that agree with each other. Nothing here asserts a speed."""

from __future__ import annotations

import pytest

from tierstore.bench import quant
from tierstore.bench.results.figures import to_json
from tierstore.errors import ConfigError
from tierstore.quant.layout import CodeFormat


def test_figures_by_hand() -> None:
    # Two rounds; ratios are taken within rounds, then their median. A copy of 100 bytes, codes of 50.
    samples = {1: {"copy": [1.0, 2.0], "bf16": [4.0, 8.0], "int8": [2.0, 1.0]}}
    made, rounds = quant.figures(samples, {"copy": 100, "bf16": 100, "int8": 50}, 60)
    copy, plain, int8 = made
    assert (copy.bandwidth_to_copy_ratio, copy.flops_per_s) == (1, 0)
    assert (plain.speed_to_torch_ratio, plain.bandwidth_to_copy_ratio) == (1, 0.25)
    assert int8.speed_to_torch_ratio == (2 + 8) / 2
    assert int8.bandwidth_to_copy_ratio == (0.5 * 1 / 2 + 0.5 * 2) / 2
    assert int8.median_s == 1.5
    assert (int8.weight_bytes_per_s, int8.flops_per_s) == (50 / 1.5, 60 / 1.5)
    assert rounds["int8 speed to torch, 1 rows"] == [2, 8]


def test_every_contestant_is_measured() -> None:
    result = quant.run(inputs=200, outputs=40, rows=(1, 3), weight_bytes=100_000, threads=2, repeats=2)
    assert result.matrices_count == 100_000 // 16_000
    assert [(times.contestant, times.rows_count) for times in result.products] == [
        (name, m) for m in (1, 3) for name in ("copy", "bf16", "int8", "int4")
    ]
    assert all(len(times.samples_s) == 2 and times.median_s > 0 for times in result.products)
    int8, int4 = result.errors
    assert (int8.codes, int4.codes) == tuple(CodeFormat)
    # Four blocks a row, of which the last is an eighth full; zeros to whole lines.
    assert int8.bytes_per_parameter == 40 * 4 * 68 / 8000
    assert int4.bytes_per_parameter == 40 * 4 * 40 / 8000
    assert 0.002 < int8.weight_error_ratio < 0.01
    assert 0.04 < int4.weight_error_ratio < 0.12
    assert all(0 < error.product_error_ratio < 1e-6 for error in result.errors)
    assert len(list(quant.measurements(result))) == 8 + 16 + 4
    assert to_json(result)["bench"] == "quant"
    with pytest.raises(ConfigError, match="rows: expected at least 1"):
        quant.run(rows=())
