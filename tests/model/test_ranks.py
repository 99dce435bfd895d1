"""The whole model over several ranks against one process on the same global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launcher import Ranks

from tierstore.model import CheckpointActivations, ComputeDtype, ModelConfig, Transformer
from tierstore.moe import InMemoryExperts, RouterNoise, SaveActivations
from tierstore.parallel import Mesh, RankEnvironment

GLOBAL_BATCH = 4
Found = dict[str, Any]


def _pass(mesh: Mesh, options: Found) -> Found:
    """Loss, shares of the objective and every gradient of one pass over this rank's sequences."""
    small = {"d_model": 16, "n_layers": 3, "n_heads": 2, "seq_len": 12, "d_ff": 8, "experts": 5}
    config = ModelConfig(**{**small, **options})
    source = InMemoryExperts(
        config.expert_shape,
        layers=config.moe_layers,
        experts=config.experts,
        depth=config.n_layers,
        compute=config.compute_dtype.torch,
        replicas=mesh.replica,
    )
    model = Transformer(config, source, mesh=mesh)
    model.set_step(3, 1)
    both = torch.randint(0, 256, (GLOBAL_BATCH, 13), generator=torch.Generator().manual_seed(2))
    own = both.chunk(mesh.world.size)[mesh.world.rank]
    output = model(own[:, :-1], own[:, 1:])
    assert output.loss is not None
    assert output.objective is not None
    output.objective.backward()
    return {
        "loss": output.loss.detach(),
        "objective": output.objective.detach(),
        "loads": output.loads,
        "dense": {name: parameter.grad for name, parameter in model.named_parameters()},
        "experts": dict(source.grads),
    }


VARIANTS: list[Found] = [
    {},
    {"checkpoint_activations": CheckpointActivations.BLOCK, "moe_every": 2},
    {"capacity_factor": 0.8, "top_k": 3, "expert_activations": SaveActivations.RECOMPUTE},
    {"router_noise": RouterNoise.JITTER, "router_noise_std": 0.2, "shared_expert_d_ff": 6, "top_k": 1},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("size", "expert"), [(2, 0), (4, 0), (4, 2), (4, 1)])
def test_as_one_process(ranks: Ranks, size: int, expert: int, options: Found) -> None:
    one = _pass(Mesh.alone(RankEnvironment(), torch.device("cpu")), options)
    many = ranks.run(size, _pass, options, expert=expert)
    near = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(sum(found["loss"] for found in many) / size, one["loss"], **near)
    torch.testing.assert_close(sum(found["objective"] for found in many), one["objective"], **near)
    for found in many:
        for ours, theirs in zip(found["loads"], one["loads"], strict=True):
            assert torch.equal(ours, theirs)
    for name, grad in one["dense"].items():
        torch.testing.assert_close(sum(found["dense"][name] for found in many), grad, **near)
    assert {key for found in many for key in found["experts"]} == one["experts"].keys()
    for found in many:
        for key, grad in found["experts"].items():
            torch.testing.assert_close(grad, one["experts"][key], **near)


def _bits(mesh: Mesh, variants: list[Found]) -> bool:
    """Whether variants that only change what is kept leave every bit alone."""
    passes = [_pass(mesh, options) for options in variants]
    first = passes[0]
    for other in passes[1:]:
        assert torch.equal(first["objective"], other["objective"])
        for kind in ("dense", "experts"):
            assert first[kind].keys() == other[kind].keys()
            assert all(torch.equal(first[kind][key], other[kind][key]) for key in first[kind])
    return True


@pytest.mark.parametrize(("size", "expert"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("dtype", [ComputeDtype.FP32, ComputeDtype.BF16])
def test_what_is_kept_changes_no_bit(ranks: Ranks, size: int, expert: int, dtype: ComputeDtype) -> None:
    variants = [
        {"compute_dtype": dtype, "checkpoint_activations": checkpoint, "expert_activations": save}
        for checkpoint in CheckpointActivations
        for save in SaveActivations
    ]
    assert all(ranks.run(size, _bits, variants, expert=expert))
