"""Slices over real ranks against one process, against each other, and against PyTorch's own ``fully_shard``."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from dense_cases import ADAMW, LR, Outcome, Setting, make_model, piece, train_group
from dense_ranks import on_ranks
from launcher import Ranks
from slowness import mostly_slow
from torch import Tensor

from tierstore.parallel import Mesh, RankGroup

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_embeddings": "tied"},
    "bf16": {"compute_dtype": "bf16"},
    "bf16-tied-checkpointed": {
        "compute_dtype": "bf16",
        "tie_embeddings": "tied",
        "checkpoint_activations": "block",
    },
}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def agreed(outcomes: list[Outcome]) -> Outcome:
    """What all ranks hold, which must be the same bits."""
    first = outcomes[0]
    for other in outcomes[1:]:
        same(first.weights, other.weights)
        assert other.norms == first.norms
    return first


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", mostly_slow([2, 4], 2))
def test_ranks_add_what_micro_batches_add(ranks: Ranks, size: int, name: str) -> None:
    """N ranks with one piece each are one process with N micro-batches, bit for bit: the same sums in one order."""
    setting = Setting(pieces=size, model=MODELS[name])
    alone = train_group(RankGroup.alone(), setting)
    outcomes = on_ranks(ranks, size, setting)
    same(agreed(outcomes).weights, alone.weights)
    assert sum(o.losses[-1] for o in outcomes) / size == pytest.approx(alone.losses[-1], rel=1e-6)
    assert outcomes[0].norms == pytest.approx(alone.norms, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket_bytes": 0},
        {"bucket_bytes": 2000},
        {"buffers": 1, "gradient_buffers": 1},
        {"reshard": "after-backward"},
        {"reshard": "after-backward", "bucket_bytes": 1000, "gradient_buffers": 3},
        {"fusion": "parameter"},
        {"optimizer_state": "host"},
        {"gather": "fp32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["untied", "bf16-tied-checkpointed"])
def test_no_setting_changes_a_bit(ranks: Ranks, name: str, changes: dict[str, Any]) -> None:
    setting = Setting(model=MODELS[name])
    expected = agreed(on_ranks(ranks, 2, setting))
    found = agreed(on_ranks(ranks, 2, Setting(model=MODELS[name], dense=changes)))
    same(found.weights, expected.weights)
    if changes != {
        "fusion": "parameter"
    }:  # which cuts slices elsewhere, so squares are added in another order
        assert found.norms == expected.norms


@pytest.mark.parametrize(
    "changes", [{"gather": "compute"}, {"optimizer_state": "host"}, {"fusion": "parameter"}], ids=str
)
def test_one_rank_through_buffers_is_one_rank_without(changes: dict[str, Any]) -> None:
    for model in ({}, MODELS["bf16"]):
        expected = train_group(RankGroup.alone(), Setting(model=model, dense={"gather": "fp32"}))
        found = train_group(RankGroup.alone(), Setting(model=model, dense=changes))
        same(found.weights, expected.weights)
        assert found.losses == expected.losses


def test_checkpointing_changes_no_bit(ranks: Ranks) -> None:
    found = [
        agreed(on_ranks(ranks, 2, Setting(model={"checkpoint_activations": mode})))
        for mode in ("off", "block")
    ]
    same(found[0].weights, found[1].weights)


def test_clipping_uses_one_norm(ranks: Ranks) -> None:
    alone = train_group(RankGroup.alone(), Setting(clip=0.3))
    found = agreed(on_ranks(ranks, 2, Setting(clip=0.3)))
    assert min(found.norms) > 0.3
    for name, value in found.weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-5, atol=1e-6)


# PyTorch's own ----------------------------------------------------------------------------------------------


def _fully_sharded(mesh: Mesh, given: dict[str, Any]) -> Outcome:
    from torch.distributed.fsdp import fully_shard

    setting = Setting(**given)
    model = make_model(setting.model)
    torch_mesh = mesh.device_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=torch_mesh)
    fully_shard(model, mesh=torch_mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
    )
    outcome = Outcome()
    micros = setting.pieces // mesh.world.size
    for step in range(setting.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            tokens, targets = piece(model.config, step, mesh.world.rank + micro * mesh.world.size)
            output = model(tokens, targets)
            (output.objective / micros).backward()
            total += float(output.loss.detach()) / micros
        outcome.losses.append(total)
        optimizer.param_groups[0]["lr"] = LR * (1 + step % 3)
        optimizer.step()
    for name, parameter in model.named_parameters():
        outcome.weights[name] = parameter.full_tensor().detach()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"tie_embeddings": "tied"}], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_twenty_steps_equal_fully_shard_and_one_process(
    ranks: Ranks, size: int, model: dict[str, Any]
) -> None:
    setting = Setting(steps=20, model=model)
    theirs = ranks.run(size, _fully_sharded, asdict(setting))
    ours = on_ranks(ranks, size, setting)
    alone = train_group(RankGroup.alone(), setting)
    for rank in range(size):
        assert ours[rank].losses == pytest.approx(theirs[rank].losses, rel=1e-4)
    for name, value in agreed(ours).weights.items():
        torch.testing.assert_close(value, theirs[0].weights[name], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-3, atol=2e-5)
    assert alone.losses[-1] < alone.losses[0]
