"""LFU-decay against Algorithm 1 as it is printed: every count multiplied by beta at every decay."""

import numpy as np
from core_calls import Keys
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import singles, zipf

from tierstore import _native
from tierstore._native import Contract


class Multiplied:
    """The corrected variant on keys of one frame: counts, and a product for each at each decay."""

    def __init__(self, capacity, threshold, beta, interval, remember):
        self.capacity, self.threshold, self.beta, self.interval = capacity, threshold, beta, interval
        self.evicted = {} if remember else None
        self.hits, self.steps, self.misses, self.starved = {}, 0, 0, 0

    def request(self, key):
        if key in self.hits:
            self.hits[key] += 1.0
            return
        self.misses += 1
        if len(self.hits) == self.capacity:
            able = [k for k in self.hits if self.hits[k] >= self.threshold]
            self.starved += not able
            victim = min(able or self.hits, key=lambda k: (self.hits[k], k))
            hits = self.hits.pop(victim)
            if self.evicted is not None:
                self.evicted[victim] = hits
        self.hits[key] = 1.0 + (self.evicted or {}).pop(key, 0.0)

    def step(self):
        self.steps += 1
        if self.steps % self.interval == 0:
            self.hits = {key: hits * self.beta for key, hits in self.hits.items()}
            if self.evicted is not None:
                self.evicted = {key: hits * self.beta for key, hits in self.evicted.items()}


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
    remember=st.integers(0, 1),
)
def test_powers_of_two_give_the_counts_of_every_count_multiplied(
    keys, step_length, capacity, threshold, beta, interval, remember
):
    options = {"threshold": threshold, "beta": beta, "interval": interval, "remember": remember}
    naive = expected(keys, step_length, capacity, options)
    result = replayed(keys, step_length, capacity, options)
    assert (result["misses"], result["starved"]) == (naive.misses, naive.starved)


def test_any_other_beta_differs_by_its_rounding_at_most():
    # Counts that are equal but for the order in which they were rounded tie in one arithmetic and not in the other.
    keys = zipf(300, 6000, 0.8, seed=3)
    for beta in (0.9, 0.7, 1 / 3):
        options = {"threshold": 0.0, "beta": beta, "interval": 1, "remember": 0}
        naive = expected(keys, 20, 60, options)
        assert abs(replayed(keys, 20, 60, options)["misses"] - naive.misses) <= naive.misses // 1000


def to_the_letter(keys, size, threshold, beta, interval):
    """Misses and residents at the end of Algorithm 1, line by line as printed."""
    caches, hits, acc, steps, misses = set(), {}, 0, 0, 0
    for key in keys:
        misses += key not in caches
        if key in caches:
            hits[key] = hits.get(key, 0.0) + 1.0
        elif acc + 1 < size:
            hits[key] = 1.0
            acc += 1
            caches.add(key)
        else:
            for other in list(hits):
                if hits[other] >= threshold and min(hits.values()) == hits[other]:
                    caches.discard(other)
                    del hits[other]
                    caches.add(key)
        steps += 1
        if steps == interval:
            hits = {each: count * beta for each, count in hits.items()}
            steps = 0
    return misses, len(caches)


def test_to_the_letter_the_printed_algorithm_loses_its_cache():
    # By hand: 3 comes when 0, 1 and 2 fill acc + 1 < 4. 0 has three hits; 1 is the least, and
    # without it 2 is: both go, and of four frames two hold something.
    assert to_the_letter([0, 0, 0, 1, 2, 3], 4, 0.0, 1.0, 1000) == (4, 2)
    keys = zipf(400, 60_000, 0.8, seed=1)
    misses, residents = to_the_letter(keys.tolist(), 160, 0.0, 0.5, 500)
    assert misses > 59_000
    assert residents < 5
    paper = replayed(keys, 1, 160, {"variant": "paper", "interval": 500})
    assert paper["misses"] < 35_000


def test_hits_that_are_remembered():
    # Two frames, and 0 has two hits. Forgotten, 1 and 2 have one hit whenever they come back: they evict each other, 0
    # stays. Remembered, 1 comes back with its second hit, so 2 evicts 0 (a tie, the lower key), and 1 is there at the end.
    keys, options = [0, 0, 1, 2, 1, 2, 1], {"beta": 1.0, "interval": 1}
    assert replayed(keys, 1, 2, options)["misses"] == 6
    assert replayed(keys, 1, 2, {**options, "remember": 1})["misses"] == 5


def test_scores_survive_more_decays_than_a_number_has_exponents():
    # 3000 decays by a half: what was asked for in the last ones still outranks what was asked for long ago.
    keys = [0, 1, 1, *[2] * 3000, 3, 3, 4, 1]
    result = replayed(keys, 1, 3, {"beta": 0.5, "interval": 1})
    # 3 evicts 0, the one with a hit less; 4 evicts 1, though it was asked for as often as 3; 1 comes back.
    assert result["misses"] == 6
    assert result["evictions"] == 3


def test_what_was_taken_out_by_a_choice_and_stayed_is_chosen_again():
    # The least of those with one hit each.
    assert Keys(3, "lfu-decay").asked([0, 1, 2, 3, 4, 0]) == [[], [], [], [0], [1], [2]]
