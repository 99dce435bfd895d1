"""Dispatch: a hand-worked order, and the way there and back as the identity."""

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.moe.dispatch import combine, combine_weighted, dispatch, dispatch_token, divide_experts


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


def test_divided_experts_by_hand() -> None:
    """Rank 0 has 2 and 0 rows of two experts, rank 1 has 3 and 1: expert 0's rows 0 to 4 go to parts 0 1 0 1 0, of which 2
    to 4 are rank 1's.
    """
    expert_TK = torch.tensor([[1, 0], [0, -1], [0, -1]])
    plan = dispatch(expert_TK, torch.tensor([3, 1]))
    assert plan.order_N.tolist() == [1, 2, 4, 0]
    divided, load_SU = divide_experts(plan, torch.tensor([[2, 0], [3, 1]]), 1, 2)
    assert load_SU.tolist() == [[1, 1, 0, 0], [2, 1, 1, 0]]
    assert divided.order_N.tolist() == [1, 4, 2, 0]
    assert divided.token_N.tolist() == [0, 2, 1, 0]
    assert divided.offsets == (0, 2, 3, 4, 4)
    assert divided.place_TK.tolist() == [[3, 0], [2, 4], [1, 4]]


@settings(max_examples=share(50))
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 999))
def test_divided_experts_against_slices(ranks: int, experts: int, parts: int, seed: int) -> None:
    """Part p of an expert has all ranks' rows p, p + parts, ..., of each rank in the order of its tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 9, (ranks,), generator=draw).tolist()
    chosen = [torch.randint(-1, experts, (count, 2), generator=draw) for count in tokens]
    load_SE = torch.stack([(each.flatten() + 1).bincount(minlength=experts + 1)[1:] for each in chosen])
    for rank, each in enumerate(chosen):
        plan = dispatch(each, load_SE[rank])
        divided, load_SU = divide_experts(plan, load_SE, rank, parts)
        for expert in range(experts):
            rows = [(r, i) for r in range(ranks) for i in range(int(load_SE[r, expert]))]
            for part in range(parts):
                there, unit = rows[part::parts], expert * parts + part
                assert load_SU[:, unit].tolist() == [sum(r == s for r, _ in there) for s in range(ranks)]
                wanted = [int(plan.order_N[plan.span(expert)][i]) for r, i in there if r == rank]
                assert divided.order_N[divided.span(unit)].tolist() == wanted
        assert torch.equal(divided.token_N, divided.order_N // 2)
        places = torch.cat([divided.order_N, torch.tensor([-1])])[divided.place_TK].flatten()
        dropped = each.flatten() < 0
        assert torch.equal(places.masked_fill(dropped, 0), torch.arange(len(places)).masked_fill(dropped, 0))
        assert bool((places[dropped] == -1).all())


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
