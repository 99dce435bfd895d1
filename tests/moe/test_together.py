"""Experts that are computed together: every bit is that of one after another."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tierstore.moe import experts as formulas
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import Activation, ExpertShape, SaveActivations
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import LocalRows
from tierstore.moe.experts import ExpertRows, Workspace, forward_expert, forward_experts, rows_together
from tierstore.moe.lora import LoraConfig, PairShape
from tierstore.moe.low_rank import PairLease
from tierstore.moe.source import ExpertLease, together

TYPES = (torch.float32, torch.bfloat16)
BY_ROW = [Activation.SWIGLU, Activation.REGLU]


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(0.3).to(dtype)


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
