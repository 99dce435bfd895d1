"""bench tasks: the modes and the formula by hand, and figures of real ranks. Nothing here asserts a speed."""

from __future__ import annotations

import itertools

import pytest

from tierstore.bench.tasks import (
    BATCHES,
    ModeSpeed,
    TasksBench,
    TasksResult,
    assignments,
    by_cards,
    measurements,
    run,
)
from tierstore.cli.bench.ranks.tasks import _show
from tierstore.cli.output import Output
from tierstore.errors import ConfigError


def test_the_modes() -> None:
    modes = assignments(8)
    rows = {name: [stop - start for start, stop in itertools.pairwise(of.cuts)] for name, of in modes.items()}
    assert rows["one task a card"] == [512, 256, 128, 128, 0, 0, 0, 0]
    assert rows["balanced"] == rows["balanced again"] == [128] * 8
    assert rows["as printed, by the paper"] == [78, 78, 78, 78, 115, 115, 120, 120]
    assert rows["as printed, equal cost"] == [98, 97, 98, 98, 98, 97, 98, 98]
    assert by_cards((3, 1), (2, 1), 4).cuts == (0, 1, 3, 4, 4)


def test_the_formula_gives_the_papers_speeds() -> None:
    """62.6 and 74.0 samples a second and card: 1024 / 4.088 s on four, 1024 / 1.730 s on eight."""
    bench, modes = TasksBench(time_scale=1.0), assignments(8)
    alone, balanced = (bench.step_s(modes[name]) for name in ("one task a card", "balanced"))
    assert 1024 / alone / 4 == pytest.approx(62.6, abs=0.05)
    assert 1024 / balanced / 8 == pytest.approx(74.0, abs=0.05)
    assert alone * 4 / (balanced * 8) - 1 == pytest.approx(0.182, abs=0.002)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="rounds: expected at least 1, got 0"):
        TasksBench(rounds=0)
    with pytest.raises(ConfigError, match="ranks: expected the table's 8, got 4"):
        TasksBench(ranks=4)
    with pytest.raises(ConfigError, match="time_scale: expected more than 0"):
        TasksBench(time_scale=0.0)


def result(gain: float, *, once: bool) -> TasksResult:
    mode = ModeSpeed(
        mode="balanced",
        cards_count=8,
        samples_count=1024,
        most_samples_count=128,
        step_samples_s=[1.0],
        step_s=1.0,
        predicted_step_s=1.0,
        speed=74.0,
    )
    return TasksResult(
        asked=TasksBench(),
        modes=[mode],
        gain_ratio=gain,
        predicted_gain_ratio=0.181,
        noise_ratio=0.01,
        every_example_once=once,
    )


@pytest.mark.parametrize(
    ("gain", "once", "passes"),
    [(0.155, True, True), (0.2, True, True), (0.14, True, False), (0.22, True, False), (0.18, False, False)],
)
def test_the_check(gain: float, once: bool, passes: bool) -> None:
    assert result(gain, once=once).as_predicted is passes


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _show(result(0.182, once=True), Output.for_option(False))
    out = capsys.readouterr().out
    assert "8 ranks, 5 rounds of 4 steps, 5 x the paper's speed" in out
    assert "+18.2% a card (by the formula +18.1%; noise 1.0%); every example once: yes" in out


@pytest.mark.slow
def test_real_ranks_take_every_example_once() -> None:
    found = run(TasksBench(time_scale=200.0, rounds=1, steps=1))
    assert found.every_example_once
    assert [mode.samples_count for mode in found.modes] == [sum(BATCHES)] * 3 + [782] * 2
    assert [mode.cards_count for mode in found.modes] == [4, 8, 8, 8, 8]
    # Sleeping takes at least its time.
    assert all(mode.step_s >= mode.predicted_step_s for mode in found.modes)
    assert len(list(measurements(found))) == len(found.modes) + 1
