"""Links of limited speed against their formula, and operations that wait for their turn on one."""

import itertools
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from effort import share
from engines import MakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore import _native as native
from tierstore._native import Activity

MS = 1_000_000


def test_transfers_follow_one_another() -> None:
    """1 MB/s after 2 ms: 3,000 bytes take 5 ms."""
    link = native.Link(1e6, 0.002)
    assert link.reserve(3000, 10 * MS) == 15 * MS  # starts at once
    assert link.reserve(1000, 12 * MS) == 18 * MS  # waits for the first: 15 + 2 + 1
    assert link.reserve(0, 18 * MS) == 20 * MS  # the latency alone
    assert link.reserve(1000, 100 * MS) == 103 * MS  # the link had been free
    assert link.stats() == {"transfers": 4, "nbytes": 5000, "busy_s": pytest.approx(0.013)}
    assert (link.bandwidth, link.latency) == (1e6, 0.002)


def test_a_link_may_have_a_latency_only() -> None:
    link = native.Link(latency=0.001)
    assert link.bandwidth == math.inf
    assert link.reserve(1 << 40, 0) == MS


@settings(max_examples=share(50))
@given(
    st.integers(1, 10**12),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20),
)
def test_deadlines_are_the_formula_in_exact_arithmetic(
    bandwidth: int, latency_ns: int, asked: list[tuple[int, int]]
) -> None:
    """Oracle: rationals. A deadline is at most a nanosecond's rounding (and a double's) above its formula."""
    link = native.Link(float(bandwidth), latency_ns / 1e9)
    now, free_at = 0, 0
    for pause, nbytes in asked:
        now += pause
        exact = Fraction(latency_ns) + Fraction(nbytes * 10**9, bandwidth)
        found = link.reserve(nbytes, now)
        start = max(now, free_at)
        assert found - start == pytest.approx(math.ceil(exact), rel=1e-12, abs=1)
        free_at = found


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.inf)]
)
def test_a_link_refuses_what_is_no_speed(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="link"):
        native.Link(bandwidth, latency)


def test_a_hold_is_not_done_before_its_deadline(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.record_spans(100)
    link = native.Link(1e6)
    asked = time.monotonic_ns()
    holds = [engine.hold(link, 2000, Activity.READ) for _ in range(5)]
    for index, ticket in enumerate(holds):
        engine.wait(ticket)
        assert time.monotonic_ns() - asked >= (index + 1) * 2 * MS
    spans, lost = engine.drain_spans()
    assert lost == 0
    assert [(span[0], span[1], span[2], span[5]) for span in spans] == [
        (Activity.READ, True, ticket, 2000) for ticket in holds
    ]
    starts, ends = [span[3] for span in spans], [span[4] for span in spans]
    assert [end - start for start, end in zip(starts, ends, strict=True)] == [2 * MS] * 5
    assert starts[1:] == ends[:-1]  # asked for together, they are served without a gap
    assert starts[0] >= asked


def test_a_hold_asks_for_its_turn_when_it_may(make_engine: MakeEngine) -> None:
    """The one that waits for a gate comes after the one that was submitted later."""
    engine = make_engine()
    engine.record_spans(10)
    link, gate = native.Link(1e6), engine.external()
    held = engine.hold(link, 1000, after=[gate])
    first = engine.hold(link, 1000)
    engine.wait(first)
    assert not engine.done(held)
    assert engine.stats()["waiting"] == 2  # and the gate
    engine.complete_external(gate)
    engine.wait(held)
    assert [span[2] for span in engine.drain_spans()[0]] == [first, held]


def test_a_transfer_and_its_turn_are_joined(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The bytes are there, and not before the link allows; a limit changes nothing else."""
    engine, arena = make_engine(), native.Arena(8192, native.HugePages.OFF)
    source, target = (native.Buffer(arena, [(at, 4096)], 4096) for at in (0, 4096))
    source.array()[:] = 7
    link = native.Link(1e6)
    asked = time.monotonic_ns()
    copied = engine.copy(target, source)
    joined = engine.barrier([copied, engine.hold(link, 4096, Activity.COPY)])
    engine.wait(joined)
    assert time.monotonic_ns() - asked >= 4_096_000
    assert np.array_equal(target.array(), source.array())


def test_failures_pass_through_holds(make_engine: MakeEngine) -> None:
    engine = make_engine()
    link, gate = native.Link(1e6), engine.external()
    held = engine.hold(link, 1000, after=[gate])
    behind = engine.barrier([held])
    engine.complete_external(gate, "no such thing")
    for ticket in (held, behind):
        with pytest.raises(RuntimeError, match="no such thing"):
            engine.wait(ticket)
    assert link.stats()["transfers"] == 0  # it never asked
    late = engine.hold(link, 1000, after=[held])
    with pytest.raises(RuntimeError, match="no such thing"):
        engine.wait(late)


def test_a_cancelled_hold_keeps_its_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    link = native.Link(latency=3600.0)
    held = engine.hold(link, 1)
    behind = engine.barrier([held])
    assert engine.cancel(held)
    for ticket in (held, behind):
        with pytest.raises(native.CancelledError, match="cancelled"):
            engine.wait(ticket)
    assert not engine.cancel(held)
    assert link.reserve(0, 0) >= 7200 * 1000 * MS


def test_closing_does_not_wait_for_deadlines(make_engine: MakeEngine) -> None:
    engine = make_engine()
    link = native.Link(latency=3600.0)
    holds = [engine.hold(link, 1) for _ in range(10)]
    engine.close()
    for ticket in holds:
        with pytest.raises(native.EngineClosed):
            engine.wait(ticket)


def test_a_hold_outlives_the_name_of_its_link(make_engine: MakeEngine) -> None:
    engine = make_engine()
    link = native.Link(latency=0.01)
    ticket = engine.hold(link, 0)
    del link
    engine.wait(ticket)


def test_the_ring_of_spans_keeps_the_last(make_engine: MakeEngine) -> None:
    engine, arena = make_engine(), native.Arena(4096, native.HugePages.OFF)
    page = native.Buffer(arena, [(0, 4096)], 4096)

    def zeroed(times: int) -> list[int]:
        tickets = []
        for _ in range(times):
            tickets.append(engine.fill_zero(page, after=tickets[-1:]))
        engine.wait_all(tickets)
        return tickets

    zeroed(3)
    assert engine.drain_spans() == ([], 0)  # off until asked for
    engine.record_spans(4)
    tickets = zeroed(10)
    spans, lost = engine.drain_spans()
    assert [span[2] for span in spans] == tickets[-4:]
    assert lost == 6
    assert all(span[0] is Activity.FILL_ZERO and not span[1] and span[5] == 4096 for span in spans)
    assert all(a[4] <= b[3] for a, b in itertools.pairwise(spans))
    assert all(span[3] <= span[4] for span in spans)
    assert engine.drain_spans() == ([], 0)
    engine.record_spans(0)
    zeroed(1)
    assert engine.drain_spans() == ([], 0)


def test_transfers_leave_their_spans(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, arena = make_engine(), native.Arena(4096, native.HugePages.OFF)
    engine.record_spans(10)
    page = native.Buffer(arena, [(0, 4096)], 4096)
    file = native.File(tmp_path / "data", create=native.FileCreate.YES)
    file.allocate(0, 4096)
    begun = time.monotonic_ns()
    written = engine.write(file, 0, [page])
    synced = engine.sync(file, after=[written])
    read = engine.read(file, 0, [page], after=[synced])
    engine.wait(engine.punch(file, 0, 4096, after=[read]))
    ended = time.monotonic_ns()
    spans, _ = engine.drain_spans()
    assert [(span[0], span[5]) for span in spans] == [
        (Activity.WRITE, 4096),
        (Activity.SYNC, 0),
        (Activity.READ, 4096),
        (Activity.PUNCH, 4096),
    ]
    assert all(begun <= span[3] <= span[4] <= ended for span in spans)
