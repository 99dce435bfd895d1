"""Experts that are computed together: every bit is that of one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tierstore import _native
from tierstore.moe import experts as formulas
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import LocalRows
from tierstore.moe.experts import ExpertRows, Workspace, forward_expert, forward_experts, rows_together
from tierstore.moe.lora import LoraConfig, PairShape
from tierstore.moe.low_rank import PairLease
from tierstore.moe.products import multiplies_at_once, multiply_at_once
from tierstore.moe.source import ExpertLease, together

TYPES = (torch.float32, torch.bfloat16)
BY_ROW = [Activation.SWIGLU, Activation.REGLU]


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(0.3).to(dtype)


# Products in one call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (96, 160), (33, 7), (1, 1)])
def test_products_at_once_have_the_bits_of_mm(dtype: torch.dtype, n: int, k: int) -> None:
    assert multiplies_at_once(torch.empty(1, dtype=dtype))
    rows = [1, 3, 0, 17, 2]
    x, out = _random(40, k, dtype=dtype, seed=1), torch.full((50, n), -1.0, dtype=dtype)
    x_first, out_first = [5, 0, 3, 22, 39 - 2], [0, 1, 4, 10, 30]
    weights = [_random(n, k, dtype=dtype, seed=10 + i) for i in range(len(rows))]
    multiply_at_once(out, out_first, x, x_first, rows, [w.data_ptr() for w in weights])
    expected = torch.full((50, n), -1.0, dtype=dtype)
    for w, o, f, r in zip(weights, out_first, x_first, rows, strict=True):
        torch.mm(x[f : f + r], w.t(), out=expected[o : o + r])
    assert torch.equal(out, expected)


def test_products_outside_of_their_matrices_are_refused() -> None:
    x, out, w = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8, 8)
    for out_first, x_first, rows in (([3], [0], [2]), ([0], [4], [1]), ([5], [0], [0]), ([0], [0], [5])):
        with pytest.raises(ValueError, match="expected rows below 4"):
            multiply_at_once(out, out_first, x, x_first, rows, [w.data_ptr()])
    with pytest.raises(ValueError, match="a first row for each product"):
        multiply_at_once(out, [0, 1], x, [0], [1], [w.data_ptr()])
    with pytest.raises(ValueError, match="weights: expected one for each product"):
        multiply_at_once(out, [0], x, [0], [1], [])
    assert torch.equal(out, torch.ones(4, 8))


def test_a_library_that_is_not_there_offers_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"/nowhere/libtorch_cpu\.so is not loaded"):
        _native.TorchProducts("/nowhere/libtorch_cpu.so")


def test_other_types_are_multiplied_one_by_one() -> None:
    assert not multiplies_at_once(torch.empty(1, dtype=torch.float64))
    assert not multiplies_at_once(torch.empty(1, device="meta"))


# Experts together -------------------------------------------------------------------------------------------


def test_rows_that_may_be_together() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert rows_together(ExpertShape(8, 512), bf16) == 63  # 63 x 512 elements are fewer than 32,768
    assert rows_together(ExpertShape(8, 24), bf16) == 0  # rows of 48 bytes would not be aligned
    assert rows_together(ExpertShape(8, 48), fp32) == 682
    for activation in set(Activation) - set(BY_ROW):
        assert rows_together(ExpertShape(8, 512, activation), bf16) == 0
    assert rows_together(ExpertShape(8, 65536), bf16) == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", BY_ROW)
def test_experts_together_have_the_bits_of_each_alone(
    activation: Activation, dtype: torch.dtype, adapted: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(formulas, "multiplies_at_once", lambda like: False)
    shape = ExpertShape(40, 96, activation)
    pairs = PairShape.of(shape, LoraConfig(rank=4, alpha=8.0))
    spans = [slice(7, 8), slice(0, 5), slice(9, 9), slice(20, 40), slice(8, 9)]
    x, work = _random(40, 40, dtype=dtype, seed=2), Workspace(shape, 40, torch.empty(0, dtype=dtype))
    weights = [_random(shape.numel, dtype=dtype, seed=30 + i) for i in range(len(spans))]
    leases = [
        PairLease(pairs, _random(pairs.numel, dtype=torch.float32, seed=60 + i)) if adapted else None
        for i in range(len(spans))
    ]
    expected, found = torch.zeros(40, 40, dtype=dtype), torch.zeros(40, 40, dtype=dtype)
    for span, flat, pair in zip(spans, weights, leases, strict=True):
        rows = span.stop - span.start
        if rows:
            forward_expert(shape, flat, x[span], work.inner(0, rows), expected[span], work, pair)
    experts = [ExpertRows(*each) for each in zip(weights, spans, leases, strict=True)]
    forward_experts(shape, experts, x, found, work)
    assert torch.equal(found, expected)
    assert found.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_another_size_are_refused(dtype: torch.dtype) -> None:
    """Also where products are made by address."""
    shape, x = ExpertShape(32, 64), torch.ones(1, 32, dtype=dtype)
    short = ExpertRows(torch.ones(shape.numel - 1, dtype=dtype), slice(0, 1))
    with pytest.raises(ValueError, match=f"a flat tensor of {shape.numel} elements"):
        forward_experts(shape, [short], x, x.clone(), Workspace(shape, 1, x))


class _Source:
    """Leases in groups of ``size``."""

    def __init__(self, weights: Sequence[Tensor], size: int) -> None:
        self._weights, self._size = weights, size

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for place, expert in enumerate(experts):
            more = (place + 1) % self._size != 0 and place + 1 < len(experts)
            yield ExpertLease(expert, self._weights[expert], more=more)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        raise AssertionError


@pytest.mark.parametrize("tokens", [1, 9, 200])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_a_pass_has_the_same_bits_however_its_experts_come(
    activation: Activation, dtype: torch.dtype, tokens: int
) -> None:
    shape, experts = ExpertShape(32, 128, activation), 12
    weights = [_random(shape.numel, dtype=dtype, seed=i) for i in range(experts)]
    x = _random(tokens, 32, dtype=dtype, seed=99)
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(tokens, experts, generator=generator)
    chosen, expert_TK = scores.topk(3, dim=1)
    plan = dispatch(expert_TK, torch.bincount(expert_TK.flatten(), minlength=experts))
    results = []
    for size in (1, 2, 5, experts):
        call = ExpertPass(
            0,
            shape,
            _Source(weights, size),
            plan,
            LocalRows(plan, plan.experts),
            Weighting.BY_OUTPUT,
            SaveActivations.RECOMPUTE,
        )
        with torch.no_grad():
            results.append(compute_experts(x, chosen, call))
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_leases_are_grouped_up_to_the_first_without_more() -> None:
    flat = torch.zeros(1)
    leases = [ExpertLease(expert, flat, more=expert in (0, 1, 4)) for expert in range(6)]
    groups = [[lease.expert for lease in group] for group in together(leases)]
    assert groups == [[0, 1, 2], [3], [4, 5]]
