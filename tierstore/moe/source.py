"""Where experts live, as the MoE layer sees it.

The layer never holds an expert: it requests the experts that its router chose from a source, one after another, and each
is valid until the next is requested. A tiered store, a dictionary in memory and a test's fake are all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tierstore.moe.config import ExpertShape
from tierstore.moe.dispatch import Dispatch
from tierstore.moe.exchange import LocalRows, PassLoads, Rows, rows_of
from tierstore.moe.experts import initial_expert
from tierstore.moe.low_rank import PairLease
from tierstore.parallel import Mesh, RankGroup
from tierstore.parallel.collectives import Charge
from tierstore.quant.weights import Weights, plain_weights
from tierstore.timeline import NullTimeline, TimelineSink

if TYPE_CHECKING:
    from tierstore.moe.computing import ExpertPass


@dataclass(frozen=True, slots=True)
class ExpertLease:
    """One expert. Valid until the iterator that gave it advances.

    ``more``: the next lease comes without a wait. Leases with ``more`` form a run with the lease that follows them; all of
    a run stay valid until the iterator advances past its last one (``together``).

    ``weights``: flat, in the compute type, read only; or quantised, for forward passes alone. ``gradients``: None in a
    forward pass, and for a frozen expert; in a backward pass a flat tensor of the same numel whose content is undefined
    until the layer has overwritten all of it. Its type is that of the weights or a wider one. ``pair``: the low-rank pairs
    that train beside a frozen expert.

    All start on a multiple of 64 bytes: otherwise products with few rows choose other kernels, and the bits would
    depend on an expert's address.
    """

    expert: int
    weights: Weights
    gradients: Tensor | None = None
    pair: PairLease | None = None
    more: bool = False

    @property
    def flat(self) -> Tensor:
        """``weights`` for uses that need them plain, such as a backward pass. Raises ConfigError if they are quantised."""
        return plain_weights(self.weights)

    @property
    def all_gradients(self) -> list[Tensor]:
        """The gradients of the expert and of its pairs, of those that are trained."""
        held = (self.gradients, None if self.pair is None else self.pair.gradients)
        return [gradients for gradients in held if gradients is not None]

    def zero_gradients(self) -> None:
        """Clear the gradients: no token of this rank reached the expert."""
        for gradients in self.all_gradients:
            gradients.zero_()


def together(leases: Iterable[ExpertLease]) -> Iterator[list[ExpertLease]]:
    """``leases`` in groups that are valid at the same time (``ExpertLease.more``)."""
    group: list[ExpertLease] = []
    for lease in leases:
        group.append(lease)
        if not lease.more:
            yield group
            group = []


class ExpertSource(Protocol):
    """Gives a lease of each requested expert (ascending), in an order that the source chooses. Advancing past a lease
    marks its work as complete.

    The layer runs every iterator to its end, unless the computation raises. With activation checkpointing,
    or when a layer recomputes, ``forward`` is also called inside the backward pass.

    If an expert has replicas on other ranks, the layer leaves in ``gradients`` what this replica's tokens contribute. A
    backward pass then requests the same experts, in the same order, on all replicas, and the source sums each gradient
    over them, in rank order, before it takes it as complete.
    """

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]: ...
    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]: ...


class JointSource(ExpertSource, Protocol):
    """A source whose lease of an expert may serve several micro-batches."""

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        """For each requested expert and each micro-batch that requests it, yield the micro-batch and a lease. ``asked[m]``:
        the experts of micro-batch m, ascending.

        An expert's leases come one after another, in the order of micro-batches, with the same weights. Their
        ``gradients`` are summed in that order, in fp32; advancing past the last lease completes the sum.
        """
        ...


class ExpertBarrier(Protocol):
    """Where the calls of several passes for the experts of one layer are joined: those of a step's micro-batches in layer
    order (``train.layer_order.LayerOrder``), or of the groups of a served batch (``serve.passes.LockstepPasses``).

    Each pass runs in its own greenlet. Its call switches to the barrier's, and returns when all passes have called::

        pass 0   ... router, compute --+                            +--> y, the rest of the block ...
        pass 1   ... router, compute --+                            +--> y, the rest of the block ...
        barrier                        +--> one lease of each expert, the rows of pass 0, those of pass 1

    A block that layer order recomputes gets a placeholder at once (``moe.joint.PendingExperts``).
    """

    def compute(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
        """What ``compute_experts`` returns, for the present micro-batch."""
        ...


class ExpertSourceRef:
    """The source of a model that is built before its experts are opened: ``target`` is set later.

    While there is a ``barrier``, calls for experts go to it. ``chunking``: how passes are cut into chunks.
    """

    def __init__(self, chunking: Chunking | None = None) -> None:
        self.target: ExpertSource | None = None
        self.barrier: ExpertBarrier | None = None
        self.chunking = chunking or Chunking()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        assert self.target is not None
        return self.target.forward(layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        assert self.target is not None
        return self.target.backward(layer, experts)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        """Requires a target that is a ``JointSource``."""
        target: Any = self.target
        leases: Iterator[tuple[int, ExpertLease]] = target.backward_each(layer, asked)
        return leases


def chunking_of(source: ExpertSource) -> Chunking:
    """How passes over the experts of ``source`` are cut into chunks; by default they are not."""
    return source.chunking if isinstance(source, ExpertSourceRef) else Chunking()


def in_training(source: ExpertSource) -> bool:
    """Whether the present forward pass is one of training: it records a graph, or will when it is recomputed."""
    return torch.is_grad_enabled() or (isinstance(source, ExpertSourceRef) and source.barrier is not None)


def rows_to(
    source: ExpertSource, plan: Dispatch, load_RE: Tensor, mesh: Mesh | None, charge: Charge | None
) -> tuple[Dispatch, Rows]:
    """The dispatch plan of the present pass over the experts of ``source``, and the exchange of its rows. ``mesh`` None: all
    experts are on this rank.
    """
    if mesh is None:
        return plan, LocalRows(plan, plan.experts)
    training, parts = in_training(source), chunking_of(source).degrees.parts
    return rows_of(plan, load_RE, mesh, training=training, charge=charge, parts=parts)


def users_of(asked: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The experts that micro-batches request (``asked[m]``), ascending, and which micro-batches request each."""
    users: dict[int, list[int]] = {}
    for micro, experts in enumerate(asked):
        for expert in experts:
            users.setdefault(expert, []).append(micro)
    return dict(sorted(users.items()))


class InMemoryExperts:
    """Keeps every expert in memory: fp32 masters, gradients summed in fp32 (fp64 if ``compute`` is fp64).

    ``masters[layer, expert]`` is flat; ``grads[layer, expert]`` appears with the first backward pass that reaches the
    expert; ``zero_grad()`` clears them all. ``compute``: the type of leased weights. ``replicas``: the ranks that hold
    these experts too.
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
            self._add(layer, expert, gradients)

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        for expert, users in users_of(asked).items():
            for micro in users:
                for lease in self.backward(layer, [expert]):
                    yield micro, lease

    def _add(self, layer: int, expert: int, gradients: Tensor) -> None:
        held = self.grads.get((layer, expert))
        if held is None:
            self.grads[layer, expert] = gradients.to(self.masters[layer, expert].dtype)
        else:
            held += gradients


# Chunks of the passes over a model's experts (``tierstore.moe.chunks``) -------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkDegrees:
    """The number of chunks of forward and of backward passes. ``parts``: those of each expert's rows, for more chunks than a
    rank has experts. Each part is a product of its own, so unlike the number of chunks they change bits.
    """

    forward: int = 1
    backward: int = 1
    parts: int = 1

    def __str__(self) -> str:
        parts = f", each expert in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.forward} forward, {self.backward} backward{parts}"


class Chunking:
    """How the passes over a model's experts are cut into chunks, and the loads that they carried. Shared by all layers.

    ``degrees`` may change between steps, on all ranks alike. Only backward passes are counted.
    """

    def __init__(self, timeline: TimelineSink | None = None) -> None:
        self.degrees = ChunkDegrees()
        self.timeline: TimelineSink = timeline or NullTimeline()
        self._counted = np.zeros(3)
        self._passes = 0

    def count(self, rows: Rows) -> None:
        """Count a backward pass that moves ``rows``."""
        loads = rows.most()
        if loads is not None:
            self._counted += astuple(loads)
            self._passes += 1

    def mean_loads(self) -> PassLoads:
        """Means over the passes since the last call; zeros if there was none."""
        means = PassLoads(*(self._counted / max(self._passes, 1)).tolist())
        self._counted[:], self._passes = 0, 0
        return means
