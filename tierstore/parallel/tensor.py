"""Tensor parallelism of the dense layers: the sums over ranks at both ends of each split pair of products.

A pair of products with a nonlinear function between them is split as ``tierstore.parallel.layout`` describes. Each rank
computes its part from the whole input, and the outputs of all ranks are summed. Megatron-LM (Shoeybi et al. 2019,
section 3) calls the two ends f and g: ``enter`` passes its input on, and sums the gradients of all ranks; ``leave`` sums
the outputs of all ranks, and passes its gradient on. Sums are in rank order, so all ranks have the same bits of whatever
is not split: the residual stream, its gradient, and the gradients of norms and routers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tierstore.parallel.collectives import Charge, RankGroup
from tierstore.parallel.layout import Division
from tierstore.stats import Cause, StallLedger, Tier


class TensorRanks:
    """The ranks of ``group``, which compute the same tokens with parts of a layer's parameters. With one rank nothing is
    split. Waiting for the others is charged to ``ledger``.
    """

    def __init__(
        self, group: RankGroup | None = None, *, layer: int | None = None, ledger: StallLedger | None = None
    ) -> None:
        self.group = RankGroup.alone() if group is None else group
        self._charge: Charge | None = None
        if ledger is not None:
            self._charge = partial(ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_REDUCE)

    @property
    def size(self) -> int:
        """The number of parts."""
        return self.group.size

    def enter(self, x: Tensor) -> Tensor:
        """Pass ``x``, which is the same on all ranks, to this rank's part of the products (f)."""
        if self.size == 1:
            return x
        apply: Any = _Enter.apply
        entered: Tensor = apply(x, self)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """The sum of every rank's ``y``, the result of its part of the products (g). A collective. Raises PeerError."""
        if self.size == 1:
            return y
        apply: Any = _Leave.apply
        left: Tensor = apply(y, self)
        return left

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, in rank order, as a new tensor."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total).wait(self._charge)
        return total

    def part(self, whole: Tensor, division: Division) -> Tensor:
        """A copy of this rank's part of ``whole``."""
        return part_of(whole, division, self.group.rank, self.size)

    def parameter(self, whole: Tensor, division: Division) -> nn.Parameter:
        """This rank's part of ``whole`` as a parameter; with one rank ``whole`` itself, not copied."""
        return nn.Parameter(whole if self.size == 1 else self.part(whole, division))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.summed(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.summed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def part_of(whole: Tensor, division: Division, rank: int, ranks: int) -> Tensor:
    """A copy of the part of ``rank``, of ``ranks``, of ``whole``."""
    dimension = division.dimension
    pieces = [
        whole.narrow(dimension, piece.start, piece.stop - piece.start)
        for piece in division.pieces(whole.shape[dimension], rank, ranks)
    ]
    return torch.cat(pieces, dim=dimension)


def whole_of(parts: list[Tensor], division: Division) -> Tensor:
    """The parameter assembled from ``parts``, ordered by rank."""
    dimension = division.dimension
    blocks = [part.chunk(division.blocks, dim=dimension) for part in parts]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block], dim=dimension)
