"""Sizes by hand, and bad values by name."""

from typing import Any

import pytest

from tierstore.errors import ConfigError
from tierstore.model import ComputeDtype, ModelConfig
from tierstore.moe import Activation


def test_sizes_by_hand() -> None:
    config = ModelConfig()  # swiglu: 3 * 256 * 1024 an expert
    assert config.expert_shape.numel == 786_432
    assert config.architecture.records == 128
    assert config.architecture.sparse == 100_663_296
    # embedding and head 65536, last norm 256, 2 blocks of 4 * 65536 + 2 * 256, 2 routers of 64 * 256
    assert config.architecture.dense == 2 * 65_536 + 256 + 2 * (262_144 + 512) + 2 * 16_384
    assert config.architecture.active == config.architecture.dense + 4 * 786_432
    assert config.architecture.parameters == config.architecture.dense + config.architecture.sparse
    assert config.moe_layers == (0, 1)
    assert ModelConfig(n_layers=5, moe_every=2).moe_layers == (1, 3)


def test_plain_strings_become_choices() -> None:
    config = ModelConfig(activation="gelu", compute_dtype="bf16")  # type: ignore[arg-type]
    assert config.activation is Activation.GELU
    assert config.compute_dtype is ComputeDtype.BF16


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("vocab_size", {"vocab_size": 1}),
        ("d_model", {"d_model": 0}),
        ("n_heads", {"n_heads": 3}),
        ("n_heads", {"d_model": 12, "n_heads": 4}),
        ("seq_len", {"seq_len": 0}),
        ("d_ff", {"d_ff": -1}),
        ("d_ff", {"d_ff": 2.5}),
        ("d_ff_dense", {"d_ff_dense": -1}),
        ("experts", {"experts": 0}),
        ("top_k", {"top_k": 65}),
        ("moe_every", {"moe_every": 5}),
        ("moe_every", {"moe_every": -1}),
        ("activation", {"activation": "relu"}),
        ("tie_embeddings", {"tie_embeddings": "maybe"}),
        ("router_noise", {"router_noise": "loud"}),
        ("router_noise_std", {"router_noise_std": 0.1}),
        ("capacity_factor", {"capacity_factor": -1.0}),
        ("rope_theta", {"rope_theta": 0.0}),
        ("norm_eps", {"norm_eps": 0.0}),
        ("checkpoint_activations", {"checkpoint_activations": "some"}),
        ("expert_activations", {"expert_activations": "some"}),
        ("compute_dtype", {"compute_dtype": "fp8"}),
        ("aux_loss_weight", {"aux_loss_weight": -0.1}),
    ],
)
def test_bad_values_are_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        ModelConfig(**options)
