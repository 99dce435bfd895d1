"""The whole model: its definition's variants, equal bits, causality, sampling."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tierstore.model import CheckpointActivations, ComputeDtype, ModelConfig, TieEmbeddings, Transformer
from tierstore.moe import Activation, InMemoryExperts, RouterNoise, SaveActivations


def _config(**options: Any) -> ModelConfig:
    small = {"d_model": 16, "n_layers": 3, "n_heads": 2, "seq_len": 12, "d_ff": 8, "experts": 4}
    return ModelConfig(**{**small, **options})


def _model(config: ModelConfig) -> tuple[Transformer, InMemoryExperts]:
    source = InMemoryExperts(
        config.expert_shape,
        layers=config.moe_layers,
        experts=config.experts,
        seed=config.seed,
        depth=config.n_layers,
        compute=config.compute_dtype.torch,
    )
    return Transformer(config, source), source


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    both = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1], both[:, 1:]


def _everything(config: ModelConfig) -> list[Tensor]:
    """Loss and every gradient of one pass."""
    model, source = _model(config)
    model.set_step(3, 1)
    output = model(*_batch())
    output.objective.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    experts = [source.grads[key] for key in sorted(source.grads)]
    return [output.objective.detach(), *(grad for grad in grads if grad is not None), *experts]


VARIANTS = [
    {},
    {"activation": Activation.GELU, "tie_embeddings": TieEmbeddings.TIED, "moe_every": 2},
    {"shared_expert_d_ff": 6, "top_k": 1, "capacity_factor": 1.0},
    {"router_noise": RouterNoise.JITTER, "router_noise_std": 0.2, "top_k": 3},
    {"moe_every": 0},
]


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.GELU])
def test_a_block_without_experts_is_one_expert_that_gets_every_token(activation: Activation) -> None:
    """Its router weighs each token by 1, so with the same weights loss and gradients are the same."""
    sparse, source = _model(_config(experts=1, top_k=1, activation=activation, d_ff=24))
    dense, _ = _model(_config(moe_every=0, activation=activation, d_ff=24))
    theirs, own = dict(sparse.named_parameters()), dict(dense.named_parameters())

    def of_expert(name: str, flats: dict[tuple[int, int], Tensor]) -> Tensor:
        """The matrix of a record (inner rows, then D x F) that is ``blocks.<layer>.ffn.<matrix>``."""
        _, layer, _, matrix = name.split(".")
        flat, last = flats[int(layer), 0], 16 * 24
        return flat[:-last] if matrix == "inner" else flat[-last:]

    with torch.no_grad():
        for name, parameter in own.items():
            same = of_expert(name, source.masters) if "ffn." in name else theirs[name]
            parameter.copy_(same.view_as(parameter))
    found, expected = dense(*_batch()), sparse(*_batch())
    torch.testing.assert_close(found.loss, expected.loss)
    found.objective.backward()
    expected.loss.backward()
    assert found.loads == ()
    for name, parameter in own.items():
        same = of_expert(name, source.grads) if "ffn." in name else theirs[name].grad
        torch.testing.assert_close(parameter.grad, same.view_as(parameter), msg=name)


@pytest.mark.parametrize("options", VARIANTS)
def test_counts_units_and_losses(options: dict[str, Any]) -> None:
    config = _config(**options)
    model, source = _model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.architecture.dense
    assert sum(flat.numel() for flat in source.masters.values()) == config.architecture.sparse
    units = model.dense_units()
    assert [name for name, _ in units] == ["embedding", "block.0", "block.1", "block.2", "head"]
    listed = [id(parameter) for _, parameters in units for parameter in parameters]
    assert sorted(listed) == sorted(id(parameter) for parameter in model.parameters())
    output = model(*_batch())
    assert output.loss.item() == pytest.approx(5.545, abs=0.2)  # ln 256
    assert len(output.loads) == len(config.moe_layers)
    objective = output.loss + 0.01 * output.aux_loss + 1e-3 * output.z_loss
    torch.testing.assert_close(output.objective, objective)
    logits = model.eval()(_batch()[0]).logits
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), _batch()[1].flatten())
    if config.router_noise == RouterNoise.NONE:
        torch.testing.assert_close(found, output.loss)


@pytest.mark.parametrize("dtype", list(ComputeDtype))
@pytest.mark.parametrize("options", VARIANTS)
def test_recomputing_changes_no_bit(options: dict[str, Any], dtype: ComputeDtype) -> None:
    runs = [
        _everything(
            _config(**options, compute_dtype=dtype, checkpoint_activations=again, expert_activations=save)
        )
        for again, save in itertools.product(CheckpointActivations, SaveActivations)
    ]
    for run in [_everything(_config(**options, compute_dtype=dtype)), *runs[1:]]:
        assert len(run) == len(runs[0])
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_bf16_is_near_fp32_and_keeps_fp32_masters() -> None:
    wide, _ = _model(_config())
    narrow, _ = _model(_config(compute_dtype=ComputeDtype.BF16))
    a, b = wide(*_batch()), narrow(*_batch())
    assert b.loss.dtype == torch.float32
    assert abs(a.loss.item() - b.loss.item()) < 0.02
    b.objective.backward()
    for parameter in narrow.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_first_weights_do_not_depend_on_the_rest() -> None:
    torch.manual_seed(1)
    small, _ = _model(_config())
    torch.manual_seed(2)
    large, _ = _model(_config(experts=6, moe_every=3, d_ff=10))
    assert torch.equal(small.embedding, large.embedding)
    assert torch.equal(
        small.get_parameter("blocks.1.attention.qkv"), large.get_parameter("blocks.1.attention.qkv")
    )
    other, _ = _model(_config(seed=1))
    assert not torch.equal(small.embedding, other.embedding)


def test_later_tokens_change_nothing_before_them() -> None:
    model, _ = _model(_config())
    tokens = _batch()[0]
    changed = tokens.clone()
    changed[:, 8:] = 5
    torch.testing.assert_close(model(tokens).logits[:, :8], model(changed).logits[:, :8])


def test_it_learns() -> None:
    model, source = _model(_config())
    tokens, targets = _batch()
    masters = list(source.masters.values())
    optimizer = torch.optim.AdamW([*model.parameters(), *masters], lr=1e-2)
    for _ in range(40):
        output = model(tokens, targets)
        output.objective.backward()
        for key, flat in source.masters.items():
            flat.grad = source.grads.get(key)
        optimizer.step()
        optimizer.zero_grad()
        source.zero_grad()
    assert output.loss.item() < 2.0


@pytest.mark.slow
def test_sampling() -> None:
    model, _ = _model(_config(router_noise=RouterNoise.JITTER, router_noise_std=0.2))
    long = model.generate(b"abc", 20, seed=4)  # past the window
    assert len(long) == 20
    assert long == model.generate(b"abc", 20, seed=4)
    assert long != model.generate(b"abc", 20, seed=5)
    assert model.training
    greedy = model.generate(b"abc", 1, temperature=0)
    model.eval()
    assert greedy == [int(model(torch.tensor([[97, 98, 99]])).logits[0, -1].argmax())]
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(b"", 1)
    with pytest.raises(ValueError, match="exceed seq_len 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_the_first_logits_are_as_large_at_every_width(width: int) -> None:
    """Above a width of 256, where a standard deviation of 0.02 gives 0.32."""
    model, _ = _model(_config(d_model=width, experts=1, top_k=1, n_layers=1))
    tokens_BT, targets_BT = _batch()
    with torch.no_grad():
        loss = model(tokens_BT[:, :12], targets_BT[:, :12]).loss
    assert float(model.head.detach().std()) * max(width, 256) ** 0.5 == pytest.approx(0.32, rel=0.03)
    assert float(loss) == pytest.approx(math.log(256), abs=0.2)
