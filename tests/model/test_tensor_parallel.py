"""The built-in model over tensor-parallel ranks against one process, and against torch's own tensor parallelism.

Products of parts round otherwise than whole ones: values are equal within fp32 rounding (1e-5 of them), and what no rank
divides has the same bits on all ranks.
"""

import pytest
import torch
from launcher import Ranks
from model_passes import Found, alone, one_pass, small_model
from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.model import CheckpointActivations, ComputeDtype, ModelConfig, Transformer
from tierstore.model.attention import Attention, rotary_tables
from tierstore.model.config import check_divisible, divisions
from tierstore.model.spec import divided_units, spec_of
from tierstore.moe import ExpertShape, FeedForward, InMemoryExperts
from tierstore.moe.config import Activation
from tierstore.parallel import Collective, Mesh, TensorRanks
from tierstore.parallel.tensor import part_of, whole_of

NEAR = {"rtol": 1e-4, "atol": 1e-5}

VARIANTS: list[Found] = [
    {},
    {"activation": "gelu", "checkpoint_activations": CheckpointActivations.BLOCK, "top_k": 3},
    {"compute_dtype": ComputeDtype.BF16, "shared_expert_d_ff": 0},
]


@pytest.mark.parametrize("options", VARIANTS, ids=["swiglu", "gelu, checkpointed", "bf16"])
@pytest.mark.parametrize(("size", "tensor"), [(2, 2), (4, 4), (4, 2)])
def test_as_one_process(ranks: Ranks, size: int, tensor: int, options: Found) -> None:
    config = small_model(**{"n_heads": 4, "moe_every": 2, "shared_expert_d_ff": 8, **options})
    one = one_pass(alone(), config)
    many = ranks.run(size, one_pass, config, tensor=tensor)
    near = {"rtol": 0.1, "atol": 0.02} if "compute_dtype" in options else NEAR
    data = size // tensor
    groups = [many[start : start + tensor] for start in range(0, size, tensor)]
    torch.testing.assert_close(sum(group[0]["loss"] for group in groups) / data, one["loss"], **near)
    for name, whole in one["weights"].items():
        division = divisions(config).get(name)
        total = torch.zeros_like(whole)
        for group in groups:
            if division is None:
                for found in group:
                    assert torch.equal(found["weights"][name], whole)
                    assert torch.equal(found["gradients"][name], group[0]["gradients"][name]), name
                total += group[0]["gradients"][name]
            else:
                assert torch.equal(whole_of([found["weights"][name] for found in group], division), whole)
                total += whole_of([found["gradients"][name] for found in group], division)
        torch.testing.assert_close(total, one["gradients"][name], **near, msg=name)
    for group in groups:
        held = [key for found in group for key in found["experts"]]
        assert len(held) == len(set(held)), "each expert is one rank's"
    for found in many:
        for key, gradient in found["experts"].items():
            torch.testing.assert_close(gradient, one["experts"][key], **near)


# Against torch.distributed.tensor ---------------------------------------------------------------------------


class PlainNetwork(nn.Module):
    """SwiGLU from three linear modules, as torch's parallel styles want them."""

    def __init__(self, whole: FeedForward) -> None:
        super().__init__()
        inner, down = whole.inner.detach(), whole.down.detach()
        d_ff, d_model = inner.shape[0] // 2, inner.shape[1]
        self.gate, self.up = (nn.Linear(d_model, d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(d_ff, d_model, bias=False)
        for linear, weight in ((self.gate, inner[:d_ff]), (self.up, inner[d_ff:]), (self.down, down)):
            linear.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def beside_dtensor(mesh: Mesh) -> Found:
    """Largest differences of a feed-forward network's output and gradients from torch's own tensor parallelism."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from tierstore.parallel import Channel

    shape = ExpertShape(16, 24)
    ours = FeedForward(shape, tensor=TensorRanks(mesh.tensor))
    plain = PlainNetwork(FeedForward(shape))
    group = mesh.tensor.communicator(Channel.EXCHANGE)
    device_mesh = DeviceMesh.from_group(group, "cpu")
    styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(plain, device_mesh, styles)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    factors = torch.randn(7, 16, generator=torch.Generator().manual_seed(2))
    found: list[list[Tensor]] = []
    for network in (ours, plain):
        given = x.clone().requires_grad_()
        y = network(given)
        (y * factors).sum().backward()
        assert given.grad is not None
        found.append([y.detach(), given.grad])
    inner, down = ours.inner.grad, ours.down.grad
    assert inner is not None
    assert down is not None
    locals_ = [getattr(plain, name).weight.grad.to_local() for name in ("gate", "up", "down")]
    found[0] += [inner, down]
    found[1] += [torch.cat(locals_[:2]), locals_[2]]
    return {"differences": [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]}


def test_a_network_beside_dtensor(ranks: Ranks) -> None:
    for found in ranks.run(2, beside_dtensor, tensor=2):
        assert max(found["differences"]) < 2e-6


def one_attention(mesh: Mesh) -> Found:
    attention = Attention(16, 4, tensor=TensorRanks(mesh.tensor))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(4))
    before = mesh.tensor.traffic[Collective.ALL_REDUCE].sent_bytes
    y = attention(x, *rotary_tables(6, 4, 1e4))
    sent = mesh.tensor.traffic[Collective.ALL_REDUCE].sent_bytes - before
    return {"y": y.detach(), "sent": sent, "qkv": attention.qkv.detach().clone()}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_divided_by_heads(ranks: Ranks, size: int) -> None:
    one, many = one_attention(alone()), ranks.run(size, one_attention, tensor=size)
    for rank, found in enumerate(many):
        torch.testing.assert_close(found["y"], one["y"], **NEAR)
        assert torch.equal(found["y"], many[0]["y"])
        assert torch.equal(
            found["qkv"], part_of(one["qkv"], divisions(ModelConfig())["blocks.0.attention.qkv"], rank, size)
        )
    # An all-reduce of 2 x 6 x 16 fp32: 2 (T - 1) / T of it from each rank; a small one goes whole to all others.
    assert sum(found["sent"] for found in many) == size * (size - 1) * 768


# What can be divided ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ranks_", "message"),
    [
        ({"n_heads": 4}, 3, "model.n_heads: expected a multiple of parallel.tensor = 3"),
        (
            {"d_ff_dense": 6, "moe_every": 2},
            4,
            "model.d_ff_dense: expected a multiple of parallel.tensor = 4",
        ),
        ({"shared_expert_d_ff": 6}, 4, "model.shared_expert_d_ff: expected a multiple"),
    ],
)
def test_what_cannot_be_divided(options: Found, ranks_: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(ModelConfig(**options), ranks_)


def test_the_units_of_a_rank_are_counted_as_its_model_has_them(ranks: Ranks) -> None:
    config = ModelConfig(
        d_model=16, n_heads=2, d_ff=8, experts=3, n_layers=2, moe_every=2, shared_expert_d_ff=4
    )
    for size, found in ((1, [unit_sizes(alone(), config)]), (2, ranks.run(2, unit_sizes, config, tensor=2))):
        assert found == [[unit.numel for unit in divided_units(spec_of(config), size)]] * size


def unit_sizes(mesh: Mesh, config: ModelConfig) -> list[int]:
    source = InMemoryExperts(config.expert_shape, layers=(), experts=0)
    model = Transformer(config, source, mesh=mesh)
    assert [len(unit) for unit in model.unit_divisions()] == [len(unit) for _, unit in model.dense_units()]
    return [sum(parameter.numel() for parameter in parameters) for _, parameters in model.dense_units()]


def test_activations() -> None:
    """Gate and up are blocks of their own; GELU has one."""
    for kind, blocks in ((Activation.SWIGLU, 2), (Activation.GELU, 1)):
        config = ModelConfig(activation=kind, moe_every=2)
        assert divisions(config)["blocks.0.ffn.inner"].blocks == blocks
