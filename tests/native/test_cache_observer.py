"""What an observer of the residency core sees, and what it can refuse."""

import numpy as np
import pytest
from core_calls import units

from tierstore._native import EventBuffer, Residency
from tierstore.trace.format import TraceKind


def observed(rows, sink):
    core = Residency(4, policy="lru", lookahead_frames=2)
    buffer = EventBuffer(rows, sink)
    core.observe(buffer)
    for _ in range(4):
        core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
    return core, buffer


def test_events_come_in_bulk_before_what_follows():
    seen = []
    core, buffer = observed(3, lambda *columns: seen.append(columns))
    core.begin_access(2, 0, *units([0, 1], 1 | 1 << 3))
    core.next_group()
    core.end_unit(1)
    core.prefetch(1, 0, *units([2]))
    core.end_unit(0)
    core.clean(np.array([0, 1], np.uint32))
    core.end_group()
    assert seen == [], "an open access is not interrupted, however full the buffer"
    core.end_step()
    ((kinds, phases, layers, at, steps, offsets, records, flags),) = seen
    kind = TraceKind
    assert kinds.tolist() == [kind.ACCESS, kind.END_UNIT, kind.PREFETCH, kind.END_UNIT, kind.CLEAN]
    assert phases.tolist() == [2, 0, 1, 0, 0]
    assert layers.tolist() == [0] * 5
    assert at.tolist() == [0, 2, 2, 2, 2]
    assert steps.tolist() == [0] * 5
    assert offsets.tolist() == [0, 2, 3, 4, 5, 7]
    assert records.tolist() == [0, 1, 1, 2, 0, 0, 1]
    assert flags.tolist() == [9, 9, 0, 1, 0, 0, 0]
    buffer.flush()
    assert [seen[1][0].tolist(), seen[1][4].tolist()] == [[kind.END_STEP], [1]]
    core.observe(None)
    core.end_step()
    buffer.flush()
    assert len(seen) == 2
    with pytest.raises(RuntimeError, match="before the first record"):
        core.observe(buffer)


def test_what_fails_is_no_event():
    seen = []
    core, buffer = observed(100, lambda *columns: seen.append(columns[0].tolist()))
    with pytest.raises(ValueError, match="no record 9"):
        core.begin_access(0, 0, *units([9]))
    with pytest.raises(ValueError, match="no record 9"):
        core.set_stored(9, 0)
    buffer.flush()
    assert seen == []


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.begin_access(1, 0, *units([1])),
        lambda core: core.prefetch(1, 0, *units([2])),
        lambda core: core.end_step(),
    ],
)
def test_a_sink_that_raises_refuses_what_comes_next_with_nothing_changed(call):
    def full(*_):
        raise OSError(28, "full")

    core, _ = observed(2, full)
    core.clean()
    core.cancel_prefetch()
    before = core.stats()
    with pytest.raises(OSError, match="full"):
        call(core)
    assert core.stats() == before
    assert not core.access_open
    assert core.resident_entries().size == 0
