"""The simulator on cases small enough to work by hand, and what it refuses."""

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import columns, zipf

from tierstore import _native
from tierstore._native import Contract, Detail, GroupOrder, Oversized, Scope


def run(events, capacity, policy="lru", **keywords):
    kinds = {**dict.fromkeys(("writes", "phases", "groups", "pinned"), np.uint8), "bytes": np.uint64}
    keywords = {
        key: np.array(value, kinds.get(key, np.uint32))
        if isinstance(value, list) and key != "layer_quotas"
        else value
        for key, value in keywords.items()
    }
    return _native.simulate(*columns(events), policy=policy, capacity_frames=capacity, **keywords)


def test_the_case_from_the_literature():
    # 3 layers x 4 experts, 2 slots a layer, LRU: see test_cache_residency.py for the count.
    sets = ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1])
    result = run(
        [[4 * layer + expert for expert in chosen] for chosen in sets for layer in range(3)],
        6,
        layers=[0, 1, 2] * 5,
        steps=[step for step in range(5) for _ in range(3)],
        scope=Scope.LAYER,
        layer_quotas=[2, 2, 2],
    )
    assert (result["requests"], result["hits"], result["misses"]) == (30, 12, 18)
    assert result["layer_hits"].tolist() == [4, 4, 4]
    assert result["layer_misses"].tolist() == [6, 6, 6]
    assert result["step_requests"].tolist() == [6] * 5
    assert result["step_misses"].tolist() == [6, 3, 3, 3, 3]
    assert result["evictions"] == 12


def test_no_entry_of_a_set_evicts_another_and_one_after_another_they_do():
    events = [[0, 1, 2], [3, 0]]
    # As a set: 3 takes the place of 1, for 0 is in use. One by one: 3 evicts 0, and 0 then 1.
    assert run(events, 3)["misses"] == 4
    assert run(events, 3, contract=Contract.SEQUENTIAL)["misses"] == 5


def test_a_set_that_does_not_fit_is_split_in_the_order_given():
    # Groups of two: {0, 1} {2, 3} {4}; then {4, 3} hit, for 2 was the older of the two that 4 could replace.
    result = run([[0, 1, 2, 3, 4], [4, 3]], 2)
    assert (result["hits"], result["misses"], result["evictions"]) == (2, 5, 3)


def test_what_was_written_is_written_back_when_it_leaves():
    # 0 is written, read again, evicted (written back); it comes back clean and leaves for nothing.
    result = run([[0], [0], [1], [0], [2]], 1, writes=[1, 0, 0, 0, 0], steps=[4, 4, 7, 7, 9])
    assert (result["evictions"], result["write_backs"]) == (3, 1)
    assert result["step_write_backs"].tolist() == [0, 1, 0]
    assert result["step_requests"].tolist() == [2, 2, 1]


def test_sizes_are_in_frames():
    # 3 frames for 3 make 1 and 2 leave; then 1 (1 frame) makes 3 leave, which was written.
    result = run([[0], [1], [2], [0]], 3, sizes=[1, 2, 3], writes=[0, 0, 1, 0])
    assert (result["misses"], result["missed_frames"]) == (4, 7)
    assert (result["evictions"], result["write_backs"], result["written_frames"]) == (3, 1, 3)
    assert (result["missed_bytes"], result["written_bytes"]) == (7, 3)


def test_bytes_are_those_of_each_entry():
    result = run([[0], [1], [2], [0]], 1, bytes=[5, 70, 1 << 40], writes=[0, 0, 1, 0], steps=[0, 1, 1, 2])
    assert (result["missed_frames"], result["written_frames"]) == (4, 1)
    assert (result["missed_bytes"], result["written_bytes"]) == (80 + (1 << 40), 1 << 40)
    with pytest.raises(ValueError, match="column 'bytes': expected 2 values"):
        run([[0], [1]], 1, sizes=[1, 1], bytes=[5])


def test_a_record_is_never_split():
    # Both entries of a record are used at once, whatever the order of records.
    with pytest.raises(_native.CapacityError) as error:
        run([[0, 1, 2]], 2, records=[0, 1, 1], sizes=[1, 1, 2])
    assert error.value.needed_frames == 3
    assert run([[0, 1, 2]], 3, records=[0, 1, 1], sizes=[1, 1, 2])["evictions"] == 1
    # Only an event can use them together.
    assert (
        run([[0, 1, 2]], 2, records=[0, 1, 1], sizes=[1, 1, 2], contract=Contract.SEQUENTIAL)["misses"] == 3
    )
    assert run([[1], [2]], 2, records=[0, 1, 1], sizes=[1, 1, 2])["misses"] == 2


def test_what_is_pinned_never_leaves():
    result = run([[0], [1], [2], [1], [0]], 2, pinned=[1, 0, 0])
    # 0 stays; 1 and 2 share the other frame.
    assert (result["hits"], result["misses"]) == (1, 4)
    with pytest.raises(_native.CapacityError) as error:
        run([[0], [1], [2]], 2, pinned=[1, 1, 0])
    assert error.value.needed_frames == 3


def test_the_warm_up_is_carried_out_and_not_counted():
    result = run([[0], [1], [0], [1], [2]], 2, steps=[0, 0, 1, 1, 1], layers=[0, 0, 0, 1, 1], warmup_events=3)
    assert (result["requests"], result["hits"], result["misses"], result["evictions"]) == (2, 1, 1, 1)
    assert result["step_requests"].tolist() == [0, 2]
    assert (result["layer_hits"].tolist(), result["layer_misses"].tolist()) == ([0, 1], [0, 1])
    everything = run([[0], [1]], 2, steps=[0, 1], warmup_events=9)
    assert (everything["requests"], everything["step_misses"].tolist()) == (0, [0, 0])


@pytest.mark.parametrize("contract", Contract)
def test_bytes_by_event_when_asked_for(contract):
    events = [[0, 1], [], [2], [0]]
    keywords = {"sizes": [1, 2, 3], "writes": [0, 1, 0, 0], "contract": contract}
    result = run(events, 3, detail=_native.Detail.EVENTS, **keywords)
    assert result["event_missed_bytes"].tolist() == [3, 0, 3, 1]
    assert result["event_written_bytes"].tolist() == [0, 0, 2, 0]
    keywords["bytes"] = [10, 2000, 300]
    result = run(events, 3, detail=_native.Detail.EVENTS, **keywords)
    assert result["event_missed_bytes"].tolist() == [2010, 0, 300, 10]
    assert result["event_written_bytes"].tolist() == [0, 0, 2000, 0]
    late = run(events, 3, detail=_native.Detail.EVENTS, warmup_events=3, **keywords)
    assert late["event_missed_bytes"].tolist() == [0, 0, 0, 10]
    assert (late["missed_bytes"], late["written_bytes"]) == (10, 0)
    assert run(events, 3, **keywords)["event_missed_bytes"].size == 0


def test_layers_are_those_of_events_or_else_of_entries():
    events = [[0, 1], [2], [0]]
    assert run(events, 3)["layer_hits"].size == 0
    assert run(events, 3, layers=[1, 0, 1])["layer_misses"].tolist() == [1, 2]
    assert run(events, 3, entry_layers=[1, 0, 0])["layer_misses"].tolist() == [2, 1]
    by_entry = run(
        events,
        3,
        entry_layers=[1, 0, 0],
        scope=Scope.LAYER,
        layer_quotas=[1, 1],
        contract=Contract.SEQUENTIAL,
    )
    # Layer 0 has one frame for 1 and 2, layer 1 one for 0.
    assert by_entry["layer_hits"].tolist() == [0, 1]
    assert by_entry["layer_misses"].tolist() == [2, 1]


def test_steps_are_the_clock_of_decay():
    # Halved at each new step, whatever its number: 0 has 3 hits, then .75; 1 has 1, then .5, and goes for 2. With
    # a step for each request 0 comes to 1.75, then .4375, and 1 to .5: 0 goes, and 1 hits.
    options = {"beta": 0.5, "interval": 1}
    keys = [[0], [0], [0], [1], [2], [1]]
    assert run(keys, 2, "lfu-decay", options=options, steps=[0, 0, 0, 2, 3, 3])["hits"] == 2
    assert run(keys, 2, "lfu-decay", options=options, steps=[0, 0, 0, 1, 2, 2])["hits"] == 2
    assert run(keys, 2, "lfu-decay", options=options, steps=[0, 1, 2, 3, 4, 4])["hits"] == 3


def test_a_policy_written_in_python_counts_as_its_native_twin():
    keys = zipf(50, 3000, 0.7, 2)
    offsets = np.arange(0, 3001, 3, dtype=np.uint64)
    sizes = np.arange(50, dtype=np.uint32) % 4 + 1
    layers = np.zeros(1000, np.uint32)

    def result(policy, **keywords):
        found = _native.simulate(
            offsets, keys, (keys % 2).astype(np.uint8), layers, sizes=sizes,
            policy=policy, capacity_frames=60, contract=Contract.SEQUENTIAL, **keywords,
        )  # fmt: skip
        return {name: np.asarray(value).tolist() for name, value in found.items()}

    assert result("python_lru:PythonLru") == result("lru")
    with pytest.raises(ZeroDivisionError, match="as the test wants it"):
        result("python_lru:PythonLru", options={"fails_at": int(keys[7])})
    with pytest.raises(ValueError, match="no_such_module"):
        result("no_such_module:Lru")


def test_nothing_asked_for_counts_nothing():
    assert run([], 0)["requests"] == 0
    assert run([[], []], 0, steps=[1, 2])["step_requests"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"writes": [1]}, "column 'writes': expected 3 values, one for each entry asked for, got 1"),
        ({"writes": []}, "column 'writes': expected values, or to be left out"),
        ({"sizes": []}, "column 'sizes': expected values, or to be left out"),
        ({"layers": [1]}, "column 'layers': expected 2 values, one for each event, got 1"),
        ({"phases": [1, 1, 1]}, "column 'phases': expected 2 values"),
        ({"phases": [1, 6]}, "column 'phases': no phase 6"),
        ({"steps": [1]}, "column 'steps': expected 2 values"),
        ({"steps": [1, 0]}, "column 'steps': expected steps that never decrease"),
        ({"sizes": [1, 1]}, "column 'entries': entry 2, and there are 2"),
        ({"sizes": [1, 0, 1]}, "column 'sizes': expected at least 1 frame"),
        (
            {"sizes": [1] * 3, "pinned": [0] * 4},
            "column 'sizes': expected 4 values, one for each entry, got 3",
        ),
        ({"records": [0] * 2, "pinned": [0] * 3}, "column 'records': expected 3 values"),
        ({"entry_layers": [0, 0, 1 << 16]}, "layer 65536: layers are numbered up to 65535"),
        ({"scope": Scope.LAYER}, "layer quotas belong to layer scope"),
        (
            {"scope": Scope.LAYER, "layer_quotas": [3]},
            "layer scope needs the column 'layers' or 'entry_layers'",
        ),
        (
            {"scope": Scope.LAYER, "layer_quotas": [3, 3], "layers": [0, 1]},
            "quotas are 6 frames, the capacity 3",
        ),
        (
            {"scope": Scope.LAYER, "layer_quotas": [3], "layers": [0, 1]},
            "entry 2 is of layer 1, and there are",
        ),
        (
            {"scope": Scope.LAYER, "layer_quotas": [2, 1], "entry_layers": [0, 1, 1]},
            "event 0: entry 1 is not of layer 0, and the scope is the layer",
        ),
        ({"policy": "mru"}, "unknown cache policy 'mru'"),
        ({"options": {"beta": 0.5}}, "'lru' has no option 'beta'"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(keywords, message):
    with pytest.raises(ValueError, match=message):
        run([[0, 1], [2]], 3, **keywords)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "column 'offsets': expected one value more than events, from 0 to the 2 entries"),
        ([0], "column 'offsets': expected one value more"),
        ([1, 2], "column 'offsets': expected one value more"),
        ([0, 2, 1, 2], "column 'offsets': event 1 ends before it begins"),
    ],
)
def test_offsets_that_are_no_offsets_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        _native.simulate(
            np.array(offsets, np.uint64), np.array([0, 1], np.uint32), policy="lru", capacity_frames=3
        )


def test_entries_that_are_not_numbered_densely_are_refused_before_memory_is_taken_for_them():
    with pytest.raises(
        ValueError, match="column 'entries': 4294967296 entries, numbered from 0 on; 536870912 are"
    ):
        run([[0], [2**32 - 1]], 2)


@pytest.mark.parametrize("capacity", [1, 2, 9])
def test_an_entry_twice_in_a_set_is_refused(capacity):
    with pytest.raises(ValueError, match="event 1 asks for entry 1 twice, and atomic events are sets"):
        run([[0], [0, 1, 2, 1]], capacity)


def test_arrays_are_not_converted():
    with pytest.raises(TypeError):
        _native.simulate(
            np.array([0, 1], np.int64), np.array([0], np.uint32), policy="lru", capacity_frames=1
        )


def test_one_entry_that_does_not_fit_says_what_it_needs():
    with pytest.raises(_native.CapacityError) as error:
        run([[0]], 3, sizes=[4])
    assert error.value.needed_frames == 4
    with pytest.raises(_native.CapacityError) as error:
        run([[0]], 4, "lfu-decay", options={"variant": "paper"}, sizes=[4])
    assert error.value.needed_frames == 5  # one stays empty


EVENTS = st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), min_size=1, max_size=25)
COUNTS = ("misses", "evictions", "write_backs", "missed_bytes", "written_bytes", "starved")


@settings(max_examples=share(120))
@given(
    events=EVENTS,
    sizes=st.lists(st.integers(1, 9), min_size=7, max_size=7),
    capacity=st.integers(1, 8),
    policy=st.sampled_from([*_native.policy_names(), *_native.bound_names()]),
    contract=st.sampled_from(Contract),
    order=st.sampled_from(GroupOrder),
)
def test_what_is_larger_than_the_cache_is_as_if_it_were_not_asked_for(
    events, sizes, capacity, policy, contract, order
):
    """A miss each, written through where it is dirty; all others are what they are without it."""
    keywords = {"policy": policy, "sizes": sizes, "contract": contract, "group_order": order}
    large = {entry for entry in range(7) if sizes[entry] > capacity and policy != "unbounded"}
    if policy in ("next-use", "learned-use"):  # they learn from all that is asked for
        events = [[entry for entry in event if entry not in large] for event in events]
    writes = [entry % 2 for event in events for entry in event]
    found = run(events, capacity, writes=writes, oversized=Oversized.BYPASS, detail=Detail.EVENTS, **keywords)
    rest = [[entry for entry in event if entry not in large] for event in events]
    kept = run(rest, capacity, writes=[entry % 2 for event in rest for entry in event], **keywords)
    passed = [entry for event in events for entry in event if entry in large]
    written = [entry for entry in passed if entry % 2]
    expected = {name: kept[name] for name in COUNTS}
    expected["misses"] += len(passed)
    expected["missed_bytes"] += sum(sizes[entry] for entry in passed)
    expected["write_backs"] += len(written)
    expected["written_bytes"] += sum(sizes[entry] for entry in written)
    assert {name: found[name] for name in COUNTS} == expected
    assert found["not_admitted"] == len(passed)
    assert int(found["event_misses"].sum()) == found["misses"]
    assert int(found["event_write_backs"].sum()) == found["write_backs"]


def test_what_does_not_fit_beside_the_rest_of_its_record_is_not_admitted():
    # Record 0 has entries 0 and 1 of 1 and 2 frames, which a cache of 2 cannot hold at once.
    keywords = {"records": [0, 0, 1], "sizes": [1, 2, 1], "oversized": Oversized.BYPASS}
    found = run([[0], [0, 1], [2], [0, 1]], 2, **keywords)
    # 0 comes and stays beside 2; 1 passes by, twice.
    assert (found["hits"], found["misses"], found["not_admitted"], found["evictions"]) == (2, 4, 2, 0)
    # Where 1 is there already, 0 is what passes by.
    found = run([[1], [0, 1]], 2, **keywords)
    assert (found["hits"], found["misses"], found["not_admitted"]) == (1, 2, 1)


def test_a_quota_may_be_too_small_for_what_another_would_hold():
    keywords = {"layers": [0, 1, 0, 1], "scope": Scope.LAYER, "sizes": [2, 2]}
    found = run([[0], [1]] * 2, 3, layer_quotas=[2, 1], oversized=Oversized.BYPASS, **keywords)
    assert (found["hits"], found["not_admitted"]) == (1, 2)
    assert (found["layer_hits"].tolist(), found["layer_misses"].tolist()) == ([1, 0], [1, 2])
    with pytest.raises(_native.CapacityError):
        run([[0], [1]] * 2, 3, layer_quotas=[2, 1], **keywords)


def test_a_pin_that_does_not_fit_is_refused_even_so():
    with pytest.raises(_native.CapacityError):
        run([[0], [1]], 2, sizes=[3, 1], pinned=[1, 0], oversized=Oversized.BYPASS)
    found = run([[0], [1]] * 2, 2, sizes=[1, 2], pinned=[1, 0], oversized=Oversized.BYPASS)
    assert (found["hits"], found["not_admitted"]) == (1, 2)
