"""The experts of one layer for several micro-batches: one lease of each serves all of them.

Each micro-batch's rows are computed separately, in products of the shapes that they would have alone, in the order of
micro-batches: the bits are those of one micro-batch after another.

::

    results = forward_together(source, [(x, weights, call) for each micro-batch])
    ...                                       # the rest of the block, and later its recomputation:
    pending = PendingExperts(x, weights, call)
    y = pending.output()                      # a placeholder: only the graph behind it is needed, no value is read
    ...                                       # out = the rest of the block; the gradient of y is found
    backward_together(source, [(pending, grad_y) for each micro-batch])
    out.backward(grad_out)                    # passes the experts' gradients on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tierstore.moe.chunks import Travel
from tierstore.moe.computing import BackwardWalk, ExpertPass, ForwardWalk, Saved, backward_walk
from tierstore.moe.experts import Scratch
from tierstore.moe.source import JointSource, chunking_of, together, users_of


def forward_together(source: JointSource, calls: Sequence[tuple[Tensor, Tensor, ExpertPass]]) -> list[Tensor]:
    """The results of ``calls`` (tokens, weights, pass), one per micro-batch, for the experts of one layer."""
    scratch = Scratch()
    walks = [
        ForwardWalk(x_TD, weight_TK, call, saving=False, scratch=scratch) for x_TD, weight_TK, call in calls
    ]
    users = users_of([walk.asked for walk in walks])
    layer = _layer([call for _, _, call in calls])
    travel = Travel(walks, chunking_of(source), f"forward {layer}")
    for leases in together(source.forward(layer, list(users))):
        if len(walks) == 1:
            travel.compute(leases)
            continue
        for lease in leases:  # expert by expert: its weights stay in the processor's caches for all users
            for micro in users[lease.expert]:
                travel.compute([lease], micro)
    travel.end()
    return [walks.pop(0).finish() for _ in calls]


class PendingExperts:
    """A call for experts in a recomputed block; its gradients come from ``backward_together``."""

    def __init__(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> None:
        self.inputs: tuple[Tensor, Tensor, ExpertPass] | None = (x_TD.detach(), weight_TK.detach(), call)
        #: The gradients of the tokens and of their weights, once they are known.
        self._gradients: tuple[Tensor, Tensor] | None = None
        anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=True)
        apply: Any = _Pending.apply
        self._output: Tensor | None = apply(x_TD, weight_TK, anchor, self)
        # Taken now: the output may be changed in place.
        self._edge: GradientEdge | None = get_gradient_edge(self._output)

    def output(self) -> Tensor:
        """A stand-in for the experts' results, filled with NaN. Can be called once."""
        output, self._output = self._output, None
        assert output is not None
        return output

    def output_gradient(self, made: Tensor, gradient: Tensor | None) -> Tensor:
        """The gradient of the output, from ``gradient`` of ``made``, which was computed from it. Keeps the graph. Can
        be called once.
        """
        edge, self._edge = self._edge, None  # otherwise the graph and this object would keep each other alive
        assert edge is not None
        gradients = None if gradient is None else [gradient]
        (found,) = torch.autograd.grad([made], [edge], gradients, retain_graph=True)
        return found

    def finish(self, gradients: tuple[Tensor, Tensor]) -> None:
        """Set the gradients of the tokens and of their weights."""
        self.inputs, self._gradients = None, gradients

    def gradients(self) -> tuple[Tensor, Tensor]:
        """The gradients given to ``finish``. Can be called once."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise RuntimeError("a backward pass through experts whose gradients are not known yet")
        return gradients


class _Pending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, pending: PendingExperts) -> Tensor:
        ctx.pending = pending
        return torch.full_like(x_TD, torch.nan, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return (*ctx.pending.gradients(), None, None)


def backward_together(source: JointSource, pending: Sequence[tuple[PendingExperts, Tensor]]) -> None:
    """Compute the gradients of ``pending``, given those of their outputs; leaves the experts' gradients with ``source``."""
    scratch = Scratch()
    walks: list[BackwardWalk] = []
    calls: list[ExpertPass] = []
    for each, grad_TD in pending:
        assert each.inputs is not None
        x_TD, weight_TK, call = each.inputs
        calls.append(call)
        walks.append(backward_walk(x_TD, weight_TK, grad_TD, call, Saved(), scratch))
    layer = _layer(calls)
    travel = Travel(walks, chunking_of(source), f"backward {layer}")
    for micro, lease in source.backward_each(layer, [walk.asked for walk in walks]):
        travel.compute([lease], micro)
    travel.end()
    for each, _ in pending:
        each.finish(walks.pop(0).finish())


def _layer(calls: Sequence[ExpertPass]) -> int:
    layers = {call.layer for call in calls}
    if len(layers) != 1:
        raise RuntimeError(f"micro-batches meet at different layers: {sorted(layers)}")
    return layers.pop()
