"""Blocks of steps stay moderate, whatever a step is made of."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.lab.routing import expert_masks, step_blocks


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
