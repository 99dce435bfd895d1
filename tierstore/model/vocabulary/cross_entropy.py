"""Cross entropy with a head whose rows are divided over data ranks: each computes the logits of its part of the vocabulary,
for the tokens of all ranks.

Shapes: T tokens of this rank (the same number on every rank), C of them in a chunk, N ranks, D width, R rows of this rank
with padding, V' without.

Of each chunk, hidden states go to all ranks; largest logit, sum of exponentials and the target's logit come back from each
and are combined in rank order; the logarithm of the whole sum goes out again, and with it each rank makes the gradients of
its logits, of its rows, and its part of the hidden states' gradients, which their owner adds up in rank order. Gradients are
made in the forward pass, while the logits are there: they are neither kept nor computed again, and hidden states travel
once. So the backward pass sends one number, and multiplies.

The same bits in every run. Against one process the sums over the vocabulary, and those over tokens of products of other
shapes, round otherwise: see docs/PARALLEL.md for the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tierstore.model.loss import CHUNK_LOGITS
from tierstore.model.vocabulary.embedding import gather_tokens
from tierstore.moe.exchange import Charge
from tierstore.parallel import Channel, RankGroup
from tierstore.parallel.layout import TableRows


@dataclass(frozen=True)
class _Head:
    """This rank's rows of the head, and where the others are. ``rows_VD``: without padding, in the compute type."""

    rows_VD: Tensor
    table: TableRows
    group: RankGroup
    charge: Charge | None

    def gather(self, own: Tensor) -> Tensor:
        """(N * C, ...) of every rank's ``own`` (C, ...). A collective."""
        whole = own.new_empty((self.group.size * own.shape[0], *own.shape[1:]))
        flat = own.contiguous().view(-1)
        self.group.all_gather(whole.view(-1), flat, channel=Channel.EXCHANGE).wait(self.charge)
        return whole

    def scatter(self, parts: Tensor) -> Tensor:
        """(N, C, ...) of what every rank has for this one, of ``parts`` (N * C, ...) for each. A collective."""
        size = self.group.size
        count = parts.shape[0] // size
        came = torch.empty_like(parts)
        self.group.all_to_all(came, parts, [count] * size, [count] * size).wait(self.charge)
        return came.view(size, count, *parts.shape[1:])


class _Summed(torch.autograd.Function):
    """The sum over T of the losses, with what they will send back."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        rows_RD: Tensor,
        targets_T: Tensor,
        table: TableRows,
        group: RankGroup,
        charge: Charge | None,
        training: bool,
    ) -> Tensor:
        tokens = x_TD.shape[0]
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        owned = len(table.owned(group.rank))
        head = _Head(rows_RD[:owned].to(x_TD.dtype), table, group, charge)
        targets_A, counts = gather_tokens(targets_T, table, group, charge)
        if len(set(counts)) > 1:
            raise ValueError(f"the ranks have {counts} tokens: a divided head needs as many on each")
        targets_NT = targets_A.view(group.size, tokens)
        total = x_TD.new_zeros((), dtype=wide)
        rows_grad = torch.zeros_like(rows_RD) if training else None
        x_grad = torch.empty_like(x_TD) if training else None
        chunk = max(1, CHUNK_LOGITS // table.rows)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            lost, gradient = _chunk(x_TD[part], targets_NT[:, part], head, rows_grad)
            total = total + lost
            if x_grad is not None:
                x_grad[part] = gradient
        ctx.group, ctx.charge = group, charge
        ctx.gradients = x_grad, rows_grad
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = gradients
        # What the rows of this rank get from tokens of other ranks was made with their factor, which is one for all.
        both = torch.stack([factor, -factor]).double()
        ctx.group.max(both)
        if both[0] != -both[1] and not both.isnan().any():
            raise RuntimeError("the ranks multiply their losses by different factors")
        if ctx.gradients is None:
            raise RuntimeError("a second backward pass through one forward pass")
        (x_grad, rows_grad), ctx.gradients = ctx.gradients, None
        x_grad, rows_grad = x_grad.mul_(factor.to(x_grad.dtype)), rows_grad.mul_(factor.to(rows_grad.dtype))
        return x_grad, rows_grad, None, None, None, None, None


def _chunk(x_CD: Tensor, targets_NC: Tensor, head: _Head, rows_grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """The losses of a chunk's own tokens, summed, and the gradient of ``x_CD``; ``rows_grad`` (R, D) gets what the tokens of
    all ranks send this one's rows. Where that is None, nothing has a gradient.
    """
    group, count = head.group, x_CD.shape[0]
    own = head.table.owned(group.rank)
    all_XD = head.gather(x_CD)  # X: N * C
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    logits_XV = F.linear(all_XD, head.rows_VD).to(wide)
    target_X = targets_NC.reshape(-1)
    mine_X = ((target_X >= own.start) & (target_X < own.stop)).nonzero().squeeze(1)
    place_X = target_X[mine_X] - own.start
    found_X3 = logits_XV.new_zeros((len(target_X), 3))
    most_X = logits_XV.amax(dim=1) if len(own) else logits_XV.new_full((len(target_X),), -torch.inf)
    found_X3[:, 0] = most_X
    found_X3[mine_X, 2] = logits_XV[mine_X, place_X]
    exponents_XV = logits_XV.sub_(most_X.unsqueeze(1)).exp_()
    found_X3[:, 1] = exponents_XV.sum(dim=1)
    most_NC, sum_NC, target_NC = head.scatter(found_X3).unbind(dim=2)
    largest_C = most_NC.amax(dim=0)
    whole_C = torch.zeros_like(largest_C)
    target_C = torch.zeros_like(largest_C)
    for most, summed, target in zip(most_NC, sum_NC, target_NC, strict=True):
        whole_C += summed * (most - largest_C).exp()
        target_C += target  # zeros but from the owner
    log_C = largest_C + whole_C.log()
    lost = (log_C - target_C).sum()
    if rows_grad is None:
        return lost, x_CD
    log_X = head.gather(log_C)
    exponents_XV.mul_((most_X - log_X).exp().unsqueeze(1))
    exponents_XV[mine_X, place_X] -= 1.0
    passed_XV = exponents_XV.to(x_CD.dtype)
    rows_grad[: len(own)] += (passed_XV.t() @ all_XD).to(rows_grad.dtype)
    parts_NCD = head.scatter(passed_XV @ head.rows_VD)
    gradient_CD = parts_NCD[0].to(wide)
    for other in parts_NCD[1:]:
        gradient_CD = gradient_CD + other
    assert gradient_CD.shape[0] == count
    return lost, gradient_CD.to(x_CD.dtype)


def divided_cross_entropy(
    x_TD: Tensor,
    rows_RD: Tensor,
    targets_T: Tensor,
    table: TableRows,
    group: RankGroup,
    *,
    charge: Charge | None = None,
) -> Tensor:
    """Mean over this rank's T of ``-log softmax(x head^T)[target]``, fp32, in nats, where this rank has ``rows_RD`` of the
    head. A collective, as its backward pass is, in which all ranks must multiply it by the same factor: the gradient of
    ``rows_RD`` is that of the sum of all ranks' means.

    Raises ValueError on all ranks for a target that is no row of the table, or numbers of tokens that differ, PeerError,
    RuntimeError in the backward pass.
    """
    training = torch.is_grad_enabled() and (x_TD.requires_grad or rows_RD.requires_grad)
    total: Tensor = _Summed.apply(  # type: ignore[no-untyped-call]
        x_TD, rows_RD, targets_T, table, group, charge, training
    )
    return total / x_TD.shape[0]


def divided_logits(
    x_TD: Tensor, rows_RD: Tensor, table: TableRows, group: RankGroup, *, charge: Charge | None = None
) -> Tensor:
    """``x head^T`` of this rank's tokens, (T, V) in the type of ``x_TD``, whole, without a graph. A collective."""
    with torch.no_grad():
        head = _Head(rows_RD.to(x_TD.dtype), table, group, charge)
        logits_NTR = head.scatter(F.linear(head.gather(x_TD), head.rows_VD))
        return logits_NTR.transpose(0, 1).flatten(1)[:, : table.rows].contiguous()
