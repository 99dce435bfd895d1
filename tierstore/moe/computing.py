"""A layer's experts as one step of autograd: dispatch, one expert after another, and back.

Shapes: T tokens, K experts a token, N assignments, M rows of the experts computed here, D width of the model, P what
feeds the activation (2F or F).

Experts come from an :class:`ExpertSource`, one by one, in the forward pass and again in the backward pass. Each is
computed whole, one product over all of its tokens, so that no shape depends on how many fit in memory at once; rows
wait in buffers that are sorted by expert, and are added up when all are there, so that no sum depends on the order in
which experts came.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.moe.dispatch import (
    Dispatch,
    combine,
    combine_outputs,
    combine_weighted,
    gradients_of_outputs,
    gradients_of_weights,
)
from tierstore.moe.exchange import LocalRows, Rows
from tierstore.moe.experts import (
    Workspace,
    backward_expert,
    backward_weighted_expert,
    forward_expert,
    recompute_inner,
)
from tierstore.moe.source import ExpertSource


class Weighting(Enum):
    """Where the router's weights meet the experts: one sum, rounded in different places."""

    #: The backward pass weighs inside of the expert, in the compute type; no expert's output is kept.
    BY_EXPERT = "by_expert"
    #: Outputs are weighed as they are, in the wider of both types, and kept; gradients are added up in ascending order
    #: of experts. These are the bits of transformers' ``grouped_mm``.
    BY_OUTPUT = "by_output"


@dataclass(frozen=True, slots=True)
class ExpertPass:
    """A pass over the experts of ``layer``, beside its tensors."""

    layer: int
    shape: ExpertShape
    source: ExpertSource
    plan: Dispatch
    rows: Rows
    weighting: Weighting
    save: SaveActivations


def compute_experts(x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
    """``y[t] = sum_k weight[t, k] * expert[t, k](x[t])``, differentiable.

    A backward pass leaves the experts' gradients with the source, whether or not anything before them needs one.
    """
    anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=torch.is_grad_enabled())
    apply: Any = _Experts.apply
    y_TD: Tensor = apply(x_TD, weight_TK, anchor, call)
    return y_TD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, call: ExpertPass) -> Tensor:
        plan, rows = call.plan, call.rows
        arriving = rows.to_experts(x_TD.index_select(0, plan.token_N))
        saving = anchor.requires_grad and call.save is SaveActivations.SAVE
        inner_MP = x_TD.new_empty(rows.rows if saving else 0, call.shape.inner_rows)
        work = Workspace(call.shape, rows.most_rows, x_TD, inner=0 if saving else 1)
        y_ND = _new_rows(x_TD, plan)
        y_MD = rows.results(y_ND)
        # The source is asked before the rows are waited for: experts and tokens travel at the same time.
        for lease in call.source.forward(call.layer, rows.asked):
            span, x_MD = rows.span(lease.expert), arriving.rows()
            if span.start < span.stop:
                inner = inner_MP[span] if saving else work.inner(0, span.stop - span.start)
                forward_expert(call.shape, lease.weights, x_MD[span], inner, y_MD[span], work, lease.pair)
        x_MD = arriving.rows()
        rows.to_tokens(y_MD, y_ND).rows()
        # Rows that came from other ranks are kept; those of this one are picked from its input again.
        kept_MD = x_MD if saving and not isinstance(rows, LocalRows) else None
        by_output = call.weighting is Weighting.BY_OUTPUT
        kept_y_ND = y_ND if saving and by_output else None
        ctx.save_for_backward(x_TD, weight_TK, inner_MP, kept_MD, kept_y_ND)
        ctx.call, ctx.saved_inner = call, saving
        if by_output:
            return combine_outputs(y_ND, plan.place_TK, weight_TK)
        return combine_weighted(y_ND, plan.place_TK, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        call: ExpertPass = ctx.call
        if call.weighting is Weighting.BY_OUTPUT:
            grad_x_TD, grad_weight_TK = _backward_by_output(ctx, grad_TD)
        else:
            grad_x_TD, grad_weight_TK = _backward_by_expert(ctx, grad_TD)
        return grad_x_TD, grad_weight_TK, None, None


def _backward_by_expert(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    x_TD, weight_TK, inner_MP, kept_MD, _ = ctx.saved_tensors
    call: ExpertPass = ctx.call
    plan, rows, shape = call.plan, call.rows, call.shape
    grads = rows.to_experts(grad_TD.index_select(0, plan.token_N))
    weights = rows.to_experts(weight_TK.reshape(-1).index_select(0, plan.order_N))
    inputs = None if kept_MD is not None else rows.to_experts(x_TD.index_select(0, plan.token_N))
    grad_x_ND = _new_rows(x_TD, plan)
    grad_weight_N = weight_TK.new_empty(plan.rows)
    grad_x_MD, grad_weight_M = rows.results(grad_x_ND), rows.results(grad_weight_N)
    work = Workspace(shape, rows.most_rows, x_TD, inner=1 if ctx.saved_inner else 2, hidden=2)
    for lease in call.source.backward(call.layer, rows.asked):
        span = rows.span(lease.expert)
        x_MD = kept_MD if inputs is None else inputs.rows()
        grad_MD, weight_M = grads.rows(), weights.rows()
        if span.start == span.stop:  # only another replica's tokens reached it
            lease.zero_gradients()
            continue
        if ctx.saved_inner:
            inner = inner_MP[span]
        else:
            inner = work.inner(1, span.stop - span.start)
            recompute_inner(shape, lease.weights, x_MD[span], inner, lease.pair)
        grad_weight_M[span] = backward_weighted_expert(
            shape,
            lease.weights,
            lease.gradients,
            x_MD[span],
            inner,
            weight_M[span],
            grad_MD[span],
            grad_x_MD[span],
            work,
            lease.pair,
        )
    for arrival in (grads, weights, inputs):
        if arrival is not None:
            arrival.rows()
    back = rows.to_tokens(grad_x_MD, grad_x_ND), rows.to_tokens(grad_weight_M, grad_weight_N)
    for arrival in back:
        arrival.rows()
    return combine(grad_x_ND, plan.place_TK), _by_token(grad_weight_N, plan, weight_TK)


def _backward_by_output(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    x_TD, weight_TK, inner_MP, kept_MD, y_ND = ctx.saved_tensors
    call: ExpertPass = ctx.call
    plan, rows, shape = call.plan, call.rows, call.shape
    grads = rows.to_experts(gradients_of_outputs(grad_TD, plan, weight_TK))
    inputs = None if kept_MD is not None else rows.to_experts(x_TD.index_select(0, plan.token_N))
    grad_x_ND = _new_rows(x_TD, plan)
    grad_x_MD = rows.results(grad_x_ND)
    saved = y_ND is not None
    if not saved:
        y_ND = _new_rows(x_TD, plan)
    y_MD = None if saved else rows.results(y_ND)
    work = Workspace(shape, rows.most_rows, x_TD, inner=1 if saved else 2, hidden=2)
    for lease in call.source.backward(call.layer, rows.asked):
        span = rows.span(lease.expert)
        x_MD, grad_MD = kept_MD if inputs is None else inputs.rows(), grads.rows()
        if span.start == span.stop:  # only another replica's tokens reached it
            lease.zero_gradients()
            continue
        if y_MD is None:
            inner = inner_MP[span]
        else:
            inner = work.inner(1, span.stop - span.start)
            forward_expert(shape, lease.weights, x_MD[span], inner, y_MD[span], work, lease.pair)
        backward_expert(
            shape,
            lease.weights,
            lease.gradients,
            x_MD[span],
            inner,
            grad_MD[span],
            grad_x_MD[span],
            work,
            lease.pair,
        )
    for arrival in (grads, inputs):
        if arrival is not None:
            arrival.rows()
    if y_MD is not None:
        rows.to_tokens(y_MD, y_ND).rows()
    rows.to_tokens(grad_x_MD, grad_x_ND).rows()
    grad_weight_N = gradients_of_weights(grad_TD, plan, y_ND, weight_TK)
    ascending_TK = plan.place_TK.sort(dim=1).values
    return combine(grad_x_ND, ascending_TK), _by_token(grad_weight_N, plan, weight_TK)


def _new_rows(like: Tensor, plan: Dispatch) -> Tensor:
    """Room for N rows, and one of zeros, which is where the dropped are found."""
    rows_ND = like.new_empty(plan.rows + 1, like.shape[1])
    rows_ND[plan.rows].zero_()
    return rows_ND


def _by_token(rows_N: Tensor, plan: Dispatch, like_TK: Tensor) -> Tensor:
    out_TK = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    out_TK.view(-1)[plan.order_N] = rows_N
    return out_TK
