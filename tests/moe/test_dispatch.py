"""Dispatch: a hand-worked order, and the way there and back as the identity."""

from __future__ import annotations

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.moe.dispatch import combine, combine_weighted, dispatch, dispatch_token


def test_by_hand() -> None:
    expert_TK = torch.tensor([[2, 0], [0, -1], [2, 3]])
    plan = dispatch(expert_TK, torch.tensor([2, 0, 2, 1]))
    assert plan.order_N.tolist() == [1, 2, 0, 4, 5]
    assert plan.token_N.tolist() == [0, 1, 0, 2, 2]
    assert plan.offsets == (0, 2, 2, 4, 5)
    assert plan.experts == (0, 2, 3)
    assert (plan.rows, plan.most_rows) == (5, 2)
    assert plan.place_TK.tolist() == [[2, 0], [1, 5], [3, 4]]
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [0.0]])
    assert combine(rows, plan.place_TK).tolist() == [[4.0], [2.0], [9.0]]
    weight = torch.tensor([[0.5, 2.0], [1.0, 7.0], [0.0, 1.0]])
    assert combine_weighted(rows, plan.place_TK, weight).tolist() == [[3.5], [2.0], [5.0]]


@settings(max_examples=share(50))
@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 6), st.integers(0, 999))
def test_there_and_back(tokens: int, top_k: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert_TK = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    load_E = torch.tensor([int((expert_TK == e).sum()) for e in range(experts)])
    plan = dispatch(expert_TK, load_E)
    flat = expert_TK.flatten().tolist()
    wanted = [i for e in range(experts) for i, owner in enumerate(flat) if owner == e]
    assert plan.order_N.tolist() == wanted
    for e in range(experts):
        assert all(flat[i] == e for i in wanted[plan.span(e)])
    x = torch.randn(tokens, 3, generator=generator)
    rows = torch.cat([x[plan.token_N], torch.zeros(1, 3)])
    kept = (expert_TK >= 0).sum(dim=1, keepdim=True)
    torch.testing.assert_close(combine(rows, plan.place_TK), x * kept)


@settings(max_examples=share(40))
@given(chosen=st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
def test_a_single_token_is_dispatched_alike(chosen: list[int]) -> None:
    expert_1K = torch.tensor([chosen])
    one = dispatch_token(expert_1K, 12)
    whole = dispatch(expert_1K, torch.bincount(expert_1K[0], minlength=12))
    for name in ("order_N", "token_N", "place_TK"):
        assert torch.equal(getattr(one, name), getattr(whole, name)), name
    assert one.offsets == whole.offsets


@pytest.mark.parametrize("chosen", [[0, 12], [3, -1]])
def test_a_single_token_at_no_expert(chosen: list[int]) -> None:
    with pytest.raises(ValueError, match=r"routed to experts .* of 12"):
        dispatch_token(torch.tensor([chosen]), 12)
