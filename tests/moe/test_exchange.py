"""The MoE layer over several ranks against one process on the same global batch.

Logits are exact here (small dyadic numbers), so that routing and its weights have the same bits however the batch
is cut. Then, where an expert has no replica, its products have the same shapes and operands as in one process:
outputs and expert gradients must be equal to the bit. What is a sum over ranks in another order than the sum over
tokens (replicated experts' and the router's gradients, the losses) is equal within rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import Ranks
from torch import Tensor

from tierstore.moe import (
    ExpertShape,
    InMemoryExperts,
    MoELayer,
    NoiseKey,
    RouterConfig,
    RouterNoise,
    SaveActivations,
)
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import ExchangedRows, RowChunk, expert_groups
from tierstore.moe.source import ChunkDegrees, ExpertSourceRef
from tierstore.parallel import Mesh, RankEnvironment, RankGroup, Work

WIDTH = 16
Found = dict[str, Any]


def _global_batch(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs with few bits, and the gradient that comes back for each."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(-4, 5, (tokens, WIDTH), generator=generator).to(dtype) / 4
    return x, torch.randn(tokens, WIDTH, generator=generator).to(dtype)


def _pass(mesh: Mesh, tokens: list[int], dtype: torch.dtype, options: Found, times: int = 1) -> Found:
    """Passes over this rank's ``tokens[rank]`` tokens, and all that they computed."""
    options = dict(options)
    save = options.pop("save", SaveActivations.SAVE)
    degrees = options.pop("degrees", ChunkDegrees())
    experts = options.setdefault("experts", 6)
    shape = ExpertShape(WIDTH, 24)
    source = InMemoryExperts(shape, layers=[3], experts=experts, compute=dtype, replicas=mesh.replica)
    config = RouterConfig(**options)
    slot = ExpertSourceRef()
    slot.target, slot.chunking.degrees = source, degrees
    layer = MoELayer(config, shape, slot, layer=3, seed=1, save_activations=save, mesh=mesh)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        weight = layer.router.weight
        weight.copy_(torch.randint(-2, 3, weight.shape, generator=generator) / 4)
    if dtype == torch.float64:
        layer = layer.double()
    starts = list(itertools.accumulate(tokens, initial=0))
    own = slice(starts[mesh.world.rank], starts[mesh.world.rank + 1])
    x, factors = (whole[own] for whole in _global_batch(sum(tokens), dtype))
    x = x.clone().requires_grad_()
    for micro in range(times):
        y, routing = layer(x, NoiseKey(5, micro))
        wide = torch.promote_types(dtype, torch.float32)
        objective = (y.to(wide) * factors.to(wide)).sum() + 3 * routing.aux_loss + 2 * routing.z_loss
        objective.backward()
    assert x.grad is not None
    return {
        "y": y.detach(),
        "expert_TK": routing.expert_TK,
        "weight_TK": routing.weight_TK.detach(),
        "load_E": routing.load_E,
        "aux_loss": routing.aux_loss.detach(),
        "z_loss": routing.z_loss.detach(),
        "x_grad": x.grad,
        "router_grad": layer.router.weight.grad,
        "expert_grads": {expert: grad for (_, expert), grad in source.grads.items()},
    }


def _alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


def _compare(
    ranks: Ranks,
    tokens: list[int],
    options: Found,
    *,
    expert: int = 0,
    dtype: torch.dtype = torch.float32,
    times: int = 1,
) -> list[Found]:
    """Runs both, and compares all that must be the same. Returns what the ranks found."""
    size = len(tokens)
    one = _pass(_alone(), [sum(tokens)], dtype, options, times)
    many: list[Found] = ranks.run(size, _pass, tokens, dtype, options, times, expert=expert)
    replicas = size // (expert or size)
    for name in ("expert_TK", "weight_TK", *(["y"] if replicas == 1 else [])):
        assert torch.equal(torch.cat([found[name] for found in many]), one[name]), name
    for found in many:
        assert torch.equal(found["load_E"], one["load_E"])
    close: Found = {
        torch.float64: {"rtol": 1e-10, "atol": 1e-10},
        torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    }
    near = close.get(dtype, {"rtol": 0.02, "atol": 0.05})
    for name in ("aux_loss", "z_loss", "router_grad"):
        torch.testing.assert_close(sum(found[name] for found in many), one[name], **near)
    for name in ("x_grad", "y"):
        torch.testing.assert_close(torch.cat([found[name] for found in many]), one[name], **near)
    held: dict[int, list[Tensor]] = {}
    for found in many:
        for number, grad in found["expert_grads"].items():
            held.setdefault(number, []).append(grad)
    assert held.keys() == one["expert_grads"].keys()
    for number, grads in held.items():
        assert len(grads) == replicas
        assert all(torch.equal(grads[0], grad) for grad in grads)
        if replicas == 1:
            assert torch.equal(grads[0], one["expert_grads"][number])
        else:
            torch.testing.assert_close(grads[0], one["expert_grads"][number], **near)
    return many


LAYOUTS = [([20, 20], 0), ([12, 12, 12, 12], 0), ([12, 12, 12, 12], 2), ([20, 20], 1)]


@pytest.mark.parametrize(("tokens", "expert"), LAYOUTS)
@pytest.mark.parametrize("save", list(SaveActivations))
def test_as_one_process(ranks: Ranks, tokens: list[int], expert: int, save: SaveActivations) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        _compare(ranks, tokens, {"save": save, "top_k": 2}, expert=expert, dtype=dtype)


@pytest.mark.parametrize(("tokens", "expert"), LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_capacity_is_that_of_the_global_batch(
    ranks: Ranks, tokens: list[int], expert: int, top_k: int, factor: float
) -> None:
    options = {"top_k": top_k, "capacity_factor": factor}
    found = _compare(ranks, tokens, options, expert=expert, dtype=torch.float64)
    assert any(bool((one["expert_TK"] < 0).any()) for one in found)


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("tokens", [[7, 0, 30, 3], [0, 0, 0, 11], [1, 0, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("experts", [3, 6, 9])
def test_uneven_ranks_and_blocks(ranks: Ranks, tokens: list[int], experts: int, expert: int) -> None:
    # With three experts on four ranks one owns none; with one token most ranks' experts get none.
    _compare(ranks, tokens, {"experts": experts, "top_k": 2}, expert=expert)


@pytest.mark.parametrize(("tokens", "expert"), LAYOUTS)
def test_noise_is_drawn_for_the_global_batch(ranks: Ranks, tokens: list[int], expert: int) -> None:
    options = {"noise": RouterNoise.JITTER, "noise_std": 0.3, "experts": 6}
    one = _pass(_alone(), [sum(tokens)], torch.float64, options)
    many = ranks.run(len(tokens), _pass, tokens, torch.float64, options, expert=expert)
    assert torch.equal(torch.cat([found["expert_TK"] for found in many]), one["expert_TK"])
    torch.testing.assert_close(torch.cat([found["y"] for found in many]), one["y"], rtol=1e-6, atol=1e-6)


def test_passes_follow_each_other(ranks: Ranks) -> None:
    _compare(ranks, [9, 14], {"top_k": 2}, times=3)
    _compare(ranks, [9, 4, 0, 3], {"top_k": 2}, expert=2, times=3, dtype=torch.float64)


def _evaluate(mesh: Mesh) -> dict[str, Any]:
    """What a pass without gradients asks of the source: nothing for another replica's sake."""
    shape = ExpertShape(WIDTH, 8)

    class Asked(InMemoryExperts):
        asked: tuple[int, ...] = ()

        def forward(self, layer: int, experts: Any) -> Any:
            self.asked = tuple(experts)
            return super().forward(layer, experts)

    source = Asked(shape, layers=[0], experts=4, replicas=mesh.replica)
    layer = MoELayer(RouterConfig(experts=4, top_k=1), shape, source, mesh=mesh)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, WIDTH))
        # The tokens of world rank r all go to expert r.
        x = torch.zeros(3, WIDTH)
        x[:, mesh.world.rank] = 1.0
        layer(x, NoiseKey())
        without = source.asked
    layer(x, NoiseKey())[0].sum().backward()
    return {"evaluating": without, "training": source.asked, "stepped": sorted(e for _, e in source.grads)}


def test_replicas_step_the_same_experts(ranks: Ranks) -> None:
    # Ranks 0, 1 are one copy of the experts (0, 1 | 2, 3), ranks 2, 3 the other.
    found = ranks.run(4, _evaluate, expert=2)
    assert [one["evaluating"] for one in found] == [(0, 1), (), (), (2, 3)]
    assert [one["training"] for one in found] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [one["stepped"] for one in found] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_groups_of_experts_worked_by_hand() -> None:
    """Six experts with 4, 1, 1, 6, 0 and 2 rows: 0, 4, 5, 6, 12, 12, 14 lie before each bound."""
    load_E = [4, 1, 1, 6, 0, 2]
    assert expert_groups(load_E, 0, 6, 1) == [0, 6]
    # Half of 14 is 7: nearest is 6, before expert 3.
    assert expert_groups(load_E, 0, 6, 2) == [0, 3, 6]
    # Quarters: 3.5 (nearest 4), 7 (nearest 6), 10.5 (nearest 12, the first of two).
    assert expert_groups(load_E, 0, 6, 4) == [0, 1, 3, 4, 6]
    # Of the last three, 6, 0 and 2: a third is 2.67 (nearest 0, so the first group is empty), two are 5.33 (nearest 6).
    assert expert_groups(load_E, 3, 6, 3) == [3, 3, 4, 6]
    # No rows, and no experts.
    assert expert_groups([0, 0], 0, 2, 2) == [0, 0, 2]
    assert expert_groups(load_E, 2, 2, 3) == [2, 2, 2, 2]


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 6))
def test_groups_of_experts_are_balanced(loads: list[int], degree: int) -> None:
    """No group has more than its share and one expert's rows beside it."""
    bounds = expert_groups(loads, 0, len(loads), degree)
    assert len(bounds) == degree + 1
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1]) == (0, len(loads))
    for first, last in itertools.pairwise(bounds):
        assert sum(loads[first:last]) <= sum(loads) / degree + max(loads, default=0)


@pytest.mark.parametrize("save", list(SaveActivations))
@pytest.mark.parametrize(
    ("tokens", "expert", "experts"),
    [([20, 9], 0, 6), ([7, 0, 30, 3], 0, 9), ([1, 0, 0, 0], 0, 8), ([12, 5, 0, 12], 2, 6)],
)
def test_chunks_change_no_bit(
    ranks: Ranks, tokens: list[int], expert: int, experts: int, save: SaveActivations
) -> None:
    """With uneven loads, experts and chunks without rows, ranks without tokens, and replicas."""
    for dtype in (torch.float32, torch.bfloat16):
        options = {"save": save, "top_k": 2, "experts": experts}
        one = ranks.run(len(tokens), _pass, tokens, dtype, options, 2, expert=expert)
        for degrees in (ChunkDegrees(2, 2), ChunkDegrees(4, 1), ChunkDegrees(1, 3)):
            many = ranks.run(
                len(tokens), _pass, tokens, dtype, {**options, "degrees": degrees}, 2, expert=expert
            )
            for found, expected in zip(many, one, strict=True):
                assert found["expert_grads"].keys() == expected["expert_grads"].keys()
                for number, grad in expected["expert_grads"].items():
                    assert torch.equal(found["expert_grads"][number], grad), (degrees, number)
                for name in ("y", "x_grad", "router_grad", "weight_TK"):
                    assert torch.equal(found[name], expected[name]), (degrees, name)


@settings(max_examples=share(40))
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_rows_arrive_by_expert_then_source_then_token(ranks_: int, experts: int, data: st.DataObject) -> None:
    """Against a sort: with every rank's messages delivered by hand."""
    tokens = [data.draw(st.integers(0, 6)) for _ in range(ranks_)]
    choices = [
        torch.tensor(
            [[data.draw(st.integers(-1, experts - 1))] for _ in range(count)], dtype=torch.int64
        ).view(-1, 1)
        for count in tokens
    ]
    load_SE = torch.stack([torch.bincount(c.flatten() + 1, minlength=experts + 1)[1:] for c in choices])
    cuts = sorted(data.draw(st.lists(st.integers(0, experts), min_size=ranks_ - 1, max_size=ranks_ - 1)))
    starts = (0, *cuts, experts)
    plans = [dispatch(c, load) for c, load in zip(choices, load_SE, strict=True)]
    told = [_Told(r) for r in range(ranks_)]
    rows = [ExchangedRows(told[r], starts, load_SE, ()) for r in range(ranks_)]
    sent = [plan.token_N + 100 * r for r, plan in enumerate(plans)]
    degree = data.draw(st.integers(1, experts + 1))
    results = [mine.at_experts(each) for mine, each in zip(rows, sent, strict=True)]
    for there in _by_chunk(rows, told, degree, lambda r, chunk: chunk.to_experts(sent[r], results[r])):
        for came in there:
            came.wait()
    for r, mine in enumerate(rows):
        for expert in range(starts[r], starts[r + 1]):
            wanted = [
                100 * s + t for s in range(ranks_) for t in range(tokens[s]) if int(choices[s][t]) == expert
            ]
            assert results[r][mine.span(expert)].tolist() == wanted
    # And the way back undoes the way there.
    back = [torch.full_like(each, -1) for each in sent]
    for again in _by_chunk(rows, told, degree, lambda r, chunk: chunk.to_tokens(results[r], back[r])):
        for came in again:
            came.wait()
    assert all(torch.equal(one, other) for one, other in zip(back, sent, strict=True))


def _by_chunk(
    rows: list[ExchangedRows], told: list[_Told], degree: int, travel: Callable[[int, RowChunk], Work]
) -> Iterator[list[Work]]:
    """What ``travel`` has on its way for each rank, chunk by chunk, after all ranks' messages were delivered."""
    for number in range(degree):
        arrivals = [travel(r, each.chunks(degree)[number]) for r, each in enumerate(rows)]
        for each in told:
            each.deliver(told)
        yield arrivals


class _Told:
    """An exchange whose messages are delivered by hand."""

    groups: tuple[RankGroup, ...] = ()

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._message: tuple[Tensor, Tensor, Tensor] | None = None

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, rows_SS: Tensor) -> Work:
        assert int(rows_SS[:, self.rank].sum()) == len(out_rows)
        assert int(rows_SS[self.rank].sum()) == len(in_rows)
        self._message = out_rows, in_rows, rows_SS
        return Work()

    def deliver(self, ranks: list[_Told]) -> None:
        """What ``ranks`` sent last comes to this one."""
        pieces = []
        for other in ranks:
            assert torch.equal(other._message[2], self._message[2])
            pieces.append(torch.split(other._message[1], other._message[2][other.rank].tolist())[self.rank])
        self._message[0].copy_(torch.cat(pieces))
