"""The known future, by hand."""

from collections.abc import Sequence

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.prefetch import Schedule

F, B = Phase.FORWARD, Phase.BACKWARD
Found = tuple[Phase, int, int]


def following(
    layers: Sequence[int], phase: Phase, layer: int, depth: int, training: bool = True
) -> list[Found]:
    """(phase, layer, later) of the passes ahead."""
    found = Schedule.of_layers(layers, depth=depth).following(phase, layer, training=training)
    assert all(
        item.unit == list(layers).index(item.moe_layer) for item in found if item.moe_layer is not None
    )
    return [(item.phase, item.moe_layer, item.later) for item in found if item.moe_layer is not None]


@pytest.mark.parametrize(
    ("phase", "layer", "depth", "expected"),
    [
        (F, 1, 0, []),
        (F, 1, 1, [(F, 3, 0)]),
        (F, 1, 3, [(F, 3, 0), (F, 5, 0), (B, 5, 0)]),
        (F, 5, 2, [(B, 5, 0), (B, 3, 0)]),
        (B, 5, 1, [(B, 3, 0)]),
        (B, 3, 3, [(B, 1, 0), (F, 1, 1), (F, 3, 1)]),
        (B, 1, 7, [(F, 1, 1), (F, 3, 1), (F, 5, 1), (B, 5, 1), (B, 3, 1), (B, 1, 1), (F, 1, 2)]),
    ],
)
def test_training_goes_forward_then_backward_then_forward_again(
    phase: Phase, layer: int, depth: int, expected: list[Found]
) -> None:
    assert following([1, 3, 5], phase, layer, depth) == expected


def test_evaluation_only_goes_forward() -> None:
    assert following([0, 1], F, 0, 3, training=False) == [(F, 1, 0), (F, 0, 1), (F, 1, 1)]


@settings(max_examples=share(50))
@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_it_is_the_written_out_schedule(layers: int, depth: int, data: st.DataObject) -> None:
    order = [(F, layer) for layer in range(layers)] + [(B, layer) for layer in range(layers - 1, -1, -1)]
    at = data.draw(st.integers(0, len(order) - 1))
    unrolled = [(phase, layer, turn) for turn in range(12) for phase, layer in order]
    found = following(range(layers), *order[at], depth)
    assert found == unrolled[at + 1 : at + 1 + depth]
