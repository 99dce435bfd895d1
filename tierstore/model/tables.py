"""Vocabulary tables: the embedding and the head with its loss, whole or with their rows divided over data ranks.

Shapes: T tokens of this rank (in the loss the same number on every rank), C of them in a chunk, A tokens of all N ranks (in
rank order), V vocabulary, D width, R rows of this rank with padding, M tokens of all ranks whose rows are here.

**The embedding** (SE-MoE section 4.3, figure 9) takes three all-to-alls, of ids, of rows and of gradients. No table is
gathered, and no gradient of one is reduced. Ids go to every rank, as int32, after each rank's count, so that all know the
sizes of the messages. An owner adds gradients in the order of the global batch (by rank, then by token), with the
function that a single process uses: the gradient of a row has the bits of one process with the whole batch.

**The loss**: each rank computes the logits of its part of the vocabulary, for the tokens of all ranks. For each chunk,
hidden states go to all ranks; largest logit, sum of exponentials and the target's logit come back from each and are
combined in rank order; then the logarithm of the whole sum goes to all ranks, with which each computes the gradients of
its logits, of its rows, and its part of the hidden states' gradients, which their owner adds up in rank order. Gradients
are computed in the forward pass, while the logits are in memory: logits are neither kept nor recomputed, and hidden
states are sent once. So the backward pass sends one number, and multiplies. The bits are the same in every run. Compared
with one process, sums over the vocabulary, and sums over tokens in products of other shapes, round differently: see
docs/PARALLEL.md for the tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tierstore.moe.exchange import gather_counts
from tierstore.parallel import Channel, RankGroup
from tierstore.parallel.collectives import Charge
from tierstore.parallel.layout import SLICE_ALIGNMENT, TableRows

# 16 Mi logits are 64 MiB in fp32. A constant: if it depended on a budget, the budget would change the sum.
CHUNK_LOGITS = 1 << 24


def cross_entropy(x_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Mean over T of ``-log softmax(x head^T)[target]``, fp32, in nats.

    Tokens are processed in chunks of at most CHUNK_LOGITS logits (but at least one token). With more than one chunk, the
    backward pass recomputes the logits of each.
    """
    tokens = x_TD.shape[0]
    rows = max(1, CHUNK_LOGITS // head_VD.shape[0])
    total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        if tokens > rows and torch.is_grad_enabled():
            total = total + checkpoint(_summed, x_TD[part], head_VD, targets_T[part], use_reentrant=False)
        else:
            total = total + _summed(x_TD[part], head_VD, targets_T[part])
    return total / tokens


def _summed(x_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    logits_TV = F.linear(x_TD, head_VD.to(x_TD.dtype))
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), targets_T, reduction="sum")


# Divided ----------------------------------------------------------------------------------------------------


#: The approximate number of elements drawn at once.
_DRAWN = 1 << 22


@dataclass(frozen=True)
class RowExchange:
    """The exchange of rows for the present tokens. ``local_M``: the indices of this rank's rows to send, by destination
    rank and then in token order; ``leaving``: their number for each rank. ``order_T``: the tokens of the received rows,
    which come by owner; ``coming``: their number from each rank.
    """

    local_M: Tensor
    leaving: list[int]
    order_T: Tensor
    coming: list[int]


@dataclass(frozen=True)
class DividedTable:
    """``table``, with rows divided over the ranks of ``group``; this rank's are the argument ``rows_RD`` of its methods.
    Waits for other ranks are charged to ``charge``.

    All methods except ``first_rows`` are collectives, and so are the backward passes of ``embed`` and ``cross_entropy``.
    They raise PeerError, and ValueError on all ranks for an id outside of the table.
    """

    table: TableRows
    group: RankGroup
    charge: Charge | None = None

    def first_rows(self, *, std: float, generator: torch.Generator) -> Tensor:
        """This rank's rows (R, D) of ``nn.init.normal_`` for the whole table, which is never in memory; padding is zero."""
        rows, width = self.table.rows, self.table.width
        own = self.table.owned(self.group.rank)
        kept = torch.zeros(self.table.each, width)
        # torch draws normal values in blocks of 16, of which the last may begin anywhere: so chunks are whole blocks, and
        # the last chunk has at least one whole block.
        step = SLICE_ALIGNMENT // math.gcd(SLICE_ALIGNMENT, width)
        chunk = max(_DRAWN // (width * step), 1) * step
        least = -(-SLICE_ALIGNMENT // (width * step)) * step
        start = 0
        while start < rows:
            end = rows if rows - start < chunk + least else start + chunk
            drawn = torch.empty(end - start, width).normal_(std=std, generator=generator)
            low, high = max(start, own.start), min(end, own.stop)
            if low < high:
                kept[low - own.start : high - own.start] = drawn[low - start : high - start]
            start = end
        return kept

    def embed(self, ids_BT: Tensor, rows_RD: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
        """``(embedding[ids_BT] * scale).to(dtype)``, (B, T, D)."""
        exchange = self._exchange_ids(ids_BT.flatten())
        x_TD: Tensor = _Lookup.apply(rows_RD, self, exchange, scale, dtype)  # type: ignore[no-untyped-call]
        return x_TD.view(*ids_BT.shape, self.table.width)

    def cross_entropy(self, x_TD: Tensor, rows_RD: Tensor, targets_T: Tensor) -> Tensor:
        """Mean over this rank's T of ``-log softmax(x head^T)[target]``, fp32, in nats. In the backward pass all ranks
        must multiply it by the same factor: the gradient of ``rows_RD`` is that of the sum of all ranks' means.

        Raises ValueError on all ranks for different numbers of tokens; RuntimeError in the backward pass.
        """
        training = torch.is_grad_enabled() and (x_TD.requires_grad or rows_RD.requires_grad)
        total: Tensor = _Summed.apply(x_TD, rows_RD, targets_T, self, training)  # type: ignore[no-untyped-call]
        return total / x_TD.shape[0]

    @torch.no_grad()
    def logits(self, x_BTD: Tensor, rows_RD: Tensor) -> Tensor:
        """``x head^T`` of this rank's tokens, (B, T, V) in the type of ``x_BTD``, whole, without a graph."""
        logits_XR = F.linear(self.gather(x_BTD.flatten(0, 1)), rows_RD.to(x_BTD.dtype))
        logits_TV = self.scatter(logits_XR).transpose(0, 1).flatten(1)[:, : self.table.rows]
        return logits_TV.contiguous().view(*x_BTD.shape[:2], self.table.rows)

    def gather(self, own: Tensor) -> Tensor:
        """(N * C, ...) of every rank's ``own`` (C, ...)."""
        whole = own.new_empty((self.group.size * own.shape[0], *own.shape[1:]))
        flat = own.contiguous().view(-1)
        self.group.all_gather(whole.view(-1), flat, channel=Channel.EXCHANGE).wait(self.charge)
        return whole

    def scatter(self, parts: Tensor) -> Tensor:
        """(N, C, ...): every rank's part for this one, from ``parts`` (N * C, ...)."""
        size = self.group.size
        count = parts.shape[0] // size
        came = torch.empty_like(parts)
        self.group.all_to_all(came, parts, [count] * size, [count] * size).wait(self.charge)
        return came.view(size, count, *parts.shape[1:])

    def gather_tokens(self, ids_T: Tensor) -> tuple[Tensor, list[int]]:
        """The ids of every rank, (A,) int64, and their number by rank."""
        tokens, rows, group = ids_T.numel(), self.table.rows, self.group
        counts: list[int] = gather_counts(torch.tensor([tokens]), group, self.charge).flatten().tolist()
        # Clamped, an id that does not fit an int32 is still outside of the table.
        sent = ids_T.clamp(-1, rows).to(torch.int32).repeat(group.size)
        all_A = sent.new_empty(sum(counts))
        group.all_to_all(all_A, sent, counts, [tokens] * group.size).wait(self.charge)
        all_A = all_A.long()
        wrong = ((all_A < 0) | (all_A >= rows)).nonzero()
        if len(wrong):
            token, rank = int(wrong[0]), 0
            while token >= counts[rank]:
                token, rank = token - counts[rank], rank + 1
            raise ValueError(
                f"token {token} of rank {group.ranks[rank]}: expected an id of 0 to {rows - 1}, the vocabulary's"
            )
        return all_A, counts

    def _exchange_ids(self, ids_T: Tensor) -> RowExchange:
        """Sends the ids of every rank to all."""
        all_A, counts = self.gather_tokens(ids_T)
        rank, each = self.group.rank, self.table.each
        owner_A = torch.div(all_A, each, rounding_mode="floor")
        here_A = owner_A == rank
        local_M = all_A[here_A] - rank * each
        leaving = [int(part.sum()) for part in torch.split(here_A, counts)]
        own_T = torch.split(owner_A, counts)[rank]
        coming = torch.bincount(own_T, minlength=self.group.size).tolist()
        return RowExchange(local_M, leaving, torch.argsort(own_T, stable=True), coming)


class _Lookup(torch.autograd.Function):
    """(R, D) rows to (T, D), scaled and rounded to the compute type by their owner, so that they are sent in it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        divided: DividedTable,
        exchange: RowExchange,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        leaving_MD = (F.embedding(exchange.local_M, rows_RD) * scale).to(dtype)
        came_TD = leaving_MD.new_empty((len(exchange.order_T), rows_RD.shape[1]))
        sent = divided.group.all_to_all(came_TD, leaving_MD, exchange.coming, exchange.leaving)
        sent.wait(divided.charge)
        x_TD = torch.empty_like(came_TD)
        x_TD[exchange.order_T] = came_TD
        ctx.call = (divided, exchange, scale, rows_RD.shape[0], rows_RD.dtype)
        return x_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        divided, exchange, scale, rows, dtype = ctx.call
        leaving_TD = gradients[0].index_select(0, exchange.order_T)
        came_MD = leaving_TD.new_empty((len(exchange.local_M), leaving_TD.shape[1]))
        sent = divided.group.all_to_all(came_MD, leaving_TD, exchange.leaving, exchange.coming)
        sent.wait(divided.charge)
        summed_RD = torch.ops.aten.embedding_dense_backward(
            came_MD.to(dtype) * scale, exchange.local_M, rows, -1, False
        )
        return summed_RD, None, None, None, None


class _Summed(torch.autograd.Function):
    """The sum over T of the losses, with their gradients, computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        rows_RD: Tensor,
        targets_T: Tensor,
        divided: DividedTable,
        training: bool,
    ) -> Tensor:
        tokens, group, table = x_TD.shape[0], divided.group, divided.table
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        rows_VD = rows_RD[: len(table.owned(group.rank))].to(x_TD.dtype)
        targets_A, counts = divided.gather_tokens(targets_T)
        if len(set(counts)) > 1:
            raise ValueError(f"the ranks have {counts} tokens: a divided head needs equally many on each")
        targets_NT = targets_A.view(group.size, tokens)
        total = x_TD.new_zeros((), dtype=wide)
        rows_grad = torch.zeros_like(rows_RD) if training else None
        x_grad = torch.empty_like(x_TD) if training else None
        chunk = max(1, CHUNK_LOGITS // table.rows)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            lost, gradient = _chunk(x_TD[part], targets_NT[:, part], divided, rows_VD, rows_grad)
            total = total + lost
            if x_grad is not None:
                x_grad[part] = gradient
        ctx.group = group
        ctx.gradients = x_grad, rows_grad
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = gradients
        # Gradients of this rank's rows from other ranks' tokens assume one factor on all ranks.
        both = torch.stack([factor, -factor]).double()
        ctx.group.max(both)
        if both[0] != -both[1] and not both.isnan().any():
            raise RuntimeError("the ranks multiply their losses by different factors")
        if ctx.gradients is None:
            raise RuntimeError("a second backward pass through one forward pass")
        (x_grad, rows_grad), ctx.gradients = ctx.gradients, None
        x_grad, rows_grad = x_grad.mul_(factor.to(x_grad.dtype)), rows_grad.mul_(factor.to(rows_grad.dtype))
        return x_grad, rows_grad, None, None, None


def _chunk(
    x_CD: Tensor, targets_NC: Tensor, divided: DividedTable, rows_VD: Tensor, rows_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The summed losses of a chunk's own tokens, and the gradient of ``x_CD``; adds the gradients of this rank's rows
    from the tokens of all ranks to ``rows_grad`` (R, D). If that is None, computes no gradients. ``rows_VD``: this rank's
    rows without padding, in the compute type.
    """
    own = divided.table.owned(divided.group.rank)
    all_XD = divided.gather(x_CD)  # X: N * C
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    logits_XV = F.linear(all_XD, rows_VD).to(wide)
    target_X = targets_NC.reshape(-1)
    mine_X = ((target_X >= own.start) & (target_X < own.stop)).nonzero().squeeze(1)
    place_X = target_X[mine_X] - own.start
    found_X3 = logits_XV.new_zeros((len(target_X), 3))
    most_X = logits_XV.amax(dim=1) if len(own) else logits_XV.new_full((len(target_X),), -torch.inf)
    found_X3[:, 0] = most_X
    found_X3[mine_X, 2] = logits_XV[mine_X, place_X]
    exponents_XV = logits_XV.sub_(most_X.unsqueeze(1)).exp_()
    found_X3[:, 1] = exponents_XV.sum(dim=1)
    most_NC, sum_NC, target_NC = divided.scatter(found_X3).unbind(dim=2)
    largest_C = most_NC.amax(dim=0)
    whole_C = torch.zeros_like(largest_C)
    target_C = torch.zeros_like(largest_C)
    for most, summed, target in zip(most_NC, sum_NC, target_NC, strict=True):
        whole_C += summed * (most - largest_C).exp()
        target_C += target  # zeros except from the owner
    log_C = largest_C + whole_C.log()
    lost = (log_C - target_C).sum()
    if rows_grad is None:
        return lost, x_CD
    log_X = divided.gather(log_C)
    exponents_XV.mul_((most_X - log_X).exp().unsqueeze(1))
    exponents_XV[mine_X, place_X] -= 1.0
    passed_XV = exponents_XV.to(x_CD.dtype)
    rows_grad[: len(own)] += (passed_XV.t() @ all_XD).to(rows_grad.dtype)
    parts_NCD = divided.scatter(passed_XV @ rows_VD)
    gradient_CD = parts_NCD[0].to(wide)
    for other in parts_NCD[1:]:
        gradient_CD = gradient_CD + other
    return lost, gradient_CD.to(x_CD.dtype)
