"""Every decision of the residency core against a naive one: lists, dicts and sums, one victim at a time."""

import itertools

import numpy as np
import pytest
from core_calls import pairs
from effort import share
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_learned_use import NaiveLearnedUse
from naive_next_use import NaiveNextUse
from naive_policies import REFERENCES

from tierstore import _native
from tierstore._native import Decision as D

WEIGHTS, MOMENTS, GRADIENTS = 0, 1, 2
FORWARD, BACKWARD = 1, 2  # phases


class Naive:
    """The contract of Residency, written for reading."""

    def __init__(self, capacity, make_policy, lookahead, quotas, residents_first, parts):
        self.residents_first, self.parts = residents_first, parts
        self.quotas = quotas or [capacity]
        self.by_layer = bool(quotas)
        self.lookahead = lookahead
        self.layer, self.frames, self.bytes = {}, {}, {}
        self.policies = [make_policy(quota, self.frames) for quota in self.quotas]
        self.limits = [max(0, q - self.policies[0].headroom) for q in self.quotas]
        self.resident, self.dirty, self.stored, self.fresh, self.known = set(), set(), set(), set(), set()
        self.pins, self.holds = {}, []
        self.count = dict.fromkeys(
            [
                "hits",
                "misses",
                "creates",
                "evictions",
                "write_backs",
                "drops",
                "read_bytes",
                "written_bytes",
                "prefetch_read_bytes",
                "useful_prefetch_bytes",
                "wasted_prefetch_bytes",
                "groups",
            ],
            0,
        )

    def add(self, record, layer, frames, sizes, stored):
        for g in range(3):
            e = record * 4 + g
            self.layer[e], self.frames[e], self.bytes[e] = layer, frames[g], sizes[g]
            self.policies[self.domain(e)].layers[e] = layer
            if stored >> g & 1:
                self.stored.add(e)

    def domain(self, e):
        return self.layer[e] if self.by_layer else 0

    def size(self, entries, domain=None):
        return sum(self.frames[e] for e in entries if domain is None or self.domain(e) == domain)

    def free(self, d):
        return self.limits[d] - self.size(self.resident, d)

    def needs(self, unit):
        return [unit[0] * 4 + g for g in range(3) if unit[1] >> g & 1]

    # -- room

    def gone(self, e):
        if e in self.fresh:
            self.count["wasted_prefetch_bytes"] += self.bytes[e]
        if e in self.known:
            self.policies[self.domain(e)].remove(e)
        for group in (self.fresh, self.known, self.resident, self.dirty):
            group.discard(e)
        if e in self.holds:
            self.holds.remove(e)

    def evict(self, e, out):
        self.count["evictions"] += 1
        if e in self.dirty:
            self.stored.add(e)
            self.count["write_backs"] += 1
            self.count["written_bytes"] += self.bytes[e]
            out.append((D.EVICT_WRITE, e))
        else:
            out.append((D.EVICT, e))
        self.gone(e)

    def evictable(self, d):
        return {
            e for e in self.resident if not self.pins.get(e) and e not in self.holds and self.domain(e) == d
        }

    def make_room(self, d, frames, out):
        while self.free(d) < frames:
            victims = self.policies[d].victims(self.evictable(d), frames - self.free(d))
            if not victims:
                break
            for e in victims:
                self.evict(e, out)

    def drop_one(self, e, out):
        if e in self.resident or e in self.stored:
            if e in self.resident:
                self.gone(e)
            self.stored.discard(e)
            self.count["drops"] += 1
            out.append((D.DROP, e))

    # -- accesses

    def begin_access(self, phase, layer, units):
        d = layer if self.by_layer else 0
        pinned = self.size([e for e, n in self.pins.items() if n], d)
        room = self.limits[d] - pinned
        adds = [self.size([e for e in self.needs(u) if not self.pins.get(e)]) for u in units]
        if max(adds, default=0) > room:
            return None
        if len(units) > 1:
            room = max(max(adds), room - self.lookahead // len(self.quotas))
        if phase in (FORWARD, BACKWARD) and any(flags >> 3 & 7 for _, flags in units):
            room = min(room, self.limits[d] // self.parts)
        groups, total = [], 0
        for i in self.served(units) if sum(adds) > room else range(len(units)):
            if groups and total + adds[i] <= room:
                groups[-1].append(i)
                total += adds[i]
            else:
                groups.append([i])
                total = adds[i]
        self.access, self.groups, self.d = units, groups, d
        for policy in self.policies:
            policy.access(phase, layer, [e for u in units for e in self.needs(u)])
        return groups

    def served(self, units):
        """Units as they are served: whole ones, those with a part in memory, the rest."""
        if not self.residents_first:
            return range(len(units))
        whole, part, rest = [], [], []
        for i, unit in enumerate(units):
            there = [e in self.resident for e in self.needs(unit)]
            (whole if all(there) else part if any(there) else rest).append(i)
        return whole + part + rest

    def next_group(self, g):
        out, ahead = [], []
        units = [self.access[i] for i in self.groups[g]]
        entries = [e for u in units for e in self.needs(u)]
        for e in entries:
            if e in self.holds:
                self.holds.remove(e)
            self.pins[e] = self.pins.get(e, 0) + 1
        missing = self.size([e for e in entries if e not in self.resident])
        for e in entries:
            if e not in self.resident:
                self.policies[self.d].miss(e)
        self.make_room(self.d, missing, out)
        while self.free(self.d) < missing:
            mine = [e for e in self.holds if self.domain(e) == self.d and not self.pins.get(e)]
            self.evict(mine[-1], out)
        policy = self.policies[self.d]
        for e in entries:
            if e in self.resident:
                self.count["hits"] += 1
                if e in self.fresh:
                    self.fresh.discard(e)
                    self.count["useful_prefetch_bytes"] += self.bytes[e]
                out.append((D.HIT, e))
            elif e in self.stored:
                self.count["misses"] += 1
                self.count["read_bytes"] += self.bytes[e]
                out.append((D.FETCH, e))
            else:
                self.count["creates"] += 1
                out.append((D.CREATE, e))
            self.resident.add(e)
            policy.hit(e) if e in self.known else policy.insert(e)
            self.known.add(e)
            policy.request()
        self.count["groups"] += 1
        self.hold(
            [u for later in self.groups[g + 1 :] for u in (self.access[i] for i in later)], self.d, ahead
        )
        return out, ahead

    def end_unit(self, unit):
        out = []
        for e in self.needs(unit):
            if unit[1] >> (3 + e % 4) & 1:
                self.dirty.add(e)
            self.pins[e] -= 1
            if unit[1] >> (6 + e % 4) & 1 and not self.pins[e]:
                self.drop_one(e, out)
        return out

    def hold(self, units, d, out):
        if not self.lookahead:
            return 0
        for n, unit in enumerate(units):
            for e in self.needs(unit):
                if e in self.holds:
                    continue
                if e not in self.resident:
                    if e not in self.stored:
                        continue
                    held = self.size([h for h in self.holds if h in self.fresh])
                    if held + self.frames[e] > self.lookahead:
                        return n
                    if self.free(d) + self.size(self.evictable(d)) < self.frames[e]:
                        return n
                    self.policies[d].miss(e)
                    self.make_room(d, self.frames[e], out)
                    self.resident.add(e)
                    self.fresh.add(e)
                    self.count["read_bytes"] += self.bytes[e]
                    self.count["prefetch_read_bytes"] += self.bytes[e]
                    out.append((D.FETCH, e))
                self.holds.append(e)
        return len(units)

    def cancel(self):
        for e in self.holds:
            if e not in self.known:
                self.known.add(e)
                self.policies[self.domain(e)].insert(e)
        self.holds = []

    def clean(self, records):
        out = []
        for r in records:
            for g in (WEIGHTS, MOMENTS):
                e = r * 4 + g
                if e in self.dirty and not self.pins.get(e):
                    self.dirty.discard(e)
                    self.stored.add(e)
                    self.count["write_backs"] += 1
                    self.count["written_bytes"] += self.bytes[e]
                    out.append((D.WRITE_BACK, e))
        return out

    def end_step(self):
        self.cancel()
        for policy in self.policies:
            policy.step()


def arrays(units):
    return np.array([u[0] for u in units], np.uint32), np.array([u[1] for u in units], np.uint16)


#: For each policy its naive class, and the options that are drawn.
POLICIES = {
    **REFERENCES,
    "next-use": (NaiveNextUse, [{}, {"half_life": 0.7}]),
    "learned-use": (NaiveLearnedUse, [{}, {"price": 0.1, "rate": 0.1}]),
}


def test_every_policy_has_a_reference():
    assert set(POLICIES) == set(_native.policy_names())


@st.composite
def units(draw, records):
    chosen = sorted(draw(st.sets(st.sampled_from(records), min_size=1, max_size=6)))
    made = []
    for record in chosen:
        need = draw(st.sampled_from([1, 1, 3, 5, 7, 4]))
        dirty = draw(st.integers(0, 7)) & need
        drop = draw(st.sampled_from([0, 0, 4])) & need
        made.append((record, need | dirty << 3 | drop << 6))
    return made


@pytest.mark.slow
@settings(
    max_examples=share(250),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_every_decision_is_the_naive_one(data):
    draw = data.draw
    name, kind, options = draw(
        st.sampled_from([(name, kind, one) for name, (kind, every) in POLICIES.items() for one in every])
    )
    layers = draw(st.integers(1, 3))
    by_layer = draw(st.booleans())
    sizes = draw(st.sampled_from([(1, 1, 1), (2, 3, 2), (1, 4, 2)]))
    unequal = draw(st.booleans())
    capacity = draw(st.integers(9, 40))
    lookahead = draw(st.integers(0, capacity // 2))
    quotas = [capacity] * layers if by_layer else []
    residents_first = draw(st.sampled_from([True, True, False]))
    parts = draw(st.sampled_from([1, 2, 5]))
    total = capacity * layers if by_layer else capacity
    core = _native.Residency(
        total,
        policy=name,
        policy_options=options,
        scope=_native.Scope.LAYER if by_layer else _native.Scope.GLOBAL,
        lookahead_frames=lookahead,
        layer_quotas=quotas,
        group_order=_native.GroupOrder.RESIDENT_FIRST if residents_first else _native.GroupOrder.KEY,
        parts=parts,
    )
    naive = Naive(
        total, lambda size, frames: kind(size, frames, **options), lookahead, quotas, residents_first, parts
    )
    count = 5 * layers
    for record in range(count):
        frames = [f + (record % 3 if unequal else 0) for f in sizes]
        stored = draw(st.sampled_from([3, 3, 3, 0]))
        assert core.add_record(record // 5, frames, [f * 10 for f in frames], stored) == record
        naive.add(record, record // 5, frames, [f * 10 for f in frames], stored)

    def some_units():
        layer = draw(st.integers(0, layers - 1))
        mine = list(range(layer * 5, layer * 5 + 5)) if by_layer else list(range(count))
        return layer, draw(units(mine))

    def speculate():
        layer, chosen = some_units()
        taken, decided = core.prefetch(0, layer, *arrays(chosen))
        expected = []
        assert taken == naive.hold(chosen, layer if by_layer else 0, expected)
        assert pairs(decided) == expected

    def check():
        assert core.resident_entries().tolist() == sorted(naive.resident)
        assert core.dirty_entries().tolist() == sorted(naive.dirty)
        assert core.used_frames == naive.size(naive.resident) <= total
        for d, limit in enumerate(naive.limits):
            assert naive.size(naive.resident, d) <= limit

    for _ in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(1, 4))):
            action = draw(
                st.sampled_from(["access"] * 5 + ["prefetch"] * 3 + ["clean", "drop", "cancel", "stored"])
            )
            if action == "prefetch":
                speculate()
            elif action == "clean":
                records = draw(st.lists(st.integers(0, count - 1), max_size=5))
                assert pairs(core.clean(np.array(records, np.uint32))) == naive.clean(records)
            elif action == "drop":
                record = draw(st.integers(0, count - 1))
                expected = []
                naive.drop_one(record * 4 + 2, expected)
                assert pairs(core.drop(np.array([record * 4 + 2], np.uint32))) == expected
            elif action == "cancel":
                core.cancel_prefetch()
                naive.cancel()
            elif action == "stored":
                record = draw(st.integers(0, count - 1))
                core.set_stored(record, 3)
                naive.stored |= {record * 4, record * 4 + 1}
                naive.stored.discard(record * 4 + 2)
            else:
                layer, chosen = some_units()
                phase = draw(st.sampled_from([1, 1, 2, 2, 4, 0]))
                groups = naive.begin_access(phase, layer, chosen)
                if groups is None:
                    with pytest.raises(_native.CapacityError):
                        core.begin_access(phase, layer, *arrays(chosen))
                    continue
                number, bounds = core.begin_access(phase, layer, *arrays(chosen))
                assert [b - a for a, b in itertools.pairwise(bounds.tolist())] == [len(g) for g in groups]
                assert number == len(groups)
                for g, members in enumerate(groups):
                    served, demanded, ahead = core.next_group()
                    assert served.tolist() == members
                    assert (pairs(demanded), pairs(ahead)) == naive.next_group(g)
                    for i in members:
                        for e in naive.needs(chosen[i]):
                            assert core.state(e).resident
                            assert core.state(e).pins == 1
                    check()
                    early = draw(st.sets(st.sampled_from(members)))
                    for i in sorted(early, key=members.index):
                        assert pairs(core.end_unit(i)) == naive.end_unit(chosen[i])
                    if draw(st.booleans()):
                        speculate()
                    rest = [d for i in members if i not in early for d in naive.end_unit(chosen[i])]
                    assert pairs(core.end_group()) == rest
            check()
        core.end_step()
        naive.end_step()
        check()
    stats = core.stats()
    assert {key: getattr(stats, key) for key in naive.count} == naive.count
    assert stats.starved == sum(policy.starved for policy in naive.policies)
    assert sum(layer.hits for layer in stats.by_layer) == stats.hits
    assert sum(group.misses for group in stats.by_group.values()) == stats.misses
