"""The MoE layer: route, lay side by side, compute each expert whole, bring back.

Shapes: T tokens, K experts a token, N assignments, D width of the model, P what feeds the activation (2F
or F).

Experts are not parameters of this module. They come from an :class:`ExpertSource`, one by one in ascending
order, in the forward pass and again in the backward pass. Each expert is computed whole, one product over
all of its tokens, so that no shape depends on how many fit in memory at once. Experts without a token are
never asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tierstore.moe.config import Activation, ExpertShape, RouterConfig, SaveActivations
from tierstore.moe.dispatch import Dispatch, combine, combine_weighted, dispatch
from tierstore.moe.experts import (
    Workspace,
    backward_expert,
    feed_forward,
    forward_expert,
    recompute_inner,
    weight_std,
)
from tierstore.moe.router import NoiseKey, Router, Routing
from tierstore.moe.seeds import keyed_generator
from tierstore.moe.source import ExpertSource

__all__ = ["FeedForward", "MoELayer", "SaveActivations"]


class FeedForward(nn.Module):
    """A feed-forward network of ordinary parameters: a dense block's, or a shared expert."""

    def __init__(self, shape: ExpertShape, *, seed: int = 0, name: str = "ffn") -> None:
        super().__init__()
        self.activation = Activation(shape.activation)
        self.inner = nn.Parameter(torch.empty(shape.inner_rows, shape.d_model))
        self.down = nn.Parameter(torch.empty(shape.d_model, shape.d_ff))
        std = weight_std(shape.d_model)
        nn.init.normal_(self.inner, std=std, generator=keyed_generator(seed, name, "inner"))
        nn.init.normal_(self.down, std=std, generator=keyed_generator(seed, name, "down"))

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(x, self.inner, self.down, self.activation)


class MoELayer(nn.Module):
    """A mixture of experts whose experts live in ``source``. ``layer`` is their layer number there."""

    def __init__(
        self,
        router: RouterConfig,
        shape: ExpertShape,
        source: ExpertSource,
        *,
        layer: int = 0,
        seed: int = 0,
        shared_d_ff: int = 0,
        save_activations: SaveActivations = SaveActivations.SAVE,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layer = layer
        self.save_activations = SaveActivations(save_activations)
        self.router = Router(router, shape.d_model, layer=layer, seed=seed)
        self.shared: FeedForward | None = None
        if shared_d_ff:
            shared = ExpertShape(shape.d_model, shared_d_ff, shape.activation)
            self.shared = FeedForward(shared, seed=seed, name=f"shared.{layer}")
        self._source = source

    def forward(self, x_TD: Tensor, key: NoiseKey) -> tuple[Tensor, Routing]:
        """``(T, D)`` to ``(T, D)`` in the type of ``x_TD``, and the routing (for its losses and loads)."""
        routing = self.router(x_TD, key)
        plan = dispatch(routing.expert_TK, routing.load_E)
        # Always part of the graph: the experts' gradients are due whatever needs one before it.
        anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=torch.is_grad_enabled())
        apply: Any = _Experts.apply
        y_TD: Tensor = apply(x_TD, routing.weight_TK, anchor, plan, self)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD, routing

    @property
    def source(self) -> ExpertSource:
        """Where the experts come from."""
        return self._source


class _Experts(torch.autograd.Function):
    """``y[t] = sum_k weight[t, k] * expert[t, k](x[t])``; leaves the experts' gradients with the source."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, plan: Dispatch, layer: MoELayer
    ) -> Tensor:
        shape = layer.shape
        x_ND = x_TD.index_select(0, plan.token_N)
        y_ND = x_TD.new_empty(plan.rows + 1, shape.d_model)
        y_ND[plan.rows].zero_()
        saving = anchor.requires_grad and layer.save_activations == SaveActivations.SAVE
        inner_NP = x_TD.new_empty(plan.rows if saving else 0, shape.inner_rows)
        work = Workspace(shape, plan.most_rows, x_TD, inner=0 if saving else 1)
        asked = plan.experts
        for lease in layer.source.forward(layer.layer, asked):
            span = plan.span(lease.expert)
            inner_MP = inner_NP[span] if saving else work.inner(0, span.stop - span.start)
            forward_expert(shape, lease.weights, x_ND[span], inner_MP, y_ND[span], work)
        ctx.save_for_backward(x_TD, weight_TK, inner_NP)
        ctx.plan, ctx.layer, ctx.asked, ctx.saved_inner = plan, layer, asked, saving
        return combine_weighted(y_ND, plan.place_TK, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x_TD, weight_TK, inner_NP = ctx.saved_tensors
        plan: Dispatch = ctx.plan
        layer: MoELayer = ctx.layer
        shape = layer.shape
        x_ND = x_TD.index_select(0, plan.token_N)
        grad_ND = grad_TD.index_select(0, plan.token_N)
        weight_N = weight_TK.reshape(-1).index_select(0, plan.order_N)
        grad_x_ND = x_TD.new_empty(plan.rows + 1, shape.d_model)
        grad_x_ND[plan.rows].zero_()
        grad_weight_N = torch.zeros_like(weight_TK).view(-1)
        work = Workspace(shape, plan.most_rows, x_TD, inner=1 if ctx.saved_inner else 2, hidden=2)
        for lease in layer.source.backward(layer.layer, ctx.asked):
            span = plan.span(lease.expert)
            assert lease.gradients is not None
            if ctx.saved_inner:
                inner_MP = inner_NP[span]
            else:
                inner_MP = work.inner(1, span.stop - span.start)
                recompute_inner(shape, lease.weights, x_ND[span], inner_MP)
            grad_weight_N[plan.order_N[span]] = backward_expert(
                shape,
                lease.weights,
                lease.gradients,
                x_ND[span],
                inner_MP,
                weight_N[span],
                grad_ND[span],
                grad_x_ND[span],
                work,
            )
        grad_x_TD = combine(grad_x_ND, plan.place_TK)
        return grad_x_TD, grad_weight_N.view_as(weight_TK), None, None, None
