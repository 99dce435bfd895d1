"""Steps that somebody else's loop takes: the same bits as the trainer's, and nothing moves before they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts, open_session
from tierstore.train.setup import Loop
from tierstore.train.stepping import NonFiniteError, OpenStep, SessionParts, StepError, StepOutcome, Stepper

Make = Callable[..., TrainConfig]
TIGHT = {"host_budget": "160KiB"}
STEPS = 6


def passes(parts: SessionParts, step: OpenStep, batches: list[Any]) -> float:
    """Forward and backward over ``batches``; the mean of their losses."""
    total = 0.0
    for batch in batches:
        step.begin_pass()
        output = parts.model.run(batch)
        assert output.loss is not None
        assert output.objective is not None
        step.backward(output.objective / len(batches))
        total += float(output.loss.detach()) / len(batches)
    return total


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("micros", [1, 3])
def test_a_foreign_loop_has_the_trainers_bits(configure: Make, clip: float, known: bool, micros: int) -> None:
    config = configure(TIGHT | {"clip_norm": clip, "data.micro_batches": micros})
    with open_session(config, Opening.CREATE) as trainer:
        batches = [[trainer.data.batch(step, micro) for micro in range(micros)] for step in range(STEPS)]
        expected = [trainer.step() for _ in range(STEPS)]
        trainer.commit()
        crc = trainer.store.records_crc32c()
    foreign = configure(TIGHT | {"clip_norm": clip})
    with open_parts(foreign, Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        stepper = Stepper(parts)
        losses, norms = [], []
        for number in range(STEPS):
            count = micros if known else None
            with stepper.step(config.schedule.lr_at(number), passes=count) as step:
                losses.append(passes(parts, step, batches[number]))
            norms.append(step.grad_norm)
            assert step.outcome is StepOutcome.TAKEN
        stepper.commit()
        assert losses == [result.loss for result in expected]
        assert norms == [result.grad_norm for result in expected]
        assert parts.store.records_crc32c() == crc
        assert parts.state.position == STEPS


def test_an_abandoned_step_changes_nothing(configure: Make) -> None:
    """Not even the steps of gradients that wait since the step before: those are taken."""
    sums = []
    for abandons in (False, True):
        with open_parts(configure(TIGHT), Opening.CREATE, loop=Loop.EXTERNAL) as parts:
            stepper = Stepper(parts)
            batch = _batch(parts)
            for number in range(4):
                if abandons and number % 2:
                    with stepper.step(1.0) as step:
                        if number == 3:
                            passes(parts, step, [batch, batch])
                        step.abandon()
                    assert step.outcome is StepOutcome.ABANDONED
                    assert math.isnan(step.grad_norm)
                with stepper.step(5e-3) as step:
                    passes(parts, step, [batch])
            stepper.commit()
            assert parts.state.skipped_in_a_row == 0
            assert parts.store.history.applied == 4
            sums.append(parts.store.records_crc32c())
    assert sums[0] == sums[1]


def test_a_gradient_that_is_not_finite_skips_the_step_also_without_clipping(configure: Make) -> None:
    with open_parts(configure(TIGHT | {"max_skipped": 2}), Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        stepper = Stepper(parts)
        batch = _batch(parts)
        embedding: Any = parts.model.dense_units()[0][1][0]
        before = parts.store.records_crc32c()
        hook = embedding.register_hook(lambda gradient: gradient * math.inf)
        with stepper.step(5e-3) as step:
            passes(parts, step, [batch])
        assert step.outcome is StepOutcome.SKIPPED
        stepper.commit()
        assert parts.store.records_crc32c() == before
        with pytest.raises(NonFiniteError, match="2 steps in a row"), stepper.step(5e-3) as step:
            passes(parts, step, [batch])
        hook.remove()


def test_what_a_loop_can_get_wrong(configure: Make) -> None:
    with open_parts(configure(TIGHT), Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        stepper = Stepper(parts)
        with pytest.raises(StepError, match="at least one, got 0"), stepper.step(1e-3, passes=0):
            pass
        with stepper.step(1e-3) as step:
            with pytest.raises(StepError, match="a step is open already"), stepper.step(1e-3):
                pass
            passes(parts, step, [_batch(parts)])
        with pytest.raises(StepError, match="ends after 1 of 2 passes"), stepper.step(1e-3, passes=2) as step:
            passes(parts, step, [_batch(parts)])
    with open_session(configure(TIGHT), Opening.CREATE) as trainer:
        stepper = trainer._stepper
        with pytest.raises(StepError, match="must be known"), stepper.step(1e-3):
            pass


def test_a_foreign_run_is_resumed(configure: Make) -> None:
    config = configure(TIGHT)
    with open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        stepper = Stepper(parts)
        batch = _batch(parts)
        with stepper.step(5e-3) as step:
            passes(parts, step, [batch])
        stepper.commit()
        with stepper.step(5e-3) as step:
            expected = passes(parts, step, [batch])
    with open_parts(config, Opening.RESUME, loop=Loop.EXTERNAL) as parts:
        assert parts.state.position == 1
        with Stepper(parts).step(5e-3) as step:
            assert passes(parts, step, [batch]) == expected


def _batch(parts: SessionParts) -> Any:
    from tierstore.model.interface import Batch

    model = parts.config.model
    tokens = torch.randint(
        0, model.vocab_size, (2, model.seq_len + 1), generator=torch.Generator().manual_seed(3)
    )
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
