"""What exchanges cost, and from where on two steps no longer pay."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.machine_profile import Cost
from tierstore.parallel.hierarchical import ExchangeModel
from tierstore.parallel.layout import NodeGrid


def of_links(grid: NodeGrid, *, within: Cost, between: Cost) -> ExchangeModel:
    """From ``within`` for a collective of a node and a byte of it, ``between`` for a message between nodes."""
    others, each = grid.nodes - 1, grid.each
    byte_s = others * each / between.per_s
    rail = Cost(others * between.latency_s, 1 / byte_s)
    hierarchical_s = byte_s + grid.nodes * (each - 1) / within.per_s
    hierarchical = Cost(rail.latency_s + within.latency_s, 1 / hierarchical_s)
    return ExchangeModel(grid, Cost(others * each * between.latency_s, 1 / byte_s), rail, hierarchical)


def test_by_hand() -> None:
    """Two nodes of three ranks; a message between nodes costs 2 ms and 1 us a byte, the step within 1 ms and 0.1 us a byte.

    Flat: 3 messages of b bytes. In two steps: one of 3 b bytes, and 2 x 2 b bytes within the node. So 4 ms are gained and
    1 ms + 0.4 us a byte lost: even at 7,500 bytes.
    """
    model = of_links(NodeGrid(2, 3), within=Cost(1e-3, 1e7), between=Cost(2e-3, 1e6))
    assert model.flat.seconds(1000) == pytest.approx(9e-3)
    assert model.hierarchical.seconds(1000) == pytest.approx(2e-3 + 3e-3 + 1e-3 + 0.4e-3)
    assert model.below_bytes == pytest.approx(7500)
    assert model.message_s == pytest.approx(2e-3)
    assert (model.step_s, model.step_byte_s) == (pytest.approx(1e-3), pytest.approx(0.1e-6))
    assert model.describe() == (
        "a message between nodes costs 2 ms, the step within a node 1 ms and 9.54 MiB/s"
    )


def test_two_steps_never_pay_or_always() -> None:
    flat, rail = Cost(2e-3, 1e6), Cost(1e-3, 1e6)
    grid = NodeGrid(2, 2)
    assert ExchangeModel(grid, flat, rail, Cost(2e-3, 5e5)).below_bytes == 0
    assert ExchangeModel(grid, flat, rail, Cost(3e-3, 2e6)).below_bytes == 0
    assert ExchangeModel(grid, flat, rail, Cost(1.5e-3, 1e6)).below_bytes == math.inf


_POSITIVE = st.floats(1e-6, 1e-1)


@given(
    st.integers(2, 8), st.integers(2, 8), _POSITIVE, _POSITIVE, st.floats(1e-10, 1e-6), st.floats(1e-10, 1e-6)
)
def test_the_faster_way_changes_at_the_threshold(
    nodes: int, each: int, step_s: float, message_s: float, step_byte_s: float, byte_s: float
) -> None:
    model = of_links(
        NodeGrid(nodes, each), within=Cost(step_s, 1 / step_byte_s), between=Cost(message_s, 1 / byte_s)
    )
    below = model.below_bytes
    assert math.isfinite(below)
    for nbytes in (below * 0.5, below * 2 + 1):
        gain = model.flat.seconds(nbytes) - model.hierarchical.seconds(nbytes)
        if abs(gain) > 1e-12:
            assert (gain > 0) is (nbytes < below)
