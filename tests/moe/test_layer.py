"""The MoE layer against autograd: gradcheck in fp64, a plain loop, and the cases at the edges."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tierstore.moe import (
    Activation,
    ExpertLease,
    ExpertShape,
    InMemoryExperts,
    MoELayer,
    NoiseKey,
    RouterConfig,
    SaveActivations,
    initial_expert,
)
from tierstore.moe.config import BUILT_IN_ACTIVATIONS
from tierstore.moe.experts import feed_forward

MODES = [(activation, save) for activation in BUILT_IN_ACTIVATIONS for save in SaveActivations]


def _layer(
    shape: ExpertShape, dtype: torch.dtype = torch.float64, experts: int = 4, **options: Any
) -> tuple[MoELayer, InMemoryExperts]:
    save = options.pop("save", SaveActivations.SAVE)
    shared = options.pop("shared", 0)
    source = InMemoryExperts(shape, layers=[0], experts=experts, compute=dtype)
    router = RouterConfig(experts=experts, **options)
    layer = MoELayer(router, shape, source, seed=1, shared_d_ff=shared, save_activations=save)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in [*layer.parameters(), *source.masters.values()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return (layer.double() if dtype == torch.float64 else layer), source


def _input(tokens: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    return x.requires_grad_()


def _plain(layer: MoELayer, masters: dict[tuple[int, int], Tensor], x: Tensor) -> Tensor:
    """The layer's definition, token by token and choice by choice."""
    routing = layer.router(x, NoiseKey())
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[t])
        for k in range(routing.expert_TK.shape[1]):
            e = int(routing.expert_TK[t, k])
            if e >= 0:
                views = layer.shape.views(masters[0, e])
                out = feed_forward(x[t], views.inner, views.down, layer.shape.activation)
                row = row + routing.weight_TK[t, k].to(x.dtype) * out
        rows.append(row)
    y = torch.stack(rows)
    return y if layer.shared is None else y + layer.shared(x)


class _Differentiable(torch.autograd.Function):
    """The layer as a function of its experts' weights too, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, layer: MoELayer, source: InMemoryExperts, x: Tensor, *flat: Tensor) -> Tensor:
        for e, weights in enumerate(flat):
            source.masters[0, e].copy_(weights)
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x, NoiseKey())[0]
        ctx.source, ctx.count = source, len(flat)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.source.zero_grad()
        torch.autograd.backward(ctx.y, grad, retain_graph=True)
        grads = [ctx.source.grads.get((0, e)) for e in range(ctx.count)]
        zero = torch.zeros_like(ctx.source.masters[0, 0])
        x_grad, ctx.x.grad = ctx.x.grad, None
        return None, None, x_grad, *(zero if g is None else g for g in grads)


@pytest.mark.parametrize(("activation", "save"), MODES)
def test_gradcheck(activation: Activation, save: SaveActivations) -> None:
    shape = ExpertShape(3, 4, activation)
    layer, source = _layer(shape, save=save, shared=2)
    weight = layer.router.weight

    def by_input(x: Tensor, _weight: Tensor) -> Tensor:
        return layer(x, NoiseKey())[0]

    assert torch.autograd.gradcheck(by_input, (_input(6, 3), weight))
    flat = [source.masters[0, e].clone().requires_grad_() for e in range(4)]
    apply: Any = _Differentiable.apply
    assert torch.autograd.gradcheck(lambda x, *w: apply(layer, source, x, *w), (_input(6, 3), *flat))


@pytest.mark.parametrize(("activation", "save"), MODES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_against_the_plain_loop(
    activation: Activation, save: SaveActivations, top_k: int, factor: float | None
) -> None:
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 2e-4)):
        layer, source = _layer(
            ExpertShape(8, 5, activation), dtype, save=save, shared=4, top_k=top_k, capacity_factor=factor
        )
        x = _input(13, 8, dtype)
        y = layer(x, NoiseKey())[0]
        factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        (y * factors).sum().backward()
        masters = {key: value.clone().requires_grad_() for key, value in source.masters.items()}
        x_plain = _input(13, 8, dtype)
        ours = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        layer.zero_grad()
        y_plain = _plain(layer, masters, x_plain)
        (y_plain * factors).sum().backward()
        torch.testing.assert_close(y, y_plain, rtol=close, atol=close)
        plain = [x_plain.grad, *(parameter.grad for parameter in layer.parameters())]
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)
        for key, value in masters.items():
            assert (key in source.grads) == (value.grad is not None)
            if value.grad is not None:
                torch.testing.assert_close(source.grads[key], value.grad, rtol=close, atol=close)


class _Recording:
    """A source that writes down what it was asked, and whether every lease was returned."""

    def __init__(self, inner: InMemoryExperts) -> None:
        self.inner = inner
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.ended = 0

    def _run(self, kind: str, leases: Iterator[ExpertLease], experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.asked.append((kind, tuple(experts)))
        yield from leases
        self.ended += 1

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._run("forward", self.inner.forward(layer, experts), experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        return self._run("backward", self.inner.backward(layer, experts), experts)


@pytest.mark.parametrize("chosen", [2, None])
def test_experts_without_a_token_are_never_asked_for(chosen: int | None) -> None:
    shape = ExpertShape(4, 8)
    inner = InMemoryExperts(shape, layers=[0], experts=6)
    source = _Recording(inner)
    layer = MoELayer(RouterConfig(experts=6, top_k=1), shape, source)
    x = torch.rand(9, 4) + 0.1
    with torch.no_grad():  # all tokens to one expert, or the first of a six-way tie
        layer.router.weight.zero_()
        if chosen is not None:
            layer.router.weight[chosen] = 1.0
    y, routing = layer(x, NoiseKey())
    only = chosen or 0
    assert routing.load_E[only] == 9
    y.sum().backward()  # x needs no gradient: the experts get theirs all the same
    assert source.asked == [("forward", (only,)), ("backward", (only,))]
    assert source.ended == 2
    assert set(inner.grads) == {(0, only)}
    with torch.no_grad():
        layer(x, NoiseKey())
    assert source.asked[2:] == [("forward", (only,))]


def test_gradients_reach_the_source_when_nothing_else_needs_any() -> None:
    layer, source = _layer(ExpertShape(4, 8), torch.float32)
    layer.requires_grad_(False)
    layer(_input(5, 4, torch.float32).detach(), NoiseKey())[0].sum().backward()
    assert source.grads


def test_no_tokens_at_all() -> None:
    layer, source = _layer(ExpertShape(4, 8), torch.float32)
    x = torch.empty(0, 4, requires_grad=True)
    layer(x, NoiseKey())[0].sum().backward()
    assert not source.grads


def test_saved_or_recomputed_gives_the_same_bits() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for save in SaveActivations:
            layer, source = _layer(ExpertShape(16, 24), dtype, save=save)
            x = _input(40, 16, dtype)
            layer(x, NoiseKey())[0].float().square().sum().backward()
            assert x.grad is not None
            assert layer.router.weight.grad is not None
            found.append(
                [x.grad, layer.router.weight.grad, *(source.grads[key] for key in sorted(source.grads))]
            )
        for a, b in zip(found[-2], found[-1], strict=True):
            assert torch.equal(a, b)
    for wide, narrow in zip(found[0], found[2], strict=True):  # bf16 is near fp32, to its 8 bits
        assert (wide - narrow).norm() < 0.05 * wide.norm()


def test_gradients_may_be_wider_than_the_weights() -> None:
    class Wide(InMemoryExperts):
        def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
            for lease in super().backward(layer, experts):
                wide = ExpertLease(lease.expert, lease.weights, lease.gradients.float())
                yield wide
                assert wide.gradients is not None
                lease.gradients.copy_(wide.gradients)

    layer, source = _layer(ExpertShape(8, 8), torch.bfloat16)
    layer(_input(20, 8, torch.bfloat16), NoiseKey())[0].float().sum().backward()
    narrow = dict(source.grads)
    source.zero_grad()
    wide = Wide(layer.shape, layers=[0], experts=4, compute=torch.bfloat16)
    wide.masters = source.masters
    layer._source = wide
    layer(_input(20, 8, torch.bfloat16), NoiseKey())[0].float().sum().backward()
    for key, value in narrow.items():
        assert torch.equal(value, wide.grads[key])


def test_first_weights_are_keyed() -> None:
    shape = ExpertShape(64, 96)
    one = initial_expert(shape, seed=3, layer=1, expert=7, layers=4)
    torch.manual_seed(0)
    assert torch.equal(one, initial_expert(shape, seed=3, layer=1, expert=7, layers=4))
    for other in ({"seed": 4}, {"layer": 2}, {"expert": 8}):
        key = {"seed": 3, "layer": 1, "expert": 7, **other}
        assert not torch.equal(one, initial_expert(shape, layers=4, **key))
    views = shape.views(one)
    assert views.inner.shape == (192, 64)
    assert views.inner.std().item() == pytest.approx(0.1, rel=0.03)
    assert views.down.std().item() == pytest.approx(0.1 / 8**0.5, rel=0.03)
    with pytest.raises(ValueError, match="a flat tensor of 18432"):
        shape.views(one[:-1])
