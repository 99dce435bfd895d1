"""Gates: which passes they report, in which order; and the queue of the schedule behind them."""

from typing import Any

import pytest
import torch
from dense_cases import (
    LR,
    Outcome,
    Setting,
    backward,
    make_model,
    piece,
    slice_model,
    train_group,
    whole_weights,
)
from dense_ranks import on_ranks
from launcher import Ranks

from tierstore.cache.access import Phase
from tierstore.dense import DenseSlices, GatherOnDemand, Reshard
from tierstore.parallel import Mesh, RankGroup
from tierstore.prefetch import HorizontalQueue, Schedule
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.schedule import QueueLimits, Unit
from tierstore.prefetch.schedule import Reshard as ScheduleReshard

HOST = {"optimizer_state": "host"}  # one rank whose parameters are gathered into buffers
EVERY_PASS = [f"{side}F{unit}" for unit in range(5) for side in "+-"]
EVERY_PASS += [f"{side}B{unit}" for unit in reversed(range(5)) for side in "+-"]


class Recorder:
    """Writes down +F0 where the forward pass of unit 0 begins, -B0 where its backward pass ends."""

    def __init__(self, dense: DenseSlices) -> None:
        self._inner = GatherOnDemand(dense, Reshard.AFTER_FORWARD)
        self.events: list[str] = []

    def enter(self, unit: int, phase: Phase) -> None:
        self.events.append(f"+{phase.name[0]}{unit}")
        self._inner.enter(unit, phase)

    def leave(self, unit: int, phase: Phase) -> None:
        self.events.append(f"-{phase.name[0]}{unit}")
        self._inner.leave(unit, phase)


def recorded(model: Any, dense_changes: dict[str, Any]) -> tuple[DenseSlices, Recorder]:
    made: list[Recorder] = []

    def listen(dense: DenseSlices) -> Recorder:
        made.append(Recorder(dense))
        return made[0]

    return slice_model(model, RankGroup.alone(), dense_changes, listen), made[0]


@pytest.mark.parametrize("dense_changes", [{}, HOST], ids=["aliased", "gathered"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": "tied"}, {"checkpoint_activations": "block"}, {"compute_dtype": "bf16"}],
    ids=str,
)
def test_passes_of_a_step(changes: dict[str, Any], dense_changes: dict[str, Any]) -> None:
    # 3 blocks: units 0 (embedding), 1, 2, 3, and 4 (norm and head). A recomputed block is not a pass.
    model = make_model(changes)
    dense, recorder = recorded(model, dense_changes)
    for step in range(2):
        backward(model, dense, RankGroup.alone(), Setting(pieces=1), step)
        assert recorder.events == EVERY_PASS
        recorder.events.clear()
        dense.step(LR)


def test_forward_alone_and_a_backward_pass_that_never_comes() -> None:
    model = make_model({})
    dense, recorder = recorded(model, HOST)
    tokens, targets = piece(model.config, 0, 0)
    with torch.no_grad():
        model(tokens, targets)
    dense.begin_micro()
    model(tokens, targets)  # a loss that is not finite, say: no backward pass
    assert recorder.events == EVERY_PASS[:10] * 2
    recorder.events.clear()
    backward(model, dense, RankGroup.alone(), Setting(pieces=1), 0)
    assert recorder.events == EVERY_PASS


def test_a_forward_pass_that_raises_can_be_followed_by_another() -> None:
    model = make_model({})
    dense, recorder = recorded(model, HOST)
    tokens, targets = piece(model.config, 0, 0)
    with pytest.raises(IndexError):
        model(tokens + 1000, targets)
    recorder.events.clear()
    backward(model, dense, RankGroup.alone(), Setting(pieces=1), 0)
    assert recorder.events == EVERY_PASS


def test_parameters_that_no_gradient_reaches_have_zero_and_move_as_adamw_moves_them() -> None:
    outcomes = []
    for changes in ({}, HOST):
        model = make_model({})
        model.blocks[0].register_forward_hook(lambda block, arguments, output: (arguments[0], None))
        dense, recorder = recorded(model, changes)
        backward(model, dense, RankGroup.alone(), Setting(pieces=1), 0)
        assert recorder.events == EVERY_PASS
        dense.finish()
        gradients = [unit.gradient for unit in dense.slices]
        assert torch.count_nonzero(gradients[1]) == 0 < torch.count_nonzero(gradients[2])
        before = whole_weights(model, dense)
        dense.step(LR)
        after = whole_weights(model, dense)
        name = "blocks.0.attention.qkv"
        torch.testing.assert_close(after[name], before[name] * (1 - LR * 0.1))
        outcomes.append(after)
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name])


def test_hooks_go_with_the_gates() -> None:
    model = make_model({})
    dense, recorder = recorded(model, {})
    dense.attach(model, recorder)
    dense.detach()
    output = model(*piece(model.config, 0, 0))
    recorder_events = list(recorder.events)
    assert recorder_events == EVERY_PASS[:10]  # of the gates that are still there
    assert output.objective is not None


# The queue --------------------------------------------------------------------------------------------------


def schedule(
    dense: DenseSlices, depth: int, micros: int, timing: StepTiming, reshard: ScheduleReshard
) -> Schedule:
    units = tuple(Unit(layout.name, layout.gathered_bytes(torch.float32)) for layout in dense.layouts)
    return Schedule(
        units=units, horizontal=QueueLimits(depth), timing=timing, reshard=reshard, micro_batches=micros
    )


def queued(mesh: Mesh, depth: int, reshard: str, group: RankGroup | None = None) -> Outcome:
    """Training with the queue of the schedule in front of the slices, evaluation in between."""
    group = group or mesh.world
    setting = Setting()
    model = make_model({})
    made: list[HorizontalQueue] = []
    micros = setting.pieces // group.size

    def listen(dense: DenseSlices) -> HorizontalQueue:
        plan = schedule(dense, depth, micros, StepTiming.DEFERRED, ScheduleReshard[reshard.upper()])
        made.append(HorizontalQueue(plan, dense))
        return made[0]

    changes = {"optimizer_state": "host", "buffers": min(depth + 2, 3), "reshard": reshard.replace("_", "-")}
    dense, queue = slice_model(model, group, changes, listen), None
    queue = made[0]
    outcome = Outcome()
    for step in range(setting.steps):
        queue.begin(training=True)
        outcome.losses.append(backward(model, dense, group, setting, step))
        outcome.norms.append(sum(dense.squares()) ** 0.5)
        for unit in range(len(dense.layouts)):
            with queue.during(unit, Phase.OPTIMIZER):
                dense.step_unit(unit, LR * (1 + step % 3))
        queue.begin(training=False)
        with torch.no_grad():
            model(*piece(model.config, step, 0))
    queue.reset()
    outcome.weights = whole_weights(model, dense)
    return outcome


@pytest.mark.parametrize("reshard", ["after_forward", "after_backward"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_queue_changes_no_bit(ranks: Ranks, depth: int, reshard: str) -> None:
    expected = on_ranks(ranks, 2, Setting())
    for found, wanted in zip(ranks.run(2, queued, depth, reshard), expected, strict=True):
        assert found.losses == wanted.losses
        assert found.norms == wanted.norms
        for name, value in found.weights.items():
            assert torch.equal(value, wanted.weights[name])


def test_train_group_is_what_the_queue_is_compared_with() -> None:
    """One step moves every weight, or equality above would show nothing."""
    before = make_model({}).state_dict()
    after = train_group(RankGroup.alone(), Setting(steps=1)).weights
    assert all(not torch.equal(before[name], value) for name, value in after.items())
