"""next-use: expected times by hand, and programs that walk their layers."""

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_next_use import NaiveNextUse

from tierstore import _native
from tierstore._native import Decision

FORWARD, BACKWARD, USER = 1, 2, 4


class Program:
    """Layers of `experts` one-frame entries each, asked for pass by pass; remembers evictions and misses."""

    def __init__(self, capacity, layers, experts, policy="next-use", options=None):
        self.core = _native.Residency(capacity, policy=policy, policy_options=options or {})
        self.experts = experts
        self.misses = 0
        for layer in range(layers):
            for _ in range(experts):
                self.core.add_record(layer, [1, 0, 0], [1, 0, 0], 1)

    def ask(self, phase, layer, experts):
        """(layer, expert) of what was evicted, in order, group by group."""
        records = np.array(sorted(experts), np.uint32) + np.uint32(layer * self.experts)
        groups, _ = self.core.begin_access(phase, layer, records, np.ones(len(records), np.uint16))
        evicted = []
        for _ in range(groups):
            kinds, entries = self.core.next_group()[1]
            self.core.end_group()
            self.misses += int((kinds == Decision.FETCH).sum())
            evicted += [divmod(e // 4, self.experts) for e in entries[kinds == Decision.EVICT].tolist()]
        return evicted

    def step(self, sets, train=True):
        for layer, experts in enumerate(sets):
            self.ask(FORWARD, layer, experts)
        for layer in reversed(range(len(sets) if train else 0)):
            self.ask(BACKWARD, layer, sets[layer])


def test_decoding_gives_up_what_is_least_likely_soon():
    # Two layers of three experts, four frames, passes 0 1 0 1 ... (C = 2). In layer 0 expert 0 is used in each
    # of four cycles, expert 1 in the first and the third; in layer 1 experts 0 and 1 always.
    program = Program(4, 2, 3)
    for sets in ([{0, 1}, {0, 1}], [{0}, {0, 1}], [{0, 1}, {0, 1}], [{0}, {0, 1}]):
        program.step(sets, train=False)
    # At layer 0 expert 2 is needed. Experts 0 and 1 of layer 0 both come again in 2 passes at the soonest, and
    # after a use in each of four cycles expert 0 is the likelier one; layer 1 comes in 1 pass, surely.
    assert program.ask(FORWARD, 0, {2}) == [(0, 1)]


def test_the_chance_of_a_use_is_that_of_entries_with_the_same_past():
    # One layer of four experts, one of which is used twice and then not for six cycles, in turn: who was used
    # once will be used again next, and who was used twice will not, although it has the larger average.
    program = Program(2, 1, 4)
    turns = [[expert] * 2 for expert in range(4)] * 12
    for expert in [expert for turn in turns for expert in turn]:
        program.step([{expert}], train=False)
    before = program.misses
    for expert in [expert for turn in turns for expert in turn]:
        program.step([{expert}], train=False)
    assert program.misses - before <= len(turns)  # the second use always hits


def test_the_turn_keeps_the_last_layers_and_then_the_first():
    # Three layers of two experts, all used in each pass; four frames. The way up evicts as soon as two layers
    # are full: once the program is known to turn, what comes back last goes first.
    program = Program(4, 3, 2)
    everything = [{0, 1}] * 3
    program.step(everything)  # learns that it trains
    # Resident after the way down: layers 1 and 0, and layer 2 goes for layer 0's backward pass.
    assert sorted(program.core.resident_entries().tolist()) == [0, 4, 8, 12]
    assert [program.ask(FORWARD, layer, {0, 1}) for layer in (0, 1)] == [[], []]
    # Of layer 0 (back in 3 passes) and layer 1 (back in 2) it is layer 0 that goes, its later record first.
    assert program.ask(FORWARD, 2, {0, 1}) == [(0, 1), (0, 0)]
    assert [program.ask(BACKWARD, layer, {0, 1}) for layer in (2, 1)] == [[], []]
    # Now layer 2 comes again in 5 passes, layer 1 in 3.
    assert program.ask(BACKWARD, 0, {0, 1}) == [(2, 1), (2, 0)]


def test_a_layer_that_does_not_fit_is_used_from_its_start_again():
    # One layer of six experts and four frames: an access is two groups, 0-3 and 4-5. What is used next
    # (backward, or by the next step) begins at expert 0: the last ones used go.
    program = Program(4, 1, 6)
    program.step([range(6)])
    assert program.ask(FORWARD, 0, range(6))
    before = program.misses
    for _ in range(4):
        program.step([range(6)])
    # Eight passes of six: 2 hits each are the best that can be (each pass must bring in at least two, and its
    # second group finds none of the four frames left as they were).
    assert (program.misses - before) / 8 <= 4


def routed(layers, experts, steps, seed, sticky=0.7):
    """Sets that drift: most of a layer's experts are kept from one step to the next."""
    random = np.random.default_rng(seed)
    current = [
        set(random.choice(experts, max(1, experts // 3), replace=False).tolist()) for _ in range(layers)
    ]
    for _ in range(steps):
        for layer, used in enumerate(current):
            kept = {expert for expert in used if random.random() < sticky}
            while len(kept) < len(used):
                kept.add(int(random.integers(experts)))
            current[layer] = kept
        yield [set(used) for used in current]


@pytest.mark.parametrize("train", [False, True])
def test_it_is_compared_with_lru(train):
    counted = {}
    for policy in ("lru", "next-use"):
        program = Program(40, 5, 24, policy)
        for sets in routed(5, 24, 80, 3):
            program.step(sets, train)
        counted[policy] = program.misses
    # Without a backward half the capacity is just what a step uses, and most is used again: LRU's best case.
    assert counted["next-use"] < (0.8 if train else 1.15) * counted["lru"]


@settings(max_examples=share(50))
@given(
    layers=st.integers(1, 4),
    capacity=st.integers(4, 14),
    train=st.booleans(),
    again=st.booleans(),
    half_life=st.sampled_from([1.0, 16.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_victims_are_those_of_the_formulas(layers, capacity, train, again, half_life, seed):
    """Walks with and without a backward half, with recomputation, and now and then a forward pass alone."""
    experts = 6
    program = Program(capacity, layers, experts, options={"half_life": half_life})
    entries = range(0, layers * experts * 4, 4)
    naive = NaiveNextUse(capacity, dict.fromkeys(entries, 1), half_life)
    naive.layers = {e: e // 4 // experts for e in entries}

    def ask(phase, layer, chosen):
        asked = [(layer * experts + expert) * 4 for expert in sorted(chosen)]
        naive.access(phase, layer, asked)
        expected = []
        for at in range(0, len(asked), capacity):
            group = asked[at : at + capacity]
            missing = [e for e in group if e not in naive.resident]
            while len(naive.resident) + len(missing) > capacity:
                (gone,) = naive.victims(naive.resident - set(group), 1)
                naive.remove(gone)
                expected.append(divmod(gone // 4, experts))
            for e in group:
                naive.insert(e) if e in missing else naive.hit(e)
        assert program.ask(phase, layer, chosen) == expected

    for number, sets in enumerate(routed(layers, experts, 12, seed)):
        for layer, chosen in enumerate(sets):
            ask(USER if number == 2 else FORWARD, layer, chosen)
        for layer in reversed(range(layers if train and number != 4 else 0)):
            if again:
                ask(FORWARD, layer, sets[layer])
            ask(BACKWARD, layer, sets[layer])
