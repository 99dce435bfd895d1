"""Learning rates by hand and against torch's schedulers."""

import itertools
from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.train.config import LearningRateDecay, ScheduleConfig


def test_by_hand() -> None:
    options: dict[str, Any] = {"lr": 0.8, "warmup_steps": 4, "total_steps": 12, "min_lr_fraction": 0.25}
    cosine = ScheduleConfig(kind=LearningRateDecay.COSINE, **options)
    assert [cosine.lr_at(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert cosine.lr_at(8) == pytest.approx(0.5)  # halfway: between 0.8 and 0.2
    assert cosine.lr_at(12) == cosine.lr_at(1000) == pytest.approx(0.2)
    linear = ScheduleConfig(kind=LearningRateDecay.LINEAR, **options)
    assert [linear.lr_at(step) for step in (4, 6, 8, 12, 99)] == pytest.approx([0.8, 0.65, 0.5, 0.2, 0.2])
    constant = ScheduleConfig(kind=LearningRateDecay.CONSTANT, **options)
    assert [constant.lr_at(step) for step in (0, 3, 4, 99)] == pytest.approx([0.2, 0.8, 0.8, 0.8])
    assert ScheduleConfig(kind="linear").kind is LearningRateDecay.LINEAR  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LearningRateDecay.COSINE, LearningRateDecay.LINEAR])
def test_against_torch(kind: LearningRateDecay) -> None:
    config = ScheduleConfig(kind=kind, lr=0.3, warmup_steps=5, total_steps=35, min_lr_fraction=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if kind == LearningRateDecay.COSINE:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.03)
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.1, total_iters=30
        )
    for step in range(5, 36):
        assert config.lr_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


@settings(max_examples=share(60))
@given(st.sampled_from(list(LearningRateDecay)), st.integers(0, 20), st.integers(1, 60), st.floats(0, 1))
def test_it_rises_then_falls(kind: LearningRateDecay, warmup: int, total: int, least: float) -> None:
    config = ScheduleConfig(kind=kind, lr=0.5, warmup_steps=warmup, total_steps=total, min_lr_fraction=least)
    rates = [config.lr_at(step) for step in range(90)]
    assert all(0 < rate <= 0.5 for rate in rates[: max(1, min(warmup, total))])
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b - 1e-15 for a, b in itertools.pairwise(rates[warmup:]))
    assert min(rates[warmup:]) >= 0.5 * least - 1e-15


@settings(max_examples=share(60))
@given(
    st.sampled_from(list(LearningRateDecay)),
    st.integers(0, 20),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_first_step_of_the_lowest_rate(
    kind: LearningRateDecay, warmup: int, total: int, least: float
) -> None:
    """Brute force: the step behind the last one whose rate is another than that of the end."""
    config = ScheduleConfig(kind=kind, lr=0.5, warmup_steps=warmup, total_steps=total, min_lr_fraction=least)
    rates = [config.lr_at(step) for step in range(90)]
    behind = max([step + 1 for step in range(warmup, 90) if rates[step] != rates[-1]], default=None)
    assert config.lowest_from == behind


def test_the_steps_of_a_run_are_those_of_its_schedule() -> None:
    given = ScheduleConfig(total_steps=12, lr=2e-3)
    assert given.over(99, width=4096, blocks=32) == given
    assert ScheduleConfig().over(12, width=256, blocks=2) == given
    assert ScheduleConfig().over(99, width=256, blocks=2, began={"total_steps": 12}) == given
    of_no_run = [ScheduleConfig().lr_at(step) for step in range(70)]
    assert of_no_run == [ScheduleConfig(total_steps=60).lr_at(step) for step in range(70)]


@pytest.mark.parametrize(
    ("width", "blocks", "lr"),
    [(32, 1, 2e-3), (256, 2, 2e-3), (512, 4, 1e-3), (4096, 2, 1.25e-4), (256, 8, 1e-3), (512, 32, 1.25e-4)],
)
def test_the_default_rate_falls_with_width_and_depth(width: int, blocks: int, lr: float) -> None:
    assert ScheduleConfig().over(60, width, blocks).lr == lr
    given, began = ScheduleConfig(lr=0.5), {"lr": 0.25}  # of the run that is resumed
    assert given.over(60, width, blocks).lr == 0.5
    assert ScheduleConfig().over(60, width, blocks, began=began).lr == 0.25
    assert given.over(60, width, blocks, began=began).lr == 0.5
