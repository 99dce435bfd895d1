"""learned-use: worth by hand, sequences told apart, and the naive model's decisions."""

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_learned_use import NaiveLearnedUse, NaiveModel
from sim_columns import columns

from tierstore import _native
from tierstore._native import Decision

FORWARD = 1
NOBODY = -1


class Batch:
    """Layers of ``experts`` one-frame entries, and sequences that ask for some of them."""

    def __init__(self, capacity, layers, experts, **options):
        self.core = _native.Residency(capacity, policy="learned-use", policy_options=options)
        self.naive = NaiveLearnedUse(
            capacity, {4 * record: 1 for record in range(layers * experts)}, **options
        )
        self.experts, self.misses = experts, 0
        for record in range(layers * experts):
            self.core.add_record(record // experts, [1, 0, 0], [1, 0, 0], 1)
            self.naive.layers[4 * record] = record // experts

    def ask(self, layer, chosen):
        """``chosen`` maps sequences (``NOBODY``: it is not said which) to experts. Returns the (layer, expert) that were
        evicted, in order.
        """
        requesters: dict[int, int] = {}
        for sequence, experts in chosen.items():
            for expert in experts:
                record = layer * self.experts + expert
                requesters[record] = requesters.get(record, 0) | (0 if sequence == NOBODY else 1 << sequence)
        records = sorted(requesters)
        flags = [1 | requesters[record] << 9 for record in records]
        groups, _ = self.core.begin_access(
            FORWARD, layer, np.array(records, np.uint32), np.array(flags, np.uint16)
        )
        assert groups == 1
        kinds, entries = self.core.next_group()[1]
        self.core.end_group()
        self.misses += int((kinds == Decision.FETCH).sum())
        self.follow(layer, {4 * record: requesters[record] for record in records}, kinds, entries.tolist())
        return [
            divmod(e // 4, self.experts)
            for e, kind in zip(entries.tolist(), kinds, strict=True)
            if kind == Decision.EVICT
        ]

    def follow(self, layer, requesters, kinds, entries):
        """The naive policy names the same victims, one after another, to the bit."""
        self.naive.requesters = requesters
        self.naive.access(FORWARD, layer, list(requesters))
        free = set(self.naive.resident) - set(requesters)
        for entry, kind in zip(entries, kinds, strict=True):
            if kind == Decision.EVICT:
                assert self.naive.victims(free, 1) == [entry]
                free.remove(entry)
                self.naive.remove(entry)
            elif kind == Decision.FETCH:
                self.naive.insert(entry)
            else:
                self.naive.hit(entry)


def test_the_first_victim_by_hand():
    # Two layers of three experts, three frames. Sequence 0 uses experts 0 and 1 of layer 0, sequence 1 expert 1 too.
    # Nothing has been learned, so expert 1, which two may use again, is worth more than expert 0.
    batch = Batch(3, 2, 3)
    batch.ask(0, {0: {0, 1}, 1: {1}})
    batch.ask(1, {0: {2}})
    assert batch.ask(1, {0: {0}, 1: {0}}) == [(0, 0)]


def test_worth_by_hand():
    # One layer of two places, one use of place 0 by one sequence in one pass: no gradient step yet. Its prior goes
    # from .1 to .1 + .0005 (1 - .1) = .10045, the other's to .09995; frequencies are (1 + 2 x .10045) / 3 = .4003 and
    # 2 x .09995 / 3 = .06663. No pair is counted, so that feature is logit(prior) - logit(prior) = 0, and
    # logit P(0) = .6 logit(.4003) + .3 logit(.10045) = -.2425 - .6577 = -.9002: P = .2890.
    chances, frequencies = NaiveModel({0: 2}).pass_(0, 0, [0])
    assert frequencies == pytest.approx([0.4003, 0.06663], abs=1e-4)
    assert chances[0] == pytest.approx(0.2890, abs=2e-4)


@pytest.mark.parametrize("told", [True, False])
def test_what_a_sequence_that_left_had_used_goes_first(told):
    # Sequence 0 takes expert 0 in each of twenty passes, sequence 1 experts 1 and 2 in turn. Sequence 0 leaves: nobody
    # is left who ever took expert 0, although it was used most often, which is all that one who cannot tell them apart
    # knows.
    batch = Batch(3, 1, 4)
    other = 1 if told else 0
    for step in range(20):
        one, two = {0}, {1 + step % 2}
        batch.ask(0, {0: one, 1: two} if told else {0: one | two})
    batch.ask(0, {other: {1}})
    assert ((0, 0) in batch.ask(0, {other: {3}})) is told


def test_a_number_that_paused_is_another_sequence():
    batch = Batch(4, 2, 4)
    for _ in range(3):
        for layer in range(2):
            batch.ask(layer, {0: {0}, 1: {1}})
    for _ in range(2):
        for layer in range(2):
            batch.ask(layer, {1: {1}})
    known = batch.naive.model.known
    assert (0, 0) in known
    batch.ask(0, {0: {2}, 1: {1}})
    assert batch.naive.model.known[0, 0]["passes"] == 1.0  # and the core goes on as the naive policy does
    for _ in range(4):
        for layer in range(2):
            batch.ask(layer, {0: {2, 3}, 1: {1, 0}})


def test_prompts_between_two_tokens_end_nobody():
    # By hand: sequence 0 walks three times, and a prompt, of which nobody says who asks, once. Then sequence 0 has
    # half of its fourth pass: 3 decayed passes and this one.
    batch = Batch(4, 2, 4)
    for who in (0, 0, 0, NOBODY):
        for layer in range(2):
            batch.ask(layer, {who: {0, 1}})
    batch.ask(0, {0: {0}})
    fade = 2 ** (-1 / 24)
    assert batch.naive.model.known[0, 0]["passes"] == pytest.approx(1 + fade + fade**2 + fade**3)
    for _ in range(4):
        for layer in range(2):
            batch.ask(layer, {0: {2, 3}, NOBODY: {1, 0}})


def test_what_nobody_goes_on_from_goes_first():
    # A prompt asks for all six experts of both layers, and its last token for expert 5 of each. Seven frames hold both of
    # those in the end, and nothing was learned of the others: a sequence's next token finds what its last one used.
    batch = Batch(7, 2, 6)
    for layer in range(2):
        batch.ask(layer, {NOBODY: {0, 1, 2, 3, 4}, 0: {5}})
    assert batch.naive.model.known[0, 0]["used"] == [5]
    misses = batch.misses
    for layer in range(2):
        assert batch.ask(layer, {0: {5}}) == []
    assert batch.misses == misses


def test_requesters_belong_to_accesses():
    core = _native.Residency(4, policy="learned-use", lookahead_frames=2)
    core.add_record(0, [1, 0, 0], [1, 0, 0], 1)
    with pytest.raises(ValueError, match="flags"):
        core.prefetch(FORWARD, 0, np.array([0], np.uint32), np.array([1 | 1 << 9], np.uint16))


@settings(max_examples=share(30))
@given(data=st.data())
def test_every_victim_is_the_naive_one(data):
    draw = data.draw
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(4, 7))
    options = draw(st.sampled_from([{}, {"price": 0.05, "later": 0.0}, {"half_life": 3.0, "rate": 0.2}]))
    batch = Batch(draw(st.integers(experts, experts * layers)), layers, experts, **options)
    chosen = st.dictionaries(
        st.integers(NOBODY, 6),
        st.sets(st.integers(0, experts - 1), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
    for _ in range(draw(st.integers(2, 8))):
        for layer in range(layers):
            batch.ask(layer, draw(chosen))


def test_the_simulator_decides_the_same():
    random = np.random.default_rng(1)
    batch, asked, requesters, layers = Batch(9, 3, 6), [], [], []
    for _ in range(15):
        for layer in range(3):
            chosen = {s: set(random.choice(6, 2, replace=False).tolist()) for s in (0, 4)}
            batch.ask(layer, chosen)
            of = {e: sum(1 << s for s in chosen if e in chosen[s]) for e in set().union(*chosen.values())}
            asked.append([layer * 6 + e for e in sorted(of)])
            requesters += [of[e] for e in sorted(of)]
            layers.append(layer)
    offsets, entries = columns(asked)
    found = {}
    for told in (True, False):
        found[told] = _native.simulate(
            offsets,
            entries,
            layers=np.array(layers, np.uint32),
            entry_layers=np.arange(18, dtype=np.uint32) // 6,
            requesters=np.array(requesters, np.uint8) if told else None,
            policy="learned-use",
            capacity_frames=9,
        )["misses"]
    assert found[True] == batch.misses != found[False]
