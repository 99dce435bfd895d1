"""Whether tuning is worth anything is measured."""

from __future__ import annotations

import numpy as np
import pytest
from cases import requests_of

from tierstore.lab.miss_curves import Worth, survey
from tierstore.lab.results import Role

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
    assert "the gain is" in found.advice or "nothing to tune" in found.advice


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
