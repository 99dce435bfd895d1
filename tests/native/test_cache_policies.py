"""Policies through the smallest cache there is: one frame an entry, one entry an access."""

import math

import pytest
from core_calls import Keys

from tierstore import _native

#: Policy, frames, what is asked for, and whom each evicts (None: a hit).
EXAMPLES = {
    "lru evicts what was asked for longest ago": (
        *("lru", 3, [0, 1, 2, 0, 3, 4, 0, 1]),
        [[], [], [], None, [1], [2], None, [3]],
    ),
    "fifo evicts what came first however often it was asked for": (
        *("fifo", 3, [0, 1, 2, 0, 0, 3, 0, 4]),
        [[], [], [], None, None, [0], [1], [2]],
    ),
    # 0 and 1 were hit: the hand passes them, takes their marks, and evicts 2; then 0, whose mark is gone.
    "clock spares what was hit once more": (
        *("clock", 3, [0, 1, 2, 0, 0, 1, 3, 4]),
        [[], [], [], None, None, None, [2], [0]],
    ),
    # 0 and 1 were asked for twice, 1 longer ago; the newcomer 3 goes before 0.
    "lfu evicts the least asked for, ties by age of the last request": (
        *("lfu", 3, [0, 1, 2, 1, 0, 2, 2, 3, 4, 3]),
        [[], [], [], None, None, None, None, [1], [3], [4]],
    ),
    # The hand clears 0 and evicts 1; it stands at 2: cleared, and 3 goes; 4 and 5 are cleared: round to 0.
    "sieve moves its hand to newer entries and round": (
        *("sieve", 4, [0, 1, 2, 3, 0, 2, 4, 5, 4, 5, 6]),
        [[], [], [], [], None, None, [1], [3], None, None, [0]],
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_by_hand(name):
    policy, capacity, keys, evicted = EXAMPLES[name]
    assert Keys(capacity, policy).asked(keys) == evicted


def test_clock_with_two_bits_counts_to_three():
    cache = Keys(2, "clock", bits=2)
    cache.asked([0, 0, 0, 1, 1])
    # 0 has 2, 1 has 1: the hand takes one of each, the other of 0, and finds 1 with none; then 0.
    assert cache.asked([2, 3]) == [[1], [0]]


def test_corrected_evicts_the_least_hits_ties_by_key():
    cache = Keys(3, "lfu-decay", threshold=0)
    cache.asked([0, 1, 2, 1])  # hits: 0: 1, 1: 2, 2: 1
    assert cache.ask(3) == [0]
    assert cache.ask(0) == [2]  # 2 and 3 tie at 1; what was evicted starts anew
    assert cache.starved == 0


def test_corrected_decays_by_steps_and_spares_what_fell_below_the_threshold():
    cache = Keys(2, "lfu-decay", threshold=1, beta=0.5, interval=2)
    cache.asked([0, 1, 1])
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
    assert cache.asked([0, 1, 2]) == [[], [], []]  # acc + 1 < 4 holds for three
    assert cache.core.used_frames == 3
    assert cache.ask(0) is None  # hits: 0: 2, 1: 1, 2: 1
    assert cache.ask(3) == [1, 2]  # both tie at the minimum
    assert cache.core.used_frames == 2


def test_paper_counts_requests_and_starves_below_the_threshold():
    cache = Keys(3, "lfu-decay", variant="paper", threshold=1, beta=0.5, interval=2)
    cache.asked([0, 1])  # after the second request both have .5
    assert cache.ask(2) == [0]
    assert cache.starved == 1


def test_unequal_sizes_go_until_the_newcomer_fits():
    assert Keys(6, "lru", frames=(1, 2, 3, 4)).asked([0, 1, 2, 3]) == [[], [], [], [0, 1, 2]]


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
