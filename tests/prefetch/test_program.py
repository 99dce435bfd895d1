"""The access program: by hand, and as a live store carries it out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from effort import with_fixtures
from hypothesis import example, given
from hypothesis import strategies as st

from tierstore.cache.access import GROUP_STRIDE, Need, Phase
from tierstore.plan.traffic import CountedSteps
from tierstore.prefetch import PredictorName, Schedule, StepTiming, make_predictor
from tierstore.prefetch.program import Access, AccessProgram, Action, GradientState, Speculation
from tierstore.store import Inactive
from tierstore.store.format import Group

MakeRig = Callable[..., Any]
LAYERS, EXPERTS = (0, 2), 4
CATCH_UP, KEEP, ADD, FINISH, STEP = Action
W, FULL, SPILLED, KEPT = Need.WEIGHTS, Need.STEP, Need.STEP_SPILLED, Need.WEIGHTS | Need.ACCUMULATE


class Counted:
    """Carries out a program on no store, and writes down what was asked.

    ``prefetch`` says how many experts of a speculation are taken (all, without it).
    """

    def __init__(
        self,
        timing: StepTiming,
        *,
        depth: int = 0,
        predictor: PredictorName = PredictorName.NONE,
        inactive: Inactive = Inactive.EXACT,
        prefetch: Callable[[Speculation], int] = lambda ahead: len(ahead.experts),
    ) -> None:
        self.counts = CountedSteps(LAYERS, EXPERTS, replays=inactive is Inactive.EXACT)
        self.program = AccessProgram(
            Schedule.of_layers(LAYERS, depth=depth),
            make_predictor(predictor, range(EXPERTS)),
            self.counts,
            timing=timing,
            experts=EXPERTS,
        )
        self._prefetch = prefetch
        self._ahead: list[Any] = []

    def forward(self, layer: int, *experts: int) -> list[Any]:
        return self._told(self.program.forward(layer, experts))

    def backward(self, layer: int, *experts: int) -> list[Any]:
        return self._told(self.program.backward(layer, experts))

    def pending(self) -> list[Any]:
        return self._told(self.program.pending())

    def speculated(self) -> list[Any]:
        """Speculations since it was last asked."""
        ahead, self._ahead = self._ahead, []
        return ahead

    def _told(self, accesses: Iterator[Access]) -> list[Any]:
        told = []
        for access in accesses:
            requests = zip(
                access.experts.tolist(), access.flags.tolist(), access.actions.tolist(), strict=True
            )
            told.append((access.phase, access.layer, list(requests), access.step))
            self.program.speculate(access, self._offer, self._cancel)
            everything = np.arange(len(access.experts), dtype=np.uint32)
            self.counts.done(access, everything)
            self.program.done(access, everything)
        return told

    def _cancel(self) -> None:
        self._ahead.append("cancelled")

    def _offer(self, ahead: Speculation) -> int:
        self._ahead.append((ahead.phase, ahead.layer, ahead.experts.tolist(), ahead.flags.tolist()))
        return self._prefetch(ahead)


def test_steps_at_once_by_hand() -> None:
    """Two micro-batches: expert 0 in both, 1 only in the first, 2 only in the last. Step 1 is stepped as it goes."""
    made = Counted(StepTiming.IMMEDIATE)
    made.program.begin_micro(index=0, count=2)
    assert made.forward(0, 0, 1) == [(Phase.FORWARD, 0, [(0, W, 0), (1, W, 0)], 1)]
    assert made.backward(0, 0, 1) == [(Phase.BACKWARD, 0, [(0, KEPT, KEEP), (1, KEPT, KEEP)], 1)]
    made.program.begin_micro(index=1, count=2)
    assert made.forward(0, 0, 2) == [(Phase.FORWARD, 0, [(0, W, 0), (2, W, 0)], 1)]
    assert made.backward(0, 0, 2) == [
        (Phase.BACKWARD, 0, [(0, SPILLED, ADD | FINISH | STEP), (2, FULL, FINISH | STEP)], 1),
        (Phase.OPTIMIZER, 0, [(1, SPILLED, FINISH | STEP)], 1),
    ]
    assert list(made.program.kept()) == []
    made.counts.applied += 1
    made.program.begin_micro(index=0, count=1)
    # Nobody reached expert 3 in step 1: it is caught up, the others are up to date.
    assert made.forward(0, 2, 3) == [(Phase.FORWARD, 0, [(2, W, 0), (3, FULL, CATCH_UP)], 2)]


def test_steps_that_wait_for_the_norm_by_hand() -> None:
    made = Counted(StepTiming.DEFERRED)
    made.program.begin_micro(index=0, count=2)
    made.forward(0, 0, 1)
    assert made.backward(0, 0, 1) == [(Phase.BACKWARD, 0, [(0, KEPT, KEEP), (1, KEPT, KEEP)], 0)]
    made.program.begin_micro(index=1, count=2)
    assert made.forward(0, 0, 2) == [(Phase.FORWARD, 0, [(0, W, 0), (2, W, 0)], 0)]
    assert made.backward(0, 0, 2) == [
        (Phase.BACKWARD, 0, [(0, KEPT, ADD | FINISH), (2, KEPT, KEEP | FINISH)], 0),
        (Phase.BACKWARD, 0, [(1, Need.GRADIENTS, FINISH)], 0),
    ]
    made.program.apply()
    made.counts.applied += 1
    made.program.begin_micro(index=0, count=1)
    # Expert 1 is not asked for: its step follows the pass. Expert 3 missed a step.
    assert made.forward(0, 0, 2, 3) == [
        (Phase.FORWARD, 0, [(0, SPILLED, STEP), (2, SPILLED, STEP), (3, FULL, CATCH_UP)], 1),
        (Phase.OPTIMIZER, 0, [(1, SPILLED, STEP)], 1),
    ]
    assert [made.program.gradient(0, expert) for expert in range(4)] == [GradientState.NONE] * 4


def test_missed_steps_that_are_skipped_are_not_caught_up() -> None:
    made = Counted(StepTiming.DEFERRED, inactive=Inactive.SKIP)
    made.counts.applied = 3
    made.program.begin_micro(index=0, count=1)
    assert made.forward(2, 1) == [(Phase.FORWARD, 2, [(1, W, 0)], 3)]


def test_a_skipped_step_leaves_nothing_pending() -> None:
    made = Counted(StepTiming.DEFERRED)
    made.program.begin_micro(index=0, count=1)
    made.forward(2, 1, 3)
    made.backward(2, 1, 3)
    assert list(made.program.kept()) == [(2, 1), (2, 3)]
    made.program.discard()
    made.program.apply()
    assert made.pending() == []


def test_all_layers_before_a_commit() -> None:
    made = Counted(StepTiming.DEFERRED)
    made.program.begin_micro(index=0, count=1)
    for layer in (0, 2):
        made.forward(layer, layer)
    for layer in (2, 0):
        made.backward(layer, layer)
    assert made.pending() == []  # the norm is not known yet
    made.program.apply()
    made.counts.applied += 1
    expected = [(Phase.OPTIMIZER, layer, [(layer, SPILLED, STEP)], 1) for layer in (0, 2)]
    assert made.pending() == expected


def test_what_is_known_is_known_once_it_was_routed() -> None:
    """Depth 2 reaches the backward pass of layer 2, whose experts nobody knows while layer 0 is in its forward pass."""
    made = Counted(StepTiming.DEFERRED, depth=2)
    made.program.begin_micro(index=0, count=1)
    made.forward(0, 1)
    assert made.speculated() == []
    made.forward(2, 0, 3)
    assert made.speculated() == [(Phase.BACKWARD, 2, [0, 3], [KEPT] * 2), (Phase.BACKWARD, 0, [1], [KEPT])]
    # Recomputed by activation checkpointing: the pass after it is the layer's own backward pass.
    assert made.forward(2, 0, 3) == [(Phase.FORWARD, 2, [(0, W, 0), (3, W, 0)], 0)]
    assert made.speculated() == [(Phase.BACKWARD, 2, [0, 3], [KEPT] * 2), (Phase.BACKWARD, 0, [1], [KEPT])]


def test_the_next_step_steps_what_this_one_keeps() -> None:
    made = Counted(StepTiming.DEFERRED, depth=1, predictor=PredictorName.ALL)
    for index in range(2):
        made.program.begin_micro(index=index, count=2)
        for layer in (0, 2):
            made.forward(layer, 1)
        made.backward(2, 1)
        made.speculated()
        made.backward(0, 1)
        # The next micro-batch needs weights; the next step, what the present one will have left.
        flags = [FULL, SPILLED if index else W, FULL, FULL] if index else [W] * 4
        assert made.speculated() == [(Phase.FORWARD, 0, [0, 1, 2, 3], flags)]


def test_speculation_ends_where_there_is_no_room() -> None:
    made = Counted(StepTiming.IMMEDIATE, depth=9, predictor=PredictorName.ALL, prefetch=lambda ahead: 3)
    made.program.begin_micro(index=0, count=1)
    made.forward(0, 0)
    assert len(made.speculated()) == 1


# As a live store carries it out -----------------------------------------------------------------------------


class _Spied:
    """Accesses and prefetches of a rig's store, as they were asked for."""

    def __init__(self, store: Any) -> None:
        self.asked: list[Any] = []
        for owner, name in ((store, "begin_access"), (store.cache, "prefetch")):
            setattr(owner, name, self._spy(name, getattr(owner, name)))

    def _spy(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any) -> Any:
            shown = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
            result = call(*args)
            self.asked.append((name, *shown, result))
            return result

        return spied


class _Twin:
    """The program alone, driven through another store's host cache: nothing is computed, loaded or stepped."""

    def __init__(self, store: Any, timing: StepTiming, inactive: Inactive, depth: int, name: PredictorName):
        self._store = store
        made = Counted(timing, depth=depth, predictor=name, inactive=inactive)
        self.counts, self.program = made.counts, made.program

    def carry_out(self, accesses: Iterator[Access]) -> None:
        for access in accesses:
            numbers = self._numbers(access.layer, access.experts.tolist())
            groups = self._store.begin_access(access.phase, access.layer, numbers, access.flags)
            for group in range(groups):
                requests = self._store.cache.next_group()
                if group == groups - 1:
                    self.program.speculate(
                        access, self._prefetch, self._store.cache.residency.cancel_prefetch
                    )
                self._store.cache.end_group()
                self.counts.done(access, requests)
                self.program.done(access, requests)

    def _prefetch(self, ahead: Speculation) -> int:
        numbers = self._numbers(ahead.layer, ahead.experts.tolist())
        return self._store.cache.prefetch(ahead.phase, ahead.layer, numbers, ahead.flags)

    def _numbers(self, layer: int, experts: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.array([self._store.record(f"{layer}.{expert}").number for expert in experts], np.uint32)

    def discard(self) -> None:
        kept = [self._store.record(f"{layer}.{expert}").number for layer, expert in self.program.kept()]
        self._store.cache.drop([number * GROUP_STRIDE + Group.GRADIENTS for number in kept])
        self.program.discard()


def stats_of(store: Any) -> dict[str, int]:
    stats = store.cache.residency.stats()
    return {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}


sets = st.lists(st.sampled_from(range(EXPERTS)), unique=True).map(sorted)
micros = st.tuples(sets, sets)  # of the two layers
steps = st.tuples(st.lists(micros, min_size=1, max_size=3), st.sampled_from(["apply", "skip", "evaluate"]))


@pytest.mark.parametrize("timing", StepTiming)
@with_fixtures(12)
@given(
    run=st.lists(steps, min_size=1, max_size=4),
    inactive=st.sampled_from(Inactive),
    depth=st.integers(0, 5),
    name=st.sampled_from(PredictorName),
    room=st.sampled_from([1.2, 3.0, 8.0]),
    recomputes=st.booleans(),
)
@example(  # a pass that uses nothing was guessed wrongly, and a step beside the passes follows
    run=[([([], [0]), ([0, 1], [])], "apply")],
    inactive=Inactive.EXACT,
    depth=2,
    name=PredictorName.ALL,
    room=3.0,
    recomputes=False,
)
def test_a_live_store_asks_for_what_the_program_says(
    make_rig: MakeRig,
    timing: StepTiming,
    run: list[tuple[list[tuple[list[int], list[int]]], str]],
    inactive: Inactive,
    depth: int,
    name: PredictorName,
    room: float,
    recomputes: bool,
) -> None:
    """Whatever the steps: the same accesses and prefetches in the same order, with the same flags and outcomes."""
    lookahead = int(0.45 * room * 5 * 4096)
    options: Any = {"room": room, "depth": depth, "predictor": name, "lookahead": lookahead}
    rig = make_rig(timing, inactive=inactive, **options)
    other = make_rig(timing, inactive=inactive, **options).store
    twin = _Twin(other, timing, inactive, depth, name)
    live, alone = _Spied(rig.store), _Spied(other)
    for chosen, end in run:
        skipped = end == "skip" and timing is StepTiming.DEFERRED
        with rig.store.optimizer_step(0.01) as step, other.optimizer_step(0.01) as other_step:
            for micro, used in enumerate(chosen):
                for program in (rig.experts, twin.program):
                    program.begin_micro(index=micro, count=len(chosen))
                for layer, experts in zip(LAYERS, used, strict=True):
                    rig.forward(layer, *experts)
                    twin.carry_out(twin.program.forward(layer, experts))
                for layer, experts in zip(LAYERS[::-1], used[::-1], strict=True):
                    if recomputes:
                        rig.forward(layer, *experts)
                        twin.carry_out(twin.program.forward(layer, experts))
                    rig.backward(layer, {expert: torch.ones(1024) for expert in experts})
                    twin.carry_out(twin.program.backward(layer, experts))
            if skipped:
                rig.experts.gradients.discard()
                twin.discard()
                step.abandon()
                other_step.abandon()
            elif timing is StepTiming.DEFERRED:
                rig.experts.gradients.apply(0.5)
                twin.program.apply()
        if skipped:
            continue
        twin.counts.applied += 1
        if end == "evaluate":
            for program in (rig.experts, twin.program):
                program.begin_evaluation()
            for layer in LAYERS:
                rig.forward(layer, 1, 2)
                twin.carry_out(twin.program.forward(layer, [1, 2]))
    rig.experts.gradients.step_pending()
    twin.carry_out(twin.program.pending())
    assert live.asked == alone.asked
    assert stats_of(rig.store) == stats_of(other)
    for layer in LAYERS:
        steps_of = [rig.store.record(f"{layer}.{expert}").step for expert in range(EXPERTS)]
        if inactive is Inactive.EXACT:
            assert steps_of == twin.counts.of(layer, np.arange(EXPERTS, dtype=np.uint32)).tolist()
