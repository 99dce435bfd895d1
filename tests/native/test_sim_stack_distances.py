"""LRU at every capacity in one pass: by hand, against a list, and against the simulator one capacity at a time."""

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import columns, singles, zipf

from tierstore import _native
from tierstore._native import Contract


def test_worked_by_hand():
    # a b c a a b: a is found below b and c, then on top; b below a and c.
    found = _native.stack_distances(*columns([[0], [1], [2], [0], [0], [1]]))
    assert (found["requests"], found["cold"], found["largest_event"]) == (6, 3, 1)
    assert found["depths"].tolist() == [0, 1, 0, 2]
    assert found["write_backs"].size == 0


def test_depths_in_a_set_are_those_from_before_the_set():
    # {0, 1}, {2}, {0, 1}: as a set 0 and 1 are found at depths 3 and 2; one after another 0 goes on top first.
    events = columns([[0, 1], [2], [0, 1]])
    assert _native.stack_distances(*events)["depths"].tolist() == [0, 0, 1, 1]
    sequential = _native.stack_distances(*events, contract=Contract.SEQUENTIAL)
    assert sequential["depths"].tolist() == [0, 0, 0, 2]
    assert (_native.stack_distances(*events)["largest_event"], sequential["largest_event"]) == (2, 1)


def test_write_backs_by_hand():
    # 0 is written, falls to depth 3 and is asked for again: caches of 1 and 2 frames wrote it back. At the end
    # it is below 2, not evicted by 2 frames, and was not written since.
    written = np.array([1, 0, 0, 0, 0], np.uint8)
    found = _native.stack_distances(*columns([[0], [1], [2], [0], [2]]), written)
    assert found["write_backs"].tolist() == [0, 1, 1, 0]


def misses_at(found, capacity):
    return found["cold"] + found["depths"][capacity + 1 :].sum()


@settings(max_examples=share(60))
@given(
    events=st.lists(st.lists(st.integers(0, 12), max_size=5, unique=True), max_size=80),
    contract=st.sampled_from(Contract),
    warmup=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_capacity_is_the_simulator_at_it(events, contract, warmup, seed):
    offsets, entries = columns(events)
    written = (np.random.default_rng(seed).random(len(entries)) < 0.3).astype(np.uint8)
    keywords = {"contract": contract, "warmup_events": warmup}
    found = _native.stack_distances(offsets, entries, written, **keywords)
    # Inclusion holds from the largest set on; below, a set is split and its parts evict one another.
    for capacity in range(max(1, found["largest_event"]), len(found["depths"])):
        result = _native.simulate(
            offsets, entries, written, policy="lru", capacity_frames=capacity, **keywords
        )
        assert result["requests"] == found["requests"]
        assert result["misses"] == misses_at(found, capacity)
        assert result["write_backs"] == found["write_backs"][capacity]


def test_a_log_that_is_squeezed_many_times_keeps_its_order():
    keys = zipf(300, 30_000, 0.6, 4)
    stack, depths = [], np.zeros(301, np.uint64)
    for key in keys.tolist():
        if key in stack:
            depths[len(stack) - stack.index(key)] += 1
            stack.remove(key)
        stack.append(key)
    found = _native.stack_distances(*singles(keys))
    assert found["depths"].tolist() == depths[: len(found["depths"])].tolist()
    assert found["cold"] == len(stack)


@pytest.mark.parametrize("events", [[[0, 1, 0]], [[0], [1], [3, 2, 2]]])
def test_an_entry_twice_in_a_set_is_refused(events):
    with pytest.raises(ValueError, match=f"event {len(events) - 1} asks for an entry twice"):
        _native.stack_distances(*columns(events))
    assert _native.stack_distances(*columns(events), contract=Contract.SEQUENTIAL)["requests"] >= 3


def test_nothing_asked_for_is_nothing_found():
    found = _native.stack_distances(*columns([]), np.zeros(0, np.uint8))
    assert (found["requests"], found["cold"], found["depths"].tolist()) == (0, 0, [0])
