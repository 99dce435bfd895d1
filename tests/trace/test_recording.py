"""Traces of stores: records that are registered late, and stores that were opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tierstore.lab.requests import load_requests
from tierstore.lab.simulate import simulate
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.store.config import StoreAccess
from tierstore.trace.format import TraceKind
from tierstore.trace.reader import load_trace
from tierstore.trace.replay import replay
from tierstore.trace.writer import TraceWriter

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
    assert (header.version, len(header.records), header.late_records) == (3, 7, 6)
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
    assert trace.header.version == 2
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
    assert (header.clock, header.version) == ("late_accesses" if late else "accesses", 5)
    assert replay(path) == live
    # The lab counts so, too: each access is a step.
    requests = load_requests(path)
    assert (requests.step_count, requests.info.clock) == (1800 - late, header.clock)
    lfu, lru = simulate(requests, ["lfu-decay", "lru"], ["20f"])
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
    assert (load_trace(path).header.clock, load_trace(path).header.version) == ("steps", 2)


def test_an_older_trace_of_fetches_replays_by_its_own_clock(shifting, tmp_path):
    """A version 2 trace has no word on the clock: its policy never heard of a step, and does not now."""
    path = tmp_path / "run.trace"
    with ParameterStore.open(shifting, frames(20), access=StoreAccess.READ, trace=path) as store:
        for number in [*range(18)] * 50 + [*range(18, 36)] * 50:
            store.fetch([f"e{number:02}"]).release()
        live = store.core.cache.residency.stats()
    trace, naive = load_trace(path), Decayed(20)
    with TraceWriter(tmp_path / "old.trace", replace(trace.header, clock="steps")) as writer:
        writer.extend(trace)
    for number in [*range(18)] * 50 + [*range(18, 36)] * 50:
        naive.request(number)
    old = replay(tmp_path / "old.trace")
    assert old.hits == naive.hits < live.hits - 500
    assert load_trace(tmp_path / "old.trace").header.version == 2
