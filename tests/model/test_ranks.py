"""The whole model over several ranks against one process on the same global batch."""

import pytest
import torch
from launcher import Ranks
from model_passes import Found, alone, one_pass, small_model

from tierstore.model import CheckpointActivations, ComputeDtype, ModelConfig
from tierstore.moe import RouterNoise, SaveActivations
from tierstore.parallel import Mesh

VARIANTS: list[Found] = [
    {},
    {"checkpoint_activations": CheckpointActivations.BLOCK, "moe_every": 2},
    {"capacity_factor": 0.8, "top_k": 3, "expert_activations": SaveActivations.RECOMPUTE},
    {"router_noise": RouterNoise.JITTER, "router_noise_std": 0.2, "shared_expert_d_ff": 6, "top_k": 1},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (4, 0), (4, 2), (4, 1)])
def test_as_one_process(ranks: Ranks, size: int, expert: int, options: Found) -> None:
    config = small_model(n_heads=2, **options)
    one = one_pass(alone(), config)
    many = ranks.run(size, one_pass, config, expert=expert)
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(sum(found["loss"] for found in many) / size, one["loss"], **near)
    torch.testing.assert_close(sum(found["objective"] for found in many), one["objective"], **near)
    for found in many:
        for ours, theirs in zip(found["loads"], one["loads"], strict=True):
            assert torch.equal(ours, theirs)
    for name, grad in one["gradients"].items():
        torch.testing.assert_close(sum(found["gradients"][name] for found in many), grad, **near)
    assert {key for found in many for key in found["experts"]} == one["experts"].keys()
    for found in many:
        for key, grad in found["experts"].items():
            torch.testing.assert_close(grad, one["experts"][key], **near)


def _bits(mesh: Mesh, variants: list[ModelConfig]) -> bool:
    """Whether variants that only change what is kept leave every bit alone."""
    passes = [one_pass(mesh, config) for config in variants]
    first = passes[0]
    for other in passes[1:]:
        assert torch.equal(first["objective"], other["objective"])
        for kind in ("gradients", "experts"):
            assert first[kind].keys() == other[kind].keys()
            assert all(torch.equal(first[kind][key], other[kind][key]) for key in first[kind])
    return True


@pytest.mark.parametrize(("size", "expert"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("dtype", [ComputeDtype.FP32, ComputeDtype.BF16])
def test_what_is_kept_changes_no_bit(ranks: Ranks, size: int, expert: int, dtype: ComputeDtype) -> None:
    variants = [
        small_model(
            n_heads=2, compute_dtype=dtype, checkpoint_activations=checkpoint, expert_activations=save
        )
        for checkpoint in CheckpointActivations
        for save in SaveActivations
    ]
    assert all(ranks.run(size, _bits, variants, expert=expert))
