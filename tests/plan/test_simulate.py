"""Simulated runs: by hand, against bounds, and against a naive loop over clock ticks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.plan.simulate import DISCIPLINES, Discipline, outcome, simulate
from tierstore.prefetch.operations import Kind, Operation, PassSizes, Resource, operations
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule, Unit


def op(kind: Kind, seconds: int, *after: int, position: int = 0) -> Operation:
    """An operation whose bytes are its seconds."""
    return Operation(kind, position, seconds, after)


def lasting(operation: Operation) -> float:
    return float(operation.nbytes)


def test_a_pipeline_by_hand() -> None:
    """Three experts are fetched (3 each), copied (1) and computed (2), one after another.

    disk     000111222
    copy        0  1  2
    compute      00 11 22        ends at 12; the disk is what everything waits for
    """
    listed: list[Operation] = []
    for _ in range(3):
        fetch = len(listed)
        listed += [op(Kind.FETCH, 3), op(Kind.LOAD, 1, fetch), op(Kind.EXPERT, 2, fetch + 1)]
    run = simulate(listed, lasting)
    assert list(run.ended) == [3, 4, 6, 6, 7, 9, 9, 10, 12]
    assert run.seconds == 12
    assert [listed[i].kind for i in run.critical_path(8)] == [
        Kind.FETCH,
        Kind.FETCH,
        Kind.FETCH,
        Kind.LOAD,
        Kind.EXPERT,
    ]
    found = outcome(run, 1, steps=1, settled=0)
    assert found.step_s == 12
    assert found.bottleneck is Resource.DISK
    assert found.path_s == {Kind.FETCH: 9, Kind.LOAD: 1, Kind.EXPERT: 2}
    assert found.busy_ratio[Resource.DISK] == 9 / 12
    assert found.busy_ratio[Resource.COPY] == 3 / 12


def test_two_servers_halve_the_wait() -> None:
    listed = [op(Kind.FETCH, 4) for _ in range(4)]
    assert simulate(listed, lasting).seconds == 16
    assert simulate(listed, lasting, widths={Resource.DISK: 2}).seconds == 8


def test_computation_keeps_the_program_order_and_the_disk_does_not() -> None:
    """The first computation waits for a fetch of 5: the second, ready at once, waits too. Two copies behind the same
    fetches may overtake one another."""
    listed = [
        op(Kind.FETCH, 5),
        op(Kind.DENSE, 1, 0),
        op(Kind.DENSE, 1),
        op(Kind.LOAD, 2, 0),
        op(Kind.LOAD, 2),
    ]
    run = simulate(listed, lasting)
    assert list(run.begun) == [0, 5, 6, 5, 0]


def test_a_disk_serves_in_the_order_of_asking() -> None:
    """A read that follows the write-back of what it evicts lets the one behind it pass while the step (until 2) lasts."""
    listed = [op(Kind.EXPERT_STEP, 2), op(Kind.WRITE, 3, 0), op(Kind.FETCH, 4, 1), op(Kind.FETCH, 5)]
    assert list(simulate(listed, lasting).begun) == [0, 5, 8, 0]


def test_steps_are_measured_once_they_have_settled() -> None:
    """The first step fetches for 10, later ones find all there: 1 each."""
    listed = [op(Kind.FETCH, 10)]
    for step in range(4):
        listed.append(op(Kind.DENSE, 1, len(listed) - 1, position=step))
    run = simulate(listed, lasting)
    assert outcome(run, 1, steps=4, settled=1).step_s == 1
    assert outcome(run, 1, steps=4, settled=0).step_s == 14 / 4
    assert outcome(run, 1, steps=4).bottleneck is Resource.COMPUTE
    with pytest.raises(ValueError, match="step 4"):
        outcome(run, 1, steps=5)


def test_an_operation_follows_earlier_ones_only() -> None:
    with pytest.raises(ValueError, match="operation 0 follows 1"):
        simulate([op(Kind.DENSE, 1, 1), op(Kind.DENSE, 1)], lasting)


# Against an oracle, and bounds ------------------------------------------------------------------------------


def ticks(
    listed: Sequence[Operation], widths: Mapping[Resource, int], disciplines: Mapping[Resource, Discipline]
) -> list[int]:
    """When each ends, by looking at everything at every tick."""
    left: dict[int, int] = {}
    begun: set[int] = set()
    ended: dict[int, int] = {}
    ready: dict[int, int] = {}
    now = 0
    while len(ended) < len(listed):
        settled = False
        while not settled:  # operations of no length end in the tick in which they begin
            settled = True
            for index in [i for i, rest in left.items() if rest == 0]:
                del left[index]
                ended[index] = now
            for index, operation in enumerate(listed):
                if index not in ready and all(before in ended for before in operation.after):
                    ready[index] = now
            for resource in Resource:
                mine = [i for i, operation in enumerate(listed) if operation.resource is resource]
                waiting = [i for i in mine if i not in begun]
                if disciplines[resource] is Discipline.PROGRAM:
                    waiting = waiting[:1] if waiting and waiting[0] in ready else []
                else:
                    waiting = sorted(
                        (i for i in waiting if i in ready),
                        key=lambda i: (ready[i], i),
                    )
                busy = sum(i in left for i in mine)
                if waiting and busy < widths.get(resource, 1):
                    begun.add(waiting[0])
                    left[waiting[0]] = listed[waiting[0]].nbytes
                    settled = False
        now += 1
        left = {index: rest - 1 for index, rest in left.items()}
    return [ended[i] for i in range(len(listed))]


@st.composite
def graphs(draw: st.DrawFn) -> list[Operation]:
    listed: list[Operation] = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        kind = draw(st.sampled_from(list(Kind)))
        listed.append(op(kind, draw(st.integers(1, 5)), *after))
    return listed


WIDTHS = st.dictionaries(st.sampled_from(list(Resource)), st.integers(1, 3))


@settings(deadline=None, max_examples=150)
@given(graphs(), WIDTHS)
def test_as_a_loop_over_ticks_has_it(listed: list[Operation], widths: dict[Resource, int]) -> None:
    run = simulate(listed, lasting, widths=widths)
    assert list(run.ended) == ticks(listed, widths, DISCIPLINES)


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_bounds(listed: list[Operation]) -> None:
    """Not less than the busiest resource, nor than the longest chain; not more than one after another."""
    run = simulate(listed, lasting)
    busy = {r: sum(o.nbytes for o in listed if o.resource is r) for r in Resource}
    chain: list[int] = []
    for operation in listed:
        chain.append(operation.nbytes + max((chain[before] for before in operation.after), default=0))
    assert max(*busy.values(), *chain) <= run.seconds <= sum(o.nbytes for o in listed)


@settings(deadline=None, max_examples=100)
@given(graphs())
def test_the_critical_path_has_no_gap(listed: list[Operation]) -> None:
    """Whatever ended last is reached by operations each of which began when the one before it ended."""
    run = simulate(listed, lasting)
    last = max(range(len(listed)), key=lambda i: run.ended[i])
    path = run.critical_path(last)
    assert run.begun[path[0]] == 0
    for before, after in pairwise(path):
        assert run.ended[before] == run.begun[after]
    assert sum(listed[i].nbytes for i in path) == run.seconds


@settings(deadline=None, max_examples=100)
@given(graphs(), st.lists(st.integers(1, 5), min_size=14, max_size=14))
def test_in_program_order_nothing_shorter_makes_it_longer(listed: list[Operation], caps: list[int]) -> None:
    everywhere = dict.fromkeys(Resource, Discipline.PROGRAM)
    shorter = [
        Operation(o.kind, o.position, min(o.nbytes, cap), o.after)
        for o, cap in zip(listed, caps, strict=False)
    ]
    before = simulate(listed, lasting, disciplines=everywhere)
    after = simulate(shorter, lasting, disciplines=everywhere)
    assert all(a <= b for a, b in zip(after.ended, before.ended, strict=True))


# A real schedule --------------------------------------------------------------------------------------------


def _schedule(depth: int, timing: StepTiming) -> Schedule:
    units = (*(Unit(f"block {i}", 8, i) for i in range(4)), Unit("ends", 8))
    return Schedule(units=units, horizontal=QueueLimits(depth), vertical=QueueLimits(depth), timing=timing)


def _step_s(depth: int, timing: StepTiming, rates: Mapping[Resource, float]) -> float:
    schedule = _schedule(depth, timing)

    def sizes(item: Pass) -> PassSizes:
        if item.moe_layer is None:
            return PassSizes(gather=8, reduce=8)
        return PassSizes(gather=8, reduce=8, experts=4, fetch=6, load=2, evict=3)

    def seconds(operation: Operation) -> float:
        return (operation.nbytes or 4) / rates[operation.resource]

    run = simulate(operations(schedule, sizes, steps=4, slots=2), seconds)
    return outcome(run, len(schedule.passes), steps=4).step_s


@pytest.mark.parametrize("timing", StepTiming)
@pytest.mark.parametrize("resource", Resource)
def test_a_faster_resource_shortens_a_step(resource: Resource, timing: StepTiming) -> None:
    """But for Graham's anomalies: who takes the first that is ready may be better off had it come later."""
    rates = dict.fromkeys(Resource, 1.0)
    before = _step_s(1, timing, rates)
    for rate in (1.5, 3.0, 10.0, 100.0):
        after = _step_s(1, timing, rates | {resource: rate})
        assert after <= before * 1.02
        before = min(after, before)


@pytest.mark.parametrize("timing", StepTiming)
def test_looking_ahead_pays(timing: StepTiming) -> None:
    """With links as slow as computation, a step that looks ahead takes less than one that does not."""
    rates = dict.fromkeys(Resource, 1.0)
    assert _step_s(1, timing, rates) < 0.95 * _step_s(0, timing, rates)
