"""Replays against worked examples, naive caches and bounds; jobs in parallel."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from cases import NaiveLru, requests_of, simulate
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from python_lru import PythonMru

from tierstore._native import Detail, Oversized
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError
from tierstore.lab.importing import import_trace
from tierstore.lab.miss_curves import curves
from tierstore.lab.requests import load_requests, pin, trace_requests
from tierstore.lab.results import Role
from tierstore.lab.simulate import (
    Contract,
    PolicySpec,
    ReplaySetting,
    in_parallel,
    known_policies,
    replay_one,
)
from tierstore.trace.format import EventColumns, Trace, TraceHeader, TraceRecord

LRU = PolicySpec("lru")


def literature(**columns):
    sets = ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1])
    events = [[4 * layer + expert for expert in chosen] for chosen in sets for layer in range(3)]
    return requests_of(events, layers=list(range(3)) * 5, steps=np.repeat(np.arange(5), 3), **columns)


def test_the_case_from_the_literature():
    (found,) = simulate(literature(), ["lru"], ["6f"], scope=Scope.LAYER, windows=5)
    assert (found.requests, found.hits, found.misses, found.steps) == (30, 12, 18, 5)
    assert (found.contract, found.scope, found.role) == ("event-atomic", "layer", Role.POLICY)
    assert [(layer.requests, layer.misses) for layer in found.layers] == [(10, 6)] * 3
    assert [window.hits for window in found.windows] == [0, 3, 3, 3, 3]
    assert [window.first_step for window in found.windows] == [0, 1, 2, 3, 4]
    assert found.capacity_fraction == 0.5


def test_by_event():
    # Two slots: 0, 1 come; 2 takes the place of 0 (dirty); 0 that of 1; both go on.
    requests = requests_of([[0], [1], [2], [0]], writes=[[1], [0], [0], [0]], frame_bytes=100)
    replayed = replay_one(requests, ReplaySetting(LRU, 2), 0, Detail.EVENTS)
    assert replayed.event_read_bytes.tolist() == [100, 100, 100, 100]
    assert replayed.event_written_bytes.tolist() == [0, 0, 100, 0]
    found = replayed.outcome
    assert (found.read_bytes, found.written_bytes, found.write_backs, found.evictions) == (400, 100, 1, 2)


@pytest.mark.parametrize("frame_bytes", ["0", "4KiB"])
def test_bytes_are_those_of_the_keys(tmp_path, frame_bytes):
    # One key of a million bytes and nine of ten, in turns through a slot: all are read each time.
    source = tmp_path / "keys.csv"
    source.write_text("".join(f"k{i % 10},{10**6 if i % 10 == 0 else 10}\n" for i in range(300)))
    trace = tmp_path / "keys.trace"
    import_trace(source, trace, options={"size": "2", "frame_bytes": frame_bytes})
    requests = load_requests(trace)
    large = int(requests.table.frames.max())
    (found,) = simulate(requests, ["lru"], [large])
    assert found.misses == 300
    assert found.read_bytes == 30 * 10**6 + 270 * 10
    (curve,) = curves(requests, ["lru"], [large])
    assert curve.points[0].read_bytes == found.read_bytes
    # A capacity in bytes counts slots that hold any key; what holds all keys is the whole footprint.
    table = requests.table
    assert table.frames_of(str(table.total_frames * table.frame_bytes)) == table.total_frames


def test_a_warm_up_is_carried_out_and_not_counted():
    requests = requests_of([[0], [1], [0], [2], [0]])
    replayed = replay_one(requests, ReplaySetting(LRU, 2), requests.events_before(2), Detail.EVENTS)
    assert (replayed.outcome.hits, replayed.outcome.misses) == (2, 1)
    assert replayed.event_read_bytes.tolist() == [0, 0, 0, 1, 0]
    assert replayed.outcome.steps == 3


def test_creations_are_neither_hits_nor_misses():
    requests = requests_of([[0], [1], [0], [1]])
    requests.table.stored[0] = False
    (found,) = simulate(requests, ["lru"], ["1f"], windows=4)
    assert (found.requests, found.hits, found.misses, found.read_bytes) == (4, 0, 3, 3)
    assert sum(layer.misses for layer in found.layers) == 3
    assert [window.hits for window in found.windows] == [0, 0, 0, 0]


def test_policies_come_first_then_capacities_whatever_finishes_first():
    rng = np.random.default_rng(0)
    requests = requests_of([[entry] for entry in rng.integers(0, 50, 3000)])
    heard = []
    found = simulate(
        requests,
        ["lru", "lfu-decay:half_life=4"],
        [0.9, 0.1],
        threads=4,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert [(one.policy, one.capacity_frames) for one in found] == [
        *(("lru", 45), ("lru", 5)),
        *(("lfu-decay", 45), ("lfu-decay", 5)),
    ]
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
    alone = simulate(requests, ["lru", "lfu-decay:half_life=4"], [0.9, 0.1], threads=1)
    assert [one.misses for one in found] == [one.misses for one in alone]


@settings(max_examples=share(30))
@given(data=st.data())
def test_against_a_naive_cache(data):
    events = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=30)
    )
    writes = [data.draw(st.lists(st.integers(0, 1), min_size=len(e), max_size=len(e))) for e in events]
    capacity = data.draw(st.integers(4, 8))
    requests = requests_of(events, writes=writes)
    replayed = replay_one(requests, ReplaySetting(LRU, capacity), 0, Detail.EVENTS)
    naive = NaiveLru(capacity)
    expected = [naive.event(*pair) for pair in zip(events, writes, strict=True)]
    assert replayed.event_read_bytes.tolist() == [misses for misses, _ in expected]
    assert replayed.event_written_bytes.tolist() == [written for _, written in expected]
    assert replayed.outcome.misses == sum(misses for misses, _ in expected)


def test_sequential_requests_evict_each_other():
    requests = requests_of([[0, 1, 2]] * 3)
    atomic, sequential = (simulate(requests, ["lru"], ["3f"], contract=contract)[0] for contract in Contract)
    assert (atomic.misses, sequential.misses) == (3, 3)
    split = [simulate(requests, ["lru"], ["2f"], contract=contract)[0] for contract in Contract]
    assert [one.contract for one in split] == ["event-atomic", "sequential"]
    assert split[1].misses == 9


def test_equal_quotas_leave_out_layers_without_requests():
    requests = requests_of([[0, 1], [2], [3]], layers=[0, 2, 3])
    assert ReplaySetting(LRU, 10, Scope.LAYER).quotas(requests) == (4, 0, 3, 3)


SIX = [[2], [2], [1], [0], [1], [2]]  # sizes 3, 2, 1 in 4 frames: Belady misses 5 of them, LFU 4


def test_only_what_no_policy_beats_is_a_bound():
    wide = requests_of(SIX, sizes=[3, 2, 1])
    belady, lfu, unbounded = simulate(wide, ["belady", "lfu", "unbounded"], [4])
    assert (belady.misses, lfu.misses, unbounded.misses) == (5, 4, 3)
    assert (belady.role, lfu.role, unbounded.role) == (Role.CLAIRVOYANT, Role.POLICY, Role.BOUND)
    # Sets that do not fit are split, residents first, and then FIFO may miss less.
    sets = requests_of([[1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 3]])
    belady, bypass, fifo = simulate(sets, ["belady", "belady-bypass", "fifo"], [3])
    assert (belady.misses, fifo.misses) == (9, 8)
    assert (belady.role, bypass.role) == (Role.CLAIRVOYANT, Role.BOUND)
    assert simulate(sets, ["belady"], [6])[0].role is Role.BOUND
    assert simulate(sets, ["belady"], [3], contract=Contract.SEQUENTIAL)[0].role is Role.BOUND
    pinned = pin(sets, [(0, 0)])
    assert [one.role for one in simulate(pinned, ["belady"], [6, 7])] == [Role.CLAIRVOYANT, Role.BOUND]
    # With a quota for each layer the sets of each layer must fit its own.
    layered = requests_of([[0, 1, 2], [3], [0, 1], [4]], layers=[0, 1, 0, 1])
    for quotas, role in (((3, 1), Role.BOUND), ((2, 2), Role.CLAIRVOYANT)):
        assert ReplaySetting(PolicySpec("belady"), 4, Scope.LAYER, layer_quotas=quotas).role(layered) is role


EVENTS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), min_size=2, max_size=14)


@settings(max_examples=share(80))
@given(
    events=EVENTS,
    sizes=st.one_of(st.just([2] * 7), st.lists(st.integers(1, 3), min_size=7, max_size=7)),
    capacity=st.integers(3, 12),
    contract=st.sampled_from(Contract),
    warmup=st.integers(0, 1),
)
def test_no_policy_misses_less_than_what_is_called_a_bound(events, sizes, capacity, contract, warmup):
    asked = replace(requests_of(events, sizes=sizes), oversized=Oversized.BYPASS)
    found = simulate(asked, known_policies(), [capacity], contract=contract, warmup_steps=warmup, threads=1)
    bounds = [one for one in found if one.role is Role.BOUND]
    assert {one.policy for one in bounds} >= {"unbounded"}
    least = min(one.misses for one in found if one.role is Role.POLICY)
    assert all(one.misses <= least for one in bounds)


def test_an_imported_entry_larger_than_the_cache_is_a_miss_and_a_live_one_is_refused():
    records = [TraceRecord(0, (size, 0, 0), (size, 0, 0), 1) for size in (2, 1, 5)]
    columns = EventColumns.build([1] * 6, [0, 1, 2, 0, 1, 2], steps=range(6))
    for origin in ("imported from a.csv (csv)", ""):
        header = TraceHeader(8, policy="lru", records=records, origin=origin)
        requests = trace_requests(Trace(header=header, **vars(columns)))
        if origin:
            (found,) = simulate(requests, ["lru"], ["4f"])
            assert (found.hits, found.misses, found.not_admitted) == (2, 4, 2)
        else:
            with pytest.raises(BudgetError, match="capacity: 4 frames of 1 bytes are too small for lru"):
                simulate(requests, ["lru"], ["4f"])


def test_every_policy_that_is_known_runs():
    rng = np.random.default_rng(0)
    events = [sorted(rng.choice(12, 3, replace=False).tolist()) for _ in range(200)]
    requests = requests_of(events)
    for found in simulate(requests, known_policies(), [0.5]):
        assert 0 < found.misses < found.requests == 600


class Mru(PythonMru):
    """Raises when it is told to."""

    def __init__(self, fail: float = 0.0) -> None:
        super().__init__()
        self.fail = fail

    def tick(self, clock) -> None:
        if self.fail:
            raise KeyError("told to")


def test_a_policy_of_ones_own():
    # A loop over four through three slots: LRU never hits; MRU keeps two of them.
    requests = requests_of([[step % 4] for step in range(40)])
    mine = f"{__name__}:Mru"
    lru, mru = simulate(requests, ["lru", mine], ["3f"])
    assert lru.hits == 0
    assert mru.hits == 24
    assert mru.policy == mine
    with pytest.raises(KeyError, match="told to"):
        simulate(requests, [f"{mine}:fail=1"], ["3f"])


def test_results_come_in_the_order_of_jobs():
    assert in_parallel([(1.0, lambda n=n: n * n) for n in range(20)], threads=3) == [n * n for n in range(20)]
    assert in_parallel([], threads=2) == []


def test_the_longest_begins_first():
    begun = []
    times = [1.0, 5.0, 3.0, 5.0]
    in_parallel([(time, lambda n=n: begun.append(n)) for n, time in enumerate(times)], threads=1)
    assert begun == [1, 3, 2, 0]


def test_jobs_run_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    assert in_parallel([(1.0, lambda: both.wait() >= 0)] * 2, threads=2) == [True, True]


def test_progress_and_errors():
    heard = []
    in_parallel([(1.0, int)] * 3, threads=2, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]

    def fail():
        raise KeyError("a job")

    later = []

    def slow():
        time.sleep(0.01)
        later.append(1)

    with pytest.raises(KeyError, match="a job"):
        in_parallel([(2.0, fail), *[(1.0, slow)] * 50], threads=1)
    assert len(later) < 50
