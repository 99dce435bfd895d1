"""Policies through the smallest cache there is: one frame an entry, one entry an access."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tierstore import _native
from tierstore._native import Decision


class Keys:
    """Asks a core of `capacity` frames for keys one at a time."""

    def __init__(self, capacity, policy, keys=10, **options):
        self.core = _native.Residency(capacity, policy=policy, policy_options=options)
        for _ in range(keys):
            self.core.add_record(0, [1, 0, 0], [4096, 0, 0], 1)

    def ask(self, key):
        """The keys that were evicted for it."""
        self.core.begin_access(0, 0, np.array([key], np.uint32), np.array([1], np.uint16))
        _, (kinds, entries), _ = self.core.next_group()
        self.core.end_group()
        out = (Decision.EVICT, Decision.EVICT_WRITE)
        return [
            entry // 4 for kind, entry in zip(kinds.tolist(), entries.tolist(), strict=True) if kind in out
        ]

    @property
    def starved(self):
        return self.core.stats().starved


def test_lru_evicts_what_was_asked_for_longest_ago():
    cache = Keys(3, "lru")
    assert [cache.ask(key) for key in (0, 1, 2, 0, 3, 4, 0, 1)] == [[], [], [], [], [1], [2], [], [3]]


def test_fifo_evicts_what_came_first_however_often_it_was_asked_for():
    cache = Keys(3, "fifo")
    assert [cache.ask(key) for key in (0, 1, 2, 0, 0, 3, 0, 4)] == [[], [], [], [], [], [0], [1], [2]]


def test_clock_spares_what_was_hit_once_more():
    cache = Keys(3, "clock")
    # 0 and 1 were hit: the hand passes them, takes their marks, and evicts 2; then 0, whose mark is gone.
    assert [cache.ask(key) for key in (0, 1, 2, 0, 0, 1, 3, 4)] == [[], [], [], [], [], [], [2], [0]]


def test_clock_with_two_bits_counts_to_three():
    cache = Keys(2, "clock", bits=2)
    for key in (0, 0, 0, 1, 1):
        cache.ask(key)
    # 0 has 2, 1 has 1: the hand takes one of each, the other of 0, and finds 1 with none; then 0.
    assert [cache.ask(key) for key in (2, 3)] == [[1], [0]]


def test_lfu_evicts_the_least_asked_for_ties_by_age_of_the_last_request():
    cache = Keys(3, "lfu")
    for key in (0, 1, 2, 1, 0, 2, 2):
        cache.ask(key)
    # 0 and 1 were asked for twice, 1 longer ago; the newcomer 3 goes before 0.
    assert [cache.ask(key) for key in (3, 4, 3)] == [[1], [3], [4]]


def test_sieve_moves_its_hand_to_newer_entries_and_round():
    cache = Keys(4, "sieve")
    for key in (0, 1, 2, 3, 0, 2):
        cache.ask(key)
    # The hand clears 0 and evicts 1; it stands at 2: cleared, and 3 goes; 4 and 5 are cleared: round to 0.
    assert [cache.ask(key) for key in (4, 5, 4, 5, 6)] == [[1], [3], [], [], [0]]


def test_corrected_evicts_the_least_hits_ties_by_key():
    cache = Keys(3, "lfu-decay", threshold=0)
    for key in (0, 1, 2, 1):
        cache.ask(key)
    # hits: 0: 1, 1: 2, 2: 1
    assert cache.ask(3) == [0]
    assert cache.ask(0) == [2]  # 2 and 3 tie at 1; what was evicted starts anew
    assert cache.starved == 0


def test_corrected_decays_by_steps_and_spares_what_fell_below_the_threshold():
    cache = Keys(2, "lfu-decay", threshold=1, beta=0.5, interval=2)
    cache.ask(0)
    cache.ask(1)
    cache.ask(1)
    cache.core.end_step()
    cache.core.end_step()  # hits: 0: .5, 1: 1
    assert cache.ask(2) == [1]  # the minimum is 0, but it is below the threshold
    assert cache.starved == 0
    cache.core.end_step()
    cache.core.end_step()  # hits: 0: .25, 2: .5: none qualifies
    assert cache.ask(3) == [0]
    assert cache.starved == 1


def test_paper_leaves_a_frame_empty_and_evicts_all_that_tie():
    cache = Keys(4, "lfu-decay", variant="paper", threshold=1, beta=0.5, interval=1000)
    for key in (0, 1, 2):
        assert cache.ask(key) == []  # acc + 1 < 4 holds for three
    assert cache.core.used_frames == 3
    assert cache.ask(0) == []  # hits: 0: 2, 1: 1, 2: 1
    assert cache.ask(3) == [1, 2]  # both tie at the minimum
    assert cache.core.used_frames == 2


def test_paper_counts_requests_and_starves_below_the_threshold():
    cache = Keys(3, "lfu-decay", variant="paper", threshold=1, beta=0.5, interval=2)
    cache.ask(0)
    cache.ask(1)  # after the second request both have .5
    assert cache.ask(2) == [0]
    assert cache.starved == 1


def test_unequal_sizes_go_until_the_newcomer_fits():
    core = _native.Residency(6, policy="lru")
    for frames in (1, 2, 3, 4):
        core.add_record(0, [frames, 0, 0], [frames, 0, 0], 1)
    evicted = []
    for record in (0, 1, 2, 3):
        core.begin_access(0, 0, np.array([record], np.uint32), np.array([1], np.uint16))
        kinds, entries = core.next_group()[1]
        core.end_group()
        evicted.append(entries[kinds == Decision.EVICT].tolist())
    assert evicted == [[], [], [], [0, 4, 8]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mru", {}, "unknown cache policy 'mru'; there are: fifo, clock, lru"),
        ("lru", {"beta": 0.5}, "'lru' has no option 'beta'; it has: none"),
        ("clock", {"bits": 0}, "option 'bits': expected a whole number from 1 to 8"),
        ("clock", {"bits": 1.5}, "option 'bits'"),
        ("fifo", {"bits": 1}, "'fifo' has no option 'bits'; it has: none"),
        ("lfu", {"beta": 0.5}, "'lfu' has no option 'beta'; it has: none"),
        ("sieve", {"bits": 1}, "'sieve' has no option 'bits'; it has: none"),
        ("lfu-decay", {"treshold": 1}, "no option 'treshold'"),
        ("lfu-decay", {"beta": 0}, "option 'beta'"),
        ("lfu-decay", {"beta": 1.5}, "option 'beta'"),
        ("lfu-decay", {"beta": math.nan}, "option 'beta'"),
        ("lfu-decay", {"beta": "half"}, "option 'beta': expected a number"),
        ("lfu-decay", {"threshold": -1}, "option 'threshold'"),
        ("lfu-decay", {"interval": 1.5}, "option 'interval'"),
        ("lfu-decay", {"variant": "printed"}, "option 'variant'"),
        ("lfu-decay", {"half_life": 3, "beta": 0.5}, "option 'half_life'"),
        ("lfu-decay", {"half_life": 0}, "option 'half_life'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        _native.check_policy(name, options)


def test_half_life_is_beta_and_interval_in_one():
    assert _native.half_life(0.5, 16) == 16
    assert _native.half_life(0.25, 16) == 8
    assert _native.half_life(1, 16) == math.inf
    assert _native.beta_for_half_life(8, 16) == 0.25
    assert _native.beta_for_half_life(math.inf, 16) == 1
    assert _native.half_life(_native.beta_for_half_life(7, 3), 3) == pytest.approx(7)
    _native.check_policy("lfu-decay", {"half_life": 8, "interval": 16})
