"""Experts divided over ranks that have the same tokens, against one process: every rank has its bits.

Results, routing and gradients of tokens, router and experts are compared as bits (0.0 is not -0.0). With other pieces of
the batch on further data ranks, what is a sum over those is equal within rounding, as without tensor parallelism.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import Ranks
from torch import Tensor

from tierstore.moe import ExpertShape, InMemoryExperts, MoELayer, NoiseKey, RouterConfig, SaveActivations
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import IndexedRows, rows_of
from tierstore.parallel import Collective, Mesh, RankEnvironment, RankGroup, Work

WIDTH = 16
Found = dict[str, Any]


def alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def same_bits(one: Tensor, other: Tensor) -> bool:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


def one_layer(mesh: Mesh, dtype: torch.dtype, options: Found, shared: int = 0) -> Found:
    """A pass of a MoE layer over this data rank's part of 24 tokens, forward and backward."""
    options = dict(options)
    save = options.pop("save", SaveActivations.SAVE)
    config, shape = RouterConfig(**{"experts": 6, "top_k": 2, **options}), ExpertShape(WIDTH, 24)
    source = InMemoryExperts(shape, layers=[0], experts=config.experts, compute=dtype, replicas=mesh.replica)
    layer = MoELayer(config, shape, source, seed=1, shared_d_ff=shared, save_activations=save, mesh=mesh)
    generator = torch.Generator().manual_seed(5)
    x_TD = torch.randn(24, WIDTH, generator=generator).to(dtype)
    factors = torch.randn(24, WIDTH, generator=generator)
    own = slice(mesh.data.rank * 24 // mesh.data.size, (mesh.data.rank + 1) * 24 // mesh.data.size)
    x_TD, factors = x_TD[own].clone().requires_grad_(), factors[own]
    y_TD, routing = layer(x_TD, NoiseKey())
    ((y_TD.float() * factors).sum() + 3 * routing.aux_loss + 2 * routing.z_loss).backward()
    assert x_TD.grad is not None
    return {
        "same": {
            "y": y_TD.detach(),
            "weights": routing.weight_TK.detach(),
            "x_grad": x_TD.grad,
            "router_grad": layer.router.weight.grad,
            "aux_loss": routing.aux_loss.detach(),
        },
        "experts": {expert: gradient for (_, expert), gradient in source.grads.items()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", list(SaveActivations))
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_has_the_bits_of_one_process(
    ranks: Ranks, size: int, top_k: int, save: SaveActivations, dtype: torch.dtype
) -> None:
    options = {"top_k": top_k, "save": save}
    one = one_layer(alone(), dtype, options)
    check(ranks.run(size, one_layer, dtype, options, tensor=size), one)


def check(many: list[Found], one: Found) -> None:
    held: list[int] = []
    for found in many:
        for name, value in one["same"].items():
            assert same_bits(found["same"][name], value), name
        for expert, gradient in found["experts"].items():
            assert same_bits(gradient, one["experts"][expert])
        held += found["experts"]
    assert sorted(held) == sorted(one["experts"]), "each expert is one rank's"


@pytest.mark.parametrize(
    "options",
    [{"capacity_factor": 0.5, "top_k": 3}, {"experts": 3, "top_k": 1}, {"experts": 9, "top_k": 3}],
    ids=["dropped", "a rank without experts", "uneven blocks"],
)
def test_uneven_ranks(ranks: Ranks, options: Found) -> None:
    check(
        ranks.run(4, one_layer, torch.float32, options, tensor=4), one_layer(alone(), torch.float32, options)
    )


def test_with_other_data_ranks(ranks: Ranks) -> None:
    """Two data ranks of two tensor ranks: the ranks of a group have the same bits, and together one process's values."""
    one = one_layer(alone(), torch.float32, {"top_k": 3})
    many = ranks.run(4, one_layer, torch.float32, {"top_k": 3}, tensor=2)
    for first, second in ((0, 1), (2, 3)):
        for name, value in many[first]["same"].items():
            assert same_bits(many[second]["same"][name], value), name
    near = {"rtol": 2e-5, "atol": 2e-5}
    for name in ("y", "x_grad", "weights"):
        torch.testing.assert_close(
            torch.cat([many[rank]["same"][name] for rank in (0, 2)]), one["same"][name], **near
        )
    for name in ("router_grad", "aux_loss"):
        total = many[0]["same"][name] + many[2]["same"][name]
        torch.testing.assert_close(total, one["same"][name], **near)
    for expert, gradient in one["experts"].items():
        holders = [found["experts"][expert] for found in many if expert in found["experts"]]
        assert len(holders) == 2
        assert same_bits(*holders), "replicas have the same gradient"
        torch.testing.assert_close(holders[0], gradient, **near)


def one_pass(mesh: Mesh, weighting: Weighting, save: SaveActivations, dtype: torch.dtype) -> Found:
    """A pass over given assignments, some of them dropped, and the bytes that it sent; two tokens of negative zeros."""
    shape, experts = ExpertShape(WIDTH, 8), 5
    generator = torch.Generator().manual_seed(3)
    expert_TK = torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(17)])
    expert_TK[4, 1] = expert_TK[9, 0] = -1
    load_E = torch.bincount(expert_TK.flatten() + 1, minlength=experts + 1)[1:]
    plan = dispatch(expert_TK, load_E)
    x_TD = torch.randn(17, WIDTH, generator=generator).to(dtype)
    x_TD[:2] = -0.0
    x_TD.requires_grad_()
    weight_TK = torch.rand(17, 3, generator=generator).masked_fill(expert_TK < 0, 0).requires_grad_()
    source = InMemoryExperts(shape, layers=[0], experts=experts, compute=dtype)
    plan, rows = rows_of(plan, load_E.unsqueeze(0), mesh, training=True)
    before = mesh.tensor.traffic[Collective.ALL_TO_ALL].sent_bytes
    y_TD = compute_experts(x_TD, weight_TK, ExpertPass(0, shape, source, plan, rows, weighting, save))
    sent = mesh.tensor.traffic[Collective.ALL_TO_ALL].sent_bytes - before
    y_TD.backward(torch.randn(17, WIDTH, generator=generator).to(dtype))
    assert x_TD.grad is not None
    assert weight_TK.grad is not None
    return {
        "same": {"y": y_TD.detach(), "x_grad": x_TD.grad, "weight_grad": weight_TK.grad},
        "experts": {expert: gradient for (_, expert), gradient in source.grads.items()},
        "sent": sent,
        "rows": rows.rows,
    }


@pytest.mark.parametrize("weighting", list(Weighting))
@pytest.mark.parametrize("save", list(SaveActivations))
@pytest.mark.parametrize("size", [2, 4])
def test_both_weightings(ranks: Ranks, size: int, save: SaveActivations, weighting: Weighting) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        many = ranks.run(size, one_pass, weighting, save, dtype, tensor=size)
        check(many, one_pass(alone(), weighting, save, dtype))
        # 51 assignments but for two dropped ones; each rank sends its rows to all others.
        assert sum(found["rows"] for found in many) == 49
        for found in many:
            assert found["sent"] == (size - 1) * found["rows"] * WIDTH * dtype.itemsize


class OthersRows(RankGroup):
    """A group in which the others send what a test says; ``sent`` is what this rank sent to each of them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, range(size), {})
        self.others: list[Tensor] = []
        self.sent: list[int] = []

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, out_splits: Any, in_splits: Any) -> Any:
        assert (sum(out_splits), sum(in_splits)) == (len(out_rows), len(in_rows))
        assert [len(rows) for rows in self.others] == out_splits
        self.sent = in_rows.tolist()
        out_rows.copy_(torch.cat(self.others))
        return Work()


@given(st.integers(2, 4), st.integers(1, 6), st.integers(0, 7), st.integers(1, 3), st.data())
def test_every_rank_computes_its_own_experts_rows(
    size: int, experts: int, tokens: int, degree: int, data: st.DataObject
) -> None:
    """Against a list: rank by rank the rows of its experts in token order, and together every row once, in its place.

    By hand: experts 0 to 2 on ranks (0, 1 | 2), tokens to 2, 0, 2: rank 0 computes token 1, rank 1 tokens 0 and 2.
    """
    choice = [data.draw(st.integers(-1, experts - 1)) for _ in range(tokens)]
    expert_TK = torch.tensor(choice, dtype=torch.int64).view(-1, 1)
    load_E = torch.bincount(expert_TK.flatten() + 1, minlength=experts + 1)[1:]
    cuts = sorted(data.draw(st.lists(st.integers(0, experts), min_size=size - 1, max_size=size - 1)))
    starts = (0, *cuts, experts)
    plan = dispatch(expert_TK, load_E)
    groups = [OthersRows(rank, size) for rank in range(size)]
    asked = [tuple(range(first, last)) for first, last in itertools.pairwise(starts)]
    ways = [IndexedRows(group, starts, plan, own) for group, own in zip(groups, asked, strict=True)]
    back = [torch.full((plan.rows + 1,), -1) for _ in ways]
    results = []
    for rows, own, whole in zip(ways, asked, back, strict=True):
        mine = rows.at_experts(plan.token_N)
        for expert in own:
            wanted = [token for token in range(tokens) if choice[token] == expert]
            assert mine[rows.span(expert)].tolist() == wanted
            assert len(wanted) <= rows.most_rows
        assert rows.rows == len(mine)
        results.append(rows.at_experts(whole))
        results[-1].copy_(mine + 100)
    assert sum(rows.rows for rows in ways) == plan.rows
    chunks = [list(rows.chunks(degree)) for rows in ways]
    for own, cut in zip(asked, chunks, strict=True):
        assert tuple(expert for chunk in cut for expert in chunk.asked) == own
    for number in range(degree):
        parts = [made[cut[number].part].clone() for made, cut in zip(results, chunks, strict=True)]
        for rank, group in enumerate(groups):
            group.others = [part[:0] if other == rank else part for other, part in enumerate(parts)]
            chunks[rank][number].to_tokens(results[rank], back[rank]).wait()
            assert group.sent == parts[rank].tolist() * (size - 1)
    for whole in back:
        assert whole[:-1].tolist() == (plan.token_N + 100).tolist()
        assert int(whole[-1]) == -1, "what is behind the rows stays"
