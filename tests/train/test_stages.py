"""Pipeline stages: which blocks each has, its specification, and the order of its passes."""

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tierstore.cache.access import Phase
from tierstore.model import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.train.stages import (
    balanced_blocks,
    block_costs,
    micro_batches_held,
    one_forward_one_backward,
    stage_blocks,
)


def test_blocks_are_cut_where_the_most_expensive_stage_costs_least() -> None:
    """3 + 1 + 1 against 1 + 4: 5 at most; any other cut has 6 or more."""
    assert balanced_blocks([3, 1, 1, 1, 4], 2) == [range(3), range(3, 5)]


def test_of_equal_cuts_the_later_stages_have_more_blocks() -> None:
    assert balanced_blocks([2, 1, 1], 2) == [range(1), range(1, 3)]
    assert balanced_blocks([0, 0, 0], 2) == [range(1), range(1, 3)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_no_other_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balanced_blocks(costs, stages)
    assert [block for blocks in found for block in blocks] == list(range(len(costs)))
    assert all(found)

    def worst(cuts: Sequence[int]) -> int:
        return max(sum(costs[start:stop]) for start, stop in pairwise((0, *cuts, len(costs))))

    best = min(worst(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert worst([blocks.stop for blocks in found[:-1]]) == best


def test_a_block_costs_what_a_token_passes() -> None:
    """Two norms, attention and either a router with top-k experts or a dense network; the head falls to the last block."""
    model = ModelConfig(
        d_model=8, n_layers=2, n_heads=1, d_ff=4, experts=3, top_k=2, moe_every=2, vocab_size=10
    )
    dense = 4 * 64 + 2 * 8 + 3 * 8 * 32
    mixture = 4 * 64 + 2 * 8 + 3 * 8 + 2 * (3 * 8 * 4)
    assert block_costs(model.architecture) == [dense, mixture + 8 + 80]


def test_given_numbers_of_blocks_are_taken() -> None:
    model = ModelConfig(n_layers=4)
    assert stage_blocks(model.architecture, 2, (1, 3)) == [range(1), range(1, 4)]


# The order of passes ----------------------------------------------------------------------------------------


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


# The specification of a stage -------------------------------------------------------------------------------


WHOLE = spec_of(
    ModelConfig(d_model=16, n_layers=4, n_heads=2, seq_len=8, d_ff=8, experts=4, vocab_size=32, moe_every=2)
)
FIRST = WHOLE.stage(range(3), held=2)
LAST = WHOLE.stage(range(3, 4), held=1)


def test_values_are_those_of_the_whole_model() -> None:
    for name in (
        "seq_len",
        "vocab_size",
        "d_model",
        "compute_dtype",
        "expert_codes",
        "experts",
        "expert_shape",
    ):
        assert getattr(FIRST, name) == getattr(WHOLE, name), name
    assert FIRST.settings() == WHOLE.settings()
    assert FIRST.whole is WHOLE
    assert WHOLE.whole is None


def test_every_parameter_is_in_one_stage() -> None:
    """Blocks 1 and 3 have experts. The first stage has the embedding, the last one norm and head."""
    whole = WHOLE.architecture
    assert [unit.numel for unit in FIRST.architecture.units] == [*(unit.numel for unit in whole.units[:4]), 0]
    assert [unit.numel for unit in LAST.architecture.units] == [0, whole.units[4].numel, whole.units[5].numel]
    assert (FIRST.moe_layers, LAST.moe_layers) == ((1,), (3,))
    assert FIRST.architecture.parameters + LAST.architecture.parameters == whole.parameters
    assert (WHOLE.begins, WHOLE.ends, FIRST.ends, LAST.begins) == (True, True, False, False)


def test_units_of_a_model_without_any_stay_none() -> None:
    assert FIRST.adapter_units == ()
    assert WHOLE.own((1, 2, 3, 4, 5, 6), 0) == (1, 2, 3, 4, 5, 6)
    assert FIRST.own((1, 2, 3, 4, 5, 6), 0) == (1, 2, 3, 4, 0)
    assert LAST.own((1, 2, 3, 4, 5, 6), 0) == (0, 5, 6)


def test_a_stage_holds_activations_of_several_micro_batches() -> None:
    once = WHOLE.pass_bytes(8, range(3))
    assert FIRST.activation_bytes(8) == 2 * once + 4 * 8 * 16 * 4
    assert once < WHOLE.pass_bytes(8, range(4))


def test_another_value_is_another_stage_of_the_same_blocks() -> None:
    varied = FIRST.vary("seq_len", 4)
    assert (varied.seq_len, varied.layers, varied.held) == (4, range(3), 2)
