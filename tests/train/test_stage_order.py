"""The order of a stage's passes: by hand, and against a run of all stages by messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.train.stages import micro_batches_held, one_forward_one_backward


def said(stage: int, stages: int, micro_batches: int) -> str:
    order = one_forward_one_backward(stage, stages, micro_batches)
    return " ".join(f"{turn.phase.name[0]}{turn.micro}" for turn in order)


def test_four_micro_batches_through_three_stages() -> None:
    """Stage 0 has three on their way before the first comes back, the last stage one."""
    assert said(0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert said(1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert said(2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_micro_batches_than_stages_are_all_held() -> None:
    assert said(0, 4, 2) == "F0 F1 B0 B1"
    assert [micro_batches_held(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="stage of 0 to 1, got 2"):
        one_forward_one_backward(2, 2, 4)


@given(st.integers(1, 6), st.integers(1, 12))
def test_every_pass_finds_what_it_needs_and_the_step_takes_the_time_of_the_paper(
    stages: int, micro_batches: int
) -> None:
    """Stages that take their passes in order, each when its message is there, neither block nor hold too many; with forward
    passes of 1 and backward passes of 2 the last ends after (M + p - 1) * 3.
    """
    orders = [list(one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)]
    ended: dict[tuple[Phase, int, int], int] = {}
    clock, held = [0] * stages, [0] * stages
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            while order:
                phase, micro = order[0].phase, order[0].micro
                needs = stage - 1 if phase is Phase.FORWARD else stage + 1
                own = (Phase.FORWARD, stage, micro)
                if 0 <= needs < stages and (phase, needs, micro) not in ended:
                    break
                assert phase is Phase.FORWARD or own in ended
                there = ended.get((phase, needs, micro), 0)
                took = 1 if phase is Phase.FORWARD else 2
                clock[stage] = ended[phase, stage, micro] = max(clock[stage], there) + took
                held[stage] += 1 if phase is Phase.FORWARD else -1
                assert held[stage] <= min(micro_batches, stages - stage)
                order.pop(0)
                moved = True
        assert moved, "the stages wait for one another"
    assert max(clock) == (micro_batches + stages - 1) * 3
