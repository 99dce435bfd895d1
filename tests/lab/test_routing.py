"""Blocks of steps stay moderate, whatever a step is made of."""

import numpy as np
import pytest

from tierstore.lab.routing import decoded_sequences, expert_masks, expert_requesters, step_blocks


@pytest.mark.parametrize("each", [1, 16, 2048, 100_000])
def test_blocks_of_steps(each):
    layers, experts, k, steps = 26, 64, 6, 60
    tokens = np.zeros((steps, each), np.int64)
    blocks = list(step_blocks(tokens, layers, experts, k))
    assert sum(len(block) for _, block in blocks) == steps
    assert [first for first, _ in blocks] == np.cumsum([0, *(len(block) for _, block in blocks)])[
        :-1
    ].tolist()
    for _, block in blocks:
        ids = 8 * len(block) * each * layers * k  # bytes
        assert ids <= 1 << 24 or len(block) == 1
        assert 2 * len(block) * layers * experts <= 1 << 24


def test_masks_of_a_block():
    topk = np.array([[[0, 2]], [[2, 1]], [[3, 3]]])
    masks = expert_masks(topk, np.array([[0, 1], [1, 2]]), 4)
    assert masks[:, 0].tolist() == [[True, True, True, False], [False, True, True, True]]


def test_numbers_of_sequences_by_hand():
    # Two slots, prompts of 2, 3, 2 and 1 tokens: slot 0 takes the first and the third, slot 1 the second and the fourth.
    # The third begins in step 2, when numbers 2 to 6 have never been used, so it is 2; the fourth, in step 3, is 3.
    lengths = np.array([2, 3, 2, 1])
    tokens, numbers = decoded_sequences(lengths, 2)
    assert tokens.tolist() == [[0, 2], [1, 3], [5, 4], [6, 7]]
    assert numbers.tolist() == [[0, 1], [0, 1], [2, 1], [2, 3]]


def test_requesters_of_a_block():
    topk = np.array([[[0, 2]], [[2, 1]], [[3, 0]]])
    requesters = expert_requesters(topk, np.array([[0, 1], [1, 2]]), np.array([[0, 1], [1, 6]], np.uint8), 4)
    assert requesters[:, 0].tolist() == [[1, 2, 3, 0], [64, 2, 2, 64]]


@pytest.mark.parametrize("sequences", [1, 3, 6, 9])
def test_no_two_sequences_of_a_step_have_a_number(sequences):
    lengths = np.random.default_rng(sequences).integers(1, 9, 60)
    tokens, numbers = decoded_sequences(lengths, sequences)
    prompt = np.repeat(np.arange(60), lengths)[tokens]
    for step, row in enumerate(numbers.tolist()):
        assert len(set(row)) == min(sequences, 7)
        if step and sequences < 7:
            before = dict(zip(prompt[step - 1].tolist(), numbers[step - 1].tolist(), strict=True))
            for one, number in zip(prompt[step].tolist(), row, strict=True):
                assert (
                    before[one] == number if one in before else number not in before.values() or sequences > 3
                )
