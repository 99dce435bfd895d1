"""Miss-ratio curves, and what a regime is like."""

from dataclasses import replace

import numpy as np
import pytest
from cases import NaiveLru, requests_of, simulate
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Oversized
from tierstore.cache.config import Scope
from tierstore.lab.costs import Machine
from tierstore.lab.miss_curves import (
    Worth,
    all_policies,
    curve_capacities,
    curves,
    has_one_pass,
    keep_ratio,
    lru_curve,
    survey,
)
from tierstore.lab.results import Role
from tierstore.lab.simulate import Contract, known_policies, suits


@settings(max_examples=share(25))
@given(data=st.data())
def test_one_pass_counts_what_replays_count(data):
    events = data.draw(
        st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True), min_size=2, max_size=40)
    )
    writes = [data.draw(st.lists(st.integers(0, 1), min_size=len(e), max_size=len(e))) for e in events]
    warmup = data.draw(st.integers(0, 3))
    contract = data.draw(st.sampled_from(Contract))
    requests = requests_of(events, writes=writes, sizes=[2] * 12, frame_bytes=10)
    requests.table.stored[::3] = False
    capacities = list(range(8, 25))
    curve = lru_curve(requests, capacities, contract=contract, warmup_steps=min(warmup, len(events) - 1))
    replays = simulate(
        requests, ["lru"], capacities, contract=contract, warmup_steps=min(warmup, len(events) - 1)
    )
    for point, replayed in zip(curve.points, replays, strict=True):
        for name in ("capacity_frames", "requests", "hits", "misses", "evictions", "write_backs", "steps"):
            assert getattr(point, name) == getattr(replayed, name), name
        assert point.read_bytes == replayed.read_bytes
        assert point.written_bytes == replayed.written_bytes


def test_against_a_naive_cache():
    rng = np.random.default_rng(0)
    events = [sorted(rng.choice(30, 3, replace=False).tolist()) for _ in range(400)]
    (curve,) = curves(requests_of(events), ["lru"], [0.2, 0.5, 0.8])
    for point in curve.points:
        naive = NaiveLru(point.capacity_frames)
        assert point.misses == sum(naive.event(event, [0] * 3)[0] for event in events)


def test_curves_come_in_the_order_of_policies():
    rng = np.random.default_rng(0)
    requests = requests_of([[entry] for entry in rng.integers(0, 40, 2000)])
    found = curves(requests, ["belady", "lru", "fifo"], [0.75, 0.25, 0.5])
    assert [curve.policy for curve in found] == ["belady", "lru", "fifo"]
    assert [curve.role for curve in found] == [Role.BOUND, Role.POLICY, Role.POLICY]
    for curve in found:
        assert [point.capacity_frames for point in curve.points] == [10, 20, 30]
    bound, lru, fifo = ([point.misses for point in curve.points] for curve in found)
    assert all(least <= misses for least, misses in zip(bound, lru, strict=True))
    # Requests that are all alike: every policy misses 1 - C/N, give or take.
    for misses, point in zip(lru, found[1].points, strict=True):
        assert misses / 2000 == pytest.approx(keep_ratio(requests, point.capacity_frames), abs=0.05)
    assert lru != fifo


def test_costs_ask_for_replays():
    requests = requests_of([[0], [1], [2]] * 20, writes=[[1], [0], [0]] * 20, frame_bytes=1000)
    (plain,) = curves(requests, ["lru"], ["1f", "2f"])
    (costed,) = curves(requests, ["lru"], ["1f", "2f"], machine=Machine(), windows=4)
    assert plain.points[0].policy_s is None
    assert costed.points[0].stall_s_per_step > 0
    assert len(costed.points[0].windows) == 4
    assert plain.points[1].misses == costed.points[1].misses == 60


def test_capacities_of_a_curve():
    requests = requests_of([[entry] for entry in range(20)], layers=[entry % 2 for entry in range(20)])
    assert curve_capacities(requests, 4) == [5, 10, 15, 20]
    assert curve_capacities(requests, 20)[0] == 2
    assert curve_capacities(requests, 20, scope=Scope.LAYER)[0] == 4
    assert curve_capacities(requests_of([[0]]), 3) == [1]


def test_where_one_pass_does_not_hold():
    assert not has_one_pass(requests_of([[0], [1]], sizes=[1, 2]), 3)
    uneven = requests_of([[0], [1]])
    uneven.table.nbytes[1] = 9
    assert not has_one_pass(uneven, 2)
    assert not has_one_pass(requests_of([[0, 1]]), 1)
    assert has_one_pass(requests_of([[0, 1]]), 1, contract=Contract.SEQUENTIAL)
    assert not has_one_pass(requests_of([[0, 1]]), 2, scope=Scope.LAYER)


def test_all_policies_have_one_bound_and_suit():
    keys = requests_of([[entry] for entry in range(20)])
    assert [spec.name for spec in all_policies(keys) if not spec.runs] == ["belady"]
    assert "next-use" not in [spec.name for spec in all_policies(keys)]
    passes = requests_of([[0, 1], [2, 3]], layers=[0, 1])
    assert {spec.name for spec in all_policies(passes)} == {*known_policies(bounds=False), "belady"}
    # Two layers of 5000 entries, of which a pass asks for one: 5000 looked at for each request.
    sparse = requests_of([[entry] for entry in range(10_000)], layers=[entry % 2 for entry in range(10_000)])
    assert not suits(sparse, "next-use")


def test_a_curve_goes_below_what_an_imported_entry_takes():
    """One entry of half of the footprint: it passes by below, and the others are as without it."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, 400).tolist()
    sizes = [*[1] * 8, 8]
    imported = replace(requests_of([[key] for key in keys], sizes=sizes), oversized=Oversized.BYPASS)
    assert curve_capacities(imported, 8) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert curve_capacities(replace(imported, oversized=Oversized.REFUSE), 8) == [10, 12, 14, 16]
    large = keys.count(8)
    (found,) = curves(imported, ["lru"], [2, 4, 6, 8])
    (alone,) = curves(requests_of([[key] for key in keys if key != 8]), ["lru"], [2, 4, 6])
    assert [one.not_admitted for one in found.points] == [large] * 3 + [0]
    assert [one.misses - large for one in found.points[:3]] == [one.misses for one in alone.points]


@pytest.mark.parametrize("contract", Contract)
def test_one_pass_is_for_caches_that_hold_an_entry(contract):
    """Entries of three frames in two: nothing is ever admitted, or evicted."""
    imported = replace(
        requests_of([[0], [1], [0]], sizes=[3, 3], writes=[[1], [0], [1]]), oversized=Oversized.BYPASS
    )
    assert not has_one_pass(imported, 2, contract=contract)
    (found,) = curves(imported, ["lru"], [2, 3], contract=contract)
    below, at = found.points
    assert (below.misses, below.not_admitted, below.evictions, below.write_backs) == (3, 3, 0, 2)
    assert (at.misses, at.not_admitted, at.evictions) == (3, 0, 2)


def test_a_curve_is_a_bound_where_all_of_its_points_are():
    sets = requests_of([[0, 1, 2], [3], [0, 1], [4]] * 3)
    (whole,) = curves(sets, ["belady"], [3, 4])
    (cut,) = curves(sets, ["belady"], [2, 4])
    assert whole.role is Role.BOUND
    assert [point.role for point in cut.points] == [Role.CLAIRVOYANT, Role.BOUND]
    assert cut.role is Role.CLAIRVOYANT


LAYERS, EXPERTS = 3, 16


def training(active, steps=60, skew=1.0):
    """Forward and backward passes in which each layer asks for ``active`` of 16 experts."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, EXPERTS + 1) ** skew
    events, layers = [], []
    for _ in range(steps):
        chosen = [
            sorted(rng.choice(EXPERTS, active, replace=False, p=weights / weights.sum()))
            for _ in range(LAYERS)
        ]
        for layer in [*range(LAYERS), *reversed(range(LAYERS))]:
            events.append([layer * EXPERTS + int(expert) for expert in chosen[layer]])
            layers.append(layer)
    return requests_of(events, layers=layers, steps=np.repeat(np.arange(steps), 2 * LAYERS))


def test_what_fits_needs_no_policy():
    found = survey(training(4), 48)
    assert found.worth is Worth.FITS
    assert "everything fits" in found.advice


def test_passes_that_ask_for_everything_leave_nothing_to_choose():
    found = survey(training(16), 40)
    assert found.active_records == 16
    assert found.layer_records == 16
    assert found.worth in (Worth.AT_BOUND, Worth.CHOICE)
    assert "Tuning gains nothing" in found.advice or "further tuning gains nothing" in found.advice


def test_few_of_many_leave_room():
    found = survey(training(2), 16)
    assert found.worth is Worth.TUNE
    assert found.active_frames == 2
    assert found.capacity_frames == pytest.approx(16 / 3)
    assert found.bound < min(found.miss_ratios.values()) - 0.01
    assert "lie between" in found.advice


def test_a_long_trace_is_sampled():
    requests = requests_of([[entry] for entry in np.random.default_rng(0).integers(0, 50, 30_000)])
    part = requests.head(10_000)
    assert (part.events, part.step_count) == (10_000, 10_000)
    last = requests.tail(10_000)
    assert last.entries.tolist() == requests.entries[20_000:].tolist()
    steps = requests_of([[0], [1], [2], [3]], steps=[0, 0, 1, 1])
    assert steps.head(3).entries.tolist() == [0, 1]
    assert steps.tail(3).entries.tolist() == [2, 3]
    assert steps.head(1).entries.tolist() == [0, 1]
    assert steps.tail(1).entries.tolist() == [2, 3]


def test_where_there_is_no_bound_nothing_is_said_of_what_a_policy_may_gain():
    """Entries of several sizes, of which all sensible policies miss as many as the clairvoyant one; others miss less."""
    wide = requests_of([[2], [2], [1], [0], [1], [2]], sizes=[3, 2, 1], steps=[0] * 6)
    found = survey(wide, 4)
    assert (found.role, found.worth) == (Role.CLAIRVOYANT, Worth.TUNE)
    assert "misses: clairvoyant 0.8333, lru 0.8333, lfu-decay 0.6667. Tuning may be worth it" in found.advice
    assert "no bound here" in found.advice
    assert "the bound" not in found.advice
    assert survey(training(2), 16).role is Role.BOUND
    assert survey(training(8), 7).role is Role.CLAIRVOYANT  # a pass is split
