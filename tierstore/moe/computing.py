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
from typing import Any, NamedTuple, Protocol

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
from tierstore.moe.exchange import Arrival, LocalRows, Rows
from tierstore.moe.experts import (
    Scratch,
    Workspace,
    backward_expert,
    backward_weighted_expert,
    forward_expert,
    recompute_inner,
)
from tierstore.moe.indexed import IndexedRows
from tierstore.moe.source import ExpertLease, ExpertSource, SourceSlot


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
    Several micro-batches whose calls meet (``SourceSlot.meeting``) are computed together.
    """
    if isinstance(call.source, SourceSlot) and call.source.meeting is not None:
        return call.source.meeting.compute(x_TD, weight_TK, call)
    if not torch.is_grad_enabled():
        walk = ForwardWalk(x_TD, weight_TK, call, saving=False)
        for lease in call.source.forward(call.layer, walk.asked):
            walk.compute(lease)
        return walk.finish()
    anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=True)
    apply: Any = _Experts.apply
    y_TD: Tensor = apply(x_TD, weight_TK, anchor, call)
    return y_TD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, call: ExpertPass) -> Tensor:
        saving = call.save is SaveActivations.SAVE
        walk = ForwardWalk(x_TD, weight_TK, call, saving=saving)
        for lease in call.source.forward(call.layer, walk.asked):
            walk.compute(lease)
        y_TD = walk.finish()
        ctx.save_for_backward(x_TD, weight_TK, *walk.saved())
        ctx.call = call
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        call: ExpertPass = ctx.call
        x_TD, weight_TK, *saved = ctx.saved_tensors
        walk = backward_walk(x_TD, weight_TK, grad_TD, call, Saved(*saved))
        for lease in call.source.backward(call.layer, walk.asked):
            walk.compute(lease)
        grad_x_TD, grad_weight_TK = walk.finish()
        return grad_x_TD, grad_weight_TK, None, None


class Saved(NamedTuple):
    """What a forward pass keeps beside its inputs. ``inner_MP``: what feeds the activations; ``rows_MD``: rows that came
    from other ranks (None: those of this rank are picked from its input again); ``y_ND``: the experts' outputs.
    """

    inner_MP: Tensor | None = None
    rows_MD: Tensor | None = None
    y_ND: Tensor | None = None


class ForwardWalk:
    """A forward pass over the experts of one call: made, given each lease of ``asked``, finished.

    When it is made its rows set off for the ranks of their experts: experts and tokens travel at the same time.
    ``scratch``: shared with other walks, of which one computes at a time.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        call: ExpertPass,
        *,
        saving: bool,
        scratch: Scratch | None = None,
    ) -> None:
        plan, rows = call.plan, call.rows
        self.asked = rows.asked
        self._call, self._weight_TK, self._saving = call, weight_TK, saving
        self._arriving = rows.to_experts(x_TD.index_select(0, plan.token_N))
        self._inner_MP = x_TD.new_empty(rows.rows if saving else 0, call.shape.inner_rows)
        self._work = Workspace(call.shape, rows.most_rows, x_TD, inner=0 if saving else 1, scratch=scratch)
        self._y_ND = _new_rows(x_TD, plan)
        self._y_MD = rows.results(self._y_ND)

    def compute(self, lease: ExpertLease) -> None:
        """Computes the rows of the leased expert, if it has any."""
        call, work = self._call, self._work
        span, x_MD = call.rows.span(lease.expert), self._arriving.rows()
        if span.start < span.stop:
            inner = self._inner_MP[span] if self._saving else work.inner(0, span.stop - span.start)
            forward_expert(call.shape, lease.weights, x_MD[span], inner, self._y_MD[span], work, lease.pair)

    def finish(self) -> Tensor:
        """The results, when all experts have been computed."""
        plan = self._call.plan
        self._arriving.rows()
        self._call.rows.to_tokens(self._y_MD, self._y_ND).rows()
        if self._call.weighting is Weighting.BY_OUTPUT:
            return combine_outputs(self._y_ND, plan.place_TK, self._weight_TK)
        return combine_weighted(self._y_ND, plan.place_TK, self._weight_TK)

    def saved(self) -> Saved:
        """What the backward pass takes up, where ``saving``."""
        if not self._saving:
            return Saved()
        local = isinstance(self._call.rows, LocalRows | IndexedRows)
        by_output = self._call.weighting is Weighting.BY_OUTPUT
        return Saved(
            self._inner_MP, None if local else self._arriving.rows(), self._y_ND if by_output else None
        )


class BackwardWalk(Protocol):
    """A backward pass over the experts of one call: made, given each lease of ``asked``, finished."""

    asked: tuple[int, ...]

    def compute(self, lease: ExpertLease) -> None:
        """Computes the leased expert's gradients."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of the tokens and of their weights, when all experts have been computed."""
        ...


def backward_walk(
    x_TD: Tensor,
    weight_TK: Tensor,
    grad_TD: Tensor,
    call: ExpertPass,
    saved: Saved,
    scratch: Scratch | None = None,
) -> BackwardWalk:
    """The backward pass of ``call``, whose results have the gradient ``grad_TD``. ``scratch``: as for ``ForwardWalk``."""
    kind = _ByOutput if call.weighting is Weighting.BY_OUTPUT else _ByExpert
    return kind(x_TD, weight_TK, grad_TD, call, saved, scratch)


class _ByExpert:
    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        grad_TD: Tensor,
        call: ExpertPass,
        saved: Saved,
        scratch: Scratch | None,
    ) -> None:
        plan, rows, shape = call.plan, call.rows, call.shape
        self.asked = rows.asked
        self._call, self._saved, self._weight_TK = call, saved, weight_TK
        self._grads = rows.to_experts(grad_TD.index_select(0, plan.token_N))
        self._weights = rows.to_experts(weight_TK.reshape(-1).index_select(0, plan.order_N))
        self._inputs = _inputs(x_TD, call, saved)
        self._grad_x_ND = _new_rows(x_TD, plan)
        self._grad_weight_N = weight_TK.new_empty(plan.rows)
        self._grad_x_MD = rows.results(self._grad_x_ND)
        self._grad_weight_M = rows.results(self._grad_weight_N)
        inner = 1 if saved.inner_MP is not None else 2
        self._work = Workspace(shape, rows.most_rows, x_TD, inner=inner, hidden=2, scratch=scratch)

    def compute(self, lease: ExpertLease) -> None:
        shape, work = self._call.shape, self._work
        span = self._call.rows.span(lease.expert)
        x_MD, grad_MD, weight_M = self._inputs.rows(), self._grads.rows(), self._weights.rows()
        if span.start == span.stop:  # only another replica's tokens reached it
            lease.zero_gradients()
            return
        if self._saved.inner_MP is not None:
            inner = self._saved.inner_MP[span]
        else:
            inner = work.inner(1, span.stop - span.start)
            recompute_inner(shape, lease.flat, x_MD[span], inner, lease.pair)
        self._grad_weight_M[span] = backward_weighted_expert(
            shape,
            lease.flat,
            lease.gradients,
            x_MD[span],
            inner,
            weight_M[span],
            grad_MD[span],
            self._grad_x_MD[span],
            work,
            lease.pair,
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        rows, plan = self._call.rows, self._call.plan
        for arrival in (self._grads, self._weights, self._inputs):
            arrival.rows()
        back = (
            rows.to_tokens(self._grad_x_MD, self._grad_x_ND),
            rows.to_tokens(self._grad_weight_M, self._grad_weight_N),
        )
        for arrival in back:
            arrival.rows()
        grad_x_TD = combine(self._grad_x_ND, plan.place_TK)
        return grad_x_TD, _by_token(self._grad_weight_N, plan, self._weight_TK)


class _ByOutput:
    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        grad_TD: Tensor,
        call: ExpertPass,
        saved: Saved,
        scratch: Scratch | None,
    ) -> None:
        plan, rows, shape = call.plan, call.rows, call.shape
        self.asked = rows.asked
        self._call, self._saved, self._weight_TK, self._grad_TD = call, saved, weight_TK, grad_TD
        self._grads = rows.to_experts(gradients_of_outputs(grad_TD, plan, weight_TK))
        self._inputs = _inputs(x_TD, call, saved)
        self._grad_x_ND = _new_rows(x_TD, plan)
        self._grad_x_MD = rows.results(self._grad_x_ND)
        again = saved.y_ND is None
        self._y_ND = _new_rows(x_TD, plan) if saved.y_ND is None else saved.y_ND
        #: Where outputs are computed again; None where they were saved.
        self._y_MD = rows.results(self._y_ND) if again else None
        inner = 2 if again else 1
        self._work = Workspace(shape, rows.most_rows, x_TD, inner=inner, hidden=2, scratch=scratch)

    def compute(self, lease: ExpertLease) -> None:
        shape, work = self._call.shape, self._work
        span = self._call.rows.span(lease.expert)
        x_MD, grad_MD = self._inputs.rows(), self._grads.rows()
        if span.start == span.stop:  # only another replica's tokens reached it
            lease.zero_gradients()
            return
        if self._y_MD is None:
            assert self._saved.inner_MP is not None
            inner = self._saved.inner_MP[span]
        else:
            inner = work.inner(1, span.stop - span.start)
            forward_expert(shape, lease.weights, x_MD[span], inner, self._y_MD[span], work, lease.pair)
        backward_expert(
            shape,
            lease.flat,
            lease.gradients,
            x_MD[span],
            inner,
            grad_MD[span],
            self._grad_x_MD[span],
            work,
            lease.pair,
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        rows, plan = self._call.rows, self._call.plan
        for arrival in (self._grads, self._inputs):
            arrival.rows()
        if self._y_MD is not None:
            rows.to_tokens(self._y_MD, self._y_ND).rows()
        rows.to_tokens(self._grad_x_MD, self._grad_x_ND).rows()
        grad_weight_N = gradients_of_weights(self._grad_TD, plan, self._y_ND, self._weight_TK)
        ascending_TK = plan.place_TK.sort(dim=1).values
        return combine(self._grad_x_ND, ascending_TK), _by_token(grad_weight_N, plan, self._weight_TK)


def _inputs(x_TD: Tensor, call: ExpertPass, saved: Saved) -> Arrival:
    """The experts' rows of the forward pass."""
    if saved.rows_MD is not None:
        rows_MD = saved.rows_MD
        return Arrival(None, lambda: rows_MD)
    return call.rows.to_experts(x_TD.index_select(0, call.plan.token_N))


def _new_rows(like: Tensor, plan: Dispatch) -> Tensor:
    """Room for N rows, and one of zeros, which is where the dropped are found."""
    rows_ND = like.new_empty(plan.rows + 1, like.shape[1])
    rows_ND[plan.rows].zero_()
    return rows_ND


def _by_token(rows_N: Tensor, plan: Dispatch, like_TK: Tensor) -> Tensor:
    out_TK = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    out_TK.view(-1)[plan.order_N] = rows_N
    return out_TK
