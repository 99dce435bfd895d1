"""The simulator counts exactly what the live store's core counts on the same accesses, for every policy."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_columns import columns

from tierstore import _native
from tierstore._native import Contract, Decision, GroupOrder, Scope

VARIANTS = {
    "clock": [{}, {"bits": 3}],
    "lfu-decay": [
        {"interval": 2},
        {"threshold": 2.0, "beta": 0.25, "interval": 1},
        {"variant": "paper", "threshold": 1.0, "interval": 7},
    ],
}
MILLION = 10**6
CASES = [(name, options) for name in _native.policy_names() for options in VARIANTS.get(name, [{}])]


@dataclass(frozen=True)
class Trace:
    """``events`` are (step, layer, phase, {record: its groups that are asked for, and whether written}).

    ``groups`` are those that records have; ``sizes`` are frames by record and group. The simulator numbers
    entries densely, the core those of record r from 4r on.
    """

    layers: int
    groups: list[int]
    sizes: list[list[int]]
    events: list[tuple[int, int, int, dict[int, dict[int, bool]]]]

    def layer_of(self, record):
        return record % self.layers

    def size_of(self, asked):
        """Frames of what is asked for."""
        return sum(self.sizes[record][group] for record, chosen in asked.items() for group in chosen)

    def bytes_of(self, record, group):
        """A million for each frame, and some: enough to tell entries of one size apart."""
        return self.sizes[record][group] and self.sizes[record][group] * MILLION + record % 7


@st.composite
def traces(draw, largest=7):
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(3, 8))
    groups = draw(st.sampled_from([[0], [1], [0, 2], [0, 1, 2]]))
    most_frames = draw(st.sampled_from([1, 5 if len(groups) == 1 else 3]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    step, events = 0, []
    for _ in range(draw(st.integers(10, 80))):
        layer = int(random.integers(layers))
        chosen = random.choice(experts, random.integers(min(largest, experts) + 1), replace=False)
        records = sorted(int(expert) * layers + layer for expert in chosen)
        asked = {
            r: sorted(random.choice(groups, random.integers(1, len(groups) + 1), replace=False).tolist())
            for r in records
        }
        needed = {r: {group: random.random() < 0.4 for group in some} for r, some in asked.items()}
        events.append((step, layer, int(random.integers(1, 3)), needed))
        step += int(random.integers(2))
    sizes = random.integers(1, most_frames, (layers * experts, 3), endpoint=True)
    sizes[:, [group for group in range(3) if group not in groups]] = 0
    return Trace(layers, groups, sizes.tolist(), events)


def simulated(trace, capacity, quotas, pinned, policy, **keywords):
    entries = [(record, group) for record in range(len(trace.sizes)) for group in trace.groups]
    number = {entry: place for place, entry in enumerate(entries)}
    asked = [
        [
            (number[record, group], written)
            for record, some in chosen.items()
            for group, written in some.items()
        ]
        for *_, chosen in trace.events
    ]
    records = np.array([record for record, _ in entries], np.uint32)
    return _native.simulate(
        *columns([[entry for entry, _ in event] for event in asked]),
        np.array([written for event in asked for _, written in event], np.uint8),
        np.array([layer for _, layer, _, _ in trace.events], np.uint32),
        np.array([phase for _, _, phase, _ in trace.events], np.uint8),
        np.array([step for step, _, _, _ in trace.events], np.uint32),
        np.array([trace.sizes[record][group] for record, group in entries], np.uint32),
        records % np.uint32(trace.layers),
        records,
        np.array([group for _, group in entries], np.uint8),
        np.array([trace.bytes_of(*entry) for entry in entries], np.uint64),
        np.isin(records, pinned).astype(np.uint8),
        policy=policy,
        capacity_frames=capacity,
        scope=Scope.LAYER if quotas else Scope.GLOBAL,
        layer_quotas=quotas,
        **keywords,
    )


def lived(trace, capacity, quotas, pinned, policy, options, contract, order=GroupOrder.RESIDENT_FIRST):
    """What a Residency does, the accesses being those of the contract."""
    core = _native.Residency(
        capacity,
        policy=policy,
        policy_options=options,
        scope=Scope.LAYER if quotas else Scope.GLOBAL,
        layer_quotas=quotas,
        group_order=order,
    )
    for record, size in enumerate(trace.sizes):
        core.add_record(
            trace.layer_of(record), size, [trace.bytes_of(record, group) for group in range(3)], 7
        )
    kept = np.zeros(len(trace.sizes), np.uint16)  # groups that are pinned
    steps = Counter()
    now = 0
    for step, layer, phase, chosen in trace.events:
        if step != now:
            core.end_step()
            now = step
        if contract is Contract.ATOMIC:
            sets = [chosen]
        else:
            sets = [{r: {g: written}} for r, some in chosen.items() for g, written in some.items()]
        for asked in sets:
            records = np.array(list(asked), np.uint32)
            needed = np.array([sum(1 << g for g in some) for some in asked.values()], np.uint16)
            written = np.array([sum(w << g for g, w in some.items()) for some in asked.values()], np.uint16)
            groups, _ = core.begin_access(phase, layer, records, needed | written << 3)
            for _ in range(groups):
                units, (kinds, _), _ = core.next_group()
                steps[step] += kinds.tolist().count(Decision.FETCH)
                units.sort()
                new = needed[units] * np.isin(records[units], pinned) & ~kept[records[units]]
                if new.any():
                    core.pin(records[units][new > 0], new[new > 0])
                    kept[records[units]] |= new
                core.end_group()
    return core.stats(), [steps[step] for step in sorted({step for step, *_ in trace.events})]


def compare(trace, capacity, quotas, pinned, policy, options, contract, order=GroupOrder.RESIDENT_FIRST):
    keywords = {"options": options, "contract": contract, "group_order": order}
    try:
        stats, misses_by_step = lived(trace, capacity, quotas, pinned, policy, options, contract, order)
    except _native.CapacityError:
        with pytest.raises(_native.CapacityError):
            simulated(trace, capacity, quotas, pinned, policy, **keywords)
        return
    result = simulated(trace, capacity, quotas, pinned, policy, **keywords)
    same = ("hits", "misses", "evictions", "write_backs", "starved")
    assert {key: result[key] for key in same} == {key: getattr(stats, key) for key in same}
    for simulated_bytes, frames, moved in (
        (result["missed_bytes"], result["missed_frames"], stats.read_bytes),
        (result["written_bytes"], result["written_frames"], stats.written_bytes),
    ):
        assert (simulated_bytes, frames) == (moved, moved // MILLION)
    by_layer = zip(result["layer_hits"].tolist(), result["layer_misses"].tolist(), strict=True)
    assert [*by_layer] == [(layer.hits, layer.misses) for layer in stats.by_layer]
    assert result["step_misses"].tolist() == misses_by_step
    assert result["step_requests"].sum() == result["requests"] == stats.hits + stats.misses
    assert result["step_write_backs"].sum() == result["write_backs"]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "options"), CASES)
@settings(max_examples=share(50))
@given(
    trace=traces(),
    contract=st.sampled_from(Contract),
    quotas=st.one_of(st.just([]), st.lists(st.integers(4, 16), min_size=3, max_size=3)),
    capacity=st.integers(4, 24),
    order=st.sampled_from(GroupOrder),
)
def test_the_simulator_counts_what_the_core_counts(policy, options, trace, contract, quotas, capacity, order):
    quotas = quotas[: trace.layers]
    compare(trace, sum(quotas) or capacity, quotas, [], policy, options, contract, order)


@pytest.mark.parametrize("groups", [[1], [0, 2]])
def test_what_is_hashed_is_the_record_and_the_group(groups):
    # Many more entries than the sketch has counters: who shares one decides who stays.
    random = np.random.default_rng(0)
    events = []
    for step in range(1500):
        records = np.unique(random.zipf(1.2, 4) % 300).tolist()
        events.append((step, 0, 1, {record: dict.fromkeys(groups, False) for record in records}))
    sizes = [[int(group in groups) for group in range(3)] for _ in range(300)]
    compare(Trace(1, groups, sizes, events), 24, [], [], "w-tinylfu", {}, Contract.ATOMIC)


@pytest.mark.parametrize("policy", _native.policy_names())
@settings(deadline=None, max_examples=10)
@given(trace=traces(largest=3), seed=st.integers(0, 2**32), slack=st.integers(0, 3))
def test_what_is_pinned_stays_as_it_does_in_the_core(policy, trace, seed, slack):
    random = np.random.default_rng(seed)
    pinned = np.flatnonzero(random.random(len(trace.sizes)) < 0.3).tolist()
    # Nothing is split: in the core a pin between two groups of one access can make the second impossible.
    rest = [
        trace.size_of({r: some for r, some in chosen.items() if r not in pinned})
        for *_, chosen in trace.events
    ]
    capacity = max(rest) + sum(sum(trace.sizes[r]) for r in pinned) + slack
    compare(trace, capacity, [], pinned, policy, {}, Contract.ATOMIC)
