"""The MoE layer: route, lay side by side, compute each expert whole, bring back.

Shapes: T tokens, K experts a token, N assignments, D width of the model, P what feeds the activation (2F
or F).

Experts are not parameters of this module. They come from an :class:`ExpertSource`, one by one in ascending
order, in the forward pass and again in the backward pass. Each expert is computed whole, one product over
all of its tokens, so that no shape depends on how many fit in memory at once. Experts without a token are
never asked for.

On several ranks (``mesh``), tokens travel to the ranks that own their experts and results travel back; every
forward and backward pass is then a collective of all ranks, with or without tokens. What a rank differentiates
is its share of the global batch's objective, so that gradients are sums over ranks. Replicas of an expert get
its gradient from their own tokens; summing it over them is the source's part (see ``ExpertSource``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tierstore.moe.config import Activation, ExpertShape, RouterConfig, SaveActivations
from tierstore.moe.dispatch import Dispatch, combine, combine_weighted, dispatch
from tierstore.moe.exchange import Charge, LocalRows, Rows, rows_of
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
from tierstore.parallel import Mesh
from tierstore.stats import Cause, StallLedger, Tier


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
    """A mixture of experts whose experts live in ``source``. ``layer`` is their layer number there.

    ``mesh``: the ranks whose tokens make up the global batch, and how experts are spread over them; what is waited
    for on their account is charged to ``ledger``.
    """

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
        mesh: Mesh | None = None,
        ledger: StallLedger | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.mesh = mesh
        self._charge: Charge | None = None
        if ledger is not None:
            self._charge = partial(ledger.stall, layer=layer, tier=Tier.RANKS, cause=Cause.ALL_TO_ALL)
        self.layer = layer
        self.save_activations = SaveActivations(save_activations)
        data = None if mesh is None else mesh.world
        self.router = Router(router, shape.d_model, layer=layer, seed=seed, data=data, charge=self._charge)
        self.shared: FeedForward | None = None
        if shared_d_ff:
            shared = ExpertShape(shape.d_model, shared_d_ff, shape.activation)
            self.shared = FeedForward(shared, seed=seed, name=f"shared.{layer}")
        self._source = source

    def forward(self, x_TD: Tensor, key: NoiseKey) -> tuple[Tensor, Routing]:
        """``(T, D)`` to ``(T, D)`` in the type of ``x_TD``, and the routing (for its losses and loads)."""
        routing = self.router(x_TD, key)
        plan = dispatch(routing.expert_TK, routing.own_load_E)
        rows = self._rows(plan, routing)
        # Always part of the graph: the experts' gradients are due whatever needs one before it.
        anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=torch.is_grad_enabled())
        apply: Any = _Experts.apply
        y_TD: Tensor = apply(x_TD, routing.weight_TK, anchor, plan, rows, self)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD, routing

    def _rows(self, plan: Dispatch, routing: Routing) -> Rows:
        if self.mesh is None:
            return LocalRows(plan, plan.experts)
        training = torch.is_grad_enabled()
        return rows_of(plan, routing.load_RE, self.mesh, training=training, charge=self._charge)

    @property
    def source(self) -> ExpertSource:
        """Where the experts come from."""
        return self._source


class _Experts(torch.autograd.Function):
    """``y[t] = sum_k weight[t, k] * expert[t, k](x[t])``; leaves the experts' gradients with the source."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, plan: Dispatch, rows: Rows, layer: MoELayer
    ) -> Tensor:
        shape = layer.shape
        arriving = rows.to_experts(x_TD.index_select(0, plan.token_N))
        y_ND = x_TD.new_empty(plan.rows + 1, shape.d_model)
        y_ND[plan.rows].zero_()
        y_MD = rows.results(y_ND)
        saving = anchor.requires_grad and layer.save_activations == SaveActivations.SAVE
        inner_MP = x_TD.new_empty(rows.rows if saving else 0, shape.inner_rows)
        work = Workspace(shape, rows.most_rows, x_TD, inner=0 if saving else 1)
        # The source is asked before the rows are waited for: experts and tokens travel at the same time.
        for lease in layer.source.forward(layer.layer, rows.asked):
            span, x_MD = rows.span(lease.expert), arriving.rows()
            if span.start < span.stop:
                inner = inner_MP[span] if saving else work.inner(0, span.stop - span.start)
                forward_expert(shape, lease.weights, x_MD[span], inner, y_MD[span], work)
        x_MD = arriving.rows()
        rows.to_tokens(y_MD, y_ND).rows()
        # Rows that came from other ranks are kept; those of this one are picked from its input again.
        keeps = saving and not isinstance(rows, LocalRows)
        ctx.save_for_backward(x_TD, weight_TK, inner_MP, x_MD if keeps else None)
        ctx.plan, ctx.rows, ctx.layer, ctx.saved_inner = plan, rows, layer, saving
        return combine_weighted(y_ND, plan.place_TK, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor, None, None, None, None]:
        x_TD, weight_TK, inner_MP, kept_MD = ctx.saved_tensors
        plan: Dispatch = ctx.plan
        rows: Rows = ctx.rows
        layer: MoELayer = ctx.layer
        shape = layer.shape
        grads = rows.to_experts(grad_TD.index_select(0, plan.token_N))
        weights = rows.to_experts(weight_TK.reshape(-1).index_select(0, plan.order_N))
        inputs = None if kept_MD is not None else rows.to_experts(x_TD.index_select(0, plan.token_N))
        grad_x_ND = x_TD.new_empty(plan.rows + 1, shape.d_model)
        grad_x_ND[plan.rows].zero_()
        grad_weight_N = weight_TK.new_empty(plan.rows)
        grad_x_MD, grad_weight_M = rows.results(grad_x_ND), rows.results(grad_weight_N)
        work = Workspace(shape, rows.most_rows, x_TD, inner=1 if ctx.saved_inner else 2, hidden=2)
        for lease in layer.source.backward(layer.layer, rows.asked):
            span = rows.span(lease.expert)
            x_MD = kept_MD if inputs is None else inputs.rows()
            grad_MD, weight_M = grads.rows(), weights.rows()
            assert lease.gradients is not None
            if span.start == span.stop:  # only another replica's tokens reached it
                lease.gradients.zero_()
                continue
            if ctx.saved_inner:
                inner = inner_MP[span]
            else:
                inner = work.inner(1, span.stop - span.start)
                recompute_inner(shape, lease.weights, x_MD[span], inner)
            grad_weight_M[span] = backward_expert(
                shape,
                lease.weights,
                lease.gradients,
                x_MD[span],
                inner,
                weight_M[span],
                grad_MD[span],
                grad_x_MD[span],
                work,
            )
        for arrival in (grads, weights, inputs):
            if arrival is not None:
                arrival.rows()
        back = rows.to_tokens(grad_x_MD, grad_x_ND), rows.to_tokens(grad_weight_M, grad_weight_N)
        for arrival in back:
            arrival.rows()
        grad_weight_TK = torch.zeros_like(weight_TK).view(-1)
        grad_weight_TK[plan.order_N] = grad_weight_N
        grad_x_TD = combine(grad_x_ND, plan.place_TK)
        return grad_x_TD, grad_weight_TK.view_as(weight_TK), None, None, None, None
