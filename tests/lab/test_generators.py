"""Synthetic traces: the same by seed, and distributed as documented."""

import itertools

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tierstore.cache.access import Phase
from tierstore.lab.generators import KeyWorkload, RoutingWorkload, Scan, Tenants, Zipf, in_memory
from tierstore.lab.routing import Passes, Sections
from tierstore.trace.format import TraceKind
from tierstore.trace.replay import make_replay

NAMES = ("kinds", "phases", "layers", "steps", "offsets", "records", "flags")
WORKLOADS = [
    KeyWorkload(source=Zipf(keys=50, alpha=0.8, drift=0.01, phase_requests=333), requests=2500),
    KeyWorkload(source=Scan(keys=7), requests=30, requests_per_step=10),
    KeyWorkload(source=Tenants(tenants=(Scan(keys=5), Zipf(keys=9)), shares=(1, 2)), requests=999),
    RoutingWorkload(layers=3, experts=8, k=2, tokens_per_step=4, steps=40, skew=1, persistence=0.5),
    RoutingWorkload(layers=2, experts=4, k=4, tokens_per_step=1, steps=9, passes=Passes.FORWARD),
]


def drawn(source, count, seed=0):
    return source.stream(np.random.SeedSequence(seed)).draw(count)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_gives_the_same_trace_in_any_chunks(workload, monkeypatch):
    one = in_memory(workload)
    monkeypatch.setattr("tierstore.lab.generators._CHUNK_REQUESTS", 101)
    monkeypatch.setattr("tierstore.lab.generators._CHUNK_CELLS", 300)
    other = in_memory(workload)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.records.max() < len(one.header.records)
    make_replay(one.header)


def test_other_seeds_give_other_traces():
    source = Zipf(keys=50)
    one, other = (in_memory(KeyWorkload(source=source, requests=500, seed=seed)) for seed in (0, 1))
    assert not np.array_equal(one.records, other.records)


def test_a_scan_by_hand():
    trace = in_memory(KeyWorkload(source=Scan(keys=3), requests=5, requests_per_step=2))
    assert trace.records.tolist() == [0, 1, 2, 0, 1]
    assert trace.kinds.tolist() == [0, 0, 10, 0, 0, 10, 0, 10]


def test_zipf_frequencies():
    keys, count, alpha = 40, 60_000, 1.1
    # Which key has which rank: the permutation that the seed draws first.
    permutation = np.random.default_rng(np.random.SeedSequence(0).spawn(2)[1].spawn(1)[0]).permutation(keys)
    counts = np.bincount(drawn(Zipf(keys=keys, alpha=alpha), count), minlength=keys)[permutation]
    weights = np.arange(1, keys + 1) ** -alpha
    assert stats.chisquare(counts, count * weights / weights.sum()).pvalue > 0.01
    assert stats.chisquare(counts, np.full(keys, count / keys)).pvalue < 1e-9


def test_phases_have_permutations_of_their_own():
    keys = drawn(Zipf(keys=200, alpha=1.5, phase_requests=4000), 12_000)
    hottest = [int(np.bincount(keys[first : first + 4000]).argmax()) for first in (0, 4000, 8000)]
    assert len(set(hottest)) == 3


def test_drift_moves_ranks_on():
    still = drawn(Zipf(keys=100, alpha=1.5), 5000)
    moved = drawn(Zipf(keys=100, alpha=1.5, drift=1.0), 5000)
    # The same seed draws the same ranks and permutation: request i of the one asks for the key that is i
    # places further on in the permutation of the other.
    permutation = np.random.default_rng(np.random.SeedSequence(0).spawn(2)[1].spawn(1)[0]).permutation(100)
    place = np.argsort(permutation)
    assert ((place[moved] - place[still]) % 100 == np.arange(5000) % 100).all()


def test_tenants_keep_their_streams_and_shares():
    tenants = Tenants(tenants=(Scan(keys=10), Scan(keys=20)), shares=(3.0, 1.0))
    keys = drawn(tenants, 20_000)
    first, second = keys[keys < 10], keys[keys >= 10] - 10
    assert (first == np.arange(len(first)) % 10).all()
    assert (second == np.arange(len(second)) % 20).all()
    assert stats.binomtest(len(first), 20_000, 0.75).pvalue > 0.01
    assert tenants.keys == 30


def tokens(workload):
    return np.concatenate(list(workload.topk()))


def test_routers_draw_by_weight_without_replacement():
    workload = RoutingWorkload(layers=1, experts=4, k=2, tokens_per_step=100, steps=400, skew=1.0, seed=4)
    chosen = np.sort(tokens(workload)[:, 0], axis=1)
    rank = np.random.default_rng(np.random.SeedSequence(4).spawn(3)[0]).permutation(4)
    weight = 1.0 / (1 + rank)
    weight /= weight.sum()
    pairs = list(itertools.combinations(range(4), 2))
    # Drawn one after another: i then j, or j then i.
    expected = [
        weight[i] * weight[j] / (1 - weight[i]) + weight[j] * weight[i] / (1 - weight[j]) for i, j in pairs
    ]
    counts = [int((chosen == pair).all(axis=1).sum()) for pair in pairs]
    assert sum(counts) == 40_000
    assert stats.chisquare(counts, 40_000 * np.array(expected)).pvalue > 0.01


def test_persistence_repeats_the_token_before():
    workload = RoutingWorkload(
        layers=2, experts=64, k=1, tokens_per_step=50, steps=400, persistence=0.7, seed=2
    )
    chosen = tokens(workload)[:, :, 0]
    for layer in range(2):
        same = int((chosen[1:, layer] == chosen[:-1, layer]).sum())
        assert stats.binomtest(same, 19_999, 0.7 + 0.3 / 64).pvalue > 0.01
    assert (
        len(
            set(
                tokens(
                    RoutingWorkload(layers=1, experts=9, k=1, tokens_per_step=5, steps=9, persistence=1.0)
                ).ravel()
            )
        )
        == 1
    )


@settings(max_examples=share(25))
@given(
    layers=st.integers(1, 4),
    experts=st.integers(1, 6),
    tokens_per_step=st.integers(1, 5),
    steps=st.integers(1, 5),
    seed=st.integers(0, 99),
    sections=st.sampled_from(Sections),
)
def test_training_is_a_palindrome(layers, experts, tokens_per_step, steps, seed, sections):
    workload = RoutingWorkload(
        layers=layers,
        experts=experts,
        k=min(2, experts),
        tokens_per_step=tokens_per_step,
        steps=steps,
        seed=seed,
        sections=sections,
    )
    trace, chosen = in_memory(workload), tokens(workload)
    width = 2 * layers + 1
    assert len(trace) == steps * width
    for step in range(steps):
        events = [trace.part(step * width + place, step * width + place + 1) for place in range(width)]
        assert events[-1].kinds[0] == TraceKind.END_STEP
        here = chosen[step * tokens_per_step : (step + 1) * tokens_per_step]
        for layer in range(layers):
            forward, backward = events[layer], events[2 * layers - 1 - layer]
            asked = sorted({layer * experts + int(expert) for expert in here[:, layer].ravel()})
            assert forward.records.tolist() == backward.records.tolist() == asked
            assert (int(forward.phases[0]), int(backward.phases[0])) == (Phase.FORWARD, Phase.BACKWARD)
            assert (int(forward.layers[0]), int(backward.layers[0])) == (layer, layer)
            assert set(forward.flags.tolist()) == {1}
            assert set(backward.flags.tolist()) == {0b011011 if sections is Sections.SPLIT else 0b001001}
