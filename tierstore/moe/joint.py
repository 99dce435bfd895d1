"""The experts of one layer for several micro-batches: one lease of each serves all of them.

Each micro-batch's rows are computed by themselves, in products of the shapes that they would have alone, in the order of
micro-batches: the bits are those of one micro-batch after another.

::

    results = forward_together(source, [(x, weights, call) for each micro-batch])
    ...                                       # the rest of the block, and later its recomputation:
    pending = PendingExperts(x, weights, call)
    y = pending.output()                      # without content: what stands behind it is known, and nothing reads it
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

from tierstore.moe.computing import ExpertPass, ForwardWalk, Saved, backward_walk
from tierstore.moe.experts import Scratch
from tierstore.moe.source import JointSource, users_of


def forward_together(source: JointSource, calls: Sequence[tuple[Tensor, Tensor, ExpertPass]]) -> list[Tensor]:
    """The results of ``calls`` (tokens, their weights, the pass), one a micro-batch, for the experts of one layer."""
    scratch = Scratch()
    walks = [
        ForwardWalk(x_TD, weight_TK, call, saving=False, scratch=scratch) for x_TD, weight_TK, call in calls
    ]
    users = users_of([walk.asked for walk in walks])
    for lease in source.forward(_layer([call for _, _, call in calls]), list(users)):
        for micro in users[lease.expert]:
            walks[micro].compute(lease)
    return [walk.finish() for walk in walks]


class PendingExperts:
    """A call for experts in a block that is computed again, whose gradients come from ``backward_together``."""

    def __init__(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> None:
        self.x_TD = x_TD.detach()
        self.weight_TK = weight_TK.detach()
        self.call = call
        #: Of the tokens and of their weights, once they are known.
        self.gradients: tuple[Tensor, Tensor] | None = None
        anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=True)
        apply: Any = _Pending.apply
        self._output: Tensor | None = apply(x_TD, weight_TK, anchor, self)
        #: Where the gradient of the output is found, whatever is done to the output in place.
        self.edge: GradientEdge = get_gradient_edge(self._output)

    def output(self) -> Tensor:
        """What the experts' results would be, without their content: it is not a number. Once."""
        output, self._output = self._output, None
        assert output is not None
        return output


class _Pending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, pending: PendingExperts) -> Tensor:
        ctx.pending = pending
        return torch.full_like(x_TD, torch.nan, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradients = ctx.pending.gradients
        if gradients is None:
            raise RuntimeError("a backward pass through experts whose gradients are not known yet")
        ctx.pending.gradients = None
        return (*gradients, None, None)


def backward_together(source: JointSource, pending: Sequence[tuple[PendingExperts, Tensor]]) -> None:
    """Finds the gradients of ``pending``, whose outputs have those beside them, and leaves the experts' with ``source``."""
    scratch = Scratch()
    walks = [
        backward_walk(each.x_TD, each.weight_TK, grad_TD, each.call, Saved(), scratch)
        for each, grad_TD in pending
    ]
    layer = _layer([each.call for each, _ in pending])
    for micro, lease in source.backward_each(layer, [walk.asked for walk in walks]):
        walks[micro].compute(lease)
    for (each, _), walk in zip(pending, walks, strict=True):
        each.gradients = walk.finish()


def _layer(calls: Sequence[ExpertPass]) -> int:
    layers = {call.layer for call in calls}
    if len(layers) != 1:
        raise RuntimeError(f"micro-batches meet at different layers: {sorted(layers)}")
    return layers.pop()
