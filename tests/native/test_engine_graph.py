"""Tickets: order, failure, cancelling, waiting, external events, event loops, closing."""

import asyncio
import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crash_states import Event
from effort import share, with_fixtures
from engines import Events, MakeEngine, frame
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native as native


def test_tickets_count_from_one(engine: native.Engine) -> None:
    assert [engine.barrier() for _ in range(3)] == [1, 2, 3]
    assert engine.done(3)
    for unknown in (0, 4):
        for use in (engine.done, engine.wait, engine.cancel, engine.notify, engine.promote):
            with pytest.raises(ValueError, match="never given out"):
                use(unknown)
        with pytest.raises(ValueError, match="never given out"):
            engine.barrier([unknown])
    assert engine.barrier() == 4, "a refused operation takes no ticket"


def test_nothing_runs_before_what_it_follows(engine: native.Engine, arena: native.Arena) -> None:
    gate = engine.external()
    frame(arena, 0).array()[:] = 1
    copied = engine.copy(frame(arena, 1), frame(arena, 0), after=[gate])
    again = engine.copy(frame(arena, 2), frame(arena, 1), after=[copied, copied, gate])
    other = engine.copy(frame(arena, 3), frame(arena, 0))
    engine.wait(other)
    assert frame(arena, 3).array().all()
    assert not engine.done(copied)
    assert not engine.done(again)
    assert not frame(arena, 1).array().any()
    assert engine.stats()["waiting"] == 3
    with pytest.raises(TimeoutError, match="ticket 3"):
        engine.wait(again, 0.01)
    with pytest.raises(TimeoutError):
        engine.wait(again, 0)
    engine.complete_external(gate)
    engine.wait(again)
    assert frame(arena, 2).array().all()
    assert (engine.stats()["waiting"], engine.stats()["in_flight"]) == (0, 0)


def test_a_failure_reaches_all_that_follow_and_no_others(engine: native.Engine, arena: native.Arena) -> None:
    gate = engine.external()
    child = engine.copy(frame(arena, 1), frame(arena, 0), after=[gate])
    grandchild = engine.barrier([child])
    stranger = engine.barrier()
    engine.complete_external(gate, "the device is gone")
    late = engine.barrier([grandchild, stranger])
    for ticket in (gate, child, grandchild, late, late):
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.wait(ticket)
        assert engine.done(ticket)
    engine.wait(stranger)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.wait_all([stranger, late])
    assert engine.stats()["failed_ops"] == 4


def test_a_failure_is_passed_on_when_all_that_is_followed_has_ended(
    engine: native.Engine, arena: native.Arena
) -> None:
    """Whoever waits for a ticket may use its memory again, and what it followed may be filling that memory."""
    failed, filling = engine.external(), engine.external()
    follower = engine.copy(frame(arena, 1), frame(arena, 0), after=[failed, filling])
    after_it = engine.barrier([follower])
    engine.complete_external(failed, "the device is gone")
    submitted_later = engine.barrier([failed, filling])
    for ticket in (follower, after_it, submitted_later):
        assert not engine.done(ticket)
        with pytest.raises(TimeoutError):
            engine.wait(ticket, 0.01)
    engine.complete_external(filling)
    for ticket in (follower, after_it, submitted_later):
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.wait(ticket)
    both = engine.external(), engine.external()
    follower = engine.barrier(both)
    for ticket, reason in zip(both, ("first", "second"), strict=True):
        engine.complete_external(ticket, reason)
    with pytest.raises(RuntimeError, match="first"):
        engine.wait(follower)


def test_cancelling_takes_back_what_has_not_started(
    engine: native.Engine, arena: native.Arena, file: native.File
) -> None:
    frame(arena, 0).array()[:] = 5
    gate = engine.external()
    write = engine.write(file, 0, [frame(arena, 0)], after=[gate])
    read = engine.read(file, 0, [frame(arena, 1)], after=[write])
    spared = engine.copy(frame(arena, 2), frame(arena, 0), after=[gate])
    assert engine.cancel(write)
    assert not engine.cancel(write)
    for ticket in (write, read):
        with pytest.raises(native.CancelledError):
            engine.wait(ticket)
    engine.complete_external(gate)
    engine.wait(spared)
    assert not engine.cancel(spared)
    assert not any(Path(file.path).read_bytes())
    assert engine.poisoned is None
    event = engine.external()
    assert engine.cancel(event)
    engine.complete_external(event)  # too late, and harmless


def test_external_operations_follow_too(engine: native.Engine) -> None:
    first = engine.external()
    second = engine.external(after=[first])
    engine.complete_external(second)
    assert not engine.done(second)
    engine.complete_external(first)
    engine.wait(second)
    third = engine.barrier()
    engine.complete_external(third)
    fourth = engine.barrier([engine.external()])
    with pytest.raises(ValueError, match="external"):
        engine.complete_external(fourth)


def test_operations_keep_what_they_use(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    gate = engine.external()
    arena = native.Arena(1 << 20)
    file = native.File(tmp_path / "data", create=native.FileCreate.YES)
    file.allocate(0, 4096)
    crcs = native.CrcTable(1)
    frame(arena, 3).array()[:] = 6
    ticket = engine.write(file, 0, [frame(arena, 3)], crcs, after=[gate])
    del arena, file, crcs
    gc.collect()
    engine.complete_external(gate)
    engine.wait(ticket)
    assert (tmp_path / "data").read_bytes() == b"\x06" * 4096


def test_closing_ends_everything(make_engine: MakeEngine, arena: native.Arena, file: native.File) -> None:
    engine = make_engine(queue_depth=1, io_threads=1, chunk_bytes=4096)
    gate = engine.external()
    held = engine.barrier([gate])
    reads = [engine.read(file, 0, [frame(arena, i % 200)]) for i in range(500)]
    engine.close()
    ended = 0
    for ticket in reads:
        try:
            engine.wait(ticket)
        except native.EngineClosed:
            ended += 1
    assert ended + engine.stats()["reads"] == 500
    for ticket in (gate, held):
        with pytest.raises(native.EngineClosed):
            engine.wait(ticket)
    with pytest.raises(native.EngineClosed):
        engine.barrier()
    engine.close()


def test_a_dropped_engine_closes_itself(arena: native.Arena, file: native.File) -> None:
    before = threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    engine = native.Engine(backend=native.IoBackend.THREADS)
    for i in range(50):
        engine.read(file, 0, [frame(arena, i)])
    del engine
    gc.collect()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/task")) == tasks


def test_waiting_lets_other_threads_and_signals_in(engine: native.Engine) -> None:
    gate = engine.external()
    threading.Timer(0.05, engine.complete_external, [gate]).start()
    engine.wait(gate)

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            engine.wait(engine.external())
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_many_threads_wait_for_one_ticket(engine: native.Engine) -> None:
    gate = engine.external()
    errors: list[str] = []

    def wait() -> None:
        try:
            engine.wait(gate)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    engine.complete_external(gate, "no")
    for thread in threads:
        thread.join()
    assert errors == ["no"] * 8


async def test_an_event_loop_awaits_without_threads(
    engine: native.Engine, arena: native.Arena, file: native.File
) -> None:
    loop = asyncio.get_running_loop()
    futures: dict[int, asyncio.Future[None]] = {}

    def drained() -> None:
        for ticket in engine.drain_notified():
            futures.pop(ticket).set_result(None)

    async def finished(ticket: int) -> None:
        futures[ticket] = loop.create_future()
        waiting = futures[ticket]
        engine.notify(ticket)
        await waiting
        engine.wait(ticket, 0)

    loop.add_reader(engine.event_fd(), drained)
    try:
        gate = engine.external()
        tickets = [engine.read(file, 4096 * i, [frame(arena, i)], after=[gate]) for i in range(20)]
        tasks = [asyncio.create_task(finished(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        engine.complete_external(gate)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        await asyncio.wait_for(finished(tickets[0]), 10)  # done already
        assert engine.drain_notified() == []
        failing = engine.read(file, 1 << 20, [frame(arena, 0)])
        with pytest.raises(OSError, match="end of file"):
            await asyncio.wait_for(finished(failing), 10)
    finally:
        loop.remove_reader(engine.event_fd())


def write_backs(engine: native.Engine, file: native.File, arena: native.Arena, gate: int) -> list[int]:
    write = partial(engine.write, file, 0, after=[gate], priority=native.Priority.WRITE_BACK)
    return [write([frame(arena, i)]) for i in range(100)]


def test_what_is_demanded_passes_what_is_queued(
    make_engine: MakeEngine, arena: native.Arena, file: native.File, tmp_path: Path, events: Events
) -> None:
    """All become ready at once, in order of submission; the event log tells in which order they were done."""
    engine = make_engine(queue_depth=1, io_threads=1, log_path=tmp_path / "log")
    gate = engine.external()
    queued = write_backs(engine, file, arena, gate)
    demanded = engine.write(file, 4096, [frame(arena, 101)], after=[gate], priority=native.Priority.DEMAND)
    engine.complete_external(gate)
    engine.wait_all([demanded, *queued])
    engine.close()
    order = [entry.ticket for entry in events() if entry.event is Event.WRITE_DONE]
    assert sorted(order) == [*queued, demanded]
    # One may have been taken by the compute thread and one by the backend before it was ready.
    assert order.index(demanded) <= 2
    assert [ticket for ticket in order if ticket != demanded] == queued


def test_waiting_for_what_is_speculative_makes_it_urgent(
    make_engine: MakeEngine, arena: native.Arena, file: native.File, tmp_path: Path, events: Events
) -> None:
    engine = make_engine(queue_depth=1, io_threads=1, log_path=tmp_path / "log")
    gate = engine.external(priority=native.Priority.SPECULATIVE)
    queued = write_backs(engine, file, arena, gate)
    reader = engine.read(
        file, 0, [frame(arena, 102)], after=[queued[90]], priority=native.Priority.SPECULATIVE
    )
    engine.promote(reader)
    engine.complete_external(gate)
    engine.wait_all([reader, *queued])
    engine.close()
    order = [entry.ticket for entry in events() if entry.event is Event.WRITE_DONE]
    assert order.index(queued[90]) <= 2


def test_idle_work_runs_when_there_is_no_other_the_last_first(make_engine: MakeEngine) -> None:
    """One thread, busy with long copies while everything else is queued. What is promoted, or urgently followed, passes
    ahead of the rest.
    """
    idle, normal = native.Priority.IDLE, native.Priority.SPECULATIVE
    for nbytes in (8 << 20, 64 << 20, 512 << 20):
        engine = make_engine(compute_threads=1)
        engine.record_spans(100)
        memory = native.Arena(2 * nbytes, native.HugePages.OFF)
        halves = [native.Buffer(memory, [(start, nbytes)], nbytes) for start in (0, nbytes)]
        arena = native.Arena(4096 * 7, native.HugePages.OFF)
        pages = [frame(arena, index) for index in range(7)]
        busy = [engine.copy(halves[0], halves[1]) for _ in range(4)]
        first, second, third, promoted, followed, speculated = (
            engine.fill_zero(page, priority=priority)
            for page, priority in zip(pages, [*[idle] * 5, normal], strict=False)
        )
        follower = engine.barrier([followed])
        engine.promote(promoted)
        demanded = engine.fill_zero(pages[-1])
        queued_in_time = not engine.done(busy[0])
        engine.wait(follower)
        while engine.stats()["in_flight"]:  # waiting for idle work would make it urgent
            time.sleep(0.001)
        spans, lost = engine.drain_spans()
        assert not lost
        order = [span[2] for span in sorted(spans, key=lambda span: span[3])]
        assert len(order) == len(set(order)) == 11  # none ran twice
        if queued_in_time:
            assert order == [*busy, followed, promoted, demanded, speculated, third, second, first]
            return
    pytest.fail("the copies were over before all was queued")


def test_compute_threads_let_other_threads_go_first(make_engine: MakeEngine) -> None:
    make_engine(compute_threads=2)

    def niceness() -> set[int]:
        found = set()
        for path in Path("/proc/self/task").glob("*/stat"):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if name == "tierstore-work":
                found.add(int(rest.split()[16]))  # proc(5): field 19, the third being the first of the rest
        return found

    until = time.monotonic() + 10
    while (found := niceness()) != {os.nice(0) + 5} and time.monotonic() < until:
        time.sleep(0.01)
    assert found == {os.nice(0) + 5}


def test_finished_tickets_cost_no_memory(engine: native.Engine) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(20_000):
        engine.barrier()
    before = resident()
    for _ in range(300_000):
        engine.barrier()
    assert resident() - before < 4 << 20


@with_fixtures(share(40))
@given(data=st.data())
def test_random_graphs_of_copies_match_numpy(make_engine: MakeEngine, data: st.DataObject) -> None:
    """Every copy follows the last ones that touched its two frames: the result is that of program order."""
    engine = make_engine(compute_threads=data.draw(st.integers(1, 3)))
    count = 6
    arena = native.Arena(4096 * count, native.HugePages.OFF)
    arena.view().reshape(count, 4096)[:] = np.arange(1, count + 1, dtype=np.uint8)[:, None]
    oracle = arena.view().reshape(count, 4096).copy()
    last: list[int | None] = [None] * count
    gate = engine.external()
    last = [gate] * count
    for _ in range(data.draw(st.integers(1, 40))):
        dst, src = data.draw(st.permutations(range(count)))[:2]
        after = [ticket for ticket in (last[dst], last[src]) if ticket is not None]
        if data.draw(st.integers(0, 4)) == 0:
            ticket = engine.fill_zero(frame(arena, dst), after=after)
            oracle[dst] = 0
            last[dst] = ticket
            continue
        ticket = engine.copy(
            frame(arena, dst),
            frame(arena, src),
            after=after,
            priority=data.draw(st.sampled_from(native.Priority)),
        )
        oracle[dst] = oracle[src]
        last[dst] = last[src] = ticket
    engine.complete_external(gate)
    engine.wait_all([ticket for ticket in last if ticket is not None])
    assert np.array_equal(arena.view().reshape(count, 4096), oracle)
    engine.close()


def test_submitting_does_not_wait(engine: native.Engine, arena: native.Arena, file: native.File) -> None:
    gate = engine.external()
    tickets = [engine.write(file, 0, [frame(arena, 0)], after=[gate]) for _ in range(1000)]
    assert not engine.done(tickets[0])
    engine.complete_external(gate)
    engine.wait_all(tickets)
