"""bench ppmoe: bytes of real ranks against the formulas, and where two straight lines cross. Nothing asserts a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.bench.ppmoe import PpmoeBench, PpmoeResult, crossing, measurements, run
from tierstore.cli.bench.ranks.ppmoe import show_ppmoe
from tierstore.cli.output import Output
from tierstore.errors import ConfigError


@pytest.fixture(scope="module")
def result() -> PpmoeResult:
    return run(PpmoeBench(cases=((2, 1), (2, 2)), tokens=32, width=8, experts=4, rounds=1, pass_s=0.002))


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas(result: PpmoeResult) -> None:
    """32 tokens of 32 bytes on 2 ranks: the all-reduce sends 1 KiB a rank, whatever K is."""
    assert result.same_bytes
    found = {(case.top_k, way.way): way for case in result.cases for way in case.sent}
    assert found[1, "all-reduce"].sent_bytes == found[2, "all-reduce"].sent_bytes == 2 * 1024
    # Rows, one a token: half of them from each rank. Two all-to-alls: half of 16 tokens there and back.
    assert found[1, "rows"].sent_bytes == 2 * 16 * 32
    assert found[1, "all-to-all"].sent_bytes == 2 * 2 * 8 * 32
    # With the backward pass as much again, and the weights' gradients, 4 bytes a row.
    assert found[2, "rows"].passes_bytes == 2 * (2 * 32 * 32 + 32 * 4)


@pytest.mark.slow
def test_what_is_shown(result: PpmoeResult, capsys: pytest.CaptureFixture[str]) -> None:
    show_ppmoe(result, Output.for_option(False))
    out = capsys.readouterr().out
    assert "bytes as the formulas say: yes" in out
    names = {measurement.name for measurement in measurements(result)}
    assert "sent" in names
    expected = [crossover.expected_ratio for case in result.cases for crossover in case.crossovers]
    assert expected == [1.0, 2.0, 1.0, 1.0]


def test_a_crossing_by_hand() -> None:
    """2 at speed 1, 0.5 at speed 4: on logarithmic scales 1 at 2."""
    assert crossing([1, 4], [2, 0.5]) == pytest.approx(2)
    assert crossing([1, 4], [4, 2]) is None
    assert crossing([1, 4], [1, 2]) is None


@given(st.floats(0.5, 2), st.floats(-3, -0.2))
def test_points_on_a_line(at: float, slope: float) -> None:
    speeds = [0.3, 0.6, 1.0, 1.7, 3.4]
    assert crossing(speeds, [(speed / at) ** slope for speed in speeds]) == pytest.approx(at)


def test_one_wild_point_hardly_moves_it() -> None:
    """Ratios of 1 / speed, one of them twice as large: the medians of slopes and intercepts are the others'."""
    assert crossing([0.6, 0.8, 1.0, 1.25, 1.6], [1 / 0.6, 1 / 0.8, 2.0, 1 / 1.25, 1 / 1.6]) == pytest.approx(
        1, rel=0.05
    )


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="cases: expected at least 2 ranks"):
        PpmoeBench(cases=((1, 1),))
    with pytest.raises(ConfigError, match="tokens: expected a multiple of 2 ranks x 8 experts"):
        PpmoeBench(cases=((2, 1),), tokens=24)
