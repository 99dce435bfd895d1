"""Pipeline MoE's equations, as printed and corrected, against the paper's own figures; and ours against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.ppmoe import (
    INFINIBAND,
    NVLINK,
    TABLE_1,
    TABLE_2,
    V100_FLOPS,
    DivisionBytes,
    RowBytes,
    all_reduce_ratio,
    all_reduce_ratio_printed,
    all_to_all_ratio,
    all_to_all_ratio_of_nodes,
    all_to_all_ratio_printed,
    speed_ratio,
)


def test_equation_2_against_table_1() -> None:
    """The model of Table 1 has 64 experts and width 4096."""
    asked = (64, 4096, V100_FLOPS, INFINIBAND)
    assert all_to_all_ratio_printed(*asked) == pytest.approx(615, abs=0.5)
    assert TABLE_1.network == 1149
    assert TABLE_1.ratio == pytest.approx(2.17, abs=0.005)
    assert all_to_all_ratio(*asked) == pytest.approx(0.300, abs=0.001)
    assert all_to_all_ratio_of_nodes(*asked) == pytest.approx(2.14, abs=0.005)
    # N / 2 stands where 1 / N should.
    assert all_to_all_ratio_printed(*asked) / all_to_all_ratio(*asked) == pytest.approx(64**2 / 2)


def test_the_percentages_of_table_1() -> None:
    both = TABLE_1.first_all_to_all + TABLE_1.second_all_to_all
    assert 100 * both / TABLE_1.total == pytest.approx(65.5, abs=0.05)
    assert 100 * both / TABLE_1.moe == pytest.approx(79.2, abs=0.1)
    assert TABLE_1.moe + TABLE_1.others == TABLE_1.total


def test_equation_5() -> None:
    """The paper: 35 / 6, about 6, for 8 ranks of width 1000 over NVLink."""
    assert all_reduce_ratio_printed(8, 1000, V100_FLOPS, NVLINK) == pytest.approx(35 / 6)
    assert all_reduce_ratio(8, 1000, V100_FLOPS, NVLINK) == pytest.approx(35 / 48)


def test_the_ratios_of_table_2() -> None:
    checked = [row for row in TABLE_2 if row.printed]
    assert len(checked) == 7
    wrong = [row for row in checked if speed_ratio(row) != pytest.approx(row.printed, abs=0.06)]
    assert [row.model for row in wrong] == ["6.7B PPMoE"]
    (row,) = wrong
    assert (speed_ratio(row), row.printed) == (pytest.approx(83.5, abs=0.05), 81.4)
    data_parallel = next(other for other in checked if other.model == "6.7B DPMoE")
    more = 100 * (row.tokens_per_s / data_parallel.tokens_per_s - 1)
    assert more == pytest.approx(26.1, abs=0.05)  # printed 24.6
    best = {row.model: row.tokens_per_s for row in sorted(checked, key=lambda row: row.tokens_per_s)}
    assert best["143B PPMoE"] / best["143B DPMoE"] == pytest.approx(
        1.765, abs=0.001
    )  # "more than 1.75 times"


def test_bytes_by_hand() -> None:
    """8 tokens of 4 elements of 4 bytes, 2 ranks: each combines 128 bytes, and sends them to the other."""
    top_2 = RowBytes(tokens=8, width=4, itemsize=4, ranks=2, top_k=2)
    assert top_2.all_reduce == 128
    assert top_2.rows == 128  # 8 of the 16 rows
    # 4 own tokens to 2 experts each, half of them elsewhere: 4 rows of 16 bytes there and back.
    assert top_2.all_to_all == 128
    one = RowBytes(tokens=8, width=4, itemsize=4, ranks=2, top_k=1)
    assert (one.all_reduce, one.rows, one.all_to_all) == (128, 64, 64)
    # Attention: one pair, forward and backward, each an all-reduce of 128 bytes a rank.
    assert DivisionBytes(tokens=8, width=4, itemsize=4, ranks=2, pairs=1).both_passes == 256


@given(st.integers(1, 9999), st.integers(1, 4096), st.integers(2, 64), st.integers(1, 16))
def test_crossovers(tokens: int, width: int, ranks: int, top_k: int) -> None:
    made = RowBytes(tokens=tokens, width=width, itemsize=2, ranks=ranks, top_k=top_k)
    assert made.all_reduce_crossover == pytest.approx(ranks / top_k)
    assert made.rows_crossover == pytest.approx(ranks / 2)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="ranks: expected at least 1, got 0"):
        RowBytes(tokens=1, width=1, itemsize=1, ranks=0, top_k=1)
