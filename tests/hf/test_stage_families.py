"""Stages of imported models one after another in one process: the loss and all gradients of the whole model, in bits."""

import sys
from typing import Any

import pytest
import torch
from slowness import mostly_slow
from tiny_families import BALANCED, FAMILIES, FusedExperts, copy_dense, make_config, plain_model
from torch import Tensor

from tierstore.hf.experts import balance_loss, balance_loss_later
from tierstore.hf.loading import build_module, cut_module
from tierstore.hf.model import HfModel
from tierstore.hf.stage import HfStage
from tierstore.model.config import ComputeDtype
from tierstore.model.interface import IGNORED, Batch
from tierstore.model.stage import StagePass
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.train.config import FinetuneConfig

#: Four layers: masks by layer type would be others if layers were counted from the stage's first one.
LAYERS, CUTS = 4, (range(2), range(2, 3), range(3, 4))


def batch_of(*, packed: bool) -> Batch:
    both = torch.randint(1, 128, (2, 25), generator=torch.Generator().manual_seed(1))
    targets = both[:, 1:].clone()
    targets[0, :5] = IGNORED
    positions = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1) if packed else None
    mask = torch.arange(24) < torch.tensor([[24], [11]]) if packed else None
    if mask is not None:
        targets[~mask] = IGNORED
    return Batch(both[:, :-1], targets, positions, step_targets=int((targets != IGNORED).sum()), mask_BT=mask)


class Pipeline:
    """The stages of ``plain``, passed by hand as the ranks of a pipeline would be."""

    def __init__(self, plain: Any, config: Any, compute: ComputeDtype, finetune: FinetuneConfig) -> None:
        mesh = Mesh.alone(RankEnvironment(), torch.device("cpu"))
        self.source = FusedExperts(plain)
        self.stages = []
        for layers in CUTS:
            loaded = cut_module(build_module(config, compute.torch), layers)
            copy_dense(plain, loaded)
            stage = HfStage(loaded, self.source, compute=compute, mesh=mesh, finetune=finetune)
            stage.module.train()
            stage.set_step(3, 1)
            self.stages.append(stage)

    def forward(self, batch: Batch) -> list[tuple[Tensor, StagePass]]:
        """What each stage started from, and what it gave."""
        given, found = batch.tokens_BT, []
        values = torch.zeros(self.stages[0].border.forward_values, dtype=torch.int64)
        for stage in self.stages:
            if not stage.border.begins:
                given = given.detach().requires_grad_()
            output = stage.run_stage(batch, given, values)
            found.append((given, output))
            if output.stream is not None:
                assert output.values.numel() == stage.border.forward_values
                given, values = output.stream, output.values
        return found

    def backward(self, passes: list[tuple[Tensor, StagePass]], count: int) -> None:
        """Passes back through all stages, of which each is told what the last one knows."""
        gradient, told = None, passes[-1][1].values
        for given, output in reversed(passes):
            share = output.part.objective / count
            if output.stream is None:
                share.backward()
            else:
                output.told.copy_(told)
                roots = [output.stream, share] if share.requires_grad else [output.stream]
                torch.autograd.backward(roots, [gradient, torch.ones(())][: len(roots)])
            gradient = given.grad


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [(ComputeDtype.FP32, False), (ComputeDtype.BF16, True)],
    ids=["sequences", "packed documents in bf16"],
)
@pytest.mark.parametrize(
    "family", mostly_slow(FAMILIES, "qwen3_moe", "deepseek_v3", "granitemoe", "phimoe", "gpt_oss")
)
def test_stages_one_after_another_have_the_gradients_of_the_whole_model(
    family: str, dtype: ComputeDtype, packed: bool
) -> None:
    """Phi-MoE's routers draw noise in all layers; Granite scales whatever it starts from; gpt-oss and Qwen3-Next choose
    masks by layer; the auxiliary loss is of all layers together.
    """
    config = make_config(family, num_hidden_layers=LAYERS)
    plain = plain_model(config, dtype.torch)
    finetune = FinetuneConfig(aux_loss_weight=0.3)
    loaded = build_module(config, dtype.torch)
    copy_dense(plain, loaded)
    source, batch = FusedExperts(plain), batch_of(packed=packed)
    whole = HfModel(loaded, source, compute=dtype, finetune=finetune)
    whole.module.train()
    whole.set_step(3, 1)
    expected = whole.run(batch)
    (expected.objective / 3).backward()

    pipeline = Pipeline(plain, config, dtype, finetune)
    passes = pipeline.forward(batch)
    last = passes[-1][1].part
    assert torch.equal(last.loss, expected.loss)
    loads = [load for _, output in passes for load in output.part.loads]
    assert torch.equal(torch.stack(loads), torch.stack(expected.loads))
    pipeline.backward(passes, 3)
    theirs = dict(whole.module.named_parameters())
    seen = set()
    for stage in pipeline.stages:
        for (unit, parameters), names in zip(stage.dense_units(), _names(stage), strict=True):
            for name, parameter in zip(names, parameters, strict=True):
                assert name not in seen
                seen.add(name)
                assert torch.equal(parameter.grad, theirs[name].grad), (unit, name)
    assert seen == theirs.keys()
    assert pipeline.source.grads.keys() == source.grads.keys()
    for key, gradient in source.grads.items():
        assert torch.equal(pipeline.source.grads[key], gradient), key


def _names(stage: HfStage) -> list[list[str]]:
    """The names of the parameters of each unit of ``stage``, as a whole model has them."""
    known = {id(parameter): name for name, parameter in stage._module.named_parameters()}
    return [[known[id(parameter)] for parameter in parameters] for _, parameters in stage.dense_units()]


def test_a_stage_has_its_own_parameters_buffers_and_units() -> None:
    config = make_config("deepseek_v3", num_hidden_layers=LAYERS)
    plain = plain_model(config)
    stages = Pipeline(plain, config, ComputeDtype.FP32, FinetuneConfig()).stages
    assert [[name for name, unit in stage.dense_units() if unit] for stage in stages] == [
        ["embedding", "block.0", "block.1"],
        ["block.2"],
        ["block.3", "head"],
    ]
    for stage, layers in zip(stages, CUTS, strict=True):
        assert [block.self_attn.layer_idx for block in stage.blocks] == [*layers]
        assert [router.layer for router in stage.routers()] == [layer for layer in layers if layer > 0]
        biased = [int(name.split(".")[2]) for name in stage._state_buffers()]
        assert biased == [layer for layer in layers if layer > 0]
    assert stages[1].state().keys() == {"buffers"}
    whole = HfModel(build_module(config, torch.float32), FusedExperts(plain), compute=ComputeDtype.FP32)
    stages[1].load_state(whole.state())  # a store that was cut into stages has the whole model's


@pytest.mark.parametrize("family", BALANCED)
def test_the_balance_loss_has_the_bits_of_the_family(family: str) -> None:
    """Against transformers' own function; its gradient for a layer needs the counts of all, and not their probabilities."""
    plain = plain_model(make_config(family))
    generator = torch.Generator().manual_seed(5)
    logits = [torch.randn(24, 8, generator=generator).requires_grad_() for _ in range(3)]
    function = vars(sys.modules[type(plain).__module__])["load_balancing_loss_func"]
    expected = function(tuple(logits), 8, 2)
    wanted = torch.autograd.grad(expected * 0.3, logits)

    counts, probabilities = torch.zeros(9, dtype=torch.int64), []
    for each in logits:
        routed = each.softmax(dim=-1)
        counts[:8] += torch.bincount(routed.topk(2).indices.flatten(), minlength=8)
        counts[8] += len(each)
        probabilities.append(routed.sum(dim=0))
    assert torch.equal(balance_loss(counts, probabilities[0] + probabilities[1] + probabilities[2]), expected)

    later = torch.zeros_like(counts)
    first = balance_loss_later(later, probabilities[0])
    assert float(first.detach()) == 0.0
    later.copy_(counts)
    second = balance_loss(counts, probabilities[1] + probabilities[2])
    found = torch.autograd.grad(first * 0.3 + second * 0.3, logits)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_probability_that_is_not_finite_shows_before_the_loss_is_known() -> None:
    probability = torch.tensor([1.0, float("nan")], requires_grad=True)
    assert not torch.isfinite(balance_loss_later(torch.zeros(3, dtype=torch.int64), probability))


def test_the_balance_loss_by_hand() -> None:
    """Two experts, four rows: the first was chosen three times, and its probabilities add up to 2.5."""
    loss = balance_loss(torch.tensor([3, 1, 4]), torch.tensor([2.5, 1.5]))
    assert float(loss) == 2 * (0.75 * 0.625 + 0.25 * 0.375)
