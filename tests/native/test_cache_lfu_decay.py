"""LFU-decay against Algorithm 1 as it is printed: every count multiplied by beta at every decay."""

from __future__ import annotations

import numpy as np
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import singles, zipf

from tierstore import _native
from tierstore._native import Contract


class Multiplied:
    """The corrected variant on keys of one frame: counts, and a product for each at each decay."""

    def __init__(self, capacity, threshold, beta, interval):
        self.capacity, self.threshold, self.beta, self.interval = capacity, threshold, beta, interval
        self.hits, self.steps, self.misses, self.starved = {}, 0, 0, 0

    def request(self, key):
        if key in self.hits:
            self.hits[key] += 1.0
            return
        self.misses += 1
        if len(self.hits) == self.capacity:
            able = [k for k in self.hits if self.hits[k] >= self.threshold]
            self.starved += not able
            del self.hits[min(able or self.hits, key=lambda k: (self.hits[k], k))]
        self.hits[key] = 1.0

    def step(self):
        self.steps += 1
        if self.steps % self.interval == 0:
            self.hits = {key: hits * self.beta for key, hits in self.hits.items()}


def replayed(keys, step_length, capacity, options):
    offsets, entries = singles(keys)
    steps = (np.arange(len(keys)) // step_length).astype(np.uint32)
    return _native.simulate(
        offsets,
        entries,
        steps=steps,
        policy="lfu-decay",
        options=options,
        capacity_frames=capacity,
        contract=Contract.SEQUENTIAL,
    )


def expected(keys, step_length, capacity, options):
    naive = Multiplied(capacity, **options)
    for at, key in enumerate(keys):
        naive.request(int(key))
        if (at + 1) % step_length == 0:
            naive.step()
    return naive


@settings(max_examples=share(60))
@given(
    keys=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    step_length=st.integers(1, 7),
    capacity=st.integers(1, 8),
    threshold=st.sampled_from([0.0, 0.125, 0.5, 1.0, 1.5, 2.0, 7.0]),
    beta=st.sampled_from([1.0, 0.5, 0.25, 2.0**-7]),
    interval=st.integers(1, 4),
)
def test_powers_of_two_give_the_counts_of_every_count_multiplied(
    keys, step_length, capacity, threshold, beta, interval
):
    options = {"threshold": threshold, "beta": beta, "interval": interval}
    naive = expected(keys, step_length, capacity, options)
    result = replayed(keys, step_length, capacity, options)
    assert (result["misses"], result["starved"]) == (naive.misses, naive.starved)


def test_any_other_beta_differs_by_its_rounding_at_most():
    # Counts that are equal but for the order in which they were rounded tie in one arithmetic and not in the other.
    keys = zipf(300, 6000, 0.8, seed=3)
    for beta in (0.9, 0.7, 1 / 3):
        options = {"threshold": 0.0, "beta": beta, "interval": 1}
        naive = expected(keys, 20, 60, options)
        assert abs(replayed(keys, 20, 60, options)["misses"] - naive.misses) <= naive.misses // 1000


def test_scores_survive_more_decays_than_a_number_has_exponents():
    # 3000 decays by a half: what was asked for in the last ones still outranks what was asked for long ago.
    keys = [0, 1, 1, *[2] * 3000, 3, 3, 4, 1]
    result = replayed(keys, 1, 3, {"beta": 0.5, "interval": 1})
    # 3 evicts 0, the one with a hit less; 4 evicts 1, though it was asked for as often as 3; 1 comes back.
    assert result["misses"] == 6
    assert result["evictions"] == 3


def test_what_was_taken_out_by_a_choice_and_stayed_is_chosen_again():
    core = _native.Residency(3, policy="lfu-decay")
    for _ in range(5):
        core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
    one = np.array([1], np.uint16)
    evicted = []
    for record in (0, 1, 2, 3, 4, 0):
        core.begin_access(0, 0, np.array([record], np.uint32), one)
        kinds, entries = core.next_group()[1]
        core.end_group()
        evicted += entries[kinds == _native.Decision.EVICT].tolist()
    assert evicted == [0, 4, 8]  # the least entry of those with one hit each
