"""The time of a pass with a ring and without."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.machine_profile import ASSUMED, Cost
from tierstore.plan.ring import ExpertMemorySizes, PassFacts, ServedLayers, distinct_experts, pass_times

MODEL = ServedLayers(layers=10, experts=8, top_k=2, expert_numel=1000, expert_bytes=2000, dense_numel=5000)
PROFILE = replace(
    ASSUMED,
    copy=Cost(0.0, 1e6),  # 2 ms an expert, 16 ms a layer
    disk_read=Cost(0.0, 5e5),
    dense_flops=Cost(0.0, 1e7),  # 1 ms a token
    expert_flops=Cost(0.0, 4e6),  # 2 experts a token: 1 ms
)


def test_distinct_by_enumeration() -> None:
    """All choices of 2 of 4 experts by 2 tokens."""
    choices = [{a, b} for a in range(4) for b in range(a)]
    mean = sum(len(one | two) for one, two in product(choices, choices)) / len(choices) ** 2
    assert distinct_experts(4, 2, 2) == pytest.approx(mean)
    assert distinct_experts(4, 4, 1) == 4.0
    with pytest.raises(ConfigError, match=r"top_k: expected 1 to 4, got 5"):
        distinct_experts(4, 5, 1)


def times(tokens: int, ring: int, host: int = 80, **facts: float):
    sizes = ExpertMemorySizes(device=8 * ring, host=host, ring_layers=ring)
    return pass_times(MODEL, sizes, PassFacts(tokens=tokens, **facts), PROFILE)


def test_prefill_by_hand() -> None:
    """100 tokens: 200 ms of computing a layer hide 16 ms of copies. Without a ring 8 experts, less the 40% that the device
    has, are waited for.
    """
    found = times(100, 4)
    assert found.distinct == pytest.approx(8.0)
    assert found.compute_s == pytest.approx(10 * 0.2)
    assert found.ring_s == pytest.approx(10 * 0.2)
    assert found.sparse_s == pytest.approx(10 * (0.2 + 0.6 * 8 * 2e-3))
    assert found.ring_is_faster
    assert times(100, 1).ring_s == pytest.approx(10 * (0.2 + 16e-3))


def test_decoding_by_hand() -> None:
    """One token: 2 ms of computing, and a ring copies 16 ms a layer."""
    found = times(1, 4, resident=0.5, guessed=0.5)
    assert found.ring_s == pytest.approx(10 * 16e-3)
    assert found.sparse_s == pytest.approx(10 * (2e-3 + 0.5 * 1.0 * 2e-3))
    assert not found.ring_is_faster
    half = times(1, 4, host=40)
    assert half.ring_s == pytest.approx(10 * 16e-3), (
        "half from disk, at half the speed: as long as the copies"
    )
    assert times(1, 4, host=0).ring_s == pytest.approx(10 * 32e-3)
    assert times(1, 10).ring_s == pytest.approx(10 * 2e-3)
    assert times(1, 0).ring_s is None


@given(st.integers(1, 2000), st.integers(0, 10), st.floats(0, 1), st.floats(0, 1))
def test_never_faster_than_computing(tokens: int, ring: int, resident: float, guessed: float) -> None:
    found = times(tokens, ring, resident=resident, guessed=guessed)
    assert found.sparse_s >= found.compute_s * (1 - 1e-9)
    assert found.ring_s is None or found.ring_s >= found.compute_s * (1 - 1e-9)
