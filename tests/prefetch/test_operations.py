"""A schedule as a graph of operations: a small one written out, and what holds of any."""

import itertools
from dataclasses import replace

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.prefetch import QueueLimits, Schedule, StepTiming, Unit
from tierstore.prefetch.operations import Kind, Operation, PassSizes, Resource, StepPasses, operations
from tierstore.prefetch.schedule import GatherBuffer, Pass

SIZES = {
    Phase.FORWARD: PassSizes(
        gather=10, reduce=12, dispatch=5, combine=6, experts=2, fetch=100, evict=300, load=50
    ),
    Phase.BACKWARD: PassSizes(
        gather=10, reduce=12, dispatch=5, combine=6, experts=2, fetch=300, load=50, to_host=40
    ),
}


def sizes(item: Pass) -> PassSizes:
    return SIZES[item.phase]


def test_spilled_inputs_of_blocks() -> None:
    """a and b, each with 7 spilled bytes, and no experts: written as a pass begins, read back as the pass before begins."""
    schedule = Schedule(units=(Unit("a", 10), Unit("b", 10)), horizontal=QueueLimits(1))
    found = operations(schedule, lambda item: PassSizes(spilled=7))
    disk = {
        index: (op.kind, op.position, op.nbytes, op.after)
        for index, op in enumerate(found)
        if op.resource is Resource.DISK
    }
    first, second, *backward = (index for index, op in enumerate(found) if op.kind is Kind.DENSE)
    assert [*disk.values()] == [
        (Kind.WRITE, 0, 7, ()),
        (Kind.WRITE, 1, 7, (first,)),
        (Kind.FETCH, 2, 7, (first,)),  # b's, since its forward pass
        (Kind.FETCH, 3, 7, (second,)),  # a's, since b's backward pass
    ]
    for read, dense in zip([*disk][2:], backward, strict=True):
        assert read in found[dense].after


def test_one_dense_and_one_moe_unit() -> None:
    """a (dense) and b (layer 0), one pass of lookahead each. Positions: forward a 0, b 1, backward b 2, a 3, optimizer
    a 4, b 5; each line: kind, position, bytes, what it follows.
    """
    schedule = Schedule(
        units=(Unit("a", 10), Unit("b", 10, 0)), horizontal=QueueLimits(1), vertical=QueueLimits(1)
    )
    found = [(op.kind, op.position, op.nbytes, op.after) for op in operations(schedule, sizes, slots=2)]
    assert found == [
        (Kind.GATHER, 0, 10, ()),  # 0: a
        (Kind.GATHER, 0, 10, ()),  # 1: b, while a is computed
        (Kind.DENSE, 0, 0, (0,)),
        (Kind.DENSE, 1, 0, (2, 1)),  # 3
        (Kind.DISPATCH, 1, 5, (3,)),  # 4: tokens to their experts
        (Kind.WRITE, 1, 300, (3,)),  # 5: of what is evicted for the read that follows
        (Kind.FETCH, 1, 100, (5,)),  # 6: nobody could know it before
        (Kind.WRITE, 1, 300, (3,)),
        (Kind.FETCH, 1, 100, (7,)),  # 8
        (Kind.FETCH, 2, 300, (3,)),  # 9, 10: of the backward pass
        (Kind.FETCH, 2, 300, (3,)),
        (Kind.LOAD, 1, 50, (3, 6)),  # 11
        (Kind.EXPERT, 1, 0, (3, 4, 11)),  # 12
        (Kind.LOAD, 1, 50, (3, 8)),
        (Kind.EXPERT, 1, 0, (12, 13)),  # 14
        (Kind.COMBINE, 1, 6, (14,)),  # 15: and back
        (Kind.GATHER, 2, 10, (15,)),  # 16: a, again; b stays
        (Kind.DISPATCH, 2, 5, (15, 1)),  # 17
        (Kind.WRITE, 7, 300, (15, 1)),
        (Kind.FETCH, 7, 100, (18,)),  # of the next step
        (Kind.WRITE, 7, 300, (15, 1)),
        (Kind.FETCH, 7, 100, (20,)),
        (Kind.LOAD, 2, 50, (15, 1, 9)),  # 22
        (Kind.EXPERT, 2, 0, (15, 1, 17, 22)),  # 23
        (Kind.COPY_TO_HOST, 2, 40, (23,)),
        (Kind.EXPERT_STEP, 2, 0, (24,)),
        (Kind.LOAD, 2, 50, (15, 1, 10)),  # 26
        (Kind.EXPERT, 2, 0, (23, 26)),  # 27
        (Kind.COPY_TO_HOST, 2, 40, (27,)),
        (Kind.EXPERT_STEP, 2, 0, (28,)),
        (Kind.COMBINE, 2, 6, (27,)),  # 30
        (Kind.DENSE, 2, 0, (30,)),  # 31
        (Kind.REDUCE, 2, 12, (31,)),  # 32
        (Kind.DENSE, 3, 0, (31, 16)),  # 33
        (Kind.REDUCE, 3, 12, (33,)),  # 34
        (Kind.STEP, 4, 0, (33, 34, 32)),  # 35: clipping wants all gradients
        (Kind.GATHER, 5, 10, (35,)),  # a, of the next step
        (Kind.STEP, 5, 0, (35, 34, 32)),
        (Kind.GATHER, 6, 10, (37,)),
    ]


def test_chunks_of_rows_by_hand() -> None:
    """Three experts in two chunks, the first of one expert and the second of two: both dispatches set off when the pass
    begins; the first expert of a chunk waits for its rows, and its results leave behind its last one.
    """
    schedule = Schedule(units=(Unit("a", 10, 0),), horizontal=QueueLimits(0), vertical=QueueLimits(0))
    size = PassSizes(dispatch=30, combine=60, chunks=2, experts=3)
    listed = operations(schedule, lambda item: size, slots=3, passes=StepPasses.FORWARD)
    assert [(op.kind, op.nbytes, op.after) for op in listed] == [
        (Kind.GATHER, 0, ()),
        (Kind.DENSE, 0, (0,)),
        (Kind.DISPATCH, 10, (1,)),  # 2
        (Kind.DISPATCH, 20, (1,)),  # 3
        (Kind.LOAD, 0, (1,)),
        (Kind.EXPERT, 0, (1, 2, 4)),  # 5
        (Kind.COMBINE, 20, (5,)),
        (Kind.LOAD, 0, (1,)),
        (Kind.EXPERT, 0, (5, 3, 7)),  # 8
        (Kind.LOAD, 0, (1,)),
        (Kind.EXPERT, 0, (8, 9)),  # 10
        (Kind.COMBINE, 40, (10,)),
    ]
    # There is nothing to divide further than into experts, and nothing to send of no rows.
    most = operations(schedule, lambda item: replace(size, chunks=9), passes=StepPasses.FORWARD)
    assert sum(op.kind is Kind.DISPATCH for op in most) == 3
    none = operations(schedule, lambda item: replace(size, dispatch=0), passes=StepPasses.FORWARD)
    assert [op.kind for op in none].count(Kind.COMBINE) == 2
    assert Kind.DISPATCH not in [op.kind for op in none]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_unit_with_a_buffer_of_its_own_is_gathered_once_a_step(micro_batches: int) -> None:
    """Without lookahead, the one between is gathered for every pass. Each list ends with gathers of the step after it."""
    own = [Unit(name, buffer=GatherBuffer.OWN) for name in ("first", "last")]
    schedule = Schedule(
        units=(own[0], Unit("a", 10), own[1]), horizontal=QueueLimits(0), micro_batches=micro_batches
    )

    def named(item: Pass) -> PassSizes:
        return PassSizes(gather=[100, 10, 1][item.unit])

    def gathered(steps: int) -> int:
        listed = operations(schedule, named, steps=steps)
        return sum(op.nbytes for op in listed if op.kind is Kind.GATHER)

    for steps in (1, 2):
        assert gathered(steps + 1) - gathered(steps) == 101 + 10 * 2 * micro_batches


def test_a_budget_lets_a_fetch_wait() -> None:
    """Room for the forward passes' experts; each backward pass has to ask for its own, once the pass before it is over."""
    schedule = Schedule(units=(Unit("b", 0, 0), Unit("c", 0, 1)), vertical=QueueLimits(3, 700))
    found = operations(schedule, sizes)
    fetches = [(op.position, _issued(found, op)) for op in found if op.kind is Kind.FETCH][::2]
    assert fetches[:4] == [(0, 0), (1, 0), (2, 1), (3, 2)]


def _issued(found: list[Operation], fetch: Operation) -> int:
    """The pass during which it is asked for."""
    before = [found[index] for index in fetch.after]
    return max(_issued(found, op) if op.kind is Kind.WRITE else op.position for op in before)


def test_a_step_waits_for_what_a_load_does_not() -> None:
    """One layer, two experts, one gradient slot: weights are read before an expert is loaded, its moments before it is
    stepped, and the second expert has nowhere to put its gradient before that.
    """

    def backward_only(item: Pass) -> PassSizes:
        if item.phase is Phase.FORWARD:
            return PassSizes(experts=2)
        return PassSizes(experts=2, fetch=4, fetch_state=8)

    schedule = Schedule(units=(Unit("b", 0, 0),), vertical=QueueLimits(0))
    listed = operations(schedule, backward_only, gradient_slots=1)
    first = next(index for index, op in enumerate(listed) if op.kind is Kind.FETCH)
    found = [
        (op.kind, op.nbytes, [i - first for i in op.after if i >= first])
        for op in listed[first:]
        if op.kind in (Kind.FETCH, Kind.LOAD, Kind.EXPERT, Kind.EXPERT_STEP)
    ]
    assert found == [
        (Kind.FETCH, 4, []),  # 0
        (Kind.FETCH, 8, []),
        (Kind.FETCH, 4, []),  # 2
        (Kind.FETCH, 8, []),
        (Kind.LOAD, 0, [0]),  # 4
        (Kind.EXPERT, 0, [4]),
        (Kind.EXPERT_STEP, 0, [5, 1]),  # 6
        (Kind.LOAD, 0, [2]),
        (Kind.EXPERT, 0, [5, 7, 6]),  # 8
        (Kind.EXPERT_STEP, 0, [8, 3]),
    ]


def test_a_gradient_keeps_its_slot_until_it_was_stepped() -> None:
    """Also where it was copied to the host: a landing place goes with each slot."""

    def landing(item: Pass) -> PassSizes:
        return PassSizes(experts=2, to_host=8 if item.phase is Phase.BACKWARD else 0)

    schedule = Schedule(units=(Unit("b", 0, 0),), vertical=QueueLimits(0))
    listed = operations(schedule, landing, gradient_slots=1)
    first, second = (i for i, op in enumerate(listed) if op.kind is Kind.EXPERT and op.position == 1)
    copied, stepped = first + 1, first + 2
    assert (listed[copied].kind, listed[copied].after) == (Kind.COPY_TO_HOST, (first,))
    assert (listed[stepped].kind, listed[stepped].after) == (Kind.EXPERT_STEP, (copied,))
    assert stepped in listed[second].after


def test_steps_of_spare_gradients_wait_for_the_next_forward_pass() -> None:
    """Two layers of two experts, and spare buffers for three gradients: those of the second layer and one of the first
    give their slots back once they have left, and their experts' next copies follow their steps.
    """

    def leaving(item: Pass) -> PassSizes:
        return PassSizes(experts=2, to_host=8 if item.phase is Phase.BACKWARD else 0)

    schedule = Schedule(units=(Unit("b", 0, 0), Unit("c", 0, 1)), vertical=QueueLimits(0))
    found = operations(schedule, leaving, steps=2, gradient_slots=1, spare=3)
    count = len(schedule.passes)
    steps = [i for i, op in enumerate(found) if op.kind is Kind.EXPERT_STEP and op.position < count]
    assert [found[i].due for i in steps] == [count + 1, count + 1, count, 0]
    loads = [op for op in found if op.kind is Kind.LOAD and count <= op.position < count + 2]
    assert [[i for i in op.after if i in steps] for op in loads] == [[steps[2]], [], [steps[0]], [steps[1]]]
    computed = [op for op in found if op.kind is Kind.EXPERT and op.position in (2, 3)]
    left = [i for i, op in enumerate(found) if op.kind is Kind.COPY_TO_HOST]
    assert [[i for i in op.after if i in (*steps, *left)] for op in computed] == [
        [],
        [left[0]],
        [left[1]],
        [left[2]],
    ]
    again = next(op for op in found if op.kind is Kind.EXPERT and op.position == count + 2)
    assert steps[3] in again.after  # a slot without a spare buffer waits for its step


def test_what_is_evicted_was_stepped() -> None:
    """Two layers, looking one pass ahead: what is asked for at the beginning of a pass evicts what earlier ones have
    stepped.
    """

    def evicting(item: Pass) -> PassSizes:
        return PassSizes(experts=1, fetch=100, evict=100)

    schedule = Schedule(units=(Unit("b", 0, 0), Unit("c", 0, 1)), vertical=QueueLimits(1))
    found = operations(schedule, evicting, steps=2)
    count = len(schedule.passes)
    follows = [
        (
            op.position % count,
            [found[i].position % count for i in op.after if found[i].kind is Kind.EXPERT_STEP],
        )
        for op in found
        if op.kind is Kind.WRITE and op.position >= count
    ]
    # Forward b is asked for during backward b, forward c during forward b, and so on.
    assert follows == [(0, [2]), (1, [3]), (2, [3]), (3, [3]), (0, [2])]


@settings(max_examples=share(50))
@given(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 4),
    st.none() | st.integers(0, 2000),
    st.sampled_from(StepTiming),
)
def test_any_graph_computes_in_order_and_moves_every_byte_once(
    moe: list[bool], horizontal: int, vertical: int, budget: int | None, timing: StepTiming
) -> None:
    units = tuple(Unit(str(i), 10, i if has else None) for i, has in enumerate(moe))
    schedule = Schedule(
        units=units, horizontal=QueueLimits(horizontal), vertical=QueueLimits(vertical, budget), timing=timing
    )
    steps, count = 2, len(schedule.passes)
    found = operations(schedule, sizes, steps=steps)
    assert all(earlier < index for index, op in enumerate(found) for earlier in op.after)
    computed = [op for op in found if op.resource is Resource.COMPUTE]
    assert [op.position for op in computed] == sorted(op.position for op in computed)
    assert {op.position for op in computed} == set(range(steps * count))
    # Each computation follows the one before it: the main thread does one thing at a time.
    reach: list[set[int]] = []
    for op in found:
        reach.append(set(op.after).union(*(reach[earlier] for earlier in op.after)))
    order = [index for index, op in enumerate(found) if op.resource is Resource.COMPUTE]
    assert all(before in reach[index] for before, index in itertools.pairwise(order))
    # Every expert is fetched once a pass, before it is loaded; every unit reduced once a step.
    passes = [p for p in schedule.passes if p.moe_layer is not None]
    fetched = [op.position for op in found if op.kind is Kind.FETCH and op.position < steps * count]
    assert len(fetched) == 2 * len(passes) * steps
    for index, op in enumerate(found):
        if op.kind is Kind.EXPERT:
            fetches = [i for i in reach[index] if found[i].kind is Kind.FETCH]
            assert any(found[i].position == op.position for i in fetches)
    assert sum(op.kind is Kind.REDUCE for op in found) == len(units) * steps
