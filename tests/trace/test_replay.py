"""What is recorded replays as it was."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from core_calls import units
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import GroupOrder, Residency, Scope, StepClock
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.lab.requests import load_requests
from tierstore.trace.files import TraceRecorder, TraceWriter, load_trace
from tierstore.trace.format import TraceHeader, TraceKind, TraceRecord
from tierstore.trace.replay import quotas_by_layer, replay

LAYERS, EXPERTS = 3, 6


def replayed(path, **changes):
    """A replay with other settings than those that were recorded."""
    return replay(path, replace(load_trace(path).header, **changes))


def train(core, rng, steps=4, tangled=False):
    """Forward and backward passes over a small model, with everything that a run does in between."""
    for layer in range(LAYERS):
        for _ in range(EXPERTS):
            core.add_record(layer, [1, 2, 1], [4096, 8192, 4096], 3)

    def experts(layer):
        return layer * EXPERTS + np.flatnonzero(rng.random(EXPERTS) < 0.5)

    def run(step, phase, layer, chosen, flags):
        groups, _ = core.begin_access(phase, layer, *units(chosen, flags))
        if tangled and rng.random() < 0.3:
            core.prefetch(phase, layer, *units(experts(layer)))
        for _ in range(groups):
            units_served, _, _ = core.next_group()
            for unit in units_served.tolist():
                core.end_unit(unit)
                if tangled and rng.random() < 0.3:
                    core.prefetch(phase, layer, *units(experts(layer), 3))
            if not tangled:
                core.prefetch(phase, layer, *units(experts(layer)))
            core.end_group()
            if tangled and rng.random() < 0.2:
                core.clean()

    for step in range(steps):
        chosen = [experts(layer) for layer in range(LAYERS)]
        for layer in range(LAYERS):
            run(step, 0, layer, chosen[layer], 1)
        for layer in reversed(range(LAYERS)):
            run(step, 1, layer, chosen[layer], 7 | 3 << 3 | 4 << 6)
        if step % 2:
            core.clean(np.arange(5, dtype=np.uint32))
            core.set_stored(0, 3)
        core.drop(np.array([2], np.uint32))
        core.cancel_prefetch()
        core.end_step()


SETTINGS = [
    {"policy": "lru"},
    {"policy": "lfu-decay", "policy_options": {"variant": "corrected", "half_life": 2, "interval": 1}},
    {
        "policy": "lfu-decay",
        "policy_options": {"variant": "paper", "threshold": 1, "beta": 0.5, "interval": 5},
    },
]


@settings(max_examples=share(40))
@given(
    setting=st.sampled_from(SETTINGS),
    seed=st.integers(0, 2**31),
    capacity=st.integers(5, 40),
    lookahead=st.integers(0, 5),
    by_layer=st.booleans(),
    tangled=st.booleans(),
    order=st.sampled_from(GroupOrder),
    clock=st.sampled_from(StepClock),
    parts=st.integers(1, 5),
)
def test_a_replay_decides_as_the_live_run_did(
    tmp_path_factory, setting, seed, capacity, lookahead, by_layer, tangled, order, clock, parts
):
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    scope = {"group_order": order, "clock": clock, "parts": parts}
    if by_layer:
        scope |= {"scope": Scope.LAYER, "layer_quotas": [capacity] * LAYERS}
        capacity *= LAYERS
    core = Residency(capacity, lookahead_frames=lookahead, **setting, **scope)
    with TraceRecorder(path, core):
        train(core, np.random.default_rng(seed), tangled=tangled)
    assert replay(path) == core.stats()


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "run.trace"
    core = Residency(12, policy="lru", lookahead_frames=3)
    with TraceRecorder(path, core):
        train(core, np.random.default_rng(5), steps=6)
    return path, core.stats()


def test_other_capacities_and_policies(recorded):
    path, live = recorded
    assert replayed(path, capacity_frames=12) == live
    larger = replayed(path, capacity_frames=200)
    assert larger.evictions == 0
    assert larger.misses < live.misses
    asked = ("hits", "misses", "creates")
    assert sum(getattr(larger, key) for key in asked) == sum(getattr(live, key) for key in asked)
    smaller = replayed(path, capacity_frames=4, lookahead_frames=0)
    assert smaller.groups > live.groups
    assert smaller.accesses == live.accesses
    assert replayed(path, policy="lfu-decay").steps == 6
    assert replayed(path, scope="layer", layer_quotas=(12,) * 3, capacity_frames=36).steps == 6
    with pytest.raises(BudgetError, match="4 frames must be resident at once"):
        replayed(path, capacity_frames=3, lookahead_frames=0)
    with pytest.raises(ConfigError, match="unknown cache policy"):
        replayed(path, policy="mru")


def test_pins_are_replayed(tmp_path):
    path = tmp_path / "pins.trace"
    core = Residency(2, policy="lru")
    with TraceRecorder(path, core):
        for _ in range(4):
            core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
        for record in (0, 1, 2, 3):
            core.begin_access(0, 0, *units([record]))
            core.next_group()
            if record == 0:
                core.pin(*units([0]))
            core.end_group()
        core.unpin(*units([0], 1 | 1 << 3))
    assert core.stats().evictions == 2
    assert replay(path) == core.stats()


def test_many_chunks_are_one_trace(tmp_path):
    path = tmp_path / "long.trace"
    records, flags = units(range(3))
    with TraceWriter(
        path, TraceHeader(2, policy="lru", records=(TraceRecord(0, (1, 0, 0), (1, 0, 0), 1),) * 3)
    ) as w:
        for step in range(50_000):
            w.event(TraceKind.ACCESS, step=step, records=records, flags=flags)
    trace = load_trace(path)
    assert len(trace) == 50_000
    assert trace.offsets[-1] == 150_000
    assert (trace.steps == np.arange(50_000)).all()
    # Groups {0,1} and {2}: 1 is evicted by 2 (0 is older), then 0 is, ...: worked for the first two accesses.
    stats = replay(path)
    assert stats.groups == 100_000
    assert stats.hits + stats.misses == 150_000


def test_an_empty_trace(tmp_path):
    path = tmp_path / "empty.trace"
    TraceWriter(path, TraceHeader(1)).close()
    assert len(load_trace(path)) == 0
    assert replay(path).accesses == 0


def test_an_event_that_cannot_be_is_named(tmp_path):
    path = tmp_path / "wrong.trace"
    with TraceWriter(path, TraceHeader(4, records=(TraceRecord(0, (1, 0, 0), (1, 0, 0), 1),))) as writer:
        writer.event(TraceKind.ACCESS, records=units([0])[0], flags=units([0])[1])
        writer.event(TraceKind.ACCESS, records=units([7])[0], flags=units([7])[1])
    with pytest.raises(DataError, match=r"wrong\.trace: event 1: no record 7"):
        replay(path)


def one_frame(core, count=1, stored=1):
    for _ in range(count):
        core.add_record(0, [1, 0, 0], [1, 0, 0], stored)


def ask(core, *records):
    groups, _ = core.begin_access(1, 0, *units(records))
    for _ in range(groups):
        core.next_group()
        core.end_group()


def test_an_unfinished_trace_is_refused(tmp_path):
    path = tmp_path / "cut.trace"
    core = Residency(4)
    recorder = TraceRecorder(path, core)
    one_frame(core)
    core.end_step()
    recorder._events.flush()
    recorder._writer._file.flush()
    (partial,) = tmp_path.glob("cut.trace.*.partial")
    with pytest.raises(DataError, match="the trace was not completed"):
        replay(partial)
    recorder.close()
    assert replay(path).steps == 1
    core.end_step()
    recorder.close()
    assert replay(path).steps == 1, "the core goes on unrecorded"


def test_records_may_come_at_any_time(tmp_path):
    """Also inside an access; the trace is of version 3 then, and of 2 if all came first."""
    path = tmp_path / "late.trace"
    core = Residency(2, policy="lru")
    with TraceRecorder(path, core):
        one_frame(core, 2)
        ask(core, 0, 1)
        one_frame(core, 3, stored=0)
        core.begin_access(1, 0, *units([1, 3]))
        core.next_group()
        one_frame(core)
        core.end_group()
        core.end_step()
        one_frame(core)
        ask(core, 5, 6)
    trace = load_trace(path)
    assert (trace.header.version, trace.header.late_records, len(trace.header.records)) == (3, 5, 7)
    assert [record.stored for record in trace.header.records] == [1, 1, 0, 0, 0, 1, 1]
    assert trace.kinds.tolist() == [
        *(TraceKind.ACCESS, TraceKind.ADD, TraceKind.ACCESS, TraceKind.ADD, TraceKind.END_STEP),
        *(TraceKind.ADD, TraceKind.ACCESS),
    ]
    assert trace.records.tolist() == [0, 1, 2, 3, 4, 1, 3, 5, 6, 5, 6]
    assert trace.at.tolist() == [0, 0, 0, 2, 0, 0, 0]
    assert replay(path) == core.stats()
    assert replayed(path, capacity_frames=7).evictions == 0
    assert replayed(path, scope="layer", layer_quotas=(2,), policy="lfu-decay").steps == 1
    requests = load_requests(path)
    assert (requests.events, len(requests.entries), requests.table.total_frames) == (3, 6, 5)
    assert len(requests.creations()[1]) == 1

    early = tmp_path / "early.trace"
    core = Residency(2, policy="lru")
    with TraceRecorder(early, core):
        one_frame(core, 2)
        ask(core, 0, 1)
    assert load_trace(early).header.version == 2
    assert early.read_bytes()[8] == 2


def test_records_that_cannot_be_added_are_refused(tmp_path):
    path = tmp_path / "wrong.trace"
    records = (TraceRecord(0, (1, 0, 0), (1, 0, 0), 1),) * 3
    for late, added in ((1, [2, 3]), (1, [1]), (2, [2])):
        with TraceWriter(path, TraceHeader(4, records=records, late_records=late)) as writer:
            writer.event(TraceKind.ADD, records=np.array(added, np.uint32))
        with pytest.raises(DataError, match=rf"event 0: record {added[-1]} cannot be added"):
            replay(path)
    with TraceWriter(path, TraceHeader(4, records=records)) as writer:
        writer.event(TraceKind.ADD, records=np.array([3], np.uint32))
    with pytest.raises(DataError, match="event 0: record 3 cannot be added"):
        replay(path)


def test_steps_are_numbered_by_the_core(tmp_path):
    """The end of a step has the number of the one that begins."""
    path = tmp_path / "steps.trace"
    core = Residency(2, policy="lru")
    with TraceRecorder(path, core):
        core.start_at(7)
        one_frame(core)
        ask(core, 0)
        core.end_step()
        core.end_step()
        ask(core, 0)
        with pytest.raises(RuntimeError, match="before the first access"):
            core.start_at(0)
    assert load_trace(path).steps.tolist() == [7, 8, 9, 9]


def test_a_trace_begins_with_the_first_record(tmp_path):
    core = Residency(2)
    one_frame(core)
    with pytest.raises(ValueError, match="from the first record on"):
        TraceRecorder(tmp_path / "trace", core)
    assert not (tmp_path / "trace").exists()


def test_a_trace_that_cannot_be_written_fails_no_access_and_is_not_left(monkeypatch, tmp_path):
    """The first access misses, the other 19 hit, though the disk is full from the second chunk on."""
    monkeypatch.setattr("tierstore.trace.files._BUFFER_ROWS", 4)
    extend = TraceWriter.extend

    def full(writer, columns):
        if len(columns) and columns.records[0] == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extend(writer, columns)

    monkeypatch.setattr(TraceWriter, "extend", full)
    core = Residency(2, policy="lru")
    path = tmp_path / "run.trace"
    recorder = TraceRecorder(path, core)
    one_frame(core)
    one_frame(core)
    for _ in range(10):
        ask(core, 0)
    assert recorder.failure is None
    for _ in range(10):
        ask(core, 1)
    assert (core.stats().misses, core.stats().hits) == (2, 18)
    assert not path.exists()
    with pytest.raises(OSError, match="No space left") as caught:
        recorder.close()
    assert caught.value.filename == str(path)
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_layers_without_records_get_no_quota(tmp_path):
    # Layers 1 and 3 have a record of four frames each: eight frames are enough for both.
    path = tmp_path / "run.trace"
    core = Residency(8, policy="lru")
    with TraceRecorder(path, core):
        for layer in (1, 3):
            core.add_record(layer, [4, 0, 0], [4, 0, 0], 1)
        for record, layer in ((0, 1), (1, 3), (0, 1)):
            core.begin_access(1, layer, np.array([record], np.uint32), np.array([1], np.uint16))
            core.next_group()
            core.end_group()
        core.end_step()
    quotas = tuple(quotas_by_layer([1, 3], 8))
    assert replayed(path, scope="layer", layer_quotas=quotas).misses == 2
    quotas = tuple(quotas_by_layer([1, 3], 7))
    with pytest.raises(BudgetError, match="too small"):
        replayed(path, scope="layer", layer_quotas=quotas, capacity_frames=7)
