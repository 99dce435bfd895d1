"""The sequence of passes and the horizontal queue: small schedules written out in full, then any schedule."""

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.dense.config import Reshard
from tierstore.errors import ConfigError
from tierstore.prefetch import HorizontalQueue, QueueLimits, Schedule, StepTiming, Unit
from tierstore.prefetch.operations import Kind, PassSizes, operations
from tierstore.prefetch.schedule import GatherBuffer, Pass, Window

F, B, S = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def three(depth: int, *, nbytes: int | None = None, **options: object) -> Schedule:
    """Units a, b, c of 10 bytes; b has MoE layer 7."""
    units = (Unit("a", 10), Unit("b", 10, 7), Unit("c", 10))
    return Schedule(units=units, horizontal=QueueLimits(depth, nbytes), **options)  # type: ignore[arg-type]


def sequence(schedule: Schedule) -> list[tuple[Phase, int]]:
    return [(item.phase, item.unit) for item in schedule.passes]


def test_a_step_goes_forward_then_backward_then_steps() -> None:
    schedule = three(2)
    assert schedule.passes == (
        *(Pass(F, 0), Pass(F, 1, 7), Pass(F, 2)),
        *(Pass(B, 2), Pass(B, 1, 7), Pass(B, 0)),
        *(Pass(S, 0), Pass(S, 1), Pass(S, 2)),
    )
    assert schedule.forward_passes == (Pass(F, 0), Pass(F, 1, 7), Pass(F, 2))


def test_without_clipping_a_unit_is_stepped_when_its_gradients_had_time_to_be_scattered() -> None:
    immediate = StepTiming.IMMEDIATE
    forward = [(F, 0), (F, 1), (F, 2)]
    assert sequence(three(0, timing=immediate)) == [
        *forward,
        *((B, 2), (S, 2), (B, 1), (S, 1), (B, 0), (S, 0)),
    ]
    assert sequence(three(1, timing=immediate)) == [
        *forward,
        *((B, 2), (B, 1), (S, 2), (B, 0), (S, 1), (S, 0)),
    ]
    assert sequence(three(9, timing=immediate)) == [
        *forward,
        *((B, 2), (B, 1), (B, 0), (S, 2), (S, 1), (S, 0)),
    ]


def test_micro_batches_repeat_all_but_the_optimizer() -> None:
    once = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]
    assert sequence(three(1, micro_batches=2)) == [*once, *once, (S, 0), (S, 1), (S, 2)]


def test_three_units_at_depth_two() -> None:
    """Each pass: what is gathered before it, what is released after it. c is kept from its forward to its
    backward pass, and b, which is needed again two passes later. Of the next step nothing can be gathered
    before the optimizer has changed it.
    """
    assert [row[1:5] for row in three(2).rows(0)] == [
        ("forward a", "a, b, c", "a", ""),
        ("forward b", "", "", ""),
        ("forward c", "", "", ""),
        ("backward c", "a", "c", "c"),
        ("backward b", "", "b", "b"),
        ("backward a", "", "a", "a"),
        ("optimizer a", "", "", ""),
        ("optimizer b", "a", "", ""),
        ("optimizer c", "b", "", ""),
    ]
    assert [row[1:4] for row in three(2).rows(1)] == [
        ("forward a", "c", "a"),
        *[row[1:4] for row in three(2).rows(0)][1:],
    ]


def test_three_units_at_depth_one_and_none() -> None:
    assert [row[1:4] for row in three(1).rows(0)] == [
        ("forward a", "a, b", "a"),
        ("forward b", "c", "b"),
        ("forward c", "", ""),
        ("backward c", "b", "c"),
        ("backward b", "a", "b"),
        ("backward a", "", "a"),
        ("optimizer a", "", ""),
        ("optimizer b", "a", ""),
        ("optimizer c", "b", ""),
    ]
    assert [row[1:4] for row in three(0).rows(1)] == [
        ("forward a", "", "a"),
        ("forward b", "b", "b"),
        ("forward c", "c", ""),
        ("backward c", "", "c"),
        ("backward b", "b", "b"),
        ("backward a", "a", "a"),
        ("optimizer a", "", ""),
        ("optimizer b", "a", ""),
        ("optimizer c", "", ""),
    ]


def test_a_budget_holds_back_what_does_not_fit() -> None:
    """Room for two units: the third waits until the first is released, in order."""
    assert [row[1:4] for row in three(2, nbytes=20).rows(0)][:4] == [
        ("forward a", "a, b", "a"),
        ("forward b", "c", ""),
        ("forward c", "", ""),
        ("backward c", "", "c"),
    ]


def test_resharding_after_backward_gathers_once_a_step() -> None:
    rows = three(1, reshard=Reshard.AFTER_BACKWARD).rows(1)
    assert [row[2] for row in rows if row[2]] == ["c", "a", "b"]
    assert [row[3] for row in rows[:6]] == ["", "", "", "c", "b", "a"]


def test_a_buffer_of_its_own_is_gathered_once_a_step() -> None:
    """As ``three(1)``, but for a and c: no second gather before the backward pass, and what they hold stays until it is
    stale.
    """
    units = (Unit("a", 10, buffer=GatherBuffer.OWN), Unit("b", 10, 7), Unit("c", 10, buffer=GatherBuffer.OWN))
    schedule = Schedule(units=units, horizontal=QueueLimits(1))
    assert [row[1:4] for row in schedule.rows(1)] == [
        ("forward a", "", ""),
        ("forward b", "c", "b"),
        ("forward c", "", ""),
        ("backward c", "b", ""),
        ("backward b", "", "b"),
        ("backward a", "", ""),
        ("optimizer a", "", "a"),
        ("optimizer b", "a", ""),
        ("optimizer c", "b", "c"),
    ]


@given(
    owned=st.lists(st.booleans(), min_size=1, max_size=6),
    depth=st.integers(0, 5),
    timing=st.sampled_from(StepTiming),
    reshard=st.sampled_from(Reshard),
    micro_batches=st.integers(1, 3),
)
@settings(max_examples=share(60))
def test_what_is_printed_is_what_is_simulated(
    owned: list[bool], depth: int, timing: StepTiming, reshard: Reshard, micro_batches: int
) -> None:
    units = tuple(
        Unit(f"u{number}", 1, buffer=GatherBuffer.OWN if own else GatherBuffer.SHARED)
        for number, own in enumerate(owned)
    )
    schedule = Schedule(
        units=units,
        horizontal=QueueLimits(depth),
        timing=timing,
        reshard=reshard,
        micro_batches=micro_batches,
    )
    written = operations(schedule, lambda item: PassSizes(gather=1 + item.unit), steps=3, slots=1)
    for step in range(2):
        printed = [(int(row[0]), name) for row in schedule.rows(step) for name in row[2].split(", ") if name]
        first = step * len(schedule.passes)
        simulated = [
            (one.position - first, f"u{one.nbytes - 1}")
            for one in written
            if one.kind is Kind.GATHER and first <= one.position < first + len(schedule.passes)
        ]
        assert printed == simulated
        for number, own in enumerate(owned):
            assert not own or step == 0 or sum(name == f"u{number}" for _, name in printed) == 1


def test_a_schedule_is_a_readable_table() -> None:
    schedule = three(1, vertical=QueueLimits(1))
    assert str(schedule).splitlines()[:4] == [
        "   pass         gathers before  releases after  scatters after  fetches meanwhile",
        "0  forward a                    a",
        "1  forward b    c               b                               backward b",
        "2  forward c",
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nbytes": 9}, "^horizontal.nbytes: 9 bytes cannot hold a, which has 10"),
        ({"nbytes": 29, "reshard": Reshard.AFTER_BACKWARD}, "cannot hold all units \\(30 bytes\\)"),
        ({"micro_batches": 0}, "^micro_batches: expected at least 1, got 0"),
        ({"nbytes": -1}, "^nbytes: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        three(1, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="depth"):
        QueueLimits(-1)


class Slices:
    """Units that only know whether they are gathered, and with which optimizer step's content."""

    def __init__(self, schedule: Schedule) -> None:
        self.sizes = [unit.gathered for unit in schedule.units]
        self.content = [0] * len(self.sizes)
        self.whole: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.most = 0

    def gather(self, unit: int) -> None:
        assert unit not in self.whole
        self.whole[unit] = self.content[unit]
        self.most = max(self.most, sum(self.sizes[held] for held in self.whole))
        self.log.append(("gather", unit))

    def use(self, unit: int) -> None:
        assert self.whole[unit] == self.content[unit], "gathered before its optimizer step"
        self.log.append(("use", unit))

    def release(self, unit: int) -> None:
        del self.whole[unit]
        self.log.append(("release", unit))


def run_step(queue: HorizontalQueue, slices: Slices, schedule: Schedule) -> None:
    queue.begin(training=True)
    for item in schedule.passes:
        with queue.during(item.unit, item.phase):
            if item.phase is S:
                slices.content[item.unit] += 1


def test_the_queue_does_what_the_table_says() -> None:
    schedule = three(1)
    slices = Slices(schedule)
    queue = HorizontalQueue(schedule, slices)
    run_step(queue, slices, schedule)
    g, u, r = "gather", "use", "release"
    assert slices.log == [
        *((g, 0), (g, 1), (u, 0), (g, 2), (r, 0), (u, 1), (r, 1), (u, 2), (g, 1), (u, 2)),
        *((g, 0), (r, 2), (u, 1), (r, 1), (u, 0), (r, 0), (g, 0), (g, 1)),
    ]


def test_validation_takes_over_what_was_gathered_for_the_next_step() -> None:
    schedule = three(1)
    slices = Slices(schedule)
    queue = HorizontalQueue(schedule, slices)
    run_step(queue, slices, schedule)
    slices.log.clear()
    queue.begin(training=False)
    assert slices.log == []
    for item in schedule.forward_passes:
        with queue.during(item.unit, item.phase):
            pass
    queue.begin(training=True)
    assert ("gather", 0) in slices.log
    run_step(queue, slices, schedule)  # began already: nothing more is gathered for it
    queue.reset()
    assert slices.whole == {}


def test_a_recomputed_forward_pass_belongs_to_the_backward_pass() -> None:
    schedule = three(0)
    slices = Slices(schedule)
    queue = HorizontalQueue(schedule, slices)
    queue.begin(training=True)
    for unit in range(3):
        with queue.during(unit, F):
            pass
    slices.log.clear()
    queue.enter(2, F)
    queue.leave(2, F)
    with queue.during(2, B):
        pass
    assert slices.log == [("use", 2), ("gather", 1), ("release", 2)]


def test_passes_out_of_order_are_refused() -> None:
    schedule = three(1)
    queue = HorizontalQueue(schedule, Slices(schedule))
    with pytest.raises(RuntimeError, match="before the step"):
        queue.enter(0, F)
    queue.begin(training=True)
    with pytest.raises(RuntimeError, match="forward of b begins, but forward of a is next in the schedule"):
        queue.enter(1, F)
    queue.enter(0, F)
    with pytest.raises(RuntimeError, match="has not ended"):
        queue.enter(1, F)
    with pytest.raises(RuntimeError, match="has not begun"):
        queue.leave(1, F)
    with pytest.raises(RuntimeError, match="inside a pass"):
        queue.begin(training=True)
    queue.reset()
    queue.begin(training=True)
    queue.enter(0, F)


schedules = st.builds(
    lambda sizes, depth, spare, timing, micro_batches: Schedule(
        units=tuple(Unit(str(i), size) for i, size in enumerate(sizes)),
        horizontal=QueueLimits(depth, None if spare is None else max(sizes) + spare),
        timing=timing,
        micro_batches=micro_batches,
    ),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.integers(0, 8),
    st.none() | st.integers(0, 60),
    st.sampled_from(StepTiming),
    st.integers(1, 3),
)


@given(schedules)
def test_every_schedule_gathers_in_time_within_its_budget(schedule: Schedule) -> None:
    """``Slices`` asserts that every unit is whole, and up to date, in its passes, and is gathered once only."""
    slices = Slices(schedule)
    queue = HorizontalQueue(schedule, slices)
    for _ in range(3):
        run_step(queue, slices, schedule)
    budget = schedule.horizontal.nbytes
    assert budget is None or slices.most <= budget
    queue.reset()
    assert slices.whole == {}
    # Never further ahead than the lookahead: units in use, plus those of the next passes.
    window = Window(schedule, training=True)
    window.begin()
    for position in range(2 * len(schedule.passes)):
        window.leave(position)
        ahead, following = set(), position + 1
        while len(ahead) <= schedule.horizontal.depth and following < position + 3 * len(schedule.passes):
            if window.at(following).phase is not S:
                ahead.add(following)
            following += 1
        assert set(window.held) <= {window.at(p).unit for p in ahead}


@settings(max_examples=share(30))
@given(schedules, st.data())
def test_the_order_of_gathers_depends_on_the_sequence_alone(schedule: Schedule, data: st.DataObject) -> None:
    """Two ranks whose gathers, disks and computations take any time at all issue the same operations: nothing that
    the queue is told, and so nothing it can act on, differs. One of them is cut short and starts again.
    """
    logs = []
    for _ in range(2):
        slices = Slices(schedule)
        queue = HorizontalQueue(schedule, slices)
        run_step(queue, slices, schedule)
        logs.append(list(slices.log))
    assert logs[0] == logs[1]
    queue.begin(training=True)
    for item in schedule.passes[: data.draw(st.integers(0, len(schedule.passes) - 1))]:
        with queue.during(item.unit, item.phase):
            pass
    queue.reset()
    slices.log.clear()
    run_step(queue, slices, schedule)
    assert slices.log == logs[0]
