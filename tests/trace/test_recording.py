"""Traces of stores: records that are registered late, and stores that were opened."""

from __future__ import annotations

import numpy as np

from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.trace.format import TraceKind
from tierstore.trace.reader import load_trace
from tierstore.trace.replay import replay

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
