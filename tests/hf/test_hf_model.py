"""HfModel: a transformers model as the trainer steps it, against transformers' own loss, units and buffers."""

import json
from typing import Any

import pytest
import torch
from launcher import Ranks
from tiny_families import BALANCED, FAMILIES, FusedExperts, copy_dense, make_config, plain_model

from tierstore.errors import StoreFormatError
from tierstore.hf.describing import parse_config
from tierstore.hf.experts import experts_modules
from tierstore.hf.loading import build_module
from tierstore.hf.model import HfModel
from tierstore.model.config import CheckpointActivations, ComputeDtype
from tierstore.model.interface import IGNORED, Batch
from tierstore.model.store_schema import BUFFERS_KEY
from tierstore.moe.seeds import derive_seed
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.train.config import FinetuneConfig

Found = dict[str, Any]


def _model(
    plain: Any, *, config: Any, mesh: Mesh | None = None, **options: Any
) -> tuple[HfModel, FusedExperts]:
    source = FusedExperts(plain)
    compute = ComputeDtype.FP32 if plain.dtype == torch.float32 else ComputeDtype.BF16
    loaded = build_module(config, plain.dtype)
    copy_dense(plain, loaded)
    model = HfModel(loaded, source, compute=compute, finetune=FinetuneConfig(**options), mesh=mesh)
    model.module.train()
    return model, source


def _batch(rows: int = 2, **options: Any) -> Batch:
    both = torch.randint(1, 128, (rows, 25), generator=torch.Generator().manual_seed(1))
    targets = both[:, 1:].clone()
    targets[0, :5] = IGNORED
    return Batch(both[:, :-1], targets, **options)


# Loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_that_of_transformers(family: str) -> None:
    plain = plain_model(make_config(family)).train()
    plain.config.router_jitter_noise = 0.0
    weight = None if family in BALANCED else 0.3  # no effect where the family has no such loss
    model, _ = _model(plain, config=make_config(family), aux_loss_weight=weight)
    batch = _batch()
    options = {"output_router_logits": True} if family in BALANCED else {}
    model.set_step(2)
    output = model.run(batch)
    assert output.loss is not None
    assert output.objective is not None
    if family == "phimoe":  # it draws: the same step gives the same numbers
        model.set_step(2)
        assert torch.equal(model.run(batch).objective, output.objective)
        plain.eval()
        model.module.eval()
        output = model.run(batch)
        assert output.loss is not None
        options = {}
    theirs = plain(
        input_ids=batch.tokens_BT,
        labels=batch.targets_BT,
        shift_labels=batch.targets_BT,
        use_cache=False,
        **options,
    )
    assert torch.equal(output.objective, theirs.loss)
    if options:
        assert torch.equal(output.aux_loss, theirs.aux_loss)
        assert float(output.aux_loss.detach()) > 0
    else:
        assert torch.equal(output.loss, theirs.loss)
    layers = [layer for layer, _ in experts_modules(plain)]
    assert [int(load.sum()) for load in output.loads] == [48 * 2] * len(layers)


def test_keys_of_outputs_in_a_config_change_no_training() -> None:
    """Packed documents: transformers' own balance loss fails with their masks. A loop of one's own has its outputs."""
    written = {"output_router_logits": True, "output_hidden_states": True, "return_dict": False}
    plain = plain_model(make_config("gpt_oss"))
    batch = _batch(positions_BT=torch.cat([torch.arange(14), torch.arange(10)]).expand(2, 24))
    found = []
    for keys in ({}, written):
        config = parse_config({**json.loads(make_config("gpt_oss").to_json_string()), **keys})
        model, _ = _model(plain, config=config)
        model.set_step(1)
        output = model.run(batch)
        output.objective.backward()
        gradients = [parameter.grad for parameter in model.module.parameters()]
        found.append([output.objective, output.aux_loss, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_no_auxiliary_loss_outside_of_training() -> None:
    plain = plain_model(make_config("mixtral"))
    model, _ = _model(plain, config=make_config("mixtral"))
    model.module.eval()
    with torch.no_grad():
        output = model.run(_batch())
    assert torch.equal(output.objective, output.loss)
    assert float(output.aux_loss) == 0


def test_share_of_a_batch() -> None:
    """Two micro-batches with 40 and 10 targets: the mean of their losses is the mean over 50 targets."""
    plain = plain_model(make_config("olmoe"))
    model, _ = _model(plain, config=make_config("olmoe"), aux_loss_weight=0.0)
    whole = _batch(rows=4)
    targets = whole.targets_BT.clone()
    targets[2:] = IGNORED
    targets[3, :9] = whole.targets_BT[3, :9]
    counted = int((targets != IGNORED).sum())
    parts = [
        Batch(whole.tokens_BT[rows], targets[rows], step_targets=counted, parts=2)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    together = model.run(Batch(whole.tokens_BT, targets, step_targets=counted))
    losses = [model.run(part).objective for part in parts]
    torch.testing.assert_close((losses[0] + losses[1]) / 2, together.objective)
    empty = Batch(whole.tokens_BT, torch.full_like(targets, IGNORED), step_targets=counted)
    output = model.run(empty)
    output.objective.backward()
    assert float(output.loss.detach()) == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_takes_no_part_in_what_balances(family: str) -> None:
    """Beside transformers with its attention mask: the objective, the norm of its gradients, and loads counted by hand."""
    config = make_config(family, **({"router_aux_loss_coef": 1.0} if family in BALANCED else {}))
    plain = plain_model(config).train()
    model, source = _model(plain, config=config)
    batch = _batch()
    mask = torch.arange(24) < torch.tensor([[7], [20]])
    tokens, targets = batch.tokens_BT * mask, batch.targets_BT.masked_fill(~mask, IGNORED)
    output = model.run(Batch(tokens, targets, step_targets=int((targets != IGNORED).sum()), mask_BT=mask))
    output.objective.backward()
    chosen_TK: list[torch.Tensor] = []
    for _, experts in experts_modules(plain):
        experts.register_forward_pre_hook(lambda _, inputs: chosen_TK.append(inputs[1]))
    torch.manual_seed(derive_seed("step", 0, 0, 0))  # Phi-MoE's router draws noise
    options = {"output_router_logits": True} if family in BALANCED else {}
    theirs = plain(input_ids=tokens, attention_mask=mask.long(), use_cache=False, **options)
    loss = torch.nn.functional.cross_entropy(theirs.logits.flatten(0, 1), targets.flatten())
    if family in BALANCED:
        torch.testing.assert_close(output.aux_loss, theirs.aux_loss)
        loss = loss + theirs.aux_loss
    torch.testing.assert_close(output.objective, loss)
    loss.backward()
    ours = [*(each.grad for each in model.module.parameters()), *source.grads.values()]
    norms = [
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        for grads in (ours, [each.grad for each in plain.parameters() if each.grad is not None])
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    for load_E, each_TK in zip(output.loads, chosen_TK, strict=True):
        assert torch.equal(load_E, torch.bincount(each_TK[mask.flatten()].flatten(), minlength=8))


def test_checkpointing_with_the_auxiliary_loss() -> None:
    plain = plain_model(make_config("qwen3_moe"))
    found = []
    for again in CheckpointActivations:
        model, source = _model(plain, config=make_config("qwen3_moe"), checkpoint_activations=again)
        output = model.run(_batch())
        output.objective.backward()
        grads = [parameter.grad for parameter in model.module.parameters()]
        found.append(
            [output.objective.detach(), *grads, *(source.grads[key] for key in sorted(source.grads))]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_packed_documents_of_gpt_oss_with_the_auxiliary_loss() -> None:
    """Its masks are made by hand, with which transformers' own output of router logits fails."""
    plain = plain_model(make_config("gpt_oss"))
    model, _ = _model(plain, config=make_config("gpt_oss"))
    batch = _batch()
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24)
    output = model.run(Batch(batch.tokens_BT, batch.targets_BT, positions))
    output.objective.backward()
    assert float(output.aux_loss.detach()) > 0


# Ranks ------------------------------------------------------------------------------------------------------


def _share_pass(mesh: Mesh, family: str, dtype: torch.dtype, checkpointing: bool) -> Found:
    config = make_config(family, num_experts_per_tok=3)
    plain = plain_model(make_config(family, num_experts_per_tok=3), dtype)
    again = CheckpointActivations.BLOCK if checkpointing else CheckpointActivations.OFF
    model, source = _model(plain, config=config, mesh=mesh, checkpoint_activations=again, aux_loss_weight=0.2)
    batch = _batch(rows=4)
    mask = torch.arange(24) < torch.tensor([[24], [24], [7], [20]])  # the first of two ranks has no padding
    targets = batch.targets_BT.masked_fill(~mask, IGNORED)
    output = model.run(
        Batch(batch.tokens_BT, targets, step_targets=int((targets != IGNORED).sum()), mask_BT=mask).of_rank(
            mesh.data.rank, mesh.data.size
        )
    )
    output.objective.backward()
    model.end_step()
    dense = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return {
        "objective": output.objective.detach(),
        "aux_loss": output.aux_loss.detach(),
        "loads": output.loads,
        "dense": dense,
        "experts": source.grads,
        "state": model.state(),
    }


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_moe", True), ("deepseek_v3", False)])
def test_two_ranks_as_one_process(ranks: Ranks, family: str, checkpointing: bool) -> None:
    alone = Mesh.alone(RankEnvironment(), torch.device("cpu"))
    options = (family, torch.float32, checkpointing)
    one = _share_pass(alone, *options)
    many: list[Found] = ranks.run(2, _share_pass, *options)
    near = {"rtol": 1e-4, "atol": 1e-6}
    for name in ("objective", "aux_loss"):
        torch.testing.assert_close(sum(found[name] for found in many), one[name], **near)
    for found in many:
        assert all(torch.equal(a, b) for a, b in zip(found["loads"], one["loads"], strict=True))
        assert found["state"] == one["state"]
    for name, grad in one["dense"].items():
        torch.testing.assert_close(sum(found["dense"][name] for found in many), grad, **near)
    experts = {key: grad for found in many for key, grad in found["experts"].items()}
    assert experts.keys() == one["experts"].keys()
    for key, grad in experts.items():
        torch.testing.assert_close(grad, one["experts"][key], **near)


@pytest.mark.parametrize(
    ("family", "dtype", "checkpointing"),
    [("qwen3_moe", torch.float32, True), ("mixtral", torch.bfloat16, False)],
)
def test_tensor_parallel_ranks_have_the_bits_of_one_process(
    ranks: Ranks, family: str, dtype: torch.dtype, checkpointing: bool
) -> None:
    """They share the experts alone, and compute all else alike: every rank finds every gradient of the dense parameters."""
    options = (family, dtype, checkpointing)
    one = _share_pass(Mesh.alone(RankEnvironment(), torch.device("cpu")), *options)
    many: list[Found] = ranks.run(2, _share_pass, *options, tensor=2)
    for found in many:
        for name in ("objective", "aux_loss"):
            assert torch.equal(found[name], one[name])
        assert found["state"] == one["state"]
        for name, grad in one["dense"].items():
            assert torch.equal(found["dense"][name], grad), name
        for key, grad in found["experts"].items():
            assert torch.equal(grad, one["experts"][key])
    held = [key for found in many for key in found["experts"]]
    assert sorted(held) == sorted(one["experts"]), "each expert is one rank's"


# Parameters and buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_units(family: str, tied: bool) -> None:
    config = make_config(family, tie_word_embeddings=tied)
    loaded = build_module(config, torch.bfloat16)
    assert sum(p.untyped_storage().nbytes() for p in loaded.module.parameters()) < 1024
    plain = plain_model(make_config(family, tie_word_embeddings=tied), torch.bfloat16)
    model, _ = _model(plain, config=config)
    units = model.dense_units()
    assert [name for name, _ in units] == [
        "embedding",
        *(f"block.{number}" for number in range(config.num_hidden_layers)),
        "head",
    ]
    flat = [parameter for _, parameters in units for parameter in parameters]
    assert {id(p) for p in flat} == {id(p) for p in model.module.parameters()}
    assert len(flat) == len({id(p) for p in flat})
    embedding = model.module.get_input_embeddings().weight
    assert units[0][1][0] is embedding
    assert (model.module.lm_head.weight is embedding) == tied
    assert all(p.dtype == torch.bfloat16 for p in model.cast_parameters())
    assert len(list(model.blocks)) == config.num_hidden_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_a_new_model(family: str, dtype: torch.dtype) -> None:
    theirs = dict(plain_model(make_config(family), dtype).named_buffers())
    ours = dict(build_module(make_config(family), dtype).module.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer, theirs[name]), name


def test_bias_update_by_hand() -> None:
    plain = plain_model(make_config("deepseek_v3"))
    model, _ = _model(plain, config=make_config("deepseek_v3"), bias_update_speed=0.01)
    ((_, bias),) = [
        item for item in model.module.named_buffers() if item[0].endswith("e_score_correction_bias")
    ]
    bias.zero_()
    model.set_step(0)
    load = sum(
        model.run(batch).loads[0] for batch in (_batch(), _batch(mask_BT=torch.arange(24).expand(2, 24) < 5))
    )
    assert int(load.sum()) == (48 + 10) * 2
    model.end_step()
    assert torch.equal(bias, 0.01 * torch.sign(load.float().mean() - load.float()))
    before = bias.clone()
    model.end_step()  # nothing was counted since
    assert torch.equal(bias, before)
    model.run(_batch())
    model.set_step(1)  # that step was abandoned
    model.end_step()
    assert torch.equal(bias, before)
    other, _ = _model(plain, config=make_config("deepseek_v3"))
    other.load_state(model.state())
    assert dict(other.module.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].equal(bias)
    with pytest.raises(StoreFormatError, match=BUFFERS_KEY):
        other.load_state({})


def test_text_ends_where_the_model_ends_it() -> None:
    plain = plain_model(make_config("mixtral"))
    model, _ = _model(plain, config=make_config("mixtral"))
    greedy = model.generate([5, 6, 7], 12, temperature=0.0)
    assert len(greedy) <= 12
    options = {"max_new_tokens": 12, "do_sample": False}
    tokens = torch.tensor([[5, 6, 7]])
    theirs = plain.eval().generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert greedy == theirs[0, 3:].tolist()
    state = torch.get_rng_state()
    first = model.generate([5, 6, 7], 12, seed=3)
    assert first == model.generate([5, 6, 7], 12, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.module.training
