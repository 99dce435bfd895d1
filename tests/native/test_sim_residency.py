"""The simulator counts exactly what the live store's core counts on the same accesses, for every policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import columns

from tierstore import _native
from tierstore._native import Contract, Decision, Scope

# The core numbers the weights of record r as entry 4r. Only a policy that hashes numbers can tell.
STRIDES = {"w-tinylfu": 4}
VARIANTS = {
    "clock": [{}, {"bits": 3}],
    "lfu-decay": [
        {"interval": 2},
        {"threshold": 2.0, "beta": 0.25, "interval": 1},
        {"variant": "paper", "threshold": 1.0, "interval": 7},
    ],
}
CASES = [(name, options) for name in _native.policy_names() for options in VARIANTS.get(name, [{}])]


@dataclass(frozen=True)
class Trace:
    """``events`` are (step, layer, phase, {record: written}); ``sizes`` are frames by record."""

    layers: int
    sizes: list[int]
    events: list[tuple[int, int, int, dict[int, bool]]]

    def layer_of(self, record):
        return record % self.layers


@st.composite
def traces(draw, largest=7):
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(3, 8))
    most_frames = draw(st.sampled_from([1, 5]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    step, events = 0, []
    for _ in range(draw(st.integers(10, 80))):
        layer = int(random.integers(layers))
        chosen = random.choice(experts, random.integers(min(largest, experts) + 1), replace=False)
        records = sorted(int(expert) * layers + layer for expert in chosen)
        events.append((step, layer, int(random.integers(1, 3)), {r: random.random() < 0.4 for r in records}))
        step += int(random.integers(2))
    sizes = random.integers(1, most_frames, layers * experts, endpoint=True)
    return Trace(layers, sizes.tolist(), events)


def simulated(trace, capacity, quotas, pinned, policy, **keywords):
    stride = STRIDES.get(policy, 1)
    offsets, records = columns([list(chosen) for _, _, _, chosen in trace.events])
    every = np.arange(len(trace.sizes) * stride, dtype=np.uint32) // stride
    return _native.simulate(
        offsets,
        records * np.uint32(stride),
        np.array([w for _, _, _, chosen in trace.events for w in chosen.values()], np.uint8),
        np.array([layer for _, layer, _, _ in trace.events], np.uint32),
        np.array([phase for _, _, phase, _ in trace.events], np.uint8),
        np.array([step for step, _, _, _ in trace.events], np.uint32),
        np.array(trace.sizes, np.uint32)[every],
        every % np.uint32(trace.layers),
        every,
        np.isin(every, pinned).astype(np.uint8),
        policy=policy,
        capacity_frames=capacity,
        scope=Scope.LAYER if quotas else Scope.GLOBAL,
        layer_quotas=quotas,
        **keywords,
    )


def lived(trace, capacity, quotas, pinned, policy, options, contract):
    """What a Residency does, the accesses being those of the contract."""
    core = _native.Residency(
        capacity,
        policy=policy,
        policy_options=options,
        scope=Scope.LAYER if quotas else Scope.GLOBAL,
        layer_quotas=quotas,
    )
    for record, size in enumerate(trace.sizes):
        core.add_record(trace.layer_of(record), [size, 0, 0], [size, 0, 0], 1)
    kept = set()
    steps = Counter()
    now = 0
    for step, layer, phase, chosen in trace.events:
        if step != now:
            core.end_step(now)
            now = step
        sets = [list(chosen)] if contract is Contract.ATOMIC else [[record] for record in chosen]
        for group in sets:
            records = np.array(group, np.uint32)
            flags = np.array([9 if chosen[record] else 1 for record in group], np.uint16)
            groups, _ = core.begin_access(step, phase, layer, records, flags)
            for _ in range(groups):
                begin, end, (kinds, _), _ = core.next_group()
                steps[step] += kinds.tolist().count(Decision.FETCH)
                new = [r for r in group[begin:end] if r in pinned and r not in kept]
                if new:
                    core.pin(np.array(new, np.uint32), np.ones(len(new), np.uint16))
                    kept.update(new)
                core.end_group()
    return core.stats(), [steps[step] for step in sorted({step for step, *_ in trace.events})]


def compare(trace, capacity, quotas, pinned, policy, options, contract):
    try:
        stats, misses_by_step = lived(trace, capacity, quotas, pinned, policy, options, contract)
    except _native.CapacityError:
        with pytest.raises(_native.CapacityError):
            simulated(trace, capacity, quotas, pinned, policy, options=options, contract=contract)
        return
    result = simulated(trace, capacity, quotas, pinned, policy, options=options, contract=contract)
    same = ("hits", "misses", "evictions", "write_backs", "starved")
    assert {key: result[key] for key in same} == {key: stats[key] for key in same}
    assert (result["missed_frames"], result["written_frames"]) == (
        stats["read_bytes"],
        stats["written_bytes"],
    )
    by_layer = zip(result["layer_hits"].tolist(), result["layer_misses"].tolist(), strict=True)
    assert [{"hits": hits, "misses": misses} for hits, misses in by_layer] == stats["by_layer"]
    assert result["step_misses"].tolist() == misses_by_step
    assert result["step_requests"].sum() == result["requests"] == stats["hits"] + stats["misses"]
    assert result["step_write_backs"].sum() == result["write_backs"]


@pytest.mark.parametrize(("policy", "options"), CASES)
@settings(deadline=None, max_examples=50)
@given(
    trace=traces(),
    contract=st.sampled_from(Contract),
    quotas=st.one_of(st.just([]), st.lists(st.integers(4, 12), min_size=3, max_size=3)),
    capacity=st.integers(4, 16),
)
def test_the_simulator_counts_what_the_core_counts(policy, options, trace, contract, quotas, capacity):
    quotas = quotas[: trace.layers]
    compare(trace, sum(quotas) or capacity, quotas, [], policy, options, contract)


@pytest.mark.parametrize("policy", _native.policy_names())
@settings(deadline=None, max_examples=10)
@given(trace=traces(largest=3), seed=st.integers(0, 2**32), slack=st.integers(0, 3))
def test_what_is_pinned_stays_as_it_does_in_the_core(policy, trace, seed, slack):
    random = np.random.default_rng(seed)
    pinned = np.flatnonzero(random.random(len(trace.sizes)) < 0.3).tolist()
    # Nothing is split: in the core a pin between two groups of one access can make the second impossible.
    rest = [sum(trace.sizes[r] for r in chosen if r not in pinned) for *_, chosen in trace.events]
    capacity = max(rest) + sum(trace.sizes[r] for r in pinned) + slack
    compare(trace, capacity, [], pinned, policy, {}, Contract.ATOMIC)
