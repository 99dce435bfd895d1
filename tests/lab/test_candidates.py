"""The capacity split between layers."""

from dataclasses import replace
from itertools import product

import numpy as np
from cases import requests_of
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.config import Scope
from tierstore.lab.candidates import (
    Candidate,
    cache_configuration,
    greedy_split,
    layer_curves,
    lower_hull,
    split_capacity,
    starting_grid,
)
from tierstore.lab.costs import Objective
from tierstore.lab.simulate import PolicySpec, ReplaySetting, replay_each
from tierstore.store import RecordSchema, StoreConfig, WeightFormat
from tierstore.store.opening import check_budget, minimum_host_budget, record_frame_bytes
from tierstore.trace.replay import quotas_by_layer

LRU = PolicySpec("lru")


def test_hull_by_hand():
    # (2, 9) lies above the line from (1, 10) to (3, 4); after (4, 3) nothing falls.
    assert lower_hull([(1, 10), (2, 9), (3, 4), (4, 3), (5, 3)]) == [(1, 10), (3, 4), (4, 3)]


def test_split_by_hand():
    # A first frame for each. Then layer 1 saves 5 a frame for two frames, layer 0 saves 3 for one.
    first, second = [(1, 8), (2, 5), (4, 4)], [(1, 20), (3, 10), (4, 9)]
    assert greedy_split([first, second, []], 3) == (1, 2, 0)
    assert greedy_split([first, second, []], 5) == (2, 3, 0)
    # What nobody gains by is shared out: 91 frames.
    assert greedy_split([first, second, []], 99) == (4 + 46, 4 + 45, 0)


@settings(max_examples=share(40))
@given(
    falls=st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=5), min_size=2, max_size=3),
    capacity=st.integers(3, 14),
)
def test_greedy_is_the_best_split_of_convex_curves(falls, capacity):
    curves = []
    for layer in falls:
        misses = np.concatenate(([200], 200 - np.cumsum(sorted(layer, reverse=True))))
        curves.append([(frames + 1, float(miss)) for frames, miss in enumerate(misses)])
    found = greedy_split(curves, capacity)
    assert sum(found) == capacity
    cost = sum(dict(curve)[min(quota, len(curve))] for curve, quota in zip(curves, found, strict=True))
    best = min(
        sum(curve[index][1] for curve, index in zip(curves, split, strict=True))
        for split in product(*(range(len(curve)) for curve in curves))
        if sum(index + 1 for index in split) <= capacity
    )
    assert cost == best


def with_records_of(requests, frames):
    """The same requests, of records that have other groups as well: ``frames`` each in all."""
    table = requests.table
    return replace(requests, table=replace(table, record_frames=np.full(len(table), frames, np.uint32)))


def uneven():
    """Layer 0 asks for 4 of 4 entries over and over, layer 2 for any of 40."""
    rng = np.random.default_rng(0)
    events, layers = [], []
    for step in range(1500):
        events += [[step % 4], [4 + int(rng.integers(40))]]
        layers += [0, 2]
    return requests_of(events, layers=layers, steps=np.repeat(np.arange(1500), 2))


def test_curves_of_layers():
    curves = layer_curves(uneven(), LRU)
    assert curves[1] == []
    frames, misses = zip(*curves[0], strict=True)
    assert (frames[-1], misses[-1]) == (4, 4)
    assert misses[0] == 1500  # a loop over 4 through 2 slots
    assert [y for _, y in curves[2]] == sorted((y for _, y in curves[2]), reverse=True)


def test_a_layer_needs_room_for_the_largest_record_with_all_of_its_groups():
    assert uneven().table.least_quotas.tolist() == [2, 0, 2]
    wide = with_records_of(uneven(), 7)
    assert wide.table.least_quotas.tolist() == [8, 0, 8]
    frames = [quota for quota, _ in layer_curves(wide, LRU)[0]]
    assert frames[0] == 8


def test_frames_go_where_the_objective_falls():
    requests = uneven()
    requests.table.nbytes[requests.table.layers == 2] = 10**6
    assert split_capacity(requests, layer_curves(requests, LRU), 6) == (4, 0, 2)
    assert split_capacity(requests, layer_curves(requests, LRU, objective=Objective.BYTES), 6) == (2, 0, 4)
    # Two frames save layer 0 some 1,500 reads of 100 us, layer 2 some 75 of 100 us and of its 1 MB at 2 GB/s: 45 ms.
    assert split_capacity(requests, layer_curves(requests, LRU, objective=Objective.STALL), 6) == (4, 0, 2)
    requests.table.nbytes[requests.table.layers == 2] = 10**7
    assert split_capacity(requests, layer_curves(requests, LRU, objective=Objective.STALL), 6) == (2, 0, 4)


def test_train_takes_every_setting_and_gives_layers_what_was_simulated():
    schema = RecordSchema("expert", 4096, WeightFormat.FP32)
    frame, least = record_frame_bytes([schema]), minimum_host_budget([schema])
    requests = with_records_of(uneven(), least // frame)
    by_layer = 0
    for capacity in range(least // frame, 4 * least // frame):
        candidates = starting_grid(requests, capacity, ["lru"], list(Scope))
        if any(candidate.scope is Scope.LAYER for candidate in candidates):
            by_layer += 1
            split = split_capacity(requests, layer_curves(requests, LRU), capacity)
            candidates.append(Candidate(LRU, Scope.LAYER, split))
            shares = cache_configuration(candidates[-1]).layer_shares
            assert tuple(quotas_by_layer([0, 2], capacity, shares)) == split
            assert sum(split) == capacity
        for candidate in candidates:
            cache = cache_configuration(candidate)
            check_budget(StoreConfig(host_budget=capacity * frame, cache=cache), [schema], [0, 2])
    assert by_layer > least // frame


def test_a_split_gives_the_loop_what_it_needs():
    requests = uneven()
    quotas = split_capacity(requests, layer_curves(requests, LRU), 12)
    assert quotas == (4, 0, 8)
    equal, tuned = replay_each(
        requests,
        [ReplaySetting(LRU, 8, Scope.LAYER), ReplaySetting(LRU, 8, Scope.LAYER, layer_quotas=(4, 0, 4))],
        lambda replayed: replayed,
    )
    assert equal.layer_misses[0] == tuned.layer_misses[0] == 4
    small_equal, small_tuned = replay_each(
        requests,
        [ReplaySetting(LRU, 6, Scope.LAYER), ReplaySetting(LRU, 6, Scope.LAYER, layer_quotas=(4, 0, 2))],
        lambda replayed: replayed,
    )
    assert small_equal.outcome.misses > 1.5 * small_tuned.outcome.misses
