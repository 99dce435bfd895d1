"""The known future, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.prefetch import Pass, PassSequence

F, B = Phase.FORWARD, Phase.BACKWARD


@pytest.mark.parametrize(
    ("phase", "layer", "depth", "expected"),
    [
        (F, 1, 0, []),
        (F, 1, 1, [Pass(F, 3)]),
        (F, 1, 3, [Pass(F, 3), Pass(F, 5), Pass(B, 5)]),
        (F, 5, 2, [Pass(B, 5), Pass(B, 3)]),
        (B, 5, 1, [Pass(B, 3)]),
        (B, 3, 3, [Pass(B, 1), Pass(F, 1, 1), Pass(F, 3, 1)]),
        (
            B,
            1,
            7,
            [
                Pass(F, 1, 1),
                Pass(F, 3, 1),
                Pass(F, 5, 1),
                Pass(B, 5, 1),
                Pass(B, 3, 1),
                Pass(B, 1, 1),
                Pass(F, 1, 2),
            ],
        ),
    ],
)
def test_training_goes_forward_then_backward_then_forward_again(
    phase: Phase, layer: int, depth: int, expected: list[Pass]
) -> None:
    assert PassSequence([1, 3, 5]).after(phase, layer, depth, training=True) == expected


def test_evaluation_only_goes_forward() -> None:
    sequence = PassSequence([0, 1])
    assert sequence.after(F, 0, 3, training=False) == [Pass(F, 1), Pass(F, 0, 1), Pass(F, 1, 1)]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(0, 20), st.data())
def test_it_is_the_written_out_schedule(layers: int, depth: int, data: st.DataObject) -> None:
    order = [(F, layer) for layer in range(layers)] + [(B, layer) for layer in range(layers - 1, -1, -1)]
    at = data.draw(st.integers(0, len(order) - 1))
    unrolled = [Pass(phase, layer, turn) for turn in range(12) for phase, layer in order]
    found = PassSequence(range(layers)).after(*order[at], depth, training=True)
    assert found == unrolled[at + 1 : at + 1 + depth]
