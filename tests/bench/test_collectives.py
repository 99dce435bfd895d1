"""bench collectives: figures of two real ranks that agree with each other. Nothing here asserts a speed."""

from __future__ import annotations

import pytest

from tierstore.bench.collectives import CollectivesBench, CollectivesResult, run
from tierstore.bench.processes import ranks
from tierstore.bench.processes.spawn import WorkerError
from tierstore.cli.bench.group import show_collectives
from tierstore.cli.output import Output
from tierstore.errors import ConfigError

LAYERS, WIDTH = 3, 16


@pytest.fixture(scope="module")
def result() -> CollectivesResult:
    return run(CollectivesBench(layers=LAYERS, d_model=WIDTH, tokens=8, rounds=2, steps=1))


@pytest.mark.slow
def test_counts_are_those_of_the_model(result: CollectivesResult) -> None:
    # Gathers: each block twice a step, embedding and head once. Fused: one a unit. Apart: a block has 2 norms, 2 matrices of
    # attention and 2 of its network, the head a norm and a matrix. Reductions: one a unit, or one a parameter.
    assert result.fused.collectives_count == 2 * LAYERS + 2 + LAYERS + 2
    assert result.apart.collectives_count == 2 * 6 * LAYERS + 3 + 6 * LAYERS + 3
    assert result.messages_ratio == (18 * LAYERS + 6) / (3 * LAYERS + 4)
    block = 4 * WIDTH * WIDTH + 2 * WIDTH + 3 * 4 * WIDTH * WIDTH
    ends = 2 * 256 * WIDTH + WIDTH
    assert result.parameters == LAYERS * block + ends
    # Half of it is sent to the other: weights twice and gradients once of a block, once each of the ends.
    sent = 4 * (3 * LAYERS * block + 2 * ends) / 2
    assert result.apart.sent_bytes == pytest.approx(sent, rel=0.01)
    assert result.fused.sent_bytes == pytest.approx(sent, rel=0.01)


@pytest.mark.slow
def test_both_modes_compute_the_same_and_take_time(result: CollectivesResult) -> None:
    assert result.same_bits is True
    for mode in (result.fused, result.apart):
        assert 0 < mode.step_min_s <= mode.step_s <= mode.step_max_s


@pytest.mark.slow
def test_the_table(result: CollectivesResult, capsys: pytest.CaptureFixture[str]) -> None:
    show_collectives(result, Output.for_option(False))
    out = capsys.readouterr().out
    assert "2 ranks on gloo, 3 dense blocks of width 16" in out
    assert "collectives a step" in out
    assert f"{result.messages_ratio:.1f} x fewer messages" in out


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers: expected at least 1, got 0"):
        CollectivesBench(layers=0)
    with pytest.raises(ConfigError, match="d_model: expected a multiple of 8, got 12"):
        CollectivesBench(d_model=12)


def test_a_rank_that_fails_is_one_error() -> None:
    with pytest.raises(WorkerError, match="rank 0: exited with status 1"):
        ranks.run_ranks("tierstore.bench.collectives", ["not json"], ranks=1, timeout_s=60)
