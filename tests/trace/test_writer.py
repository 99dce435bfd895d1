"""Traces written event by event, by columns, and recorded from a core."""

from dataclasses import replace

import numpy as np
import pytest

from tierstore.lab.miss_curves import curves
from tierstore.lab.requests import load_requests
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.store.config import StoreAccess
from tierstore.trace.files import TraceWriter, load_trace, read_chunks, read_summary
from tierstore.trace.format import Coding, EventColumns, RecordTable, TraceHeader, TraceKind
from tierstore.trace.replay import replay

NAMES = ("kinds", "phases", "layers", "at", "steps", "offsets", "records", "flags")


def summary(path):
    with path.open("rb") as file:
        return read_summary(file)


@pytest.mark.parametrize("coding", Coding)
def test_events_and_columns_give_the_same_trace(tmp_path, columns, coding):
    one, other = tmp_path / "one.trace", tmp_path / "other.trace"
    with TraceWriter(one, TraceHeader(4), coding=coding) as writer:
        writer.extend(columns)
    with TraceWriter(other, TraceHeader(4), coding=coding) as writer:
        for event in range(len(columns)):
            part = columns.part(event, event + 1)
            writer.event(
                TraceKind(int(part.kinds[0])),
                step=int(part.steps[0]),
                phase=int(part.phases[0]),
                layer=int(part.layers[0]),
                at=int(part.at[0]),
                records=part.records,
                flags=part.flags,
            )
    assert one.read_bytes() == other.read_bytes()
    trace = load_trace(one)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(trace, name), getattr(columns, name))


def test_the_hash_knows_no_chunks_and_no_settings(tmp_path, columns):
    whole, pieces, other = tmp_path / "whole", tmp_path / "pieces", tmp_path / "other"
    with TraceWriter(whole, TraceHeader(4)) as writer:
        writer.extend(columns)
    with TraceWriter(pieces, TraceHeader(99, policy="lru", origin="pieces"), coding=Coding.PLAIN) as writer:
        for part in columns.parts(100):
            writer.extend(part)
    with TraceWriter(other, TraceHeader(4)) as writer:
        writer.extend(columns.part(1, len(columns)))
    assert summary(whole).sha256 == summary(pieces).sha256 != summary(other).sha256
    assert (summary(whole).events, summary(whole).units) == (len(columns), len(columns.records))


def test_records_may_become_known_while_writing(tmp_path):
    path = tmp_path / "trace"
    with TraceWriter(path, TraceHeader(0)) as writer:
        writer.extend(EventColumns.build([1, 1], [0, 1]))
        table = RecordTable.of_columns(0, (1, 0, 0), (10, 0, 0), 1, count=2)
        writer.header = replace(writer.header, capacity_frames=2, records=table)
    assert load_trace(path).header.table == table


def test_long_traces_are_several_chunks(tmp_path, header):
    path = tmp_path / "long.trace"
    events = EventColumns.build(np.ones(200_000), np.arange(200_000) % 3)
    with TraceWriter(path, header) as writer:
        writer.extend(events)
        writer.event(TraceKind.END_STEP)
    with path.open("rb") as file:
        sizes = [len(chunk) for chunk in read_chunks(file, read_summary(file))]
    assert sizes == [65536, 65536, 65536, 200_000 - 3 * 65536, 1]
    assert path.stat().st_size < 20_000  # a period of three compresses well


def test_a_writer_that_failed_leaves_no_trace(tmp_path, header):
    path = tmp_path / "failed.trace"

    def fail():
        with TraceWriter(path, header) as writer:
            writer.event(TraceKind.END_STEP)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert list(tmp_path.iterdir()) == []
    with TraceWriter(path, header) as writer, pytest.raises(ValueError, match="layer 65536"):
        writer.extend(EventColumns.build([1], [0], layers=65536))


NUMEL = 3000
CONFIG = StoreConfig(host_budget=150_000, lookahead=30_000)


def stepped(store, *keys):
    store.update({key: np.ones(NUMEL, np.float32) for key in keys}, lr=1e-3)


def test_records_may_be_registered_at_any_time_of_a_recorded_run(tmp_path):
    path = tmp_path / "run.trace"
    with ParameterStore.create(
        tmp_path / "store", [RecordSchema("expert", NUMEL)], CONFIG, trace=path
    ) as store:
        for number in range(6):
            store.register(f"e{number}", "expert", weight=np.full(NUMEL, number, np.float32))
            store.fetch(["e0"]).release()
        stepped(store, "e1", "e2")
        with store.fetch(["e3"]):
            store.register("late", "expert", layer=1)
            store.prefetch(["e0", "e1"])
        stepped(store, "late", "e0")
        store.commit()
        live = store.core.cache.residency.stats()
    header = load_trace(path).header
    assert (header.version, len(header.records), header.late_records) == (7, 7, 6)
    assert live.evictions
    assert replay(path) == live


def test_an_opened_store_goes_on_numbering_its_steps(tmp_path):
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], CONFIG) as store:
        store.register("e0", "expert")
        for _ in range(3):
            stepped(store, "e0")
        store.commit()
    path = tmp_path / "run.trace"
    with ParameterStore.open(tmp_path / "store", CONFIG, trace=path) as store:
        stepped(store, "e0")
        stepped(store, "e0")
    trace = load_trace(path)
    assert (trace.header.version, trace.header.parts) == (7, 10)
    assert trace.steps[trace.kinds == TraceKind.ACCESS].tolist() == [3, 4]
    assert trace.steps[trace.kinds == TraceKind.END_STEP].tolist() == [4, 5]


class Decayed:
    """LFU-decay with its defaults, by Algorithm 1, on keys of one frame: every count halves after 8 steps."""

    def __init__(self, capacity):
        self.capacity, self.counts, self.steps, self.hits = capacity, {}, 0, 0

    def request(self, key):
        if key in self.counts:
            self.hits += 1
        elif len(self.counts) == self.capacity:
            del self.counts[min(self.counts, key=lambda held: (self.counts[held], held))]
        self.counts[key] = self.counts.get(key, 0.0) + 1.0

    def step(self):
        self.steps += 1
        if self.steps % 8 == 0:
            self.counts = {key: count / 2 for key, count in self.counts.items()}


def frames(count):
    """The budget of ``count`` frames, each of which holds the weights of a record of 1,024 parameters."""
    return StoreConfig(host_budget=count * 4096)


@pytest.fixture(scope="module")
def shifting(tmp_path_factory):
    """A store of 36 records."""
    path = tmp_path_factory.mktemp("shifting") / "store"
    with ParameterStore.create(path, [RecordSchema("expert", 1024)], frames(20)) as store:
        for number in range(36):
            store.register(f"e{number:02}", "expert", layer=number % 2)
        store.commit()
    return path


@pytest.mark.parametrize("access", StoreAccess)
def test_what_is_not_asked_for_any_more_decays_where_no_step_is_taken(shifting, tmp_path, access):
    """Eighteen records in turns, and then eighteen others: in memory for 20 the others get in."""
    path, naive = tmp_path / "run.trace", Decayed(20)
    with ParameterStore.open(shifting, frames(20), access=access, trace=path) as store:
        late = 36 if access is StoreAccess.WRITE else 0  # as many as there are records
        for count, number in enumerate([*range(18)] * 50 + [*range(18, 36)] * 50):
            store.fetch([f"e{number:02}"]).release()
            naive.request(number)
            if count >= late:
                naive.step()
        live = store.core.cache.residency.stats()
        clock = "late_accesses" if late else "accesses"
        assert f"clock of lfu-decay: {clock}" in store.status().effective
    assert live.hits == naive.hits > 1700  # 900 of the first half alone, at most
    header = load_trace(path).header
    assert (header.clock, header.version) == ("late_accesses" if late else "accesses", 7)
    assert replay(path) == live
    # The lab counts so, too: each access is a step.
    requests = load_requests(path)
    assert (requests.step_count, requests.info.clock) == (1800 - late, header.clock)
    lfu, lru = (curve.points[0] for curve in curves(requests, ["lfu-decay", "lru"], ["20f"]))
    assert (lfu.hits, lfu.misses, lfu.evictions) == (live.hits, live.misses, live.evictions)
    assert lru.hits == 1800 - 36


def test_from_the_first_step_on_steps_are_the_clock(shifting, tmp_path):
    path = tmp_path / "run.trace"
    with ParameterStore.open(shifting, frames(20), trace=path) as store:
        for number in range(40):
            store.fetch(
                [f"e{number % 30:02}", f"e{number % 30 + 2:02}"]
            ).release()  # of one layer: one access
        store.update({}, lr=1e-3)
        assert "clock of lfu-decay: steps" in store.status().effective
        for number in range(40):
            store.fetch([f"e{number % 30:02}"]).release()
        live = store.core.cache.residency.stats()
    assert replay(path) == live
    assert np.bincount(load_requests(path).steps).tolist() == [37, 1, 1, 1, 40]


def test_a_store_that_takes_steps_counts_steps_alone(shifting, tmp_path):
    path = tmp_path / "run.trace"
    with ParameterStore.open(shifting, frames(20), trace=path) as store:
        for number in range(36):  # no more than there are records
            store.fetch([f"e{number:02}"]).release()
        store.update({}, lr=1e-3)
        for number in range(100):
            store.fetch([f"e{number % 36:02}"]).release()
    assert (load_trace(path).header.clock, load_trace(path).header.version) == ("steps", 7)


def test_an_older_trace_of_fetches_replays_by_its_own_clock(shifting, tmp_path):
    """A version 2 trace has no word on the clock: its policy never heard of a step, and does not now."""
    path = tmp_path / "run.trace"
    with ParameterStore.open(shifting, frames(20), access=StoreAccess.READ, trace=path) as store:
        for number in [*range(18)] * 50 + [*range(18, 36)] * 50:
            store.fetch([f"e{number:02}"]).release()
        live = store.core.cache.residency.stats()
    trace, naive = load_trace(path), Decayed(20)
    with TraceWriter(tmp_path / "old.trace", replace(trace.header, clock="steps", parts=1)) as writer:
        writer.extend(trace)
    for number in [*range(18)] * 50 + [*range(18, 36)] * 50:
        naive.request(number)
    old = replay(tmp_path / "old.trace")
    assert old.hits == naive.hits < live.hits - 500
    assert load_trace(tmp_path / "old.trace").header.version == 2
