"""A layer's experts as one autograd function: dispatch, one expert after another, combine.

Shapes: T tokens, K experts a token, N assignments, M rows of the experts computed on this rank, D width of the model, P
width of the activation's input (2F or F).

Experts come from an :class:`ExpertSource`, one by one, in the forward pass and again in the backward pass. Each expert is
computed in one matrix product over all of its tokens (or over each part of them, as ``tierstore.moe.chunks`` says), so no
shape depends on how many experts fit in memory at once. Rows are kept in buffers sorted by expert and summed once all are
complete, so no sum depends on the order in which experts came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tierstore.moe.chunks import ExpertWalk, PlacedLease, RowsAtExperts, Travel
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.moe.dispatch import (
    Dispatch,
    combine,
    combine_outputs,
    combine_weighted,
    gradients_of_outputs,
    gradients_of_weights,
)
from tierstore.moe.exchange import Rows
from tierstore.moe.experts import (
    ExpertRows,
    Scratch,
    Workspace,
    backward_expert,
    forward_expert,
    forward_experts,
    recompute_inner,
    rows_together,
)
from tierstore.moe.products import compiles_products
from tierstore.moe.source import ExpertLease, ExpertSource, ExpertSourceRef, chunking_of, together


class Weighting(Enum):
    """Where the router's weights are applied. The results differ only in rounding."""

    #: The backward pass applies weights within the expert, in the compute type; experts' outputs are not kept.
    BY_EXPERT = "by_expert"
    #: Weights are applied to outputs, in the wider of both types, and outputs are kept; gradients are summed in ascending
    #: order of experts. Gives the bits of transformers' ``grouped_mm``.
    BY_OUTPUT = "by_output"


@dataclass(frozen=True, slots=True)
class ExpertPass:
    """The arguments of a pass over the experts of ``layer``, except its tensors."""

    layer: int
    shape: ExpertShape
    source: ExpertSource
    plan: Dispatch
    rows: Rows
    weighting: Weighting
    save: SaveActivations

    def pads(self, like: Tensor) -> bool:
        """Whether experts get rows of zeros (``tile_rows``): not where the bits are to be those of transformers."""
        return self.weighting is Weighting.BY_EXPERT and compiles_products(like)


def compute_experts(x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
    """``y[t] = sum_k weight[t, k] * expert[t, k](x[t])``, differentiable.

    A backward pass leaves the experts' gradients with the source, even if no input needs a gradient. Micro-batches whose
    calls meet (``ExpertSourceRef.barrier``) are computed together.
    """
    if isinstance(call.source, ExpertSourceRef) and call.source.barrier is not None:
        # Other passes' greenlets run meanwhile: control returns to a forward pass when all passes are here.
        return call.source.barrier.compute(x_TD, weight_TK, call)
    if not torch.is_grad_enabled():
        return _walk_forward(x_TD, weight_TK, call, saving=False)[0]
    anchor = torch.empty(0, dtype=x_TD.dtype, device=x_TD.device, requires_grad=True)
    apply: Any = _Experts.apply
    y_TD: Tensor = apply(x_TD, weight_TK, anchor, call)
    return y_TD


def _walk_forward(
    x_TD: Tensor, weight_TK: Tensor, call: ExpertPass, *, saving: bool
) -> tuple[Tensor, ForwardWalk]:
    walk = ForwardWalk(x_TD, weight_TK, call, saving=saving)
    travel = Travel([walk], chunking_of(call.source), f"forward {call.layer}")
    for leases in together(call.source.forward(call.layer, walk.asked)):
        travel.compute(leases)
    travel.end()
    return walk.finish(), walk


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, anchor: Tensor, call: ExpertPass) -> Tensor:
        saving = call.save is SaveActivations.SAVE
        y_TD, walk = _walk_forward(x_TD, weight_TK, call, saving=saving)
        ctx.save_for_backward(x_TD, weight_TK, *walk.saved())
        ctx.call = call
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        call: ExpertPass = ctx.call
        x_TD, weight_TK, *saved = ctx.saved_tensors
        walk = backward_walk(x_TD, weight_TK, grad_TD, call, Saved(*saved))
        travel = Travel([walk], chunking_of(call.source), f"backward {call.layer}")
        for lease in call.source.backward(call.layer, walk.asked):
            travel.compute([lease])
        travel.end()
        grad_x_TD, grad_weight_TK = walk.finish()
        return grad_x_TD, grad_weight_TK, None, None


class Saved(NamedTuple):
    """Tensors that a forward pass keeps beside its inputs. ``inner_MP``: the activations' inputs. ``rows_MD``: the experts'
    rows that were sent by other ranks (None: dispatch the input again). ``y_ND``: the experts' outputs.
    """

    inner_MP: Tensor | None = None
    rows_MD: Tensor | None = None
    y_ND: Tensor | None = None


class ForwardWalk(ExpertWalk):
    """A forward pass over the experts of one call.

    Rows are sent to the ranks of their experts before the first lease, so that experts and tokens move at the same time.
    ``scratch``: shared with other walks; only one may compute at a time.
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
        super().__init__(rows, chunking_of(call.source).degrees.forward)
        self._call, self._weight_TK, self._saving = call, weight_TK, saving
        self._arriving = RowsAtExperts(call.rows, self.chunks, x_TD.index_select(0, plan.token_N))
        self._inner_MP = x_TD.new_empty(rows.rows if saving else 0, call.shape.inner_rows)
        #: The most rows of several experts to compute together.
        self._together = 0 if saving else rows_together(call.shape, x_TD.dtype)
        most = max(rows.most_rows, min(rows.rows, self._together))
        inner = 0 if saving else 1
        self._work = Workspace(call.shape, most, x_TD, inner=inner, scratch=scratch, pads=call.pads(x_TD))
        self._y_ND = _new_rows(x_TD, plan)
        self._y_MD = rows.at_experts(self._y_ND)
        self.sent = [self._arriving]
        self.returned = [(self._y_MD, self._y_ND)]

    def _compute(self, placed: Sequence[PlacedLease]) -> None:
        shape, work, y_MD = self._call.shape, self._work, self._y_MD
        if self._saving:
            for lease, number, span, *_ in placed:
                x_MD = self._arriving.of(number, span)
                forward_expert(shape, lease.weights, x_MD, self._inner_MP[span], y_MD[span], work, lease.pair)
            return
        experts: list[ExpertRows] = []
        count = 0
        for lease, number, span, *_ in placed:
            rows = span.stop - span.start
            if experts and count + rows > self._together:
                forward_experts(shape, experts, self._arriving.rows, y_MD, work)
                experts, count = [], 0
            self._arriving.wait_for(number)
            experts.append(ExpertRows(lease.weights, span, lease.pair))
            count += rows
        if experts:
            forward_experts(shape, experts, self._arriving.rows, y_MD, work)

    def finish(self) -> Tensor:
        """Combine and return the results, once all experts have been computed."""
        plan = self._call.plan
        self.wait()
        if self._call.weighting is Weighting.BY_OUTPUT:
            return combine_outputs(self._y_ND, plan.place_TK, self._weight_TK)
        return combine_weighted(self._y_ND, plan.place_TK, self._weight_TK)

    def saved(self) -> Saved:
        """The tensors to keep for the backward pass; none unless ``saving``."""
        if not self._saving:
            return Saved()
        by_output = self._call.weighting is Weighting.BY_OUTPUT
        return Saved(
            self._inner_MP,
            self._arriving.wait() if self._call.rows.travel else None,
            self._y_ND if by_output else None,
        )


class BackwardWalk(ExpertWalk):
    """A backward pass over the experts of one call. ``grads_ND``: the gradients of the experts' outputs, or, if weights
    are applied within the experts, of the weighted outputs. ``inner``: the number of inner scratches.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        call: ExpertPass,
        saved: Saved,
        scratch: Scratch | None,
        grads_ND: Tensor,
        inner: int,
    ) -> None:
        rows = call.rows
        super().__init__(rows, chunking_of(call.source).degrees.backward)
        self._scratch = scratch or Scratch()
        self._call, self._saved, self._weight_TK = call, saved, weight_TK
        self._grads = RowsAtExperts(rows, self.chunks, grads_ND)
        self.sent = [self._grads]
        #: The experts' rows, which are sent again unless the forward pass kept them.
        self._inputs: RowsAtExperts | None = None
        if saved.rows_MD is None:
            self._inputs = RowsAtExperts(rows, self.chunks, x_TD.index_select(0, call.plan.token_N))
            self.sent.append(self._inputs)
        self._grad_x_ND = _new_rows(x_TD, call.plan)
        self._grad_x_MD = rows.at_experts(self._grad_x_ND)
        self.returned = [(self._grad_x_MD, self._grad_x_ND)]
        self._work = Workspace(
            call.shape,
            rows.most_rows,
            x_TD,
            inner=inner,
            hidden=2,
            scratch=self._scratch,
            pads=call.pads(x_TD),
        )

    def _compute(self, placed: Sequence[PlacedLease]) -> None:
        for lease, number, span, part, last in placed:
            if self._inputs is not None:
                x_MD = self._inputs.of(number, span)
            else:
                assert self._saved.rows_MD is not None
                x_MD = self._saved.rows_MD[span]
            self._compute_one(lease, number, span, x_MD)
            if part or not last:
                for index, gradients in enumerate(lease.all_gradients):
                    self._add_part(index, gradients, first=not part, last=last)

    def _add_part(self, index: int, gradients: Tensor, *, first: bool, last: bool) -> None:
        """Add a part's ``gradients`` to the sum of those before it, which ends in ``gradients`` with the last part."""
        wide = torch.promote_types(gradients.dtype, torch.float32)
        total = self._scratch.take(
            f"gradients {index}", gradients.numel(), gradients.new_empty(0, dtype=wide)
        )
        if first:
            total.copy_(gradients)
        else:
            torch.add(total, gradients, out=gradients if last else total)

    @abstractmethod
    def _compute_one(self, lease: ExpertLease, number: int, span: slice, x_MD: Tensor) -> None:
        """Compute the leased expert's rows ``x_MD``, ``span`` of chunk ``number``."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of the tokens and of their weights, once all experts have been computed."""


def backward_walk(
    x_TD: Tensor,
    weight_TK: Tensor,
    grad_TD: Tensor,
    call: ExpertPass,
    saved: Saved,
    scratch: Scratch | None = None,
) -> BackwardWalk:
    """The backward pass of ``call``, whose results have the gradient ``grad_TD``. ``scratch``: as for ``ForwardWalk``."""
    chunking_of(call.source).count(call.rows)
    kind = _ByOutput if call.weighting is Weighting.BY_OUTPUT else _ByExpert
    return kind(x_TD, weight_TK, grad_TD, call, saved, scratch)


class _ByExpert(BackwardWalk):
    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        grad_TD: Tensor,
        call: ExpertPass,
        saved: Saved,
        scratch: Scratch | None,
    ) -> None:
        plan, rows, inner = call.plan, call.rows, 1 if saved.inner_MP is not None else 2
        grads_ND = grad_TD.index_select(0, plan.token_N)
        super().__init__(x_TD, weight_TK, call, saved, scratch, grads_ND, inner)
        weight_N = weight_TK.reshape(-1).index_select(0, plan.order_N).to(x_TD.dtype)
        self._weights = RowsAtExperts(rows, self.chunks, weight_N)
        self.sent.insert(1, self._weights)
        self._grad_weight_N = weight_TK.new_empty(plan.rows)
        self._grad_weight_M = rows.at_experts(self._grad_weight_N)
        self.returned.append((self._grad_weight_M, self._grad_weight_N))

    def _compute_one(self, lease: ExpertLease, number: int, span: slice, x_MD: Tensor) -> None:
        shape, work = self._call.shape, self._work
        grad_x_MD, grad_weight_M = self._grad_x_MD[span], self._grad_weight_M[span]
        rows = span.stop - span.start
        count = work.padded(rows)
        x_CD = work.pad("x", x_MD, count)
        if self._saved.inner_MP is not None:
            inner = work.pad("padded inner", self._saved.inner_MP[span], count)
        else:
            inner = work.inner(1, count)
            recompute_inner(shape, lease.flat, x_CD, inner, lease.pair)
        grad_x_CD, grad_weight_C = grad_x_MD, grad_weight_M
        if count > rows:
            grad_x_CD, grad_weight_C = (
                work.take("out", grad_x_MD, count),
                work.take("grad weight", grad_weight_M, count),
            )
        backward_expert(
            shape,
            lease.flat,
            lease.gradients,
            x_CD,
            inner,
            work.pad("grad out", self._grads.of(number, span), count),
            grad_x_CD,
            work,
            lease.pair,
            weights=(work.pad("weight", self._weights.of(number, span), count), grad_weight_C),
        )
        if count > rows:
            grad_x_MD.copy_(grad_x_CD[:rows])
            grad_weight_M.copy_(grad_weight_C[:rows])

    def finish(self) -> tuple[Tensor, Tensor]:
        plan = self._call.plan
        self.wait()
        grad_x_TD = combine(self._grad_x_ND, plan.place_TK)
        return grad_x_TD, _by_token(self._grad_weight_N, plan, self._weight_TK)


class _ByOutput(BackwardWalk):
    def __init__(
        self,
        x_TD: Tensor,
        weight_TK: Tensor,
        grad_TD: Tensor,
        call: ExpertPass,
        saved: Saved,
        scratch: Scratch | None,
    ) -> None:
        grads_ND = gradients_of_outputs(grad_TD, call.plan, weight_TK)
        again = saved.y_ND is None
        super().__init__(x_TD, weight_TK, call, saved, scratch, grads_ND, 2 if again else 1)
        self._grad_TD = grad_TD
        self._y_ND = _new_rows(x_TD, call.plan) if saved.y_ND is None else saved.y_ND
        #: The outputs if they are recomputed; None if they were saved.
        self._y_MD = call.rows.at_experts(self._y_ND) if again else None
        if self._y_MD is not None:
            self.returned.insert(0, (self._y_MD, self._y_ND))

    def _compute_one(self, lease: ExpertLease, number: int, span: slice, x_MD: Tensor) -> None:
        shape, work = self._call.shape, self._work
        if self._y_MD is None:
            assert self._saved.inner_MP is not None
            inner = self._saved.inner_MP[span]
        else:
            inner = work.inner(1, span.stop - span.start)
            forward_expert(shape, lease.weights, x_MD, inner, self._y_MD[span], work, lease.pair)
        grads_MD, grad_x_MD = self._grads.of(number, span), self._grad_x_MD[span]
        backward_expert(
            shape, lease.flat, lease.gradients, x_MD, inner, grads_MD, grad_x_MD, work, lease.pair
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        plan = self._call.plan
        self.wait()
        grad_weight_N = gradients_of_weights(self._grad_TD, plan, self._y_ND, self._weight_TK)
        ascending_TK = plan.place_TK.sort(dim=1).values
        return combine(self._grad_x_ND, ascending_TK), _by_token(grad_weight_N, plan, self._weight_TK)


def _new_rows(like: Tensor, plan: Dispatch) -> Tensor:
    """N uninitialised rows, and a row of zeros for dropped assignments."""
    rows_ND = like.new_empty(plan.rows + 1, like.shape[1])
    rows_ND[plan.rows].zero_()
    return rows_ND


def _by_token(rows_N: Tensor, plan: Dispatch, like_TK: Tensor) -> Tensor:
    out_TK = torch.zeros_like(like_TK, memory_format=torch.contiguous_format)
    out_TK.view(-1)[plan.order_N] = rows_N
    return out_TK
