"""Training with tensor parallelism: as one process does within rounding, with the same bits however it is held."""

import numpy as np
import pytest
from launcher import Ranks
from rank_cases import Make, Settings, alone, check_against_one, train, whole_run

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
    ranks: Ranks, settings: Make, mode: str, size: int, tensor: int
) -> None:
    """Steps of the same global batches: losses, norms and experts within fp32 rounding of one process."""
    check_against_one(ranks, settings(MODES[mode]), settings(MODES[mode]), size, tensor, tensor=tensor)


HOLDS: dict[str, Settings] = {
    "tight": {"host_budget": 60_000, "cache.policy": "lru", "prefetch.depth": 0},
    "guessed": {"host_budget": 120_000, "prefetch.predictor": "router", "prefetch.depth": 2},
    "kept gathered": {"dense.reshard": "after-backward", "dense.buffers": 4},
    "moments on disk": {"dense.optimizer_state": "nvme"},
    "in chunks": {"parallel.pipeline_degree": 2},
    "computed again": {"model.expert_activations": "recompute", "model.checkpoint_activations": "block"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 2)])
def test_however_it_is_held_the_bits_are_the_same(
    ranks: Ranks, settings: Make, size: int, tensor: int
) -> None:
    """With a resume in the middle."""
    mode = {"clip_norm": 0.5, "data.micro_batches": 2, "model.shared_expert_d_ff": 8}
    expected = ranks.run(size, train, settings(mode), 4, Opening.CREATE, tensor=tensor)
    for name, hold in HOLDS.items():
        held = settings({**mode, **hold})
        found = ranks.run(size, train, held, 2, Opening.CREATE, tensor=tensor)
        rest = ranks.run(size, train, held, 4, Opening.RESUME, tensor=tensor)
        for rank in range(size):
            assert found[rank][0] + rest[rank][0] == expected[rank][0], name
            assert rest[rank][2] == expected[rank][2], name


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bf16_and_narrow_moments(ranks: Ranks, settings: Make, micro_batches: int) -> None:
    """Data ranks hold replicas of each part; losses are near those of one process."""
    mode = {"model.compute_dtype": "bf16", "adamw.moments": "int8", "data.micro_batches": micro_batches}
    one, _, _ = train(alone(), settings(mode), 6, Opening.CREATE)
    found = ranks.run(2, train, settings(mode), 6, Opening.CREATE, tensor=2)
    assert found[0][:2] == found[1][:2]
    np.testing.assert_allclose(found[0][0], one, rtol=2e-2)


def test_layer_order_has_the_bits_of_micro_order(ranks: Ranks, settings: Make) -> None:
    changes = {"data.micro_batches": 3, "host_budget": 60_000, "clip_norm": 0.5}
    expected = ranks.run(2, train, settings(changes), 4, Opening.CREATE, tensor=2)
    layered = settings({**changes, "data.micro_order": "layer"})
    assert ranks.run(2, train, layered, 4, Opening.CREATE, tensor=2) == expected


def test_validation_and_sampling(ranks: Ranks, settings: Make) -> None:
    """All ranks write the same, and find the validation loss of one process."""
    one = whole_run(alone(), settings({}), 3)
    found = ranks.run(2, whole_run, settings({}), 3, tensor=2)
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0][0], one[0], rtol=2e-5)
    np.testing.assert_allclose(found[0][1], one[1], rtol=2e-5)
