"""Training with tensor parallelism: as one process does within rounding, with the same bits however it is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launcher import Ranks
from rank_cases import Settings, alone, train, weights

from tierstore.train.ranks import Opening

MODES: dict[str, Settings] = {
    "immediate": {},
    "clipped": {"clip_norm": 0.5, "data.micro_batches": 2},
    "dense blocks and shared experts": {
        "model.checkpoint_activations": "block",
        "model.shared_expert_d_ff": 8,
        "model.moe_every": 2,
        "model.activation": "gelu",
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("size", "tensor"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does(
    ranks: Ranks, settings: Callable[..., dict[str, Any]], mode: str, size: int, tensor: int
) -> None:
    """20 steps of the same global batches: losses, norms and experts within fp32 rounding of one process."""
    single = settings(MODES[mode])
    expected, norms, _ = train(alone(), single, 20, Opening.CREATE)
    several = settings(MODES[mode])
    found = ranks.run(size, train, several, 20, Opening.CREATE, tensor=tensor)
    assert all(rank[:2] == found[0][:2] for rank in found), "losses and norms are the same bits on all ranks"
    np.testing.assert_allclose(found[0][0], expected, rtol=2e-5)
    np.testing.assert_allclose(found[0][1], norms, rtol=2e-3)
    want = weights(alone(), single)
    got = ranks.run(size, weights, several, tensor=tensor)
    for key, weight in want.items():
        holders = [rank for rank in range(size) if key in got[rank]]
        assert len(holders) == size // tensor
        for rank in holders:
            np.testing.assert_allclose(got[rank][key], weight, atol=2e-4)
            assert np.array_equal(got[rank][key], got[holders[0]][key]), "replicas hold the same bits"
