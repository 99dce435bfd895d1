"""Where experts live, as the MoE layer sees it.

The layer never holds an expert: it asks a source for the ones that its router chose, one after another,
and each is valid until the next is asked for. A tiered store, a dictionary in memory and a test's fake are
all sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tierstore.moe.config import ExpertShape
from tierstore.moe.experts import initial_expert
from tierstore.moe.low_rank import PairLease
from tierstore.parallel import RankGroup


@dataclass(frozen=True, slots=True)
class ExpertLease:
    """One expert, for as long as the iterator that gave it has not advanced.

    ``weights``: flat, in the compute type, read only. ``gradients``: None in a forward pass, and for a frozen expert; in a
    backward pass a flat tensor of the same numel whose content is undefined until the layer has overwritten all of
    it. Its type is that of the weights or a wider one. ``pair``: the low-rank pairs that train beside a frozen expert.

    All start on a multiple of 64 bytes: below that, products with few rows choose other kernels, and the
    bits would depend on where an expert happens to lie.
    """

    expert: int
    weights: Tensor
    gradients: Tensor | None = None
    pair: PairLease | None = None

    def zero_gradients(self) -> None:
        """No token of this rank reached the expert."""
        for gradients in (self.gradients, None if self.pair is None else self.pair.gradients):
            if gradients is not None:
                gradients.zero_()


class ExpertSource(Protocol):
    """Gives a lease of each expert asked for (ascending), in an order of its own. Advancing past a
    lease says that its work is complete.

    The layer runs every iterator to its end, unless the computation raises. With activation checkpointing,
    or when a layer recomputes, ``forward`` is also called inside the backward pass.

    Where an expert has replicas on other ranks, what the layer leaves in ``gradients`` is of this replica's
    tokens. A backward pass then asks for the same experts, in the same order, on all of them, and the source sums
    each gradient over the replicas, in rank order, before it takes it as complete.
    """

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]: ...
    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]: ...


class InMemoryExperts:
    """Every expert in memory, fp32 masters, gradients summed in fp32 (fp64 if so asked).

    ``masters[layer, expert]`` is flat; ``grads[layer, expert]`` appears with the first backward pass that
    reaches the expert; ``zero_grad()`` forgets them all. ``compute`` is the type in which leases give the
    weights. ``replicas``: the ranks that hold these experts too.
    """

    def __init__(
        self,
        shape: ExpertShape,
        *,
        layers: Sequence[int],
        experts: int,
        seed: int = 0,
        depth: int | None = None,
        compute: torch.dtype = torch.float32,
        replicas: RankGroup | None = None,
    ) -> None:
        self._replicas = RankGroup.alone() if replicas is None else replicas
        self._compute = compute
        dtype = torch.float64 if compute == torch.float64 else torch.float32
        depth = len(layers) if depth is None else depth
        self.masters: dict[tuple[int, int], Tensor] = {
            (layer, expert): initial_expert(shape, seed=seed, layer=layer, expert=expert, layers=depth).to(
                dtype
            )
            for layer in layers
            for expert in range(experts)
        }
        self.grads: dict[tuple[int, int], Tensor] = {}

    def zero_grad(self) -> None:
        """Forget every gradient."""
        self.grads.clear()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            yield ExpertLease(expert, self.masters[layer, expert].to(self._compute))

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        for expert in experts:
            weights = self.masters[layer, expert].to(self._compute)
            gradients = torch.full_like(weights, float("nan"))  # undefined content: a partial write must show
            yield ExpertLease(expert, weights, gradients)
            self._replicas.all_reduce(gradients).wait()
            held = self.grads.get((layer, expert))
            if held is None:
                self.grads[layer, expert] = gradients.to(self.masters[layer, expert].dtype)
            else:
                held += gradients
