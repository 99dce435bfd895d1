"""The bounds against a brute-force optimum on small cases, and worked by hand."""

import itertools

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import columns

from tierstore import _native
from tierstore._native import Contract, GroupOrder, Scope


def misses(events, policy, capacity, contract=Contract.ATOMIC, **keywords):
    result = _native.simulate(
        *columns(events), policy=policy, capacity_frames=capacity, contract=contract, **keywords
    )
    return result["misses"]


def fewest(sets, capacity, sizes, forced, warmup=0):
    """Every choice of what to keep, after every set; ``forced``: the set must be in the cache while it is used. Misses of
    the first ``warmup`` sets are not counted."""

    def room_for(kept):
        return sum(sizes[entry] for entry in kept) <= capacity

    best = {frozenset(): 0}
    for number, asked in enumerate(sets):
        after = {}
        for cache, count in best.items():
            total = count + (len(asked - cache) if number >= warmup else 0)
            have = cache | asked
            for size in range(len(have) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(have), size)):
                    if room_for(kept) and (not forced or asked <= kept):
                        after[kept] = min(total, after.get(kept, total))
        best = after
    return min(best.values())


def pieces(event, capacity):
    return [frozenset(event[i : i + capacity]) for i in range(0, len(event), capacity)]


def fewest_residents_first(events, capacity):
    """As ``fewest``, forced, with entries of one size; what is in the cache is served first where a set is split."""
    best = {frozenset(): 0}
    for event in events:
        after = {}
        for cache, count in best.items():
            order = [e for e in event if e in cache] + [e for e in event if e not in cache]
            reached = {cache: count}
            for asked in pieces(order if len(event) > capacity else event, capacity):
                further = {}
                for held, so_far in reached.items():
                    total = so_far + len(asked - held)
                    for size in range(capacity - len(asked) + 1):
                        for rest in itertools.combinations(sorted(held - asked), size):
                            kept = asked | frozenset(rest)
                            further[kept] = min(total, further.get(kept, total))
                reached = further
            for kept, total in reached.items():
                after[kept] = min(total, after.get(kept, total))
        best = after
    return min(best.values())


EVENTS = st.lists(st.lists(st.integers(0, 5), max_size=5, unique=True), max_size=9)


@settings(max_examples=share(70))
@given(events=EVENTS, capacity=st.integers(1, 4))
def test_both_are_the_fewest_misses_that_there_can_be(events, capacity):
    singles = [frozenset([entry]) for event in events for entry in event]
    ones = [1] * 6
    whole = [frozenset(event) for event in events]
    assert misses(events, "belady", capacity, Contract.SEQUENTIAL) == fewest(singles, capacity, ones, True)
    assert misses(events, "belady-bypass", capacity, Contract.SEQUENTIAL) == fewest(
        singles, capacity, ones, False
    )
    in_key_order = [piece for event in events for piece in pieces(event, capacity)]
    split = misses(events, "belady", capacity, group_order=GroupOrder.KEY)
    assert split == fewest(in_key_order, capacity, ones, True)
    # Which group comes last, and so stays, depends on what was kept: where sets are split it is a heuristic.
    found, least = misses(events, "belady", capacity), fewest_residents_first(events, capacity)
    if all(len(event) <= capacity for event in events):
        assert found == least
    assert misses(events, "belady-bypass", capacity) <= least <= found
    assert misses(events, "belady-bypass", capacity) == fewest(whole, capacity, ones, False)


@settings(max_examples=share(70))
@given(
    events=EVENTS, capacity=st.integers(5, 7), warmup=st.integers(0, 6), contract=st.sampled_from(Contract)
)
def test_after_a_warm_up_no_choice_misses_less_whatever_was_done_in_it(events, capacity, warmup, contract):
    sets = [frozenset(event) for event in events]
    if contract is Contract.SEQUENTIAL:
        capacity -= 4
        events = [[entry] for event in events for entry in event]
        sets = [frozenset(event) for event in events]
    least = {forced: fewest(sets, capacity, [1] * 6, forced, warmup) for forced in (True, False)}
    assert misses(events, "belady-bypass", capacity, contract, warmup_events=warmup) == least[False]
    # It need not begin with the last set of the warm-up, which a cache must hold that admits what is asked for.
    found = misses(events, "belady", capacity, contract, warmup_events=warmup)
    assert found <= least[True]
    if not warmup:
        assert found == least[True]


def test_a_warm_up_that_a_policy_spends_better_than_belady_would():
    # Two frames. Over all five requests it is right to give 1 up for 2, as 3 comes before it; but what comes after the
    # warm-up is 1 alone, which LFU-decay keeps.
    keys = [[1], [3], [2], [1], [1], [3]]
    assert misses(keys, "lfu-decay", 2, warmup_events=4) == misses(keys, "belady", 2, warmup_events=4) == 0


@settings(max_examples=share(40))
@given(events=EVENTS, capacity=st.integers(5, 9), sizes=st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_with_unequal_sizes_no_heuristic_beats_the_optimum(events, capacity, sizes):
    frames = np.array(sizes, np.uint32)
    singles = [frozenset([entry]) for event in events for entry in event]
    for policy, forced in (("belady", True), ("belady-bypass", False)):
        found = misses(events, policy, capacity, Contract.SEQUENTIAL, sizes=frames)
        assert found >= fewest(singles, capacity, sizes, forced)


@settings(max_examples=share(60))
@given(
    events=st.lists(st.lists(st.integers(0, 11), max_size=4, unique=True), max_size=60),
    capacity=st.integers(4, 10),
    contract=st.sampled_from(Contract),
)
def test_no_policy_beats_the_bounds_and_they_are_in_order(events, capacity, contract):
    bounds = [
        misses(events, policy, capacity, contract) for policy in ("unbounded", "belady-bypass", "belady")
    ]
    assert bounds[0] == len({entry for event in events for entry in event})
    assert bounds == sorted(bounds)
    assert all(misses(events, p, capacity, contract) >= bounds[2] for p in _native.policy_names())


def test_worked_by_hand():
    # Two frames. Forced: 0 1 miss; 2 takes the place of 1 (next at 4; 0 comes at 3); 0 hits; 1 takes the place
    # of 2, which never comes again; 0 hits. With the choice, 2 is not kept at all: 1 hits as well.
    keys = [[0], [1], [2], [0], [1], [0]]
    assert misses(keys, "belady", 2) == 4
    assert misses(keys, "belady-bypass", 2) == 3
    assert misses(keys, "unbounded", 2) == 3


def test_what_is_not_kept_is_no_eviction_but_is_written_back():
    result = _native.simulate(
        *columns([[0], [1], [2], [0], [1]]),
        np.array([0, 0, 1, 1, 0], np.uint8),
        policy="belady-bypass",
        capacity_frames=2,
    )
    assert (result["misses"], result["evictions"], result["write_backs"]) == (3, 0, 1)


def test_sets_larger_than_the_cache_pass_by():
    events = [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1]]
    # The four do not fit two frames: forced, they come as two pairs and every pair evicts the other.
    assert misses(events, "belady", 2) == 10
    assert misses(events, "belady-bypass", 2) == 4 + 2


def test_each_layer_has_a_future_of_its_own():
    result = _native.simulate(
        *columns([[0], [1], [2], [3], [0], [1], [4], [5], [0], [1]]),
        layers=np.array([0, 1] * 5, np.uint32),
        policy="belady",
        capacity_frames=3,
        scope=Scope.LAYER,
        layer_quotas=[1, 2],
    )
    # Layer 0 has one frame for 0 2 0 4 0; layer 1 two for 1 3 1 5 1.
    assert result["layer_misses"].tolist() == [5, 3]


@pytest.mark.parametrize("policy", _native.bound_names())
def test_bounds_have_no_options(policy):
    with pytest.raises(ValueError, match=f"'{policy}' has no option 'beta'; it has: none"):
        _native.simulate(*columns([[0]]), policy=policy, options={"beta": 1}, capacity_frames=1)


def test_bounds_are_none_of_the_policies():
    assert not set(_native.bound_names()) & set(_native.policy_names())
