"""Experts with low-rank pairs against autograd through ``W + scale * B A``."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from plain_reference import plain_expert
from torch import Tensor

from tierstore.errors import ConfigError
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.dispatch import dispatch, divide_experts
from tierstore.moe.exchange import LocalRows
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape
from tierstore.moe.low_rank import PairLease, initial_pair, merge_pair
from tierstore.moe.source import ExpertLease, InMemoryExperts

TOKENS, EXPERTS, TOP_K, RANK = 12, 4, 2, 3


class PairedExperts:
    """Frozen experts of ``base`` and pairs beside them, in memory; ``grads[expert]`` after a backward pass."""

    def __init__(self, base: InMemoryExperts, shape: PairShape, pairs: dict[int, Tensor]) -> None:
        self._base, self._shape, self.pairs = base, shape, pairs
        self.grads: dict[int, Tensor] = {}

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for lease in self._base.forward(layer, experts):
            yield replace(lease, pair=PairLease(self._shape, self.pairs[lease.expert]))

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for lease in self._base.forward(layer, experts):
            weights = self.pairs[lease.expert]
            gradients = torch.full_like(weights, float("nan"))  # undefined content: a partial write must show
            yield replace(lease, pair=PairLease(self._shape, weights, gradients))
            self.grads[lease.expert] = gradients


def merged(shape: PairShape, flat: Tensor, pair: Tensor) -> Tensor:
    """As ``merge_pair``, in a new tensor, differentiable in ``pair``."""
    matrices, views = shape.expert.views(flat), shape.views(pair)
    inner, down = views.inner_b @ views.inner_a, views.down_b @ views.down_a
    if shape.expert.activation.transposed:
        inner, down = inner.t(), down.t()
    parts = [matrices.inner + shape.scale * inner, matrices.inner_bias, matrices.down + shape.scale * down]
    return torch.cat([part.reshape(-1) for part in (*parts, matrices.down_bias) if part is not None])


class Case:
    """A layer of experts with pairs whose ``B`` is not zero any more, a routing, and an input."""

    def __init__(self, kind: Activation, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(5)
        self.shape = ExpertShape(8, 6, kind)
        self.pair = PairShape(self.shape, RANK, alpha=5.0)
        self.base = InMemoryExperts(self.shape, layers=[0], experts=EXPERTS, compute=dtype)
        for flat in self.base.masters.values():
            flat.copy_(torch.randn(flat.shape, generator=draw))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.pairs = {
            e: torch.randn(self.pair.numel, generator=draw).mul_(0.5).to(wide) for e in range(EXPERTS)
        }
        self.source = PairedExperts(self.base, self.pair, self.pairs)
        self.x_TD = torch.randn(TOKENS, 8, generator=draw).to(dtype).requires_grad_()
        scores = torch.rand(TOKENS, EXPERTS - 1, generator=draw)  # the last one gets no token
        weight_TK, self.expert_TK = scores.topk(TOP_K)
        self.weight_TK = weight_TK.to(wide).requires_grad_()

    def run(self, weighting: Weighting, save: SaveActivations, parts: int = 1) -> Tensor:
        load_E = torch.bincount(self.expert_TK.flatten(), minlength=EXPERTS)
        plan = dispatch(self.expert_TK, load_E)
        rows = LocalRows(plan, plan.experts)
        if parts > 1:
            asked = tuple(expert * parts + part for expert in plan.experts for part in range(parts))
            plan, _ = divide_experts(plan, load_E.unsqueeze(0), 0, parts)
            rows = LocalRows(plan, asked)
            rows.parts = parts
        call = ExpertPass(0, self.shape, self.source, plan, rows, weighting, save)
        return compute_experts(self.x_TD, self.weight_TK, call)

    def expected(self) -> tuple[Tensor, dict[int, Tensor]]:
        """The output by its definition, and the pairs that it is differentiable in."""
        pairs = {e: flat.clone().requires_grad_() for e, flat in self.pairs.items()}
        rows = []
        for t in range(TOKENS):
            row = torch.zeros_like(self.x_TD[t])
            for k in range(TOP_K):
                e = int(self.expert_TK[t, k])
                flat = merged(self.pair, self.base.masters[0, e], pairs[e])
                y = plain_expert(self.shape, flat, self.x_TD[t : t + 1])[0]
                row = row + self.weight_TK[t, k] * y
            rows.append(row)
        return torch.stack(rows), pairs


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("save", SaveActivations)
@pytest.mark.parametrize("weighting", Weighting)
@pytest.mark.parametrize("kind", Activation)
def test_equal_to_autograd_through_the_merged_weights(
    kind: Activation, weighting: Weighting, save: SaveActivations, parts: int
) -> None:
    if kind.transposed and weighting is Weighting.BY_EXPERT:
        pytest.skip("experts with biases are weighed by their output")
    case = Case(kind, torch.float64)
    inputs = (case.x_TD, case.weight_TK)
    out = case.run(weighting, save, parts)
    expected, pairs = case.expected()
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    downstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    found = torch.autograd.grad(out, inputs, downstream)
    wanted = torch.autograd.grad(expected, (*inputs, *pairs.values()), downstream, allow_unused=True)
    for got, want in zip(found, wanted, strict=False):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    assert set(case.source.grads) == set(range(EXPERTS - 1)), "the expert without a token is not asked for"
    for e, gradient in case.source.grads.items():
        assert torch.allclose(gradient, wanted[2 + e], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_within_the_rounding_of_the_compute_type(dtype: torch.dtype, tolerance: float) -> None:
    """Pairs and their gradients are fp32 in both."""
    case, exact = Case(Activation.SWIGLU, dtype), Case(Activation.SWIGLU, torch.float64)
    out, expected = (each.run(Weighting.BY_OUTPUT, SaveActivations.SAVE) for each in (case, exact))
    ones = torch.ones_like(expected)
    out.backward(ones.to(out.dtype))
    expected.backward(ones)
    assert (out.double() - expected).norm() <= tolerance * expected.norm()
    for e, gradient in case.source.grads.items():
        assert gradient.dtype == torch.float32
        assert (gradient.double() - exact.source.grads[e]).norm() <= tolerance * exact.source.grads[e].norm()


@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.CLAMPED_SWIGLU])
def test_the_merged_expert_gives_the_same(kind: Activation) -> None:
    """Square matrices (P = D) too: which way they lie is not told by their shape."""
    draw = torch.Generator().manual_seed(1)
    shape = PairShape(ExpertShape(8, 4, kind), 2, alpha=3.0)
    flat, pair = (torch.randn(numel, generator=draw) for numel in (shape.expert.numel, shape.numel))
    whole = flat.clone()
    merge_pair(shape, whole, pair)
    assert torch.allclose(whole, merged(shape, flat, pair), rtol=1e-6, atol=1e-6)


def test_an_expert_begins_as_it_is() -> None:
    shape = PairShape(ExpertShape(64, 48), 4, alpha=8.0)
    pair = initial_pair(shape, seed=0, layer=2, expert=5)
    views = shape.views(pair)
    assert not views.inner_b.any()
    assert not views.down_b.any()
    for part, inputs in ((views.inner_a, 64), (views.down_a, 48)):
        assert part.abs().max() <= inputs**-0.5
        assert part.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.15), (
            "uniform, as kaiming with a = sqrt(5)"
        )
    assert torch.equal(pair, initial_pair(shape, seed=0, layer=2, expert=5))
    assert not torch.equal(pair, initial_pair(shape, seed=0, layer=2, expert=6))
    assert shape.numel == 4 * (64 + 96 + 48 + 64)


def test_what_is_configured() -> None:
    assert not LoraConfig().enabled
    config = LoraConfig(rank=16)
    assert (config.scaled_alpha, config.attention, config.experts) == (32.0, True, True)
    assert PairShape.of(ExpertShape(64, 48), config).scale == 2.0
    assert not LoraConfig(rank=1, targets=LoraTargets.ATTENTION).experts
    for wrong, message in (
        ({"rank": -1}, "lora.rank"),
        ({"rank": 1, "alpha": float("nan")}, "lora.alpha"),
        ({"rank": 1, "targets": LoraTargets.EXPERTS, "modules": ("q_proj",)}, "lora.modules"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected 1 to 48"):
        PairShape.of(ExpertShape(64, 48), LoraConfig(rank=49))
