"""Steps that somebody else's loop takes: the same bits as the trainer's, and nothing moves before they end."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks
from refusals import refuses

from tierstore.dense import DenseConfig, DenseSlices, unit_layouts
from tierstore.dense.parameters import DividedParameters
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.stats import StallLedger
from tierstore.store.adamw import AdamWConfig
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts, open_session
from tierstore.train.setup import Loop
from tierstore.train.stepping import (
    NonFiniteError,
    OpenStep,
    SessionParts,
    StepError,
    StepOutcome,
    Stepper,
    expansion,
    gradient_norm,
)

Make = Callable[..., TrainConfig]
TIGHT = {"host_budget": "160KiB"}
STEPS = 6


def passes(parts: SessionParts, step: OpenStep, batches: list[Any]) -> float:
    """Forward and backward over ``batches``; the mean of their losses."""
    total = 0.0
    for batch in batches:
        step.begin_pass()
        output = parts.model.run(batch)
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
        with refuses(NonFiniteError, "2 steps", "max_skipped"), stepper.step(5e-3) as step:
            passes(parts, step, [batch])
        hook.remove()


def test_what_a_loop_can_get_wrong(configure: Make) -> None:
    with open_parts(configure(TIGHT), Opening.CREATE, loop=Loop.EXTERNAL) as parts:
        stepper = Stepper(parts)
        with refuses(StepError, "passes:", "got 0"), stepper.step(1e-3, passes=0):
            pass
        with stepper.step(1e-3) as step:
            with refuses(StepError, "open already"), stepper.step(1e-3):
                pass
            passes(parts, step, [_batch(parts)])
        with refuses(StepError, "step 1", "1 of 2 passes"), stepper.step(1e-3, passes=2) as step:
            passes(parts, step, [_batch(parts)])
    with open_session(configure(TIGHT), Opening.CREATE) as trainer:
        stepper = trainer._stepper
        with refuses(StepError, "passes:"), stepper.step(1e-3):
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


# The norm of a step's gradients -----------------------------------------------------------------------------


_RANDOM = random.Random(7)
EXPERTS = [_RANDOM.uniform(0, 1) * 10 ** _RANDOM.uniform(-12, 6) for _ in range(12)]
UNITS = [_RANDOM.uniform(0, 1) * 10 ** _RANDOM.uniform(-3, 3) for _ in range(8)]


@dataclass
class GivenGradients:
    """``ExpertGradients`` and ``DenseSlices``, as far as a norm asks them: sums of squares that a test gives."""

    given: Sequence[float] = field(default_factory=list)

    def squares(self) -> list[float]:
        return list(self.given)


def norm(mesh: Mesh, experts: Sequence[float], units: Sequence[float]) -> float:
    """This rank's part of ``experts``, which its group divides, and of ``units``, which stages do."""
    owned = mesh.blocks(len(experts)).owned(mesh.expert.rank)
    share = len(units) // mesh.stages
    own = units[mesh.pipeline.rank * share : (mesh.pipeline.rank + 1) * share]
    part = len(owned) // mesh.stages
    mine = [experts[owned[0] + mesh.pipeline.rank * part + i] for i in range(part)]
    return gradient_norm(
        cast(ExpertGradients, GivenGradients(mine)),
        cast(DenseSlices, GivenGradients(own)),
        mesh,
        StallLedger(),
    )


def alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def test_by_hand() -> None:
    assert norm(alone(), [9.0, 4.0], [1.0, 2.0]) == 4.0


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        (4, {}),
        (4, {"expert": 2}),
        (4, {"tensor": 2}),
        (4, {"stages": 2}),
        (4, {"stages": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_the_bits_of_one_process(ranks: Ranks, size: int, layout: dict[str, int]) -> None:
    """Whichever rank holds which experts and units: replicas count once, and no rounding depends on the layout."""
    one = norm(alone(), EXPERTS, UNITS)
    assert ranks.run(size, norm, EXPERTS, UNITS, **layout) == [one] * size


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_not_finite(ranks: Ranks, bad: float) -> None:
    assert math.isnan(norm(alone(), [1.0, bad], [1.0]))
    assert all(math.isnan(found) for found in ranks.run(2, norm, [1.0, bad], [1.0]))
    assert all(math.isnan(found) for found in ranks.run(2, norm, [1.0, 1.0], [bad]))


@given(st.lists(st.floats(0, 1e60), max_size=20), st.integers(0, 20))
def test_an_expansion_is_the_sum_without_rounding(values: list[float], cut: int) -> None:
    """Against one sum of everything: two ranks' parts, each sent as four doubles."""
    assert math.fsum([*expansion(values[:cut]), *expansion(values[cut:])]) == math.fsum(values)


# Dense parameters -------------------------------------------------------------------------------------------


def dense_squares(mesh: Mesh) -> list[float]:
    """Two units of a whole and a divided parameter, all of whose gradients are 1; a rank has its part of the divided one."""
    width = 24 // mesh.tensor.size
    units = [
        (name, [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(width, 2))])
        for name in ("first", "second")
    ]
    divided = None
    if mesh.tensor.size > 1:
        divided = DividedParameters(mesh.tensor, (frozenset({1}), frozenset({1})))
    options: dict[str, Any] = {"adamw": AdamWConfig(), "config": DenseConfig(), "divided": divided}
    layouts = unit_layouts(units, ranks=mesh.data.size)
    dense = DenseSlices(units, layouts, group=mesh.data, device=torch.device("cpu"), **options)
    for unit in dense.slices:
        for region, kept in unit.layout.slices():
            own = slice(mesh.data.rank * region.slice_numel, (mesh.data.rank + 1) * region.slice_numel)
            whole = torch.zeros(region.padded_numel)
            whole[: region.numel] = 1
            unit.gradient[kept].copy_(whole[own])
    return dense.squares()


@pytest.mark.parametrize(("size", "tensor"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_parts_count_each_and_whole_parameters_once(ranks: Ranks, size: int, tensor: int) -> None:
    """Of each unit 5 + 48 ones, however they are cut over data ranks and divided over tensor ranks."""
    for found in ranks.run(size, dense_squares, tensor=tensor):
        assert found == pytest.approx([53.0, 53.0])
