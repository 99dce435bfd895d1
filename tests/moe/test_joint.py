"""Calls of several micro-batches that share leases: the bits of one call after another."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tierstore.moe import ExpertShape
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import SaveActivations
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import LocalRows
from tierstore.moe.joint import PendingExperts, backward_together, forward_together
from tierstore.moe.source import ExpertLease, InMemoryExperts, users_of
from tierstore.parallel import RankGroup
from tierstore.prefetch.gradients import GradientParts
from tierstore.stats import StallLedger

SHAPE = ExpertShape(16, 24)
EXPERTS, TOKENS, TOP_K = 6, 12, 2


def experts() -> InMemoryExperts:
    return InMemoryExperts(SHAPE, layers=[0], experts=EXPERTS)


def call(source: InMemoryExperts, weighting: Weighting, chosen_TK: Tensor) -> ExpertPass:
    plan = dispatch(chosen_TK, torch.bincount(chosen_TK.flatten(), minlength=EXPERTS))
    rows = LocalRows(plan, plan.experts)
    return ExpertPass(0, SHAPE, source, plan, rows, weighting, SaveActivations.SAVE)


def inputs(micro: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(micro)
    x_TD = torch.randn(TOKENS, 16, generator=draw).requires_grad_()
    weight_TK = torch.rand(TOKENS, TOP_K, generator=draw).requires_grad_()
    # Micro-batch m never chooses expert m.
    others = torch.tensor([expert for expert in range(EXPERTS) if expert != micro])
    picked = torch.stack([torch.randperm(len(others), generator=draw)[:TOP_K] for _ in range(TOKENS)])
    return x_TD, weight_TK, others[picked], torch.randn(TOKENS, 16, generator=draw)


@pytest.mark.parametrize("weighting", list(Weighting))
def test_the_bits_of_one_call_after_another(weighting: Weighting) -> None:
    alone, together = experts(), experts()
    expected = []
    for micro in range(3):
        x_TD, weight_TK, chosen_TK, grad_TD = inputs(micro)
        y_TD = compute_experts(x_TD, weight_TK, call(alone, weighting, chosen_TK))
        y_TD.backward(grad_TD)
        expected.append((y_TD.detach(), x_TD.grad, weight_TK.grad))

    given = [inputs(micro) for micro in range(3)]
    calls = [call(together, weighting, chosen_TK) for _, _, chosen_TK, _ in given]
    with torch.no_grad():
        results = forward_together(
            together, [(x, w, each) for (x, w, _, _), each in zip(given, calls, strict=True)]
        )
    pending = [PendingExperts(x, w, each) for (x, w, _, _), each in zip(given, calls, strict=True)]
    made = [each.output().mul_(1.0) for each in pending]  # changed in place, as some blocks do
    assert all(bool(y.isnan().all()) for y in made)
    found = [each.output_gradient(y, grad) for each, y, (*_, grad) in zip(pending, made, given, strict=True)]
    backward_together(together, list(zip(pending, found, strict=True)))
    for y_TD, (x_TD, weight_TK, _, grad_TD), result, wanted in zip(
        made, given, results, expected, strict=True
    ):
        y_TD.backward(grad_TD)
        for one, other in zip((result, x_TD.grad, weight_TK.grad), wanted, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
    assert together.grads.keys() == alone.grads.keys()
    assert all(torch.equal(together.grads[key], alone.grads[key]) for key in alone.grads)


def test_one_lease_of_an_expert_serves_all() -> None:
    """Worked by hand: 0 and 2 are asked for by one micro-batch each, 1 by both."""
    assert users_of([[0, 1], [1, 2]]) == {0: [0], 1: [0, 1], 2: [1]}
    asked: list[list[int]] = []

    class Watched(InMemoryExperts):
        def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
            asked.append(list(experts))
            return super().forward(layer, experts)

    source = Watched(SHAPE, layers=[0], experts=EXPERTS)
    chosen = [torch.tensor([[0, 1]]), torch.tensor([[1, 2]])]
    calls = [call(source, Weighting.BY_EXPERT, each) for each in chosen]
    with torch.no_grad():
        forward_together(source, [(torch.randn(1, 16), torch.rand(1, 2), each) for each in calls])
    assert asked == [[0, 1, 2]]


def test_parts_are_added_in_order() -> None:
    """In fp32 ``(1e8 + 1) - 1e8`` is 0, and in another order it is 1: the first part lies in the slot itself."""
    total = torch.empty(3)
    parts = GradientParts(RankGroup.alone(), ledger=StallLedger())
    for micro, part in parts.add_up([0, 2, 5], total, layer=0):
        assert (part.data_ptr() == total.data_ptr()) == (micro == 0)
        part.fill_({0: 1e8, 2: 1.0, 5: -1e8}[micro])
    assert total.tolist() == [0.0] * 3
    assert [micro for micro, _ in parts.add_up([1], total, layer=0)] == [1]


def test_a_backward_pass_before_the_gradients_are_known_is_refused() -> None:
    x_TD, weight_TK, chosen_TK, grad_TD = inputs(0)
    pending = PendingExperts(x_TD, weight_TK, call(experts(), Weighting.BY_EXPERT, chosen_TK))
    with pytest.raises(RuntimeError, match="whose gradients are not known yet"):
        pending.output().backward(grad_TD)
