"""Experts whose rows are divided into parts: by hand, against a naive reference to the bit, and the whole layer closely."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest
import torch
from launcher import Ranks
from torch import Tensor

from tierstore.moe import ExpertShape, InMemoryExperts, SaveActivations
from tierstore.moe.chunks import PlacedLease, Travel
from tierstore.moe.computing import BackwardWalk, ExpertPass, ForwardWalk, Saved, Weighting, compute_experts
from tierstore.moe.dispatch import Dispatch, combine, combine_weighted, dispatch, divide_experts
from tierstore.moe.exchange import LocalRows, RowChunk, rows_of
from tierstore.moe.experts import Scratch, Workspace, backward_expert, forward_expert
from tierstore.moe.source import ChunkDegrees, ExpertLease, ExpertSourceRef
from tierstore.parallel import Mesh, RankGroup, Work
from tierstore.timeline import Args, Moment, TimelineSink, Track

SHAPE, TOP_K = ExpertShape(32, 16), 2
Found = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """A global batch: tokens, their experts and weights, and the gradient that comes back for each."""

    x_TD: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    grad_TD: Tensor

    @staticmethod
    def drawn(tokens: int, experts: int, dtype: torch.dtype) -> Batch:
        draw = torch.Generator().manual_seed(tokens)
        chosen = [torch.randperm(experts, generator=draw)[:TOP_K] for _ in range(tokens)]
        expert_TK = torch.stack(chosen) if chosen else torch.empty(0, TOP_K, dtype=torch.int64)
        x_TD, grad_TD = (torch.randn(tokens, SHAPE.d_model, generator=draw).to(dtype) for _ in range(2))
        return Batch(x_TD, expert_TK, torch.rand(tokens, TOP_K, generator=draw), grad_TD)


class Watched(InMemoryExperts):
    """Counts the leases of each expert."""

    def __init__(self, experts: int, dtype: torch.dtype, replicas: RankGroup | None = None) -> None:
        super().__init__(SHAPE, layers=[0], experts=experts, compute=dtype, replicas=replicas)
        self.leased: list[int] = []

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.leased += experts
        return super().forward(layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self.leased += experts
        return super().backward(layer, experts)


def one_pass(
    mesh: Mesh,
    tokens: list[int],
    experts: int,
    dtype: torch.dtype,
    degrees: ChunkDegrees,
    weighting: Weighting = Weighting.BY_EXPERT,
    save: SaveActivations = SaveActivations.SAVE,
) -> Found:
    """What this rank finds for its ``tokens[rank]`` tokens (tensor-parallel ranks: for all of them)."""
    batch = Batch.drawn(sum(tokens), experts, dtype)
    starts = list(itertools.accumulate(tokens, initial=0))
    places = [slice(*bounds) for bounds in itertools.pairwise(starts)]
    own = places[mesh.data.rank]
    load_RE = torch.stack([batch.expert_TK[at].flatten().bincount(minlength=experts) for at in places])
    source, slot = Watched(experts, dtype, mesh.replica), ExpertSourceRef()
    slot.target, slot.chunking.degrees = source, degrees
    plan, rows = rows_of(
        dispatch(batch.expert_TK[own], load_RE[mesh.data.rank]),
        load_RE,
        mesh,
        training=True,
        parts=degrees.parts,
    )
    x_TD, weight_TK = batch.x_TD[own].requires_grad_(), batch.weight_TK[own].requires_grad_()
    y_TD = compute_experts(x_TD, weight_TK, ExpertPass(0, SHAPE, slot, plan, rows, weighting, save))
    y_TD.backward(batch.grad_TD[own])
    return {
        "y": y_TD.detach(),
        "x_grad": x_TD.grad,
        "weight_grad": weight_TK.grad,
        "experts": {expert: gradient for (_, expert), gradient in source.grads.items()},
        "leased": source.leased,
    }


def reference(tokens: int, experts: int, dtype: torch.dtype, parts: int) -> Found:
    """Every part of every expert by itself, in one process: rows j, j + parts, ... of an expert's are its part j."""
    batch, source = Batch.drawn(tokens, experts, dtype), Watched(experts, dtype)
    y_ND = torch.zeros(tokens * TOP_K + 1, SHAPE.d_model, dtype=dtype)
    grad_x_ND, weight_grad = torch.zeros_like(y_ND), torch.zeros_like(batch.weight_TK)
    sums: dict[int, Tensor] = {}
    for expert in range(experts):
        weights = source.masters[0, expert].to(dtype)
        chosen = (batch.expert_TK.flatten() == expert).nonzero()[:, 0]
        for part in range(parts):
            at = chosen[part::parts]
            if not len(at):
                continue
            x = batch.x_TD[at // TOP_K]
            work = Workspace(SHAPE, len(at), x, hidden=2)
            inner, y, grad_x = (
                x.new_empty(len(at), SHAPE.inner_rows),
                torch.empty_like(x),
                torch.empty_like(x),
            )
            forward_expert(SHAPE, weights, x, inner, y, work)
            gradients, grad_y = torch.empty_like(weights), batch.grad_TD[at // TOP_K]
            weight = batch.weight_TK.flatten()[at]
            grad_weight = torch.empty_like(weight)
            both = (weight.to(dtype), grad_weight)
            backward_expert(SHAPE, weights, gradients, x, inner, grad_y, grad_x, work, weights=both)
            weight_grad.view(-1)[at] = grad_weight
            y_ND[at], grad_x_ND[at] = y, grad_x
            sums[expert] = sums[expert] + gradients if part else gradients.float()
    place_TK = torch.arange(tokens * TOP_K).view(tokens, TOP_K)
    return {
        "y": combine_weighted(y_ND, place_TK, batch.weight_TK),
        "x_grad": combine(grad_x_ND, place_TK),
        "weight_grad": weight_grad,
        "experts": {expert: total.to(dtype).float() for expert, total in sums.items()},
    }


def whole(many: list[Found], name: str) -> Tensor:
    return torch.cat([found[name] for found in many])


# The reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("save", list(SaveActivations))
@pytest.mark.parametrize(
    ("tokens", "experts", "degrees"),
    [
        ([20, 20], 2, ChunkDegrees(2, 2, 2)),  # one expert on each rank
        ([20, 9], 2, ChunkDegrees(1, 4, 4)),
        ([3, 0], 2, ChunkDegrees(5, 5, 5)),  # parts without rows
        ([17, 12], 6, ChunkDegrees(5, 2, 2)),
        ([7, 0, 30, 3], 6, ChunkDegrees(3, 1, 3)),  # two ranks own two experts, two own one
    ],
)
def test_bits_of_the_reference(
    ranks: Ranks,
    tokens: list[int],
    experts: int,
    degrees: ChunkDegrees,
    save: SaveActivations,
    dtype: torch.dtype,
) -> None:
    """Which depend on the number of parts, and neither on that of chunks nor on that of ranks."""
    wanted = reference(sum(tokens), experts, dtype, degrees.parts)
    many = ranks.run(len(tokens), one_pass, tokens, experts, dtype, degrees, Weighting.BY_EXPERT, save)
    for name in ("y", "x_grad", "weight_grad"):
        assert torch.equal(whole(many, name), wanted[name]), name
    held = {expert: gradient for found in many for expert, gradient in found["experts"].items()}
    assert held.keys() == wanted["experts"].keys()
    for expert, gradient in wanted["experts"].items():
        assert torch.equal(held[expert], gradient), expert
    for found in many:  # one lease in each direction, whatever the parts
        assert sorted(found["leased"]) == sorted([*found["experts"]] * 2)


@pytest.mark.parametrize("weighting", list(Weighting))
@pytest.mark.parametrize(
    ("size", "layout"), [(2, {}), (4, {"expert": 2}), (2, {"tensor": 2}), (4, {"tensor": 2})]
)
def test_close_to_experts_as_wholes(
    ranks: Ranks, size: int, layout: dict[str, int], weighting: Weighting
) -> None:
    """In fp32; with replicas, and where every rank of a tensor-parallel group has all rows."""
    tokens = [40 // size] * (size // layout.get("tensor", 1))
    for save in SaveActivations:
        one, many = (
            ranks.run(size, one_pass, tokens, 4, torch.float32, degrees, weighting, save, **layout)
            for degrees in (ChunkDegrees(), ChunkDegrees(8, 3, 4))
        )
        for found, wanted in zip(many, one, strict=True):
            for name in ("y", "x_grad", "weight_grad"):
                torch.testing.assert_close(found[name], wanted[name], rtol=2e-5, atol=2e-5)
            assert found["experts"].keys() == wanted["experts"].keys()
            for expert, gradient in wanted["experts"].items():
                torch.testing.assert_close(found["experts"][expert], gradient, rtol=2e-5, atol=2e-5)


# The order of a pass ----------------------------------------------------------------------------------------


def test_a_part_is_sent_back_before_the_next_is_computed() -> None:
    """One expert of five rows in two parts, a chunk each, worked by hand: rows 0, 2, 4 are part 0, rows 1, 3 part 1."""
    order: list[str] = []

    class Sent(LocalRows):
        parts = 2

        def __init__(self, plan: Dispatch, number: int) -> None:
            super().__init__(plan, (number,))
            self.number = number

        def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Work:
            order.append(f"dispatch {self.number}")
            return Work()

        def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Work:
            order.append(f"combine {self.number}")
            return Work()

    class InParts(LocalRows):
        parts = 2

        def chunks(self, degree: int) -> Sequence[RowChunk]:
            return [Sent(plan, number) for number in range(degree)]

    class Walk(ForwardWalk):
        def _compute(self, placed: Sequence[PlacedLease]) -> None:
            order.extend(f"compute {each.part} of {each.span}, last: {each.last}" for each in placed)
            super()._compute(placed)

    plan, load_SU = divide_experts(
        dispatch(torch.zeros(5, 1, dtype=torch.int64), torch.tensor([5])), torch.tensor([[5]]), 0, 2
    )
    assert (plan.token_N.tolist(), load_SU.tolist()) == ([0, 2, 4, 1, 3], [[3, 2]])
    source = ExpertSourceRef()
    source.chunking.degrees = ChunkDegrees(2, 2, 2)
    call = ExpertPass(
        0, SHAPE, source, plan, InParts(plan, (0, 1)), Weighting.BY_EXPERT, SaveActivations.SAVE
    )
    walk = Walk(torch.randn(5, SHAPE.d_model), torch.ones(5, 1), call, saving=True)
    assert walk.asked == (0,)
    travel = Travel([walk], source.chunking, "forward 0")
    travel.compute([ExpertLease(0, torch.randn(SHAPE.numel))])
    travel.end()
    assert order == [
        *("dispatch 0", "dispatch 1"),
        *(f"compute 0 of {slice(0, 3)}, last: False", "combine 0"),
        *(f"compute 1 of {slice(3, 5)}, last: True", "combine 1"),
    ]


def test_a_chunk_takes_two_moments_of_the_device_whatever_its_experts() -> None:
    """Two chunks of three experts: when the first begins, and when the last is queued. A moment is an event."""

    class Sink(TimelineSink):
        enabled = True
        moments: int = 0
        drawn: ClassVar[list[tuple[str, Moment, Moment]]] = []

        def now(self, stream: torch.Stream | None = None) -> int:
            self.moments += 1
            return self.moments

        def add(self, track: Track, name: str, start: Moment, end: Moment, args: Args | None = None) -> None:
            self.drawn.append((name, start, end))

    class Walk:
        parts, chunks, left = 1, (0, 1), [3, 3]

        def chunks_of(self, leases: Sequence[ExpertLease], part: int) -> list[int]:
            return [lease.expert // 3 for lease in leases]

        def compute(self, leases: Sequence[ExpertLease], part: int) -> None:
            for number in self.chunks_of(leases, part):
                self.left[number] -= 1

        def complete(self, number: int) -> bool:
            return not self.left[number]

        def send(self, number: int) -> list[Work]:
            return []

        send_back = send

    source, sink = ExpertSourceRef(), Sink()
    source.chunking.timeline = sink
    travel = Travel([cast(Any, Walk())], source.chunking, "forward 0")
    sink.moments = 0
    for expert in range(6):
        travel.compute([ExpertLease(expert, torch.zeros(1))])
    travel.end()
    # Between the chunks a moment for the results that are sent back.
    assert sink.drawn == [("forward 0: experts chunk 0", 1, 2), ("forward 0: experts chunk 1", 4, 5)]


def test_gradients_of_parts_are_added_in_order_and_in_fp32() -> None:
    """In fp32 ``(1e8 + 1) - 1e8`` is 0 and in another order 1; in bf16 1 + 2 ** -8 + 2 ** -8 would stay 1."""

    class Sums(BackwardWalk):
        def __init__(self, parts: Sequence[float]) -> None:
            self._scratch, self._values = Scratch(), iter(parts)
            self._inputs, self._saved = None, Saved(rows_MD=torch.empty(1, 1))

        def _compute_one(self, lease: ExpertLease, number: int, span: slice, x_MD: Tensor) -> None:
            for gradients in lease.all_gradients:
                gradients.fill_(next(self._values))

        def finish(self) -> tuple[Tensor, Tensor]:
            raise NotImplementedError

    for dtype, values, total in (
        (torch.float32, (1e8, 1.0, -1e8), 0.0),
        (torch.bfloat16, (1.0, 2**-8, 2**-8), 1 + 2**-7),
    ):
        lease = ExpertLease(0, torch.empty(3), torch.empty(3, dtype=dtype))
        walk = Sums(values)
        walk._compute([PlacedLease(lease, 0, slice(0, 1), part, part == 2) for part in range(3)])
        assert lease.gradients.tolist() == [total] * 3
