"""What exchanges cost: lines through points, and from where on two steps no longer pay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.parallel.hierarchical import ExchangeModel, MessageCost
from tierstore.parallel.layout import NodeGrid


def of_links(grid: NodeGrid, *, within: MessageCost, between: MessageCost) -> ExchangeModel:
    """From ``within`` for a collective of a node and a byte of it, ``between`` for a message between nodes."""
    others, each = grid.nodes - 1, grid.each
    byte_s = others * each * between.byte_s
    rail = MessageCost(others * between.start_s, byte_s)
    hierarchical = MessageCost(
        rail.start_s + within.start_s, byte_s + grid.nodes * (each - 1) * within.byte_s
    )
    return ExchangeModel(grid, MessageCost(others * each * between.start_s, byte_s), rail, hierarchical)


def test_by_hand() -> None:
    """Two nodes of three ranks; a message between nodes costs 2 ms and 1 us a byte, the step within 1 ms and 0.1 us a byte.

    Flat: 3 messages of b bytes. In two steps: one of 3 b bytes, and 2 x 2 b bytes within the node. So 4 ms are gained and
    1 ms + 0.4 us a byte lost: even at 7,500 bytes.
    """
    model = of_links(NodeGrid(2, 3), within=MessageCost(1e-3, 0.1e-6), between=MessageCost(2e-3, 1e-6))
    assert model.flat.seconds(1000) == pytest.approx(9e-3)
    assert model.hierarchical.seconds(1000) == pytest.approx(2e-3 + 3e-3 + 1e-3 + 0.4e-3)
    assert model.below_bytes == pytest.approx(7500)
    assert model.message_s == pytest.approx(2e-3)
    assert (model.step_s, model.step_byte_s) == (pytest.approx(1e-3), pytest.approx(0.1e-6))
    assert model.describe() == (
        "a message between nodes costs 2 ms, the step within a node 1 ms and 9.54 MiB/s"
    )


def test_two_steps_never_pay_or_always() -> None:
    flat, rail = MessageCost(2e-3, 1e-6), MessageCost(1e-3, 1e-6)
    grid = NodeGrid(2, 2)
    assert ExchangeModel(grid, flat, rail, MessageCost(2e-3, 2e-6)).below_bytes == 0
    assert ExchangeModel(grid, flat, rail, MessageCost(3e-3, 0.5e-6)).below_bytes == 0
    assert ExchangeModel(grid, flat, rail, MessageCost(1.5e-3, 1e-6)).below_bytes == math.inf


_POSITIVE = st.floats(1e-6, 1e-1)


@given(_POSITIVE, st.floats(0, 1e-6), st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True))
def test_a_line_goes_through_its_points(start_s: float, byte_s: float, sizes: list[int]) -> None:
    line = MessageCost(start_s, byte_s)
    fitted = MessageCost.fitted([(nbytes, line.seconds(nbytes)) for nbytes in sizes])
    for nbytes in sizes:
        assert fitted.seconds(nbytes) == pytest.approx(line.seconds(nbytes), rel=1e-6)


def test_lines_have_no_negative_part_and_need_two_sizes() -> None:
    assert MessageCost.fitted([(1, 2.0), (2, 1.0)]).byte_s == 0
    assert MessageCost.fitted([(100, 1.0), (200, 4.0)]).start_s == 0
    with pytest.raises(ValueError, match="points of two sizes"):
        MessageCost.fitted([(5, 1.0), (5, 2.0)])


@given(
    st.integers(2, 8), st.integers(2, 8), _POSITIVE, _POSITIVE, st.floats(1e-10, 1e-6), st.floats(1e-10, 1e-6)
)
def test_the_faster_way_changes_at_the_threshold(
    nodes: int, each: int, step_s: float, message_s: float, step_byte_s: float, byte_s: float
) -> None:
    model = of_links(
        NodeGrid(nodes, each), within=MessageCost(step_s, step_byte_s), between=MessageCost(message_s, byte_s)
    )
    below = model.below_bytes
    assert math.isfinite(below)
    for nbytes in (below * 0.5, below * 2 + 1):
        gain = model.flat.seconds(nbytes) - model.hierarchical.seconds(nbytes)
        if abs(gain) > 1e-12:
            assert (gain > 0) is (nbytes < below)
