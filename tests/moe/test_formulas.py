"""The formulas of experts against autograd, and what their flat records hold."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_reference import plain_expert
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.errors import ConfigError
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import Activation, ExpertShape, SaveActivations, tile_rows
from tierstore.moe.dispatch import RowOrder, dispatch
from tierstore.moe.exchange import LocalRows
from tierstore.moe.experts import Workspace, backward_expert
from tierstore.moe.layer import MoELayer
from tierstore.moe.router import RouterConfig
from tierstore.moe.source import ExpertLease, InMemoryExperts

EXPERTS, WIDTH = 5, 6


class _Source:
    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.grads = torch.zeros_like(flat)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            yield ExpertLease(expert, self.flat[expert])

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            gradients = torch.full_like(self.flat[expert], torch.nan)
            yield ExpertLease(expert, self.flat[expert], gradients)
            self.grads[expert] = gradients


@pytest.mark.parametrize("tokens", [9, 90])  # up to 4 and 36 rows an expert; the latter are padded
@pytest.mark.parametrize("save", list(SaveActivations))
@pytest.mark.parametrize("weighting", list(Weighting))
@pytest.mark.parametrize("activation", list(Activation))
def test_gradients_are_those_of_autograd(
    activation: Activation,
    weighting: Weighting,
    save: SaveActivations,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if activation is Activation.CLAMPED_SWIGLU and weighting is Weighting.BY_EXPERT:
        pytest.skip("a bias behind the weights: MoELayer refuses it")
    monkeypatch.setattr("tierstore.moe.computing.compiles_products", lambda like: True)
    shape = ExpertShape(WIDTH, 4, activation, limit=0.7)  # within reach, on both sides
    generator = torch.Generator().manual_seed(4)
    flat = torch.randn(EXPERTS, shape.numel, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    scores = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    chosen = scores.topk(2, dim=1).indices
    weight = torch.rand(tokens, 2, generator=generator, dtype=torch.float64).requires_grad_()
    leaf = flat.clone().requires_grad_()
    expected = torch.stack(
        [
            sum(weight[t, k] * plain_expert(shape, leaf[chosen[t, k]], x[t : t + 1])[0] for k in range(2))
            for t in range(tokens)
        ]
    )
    factors = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    expected.backward(factors)
    theirs = [x.grad.clone(), weight.grad.clone()]
    x.grad = weight.grad = None
    source = _Source(flat)
    plan = dispatch(chosen, torch.bincount(chosen.flatten(), minlength=EXPERTS))
    call = ExpertPass(0, shape, source, plan, LocalRows(plan, plan.experts), weighting, save)
    y = compute_experts(x, weight, call)
    y.backward(factors)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close([x.grad, weight.grad], theirs)
    torch.testing.assert_close(source.grads, leaf.grad)


def test_rows_of_tiles_by_hand() -> None:
    counts = [0, 1, 16, 17, 32, 33, 256, 257, 512, 513, 1000, 1025]
    assert [tile_rows(count) for count in counts] == [0, 1, 16, 32, 32, 48, 256, 272, 512, 544, 1024, 1088]
    assert len({tile_rows(count) for count in range(17, 4097)}) == 15 + 4 * 16


@given(st.integers(17, 1 << 20))
def test_few_numbers_of_rows_are_left(count: int) -> None:
    padded = tile_rows(count)
    assert count <= padded <= max(count + 15, count * 17 // 16 + 1)
    assert tile_rows(padded) == padded
    assert padded % 16 == 0


class _Launches(TorchDispatchMode):
    """The operations that a device would launch, those that neither make a view nor take memory alone; and the sizes of all
    matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func.overloadpacket is not torch.ops.aten.new_empty:
            self.names.append(func.overloadpacket.__name__)
        if func.overloadpacket is torch.ops.aten.mm:
            self.sizes.update(size for each in args for size in each.shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_products_have_few_shapes_and_the_same_bits_when_recomputed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.moe.computing.compiles_products", lambda like: True)
    shape = ExpertShape(8, 24)
    generator = torch.Generator().manual_seed(5)
    counts = torch.tensor([3, 16, 17, 18, 31, 40, 47])
    chosen = torch.arange(len(counts)).repeat_interleave(counts).unsqueeze(1)
    x_TD = torch.randn(len(chosen), 8, generator=generator).to(dtype)
    weight_TK = torch.rand(len(chosen), 1, generator=generator)
    flat = torch.randn(len(counts), shape.numel, generator=generator).to(dtype)
    plan = dispatch(chosen, counts)
    found = []
    for save in SaveActivations:
        source = _Source(flat)
        call = ExpertPass(0, shape, source, plan, LocalRows(plan, plan.experts), Weighting.BY_EXPERT, save)
        x, weight = x_TD.clone().requires_grad_(), weight_TK.clone().requires_grad_()
        with _Launches() as launches:
            y = compute_experts(x, weight, call)
            y.backward(torch.ones_like(y))
        assert launches.sizes == {3, 16, 32, 48, 8, 24}
        with torch.no_grad():
            assert torch.equal(compute_experts(x, weight, call), y)
        found.append((y, x.grad, weight.grad, source.grads))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_launches_of_a_backward_pass(dtype: torch.dtype, weighted: bool) -> None:
    shape, rows = ExpertShape(8, 24), 5
    flat, gradients = torch.randn(2, shape.numel).to(dtype)
    x, grad_out, grad_x = torch.randn(3, rows, 8).to(dtype)
    inner, weight = torch.randn(rows, 48).to(dtype), torch.rand(rows).to(dtype)
    weights = (weight, torch.empty(rows)) if weighted else None
    work = Workspace(shape, rows, x, hidden=2)
    with _Launches() as launches:
        backward_expert(shape, flat, gradients, x, inner, grad_out, grad_x, work, weights=weights)
    hidden, back = ["silu", "mul", "mm"], ["mm", "mul_", "mul_", "silu_backward", "mm", "mm"]
    assert launches.names == [*hidden, *(["mul", "sum", "mul_", "mul_"] if weighted else []), *back]


def test_a_transposed_record_by_hand() -> None:
    shape = ExpertShape(2, 3, Activation.CLAMPED_SWIGLU)
    assert (shape.inner_rows, shape.numel) == (6, 12 + 6 + 6 + 2)
    views = shape.views(torch.arange(26.0))
    assert views.inner.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert views.inner_bias.tolist() == [12, 13, 14, 15, 16, 17]
    assert views.down.tolist() == [[18, 19], [20, 21], [22, 23]]
    assert views.down_bias.tolist() == [24, 25]


def test_a_built_in_layer_refuses_other_formulas() -> None:
    shape = ExpertShape(4, 4, Activation.CLAMPED_SWIGLU)
    with pytest.raises(ValueError, match="clamped_swiglu"):
        MoELayer(RouterConfig(experts=2), shape, InMemoryExperts(shape, layers=[], experts=2))


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_bad_shapes(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ExpertShape(4, 4, Activation.CLAMPED_SWIGLU, **{name: -1.0})


@pytest.mark.parametrize("order", list(RowOrder))
def test_orders_of_rows_hold_the_same_assignments(order: RowOrder) -> None:
    chosen = torch.rand(200, 8, generator=torch.Generator().manual_seed(1)).topk(3, dim=1).indices
    plan = dispatch(chosen, torch.bincount(chosen.flatten(), minlength=8), order)
    for expert in range(8):
        tokens = plan.token_N[plan.span(expert)]
        assert sorted(tokens.tolist()) == (chosen == expert).any(dim=1).nonzero().flatten().tolist()
        if order is RowOrder.TOKENS:
            assert tokens.tolist() == sorted(tokens.tolist())
    assert torch.equal(plan.order_N[plan.place_TK.flatten()], torch.arange(600))
