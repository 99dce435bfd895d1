"""Passes of several micro-batches that interleave, as a pipeline stage's do: what both queues know of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cache.access import Need, Phase
from tierstore.dense.config import Reshard
from tierstore.plan.traffic import CountedSteps
from tierstore.prefetch import PredictorName, Schedule, StepTiming, make_predictor
from tierstore.prefetch.program import Access, AccessProgram, Action, Finals, Speculation
from tierstore.prefetch.schedule import MicroPass, QueueLimits, Unit, Window
from tierstore.train.stages import one_forward_one_backward

F, B, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
#: Stage 0 of 2 with two micro-batches: F0 F1 B0 B1.
ORDER = one_forward_one_backward(0, 2, 2)
KEEP, ADD, FINISH, STEP = Action.KEEP, Action.ACCUMULATE, Action.FINISH, Action.STEP


def schedule(depth: int = 1) -> Schedule:
    units = (Unit("embedding"), Unit("block", 1, 3))
    return Schedule(units=units, vertical=QueueLimits(depth), micro_batches=2, order=ORDER)


def test_the_passes_of_a_stage_by_hand() -> None:
    """Two forward passes over both units, two backward passes the other way, then the optimizer's."""
    found = [(item.phase, item.unit, item.micro) for item in schedule().passes]
    assert found[:4] == [(F, 0, 0), (F, 1, 0), (F, 0, 1), (F, 1, 1)]
    assert found[4:8] == [(B, 1, 0), (B, 0, 0), (B, 1, 1), (B, 0, 1)]
    assert found[8:] == [(OPTIMIZER, 0, 0), (OPTIMIZER, 1, 0)]


def test_what_follows_a_pass_depends_on_its_micro_batch() -> None:
    """After F0 comes F1, after F1 comes B0; after B1 the next step's F0."""
    of = schedule(2)

    def after(phase: Phase, micro: int) -> list[tuple[Phase, int, int]]:
        ahead = of.following(phase, 3, training=True, micro=micro)
        return [(item.phase, item.micro, item.later) for item in ahead]

    assert after(F, 0) == [(F, 1, 0), (B, 0, 0)]
    assert after(F, 1) == [(B, 0, 0), (B, 1, 0)]
    assert after(B, 0) == [(B, 1, 0), (F, 0, 1)]
    assert after(B, 1) == [(F, 0, 1), (F, 1, 1)]
    assert [item.micro for item in of.recomputed(3, micro=1)] == [1, 0]


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ([(F, 0), (B, 0)], "expected forward passes of micro-batches"),
        ([(F, 0), (F, 1), (B, 1), (B, 0)], "expected backward passes"),
        ([(F, 0), (B, 0), (B, 1), (F, 1)], "micro-batch 1 passes backward before"),
    ],
)
def test_an_order_that_is_none_is_refused(order: list[tuple[Phase, int]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Schedule(
            units=(Unit("block", 1, 0),),
            micro_batches=2,
            order=tuple(MicroPass(phase, micro) for phase, micro in order),
        )


@given(
    st.integers(1, 4).flatmap(lambda stages: st.tuples(st.integers(0, stages - 1), st.just(stages))),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from(Reshard),
    st.booleans(),
)
def test_every_pass_finds_its_unit_gathered_within_the_budget(
    place: tuple[int, int], micro_batches: int, blocks: int, depth: int, reshard: Reshard, tight: bool
) -> None:
    units = tuple(Unit(f"block {i}", 1, i) for i in range(blocks))
    budget = None if reshard is Reshard.AFTER_BACKWARD or not tight else 1
    of = Schedule(
        units=units,
        horizontal=QueueLimits(depth, budget),
        reshard=reshard,
        micro_batches=micro_batches,
        order=one_forward_one_backward(*place, micro_batches),
    )
    window = Window(of, training=True)
    held = set(window.begin().gathers)
    for position in range(2 * len(of.passes)):
        item = window.at(position)
        assert item.phase is OPTIMIZER or item.unit in held
        assert budget is None or window.nbytes <= budget
        movement = window.leave(position)
        held = (held | set(movement.before)) - set(movement.releases) | set(movement.after)


class Rig:
    """The program of stage 0 of 2, on no store."""

    def __init__(self, depth: int = 2) -> None:
        self.counts = CountedSteps((3,), 4, replays=True)
        self.ahead: list[Speculation] = []
        self.program = AccessProgram(
            schedule(depth),
            make_predictor(PredictorName.NONE, range(4)),
            self.counts,
            timing=StepTiming.IMMEDIATE,
            experts=4,
        )

    def forward(self, micro: int, *experts: int) -> list[Access]:
        self.program.begin_micro(index=micro, count=2)
        return self._told(self.program.forward(3, experts))

    def backward(self, micro: int, *experts: int, finals: Finals = Finals.LAST) -> list[Access]:
        self.program.resume_micro(index=micro, finals=finals)
        return self._told(self.program.backward(3, experts))

    def _told(self, accesses: object) -> list[Access]:
        found = []
        for access in accesses:  # type: ignore[attr-defined]
            self.ahead = []
            self.program.speculate(access, self._prefetch, lambda: None)
            requests = np.arange(len(access.experts))
            self.counts.done(access, requests)
            self.program.done(access, requests)
            found.append(access)
        return found

    def _prefetch(self, ahead: Speculation) -> int:
        self.ahead.append(ahead)
        return len(ahead.experts)


def test_gradients_add_up_over_micro_batches_and_the_last_backward_pass_steps() -> None:
    """Expert 0 is used by both, 1 by the first, 2 by the second: that one is stepped at once, and the first's kept gradient
    in an access of its own.
    """
    rig = Rig()
    rig.forward(0, 0, 1)
    rig.forward(1, 0, 2)
    (first,) = rig.backward(0, 0, 1)
    assert first.actions.tolist() == [KEEP, KEEP]
    second, rest = rig.backward(1, 0, 2)
    assert second.actions.tolist() == [ADD | FINISH | STEP, FINISH | STEP]
    assert second.flags.tolist() == [Need.STEP_SPILLED, Need.STEP]
    assert rest.experts.tolist() == [1]
    assert rest.actions.tolist() == [FINISH | STEP]
    assert list(rig.program.kept()) == []


def test_a_step_that_will_be_skipped_keeps_its_gradients() -> None:
    rig = Rig()
    rig.forward(0, 0)
    rig.forward(1, 0)
    rig.backward(0, 0)
    (second,) = rig.backward(1, 0, finals=Finals.NONE)
    assert second.actions.tolist() == [ADD]
    assert list(rig.program.kept()) == [(3, 0)]


def test_prefetch_knows_the_experts_of_each_backward_pass() -> None:
    """From the second forward pass B0 and B1 come next, whose experts are known; B1's are stepped there."""
    rig = Rig()
    rig.forward(0, 0, 1)
    rig.forward(1, 2)
    assert [(ahead.experts.tolist(), ahead.flags.tolist()) for ahead in rig.ahead] == [
        ([0, 1], [Need.WEIGHTS | Need.ACCUMULATE] * 2),
        ([2], [Need.STEP]),
    ]
