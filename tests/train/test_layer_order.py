"""Layer order computes the bits of micro order, with one access of each layer's experts in a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tierstore.train.config import TrainConfig

Make = Callable[[Mapping[str, Any]], TrainConfig]

LAYER = {"data.micro_order": "layer"}
#: Ways to train whose bits must not depend on the order.
MODES: dict[str, dict[str, Any]] = {
    "two": {"data.micro_batches": 2},
    "four": {"data.micro_batches": 4},
    "eight": {"data.micro_batches": 8},
    "clip": {"data.micro_batches": 4, "clip_norm": 0.3},
    "bf16": {"data.micro_batches": 3, "model.compute_dtype": "bf16"},
    "bf16-clip": {"data.micro_batches": 3, "model.compute_dtype": "bf16", "clip_norm": 0.3},
    "tied": {"data.micro_batches": 3, "model.tie_embeddings": "tied"},
    "shared-gelu": {
        "data.micro_batches": 2,
        "model.activation": "gelu",
        "model.shared_expert_d_ff": 16,
        "model.top_k": 3,
    },
    "skip": {"data.micro_batches": 2, "adamw.inactive": "skip", "model.top_k": 1, "data.batch_size": 1},
    "noise-capacity": {
        "data.micro_batches": 2,
        "model.router_noise": "jitter",
        "model.router_noise_std": 0.1,
        "model.capacity_factor": 1.0,
    },
    "dense-first": {"data.micro_batches": 2, "model.n_layers": 3, "model.moe_every": 2},
    "checkpoint": {"data.micro_batches": 2, "model.checkpoint_activations": "block"},
    "recompute": {"data.micro_batches": 2, "model.expert_activations": "recompute"},
    "gathered": {"data.micro_batches": 2, "dense.optimizer_state": "nvme", "clip_norm": 0.3},
}


@pytest.mark.parametrize("mode", MODES)
def test_layer_order_has_the_bits_of_micro_order(mode: str, configure: Make, train: Any) -> None:
    changes = {"steps": 4, **MODES[mode]}
    expected = train(configure(changes))
    found = train(configure({**changes, **LAYER}))
    assert found.bits == expected.bits
    assert found.norms == expected.norms
