"""``bench stages``: a small pipeline of real ranks, and the traffic of a stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierstore.bench.results.figures import to_json
from tierstore.bench.stages import PipelineTimes, StagesBench, measurements, run
from tierstore.errors import ConfigError


@pytest.mark.slow
def test_two_stages_take_their_passes_in_order_and_hold_no_more_than_they_should(tmp_path: Path) -> None:
    """A step takes at least (2 + 1) x 3 ms, however fast the machine is."""
    svg = tmp_path / "stages.svg"
    result = run(
        StagesBench(stages=(2,), micro_batches=(1,), forward_s=0.001, backward_s=0.002, rounds=1, svg=svg)
    )
    (pipeline,) = result.pipelines
    drawn = re.findall(r'<path fill="#(\w+)"[^>]* d="([^"]*)"', svg.read_text())
    assert [(colour, path.count("M")) for colour, path in drawn] == [("4c72b0", 2), ("dd8452", 2)] * 2
    assert pipeline.in_order
    assert pipeline.held_count == [2, 1]
    assert pipeline.model_s == pytest.approx(0.009)
    assert pipeline.step_s >= 0.009
    by_order = {(each.order, each.micro_batches_count): each for each in result.traffic}
    for count in (2, 4):
        assert by_order["1F1B", count].read_ratio >= by_order["layer order", count].read_ratio
    assert len(list(measurements(result))) == 4 + 2 * len(result.traffic)
    assert "pipelines" in to_json(result)


def test_a_stage_that_holds_more_is_seen() -> None:
    def held(*counts: int) -> PipelineTimes:
        return PipelineTimes(
            stages_count=2,
            micro_batches_count=4,
            step_samples_s=[1.0],
            step_s=1.0,
            model_s=1.0,
            ratio=1.0,
            held_count=counts,
            in_order=True,
        )

    assert held(2, 1).holds_no_more
    assert not held(2, 2).holds_no_more


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        StagesBench(stages=(1,))
    with pytest.raises(ConfigError, match="more than 0"):
        StagesBench(forward_s=0.0)
