"""The embedding whose rows are divided over data ranks (SE-MoE section 4.3, figure 9): three all-to-alls, of ids, of rows
and of gradients. No table is gathered, and no gradient of one is reduced.

Shapes: T tokens of this rank, A tokens of all N ranks (in rank order), R rows of this rank with padding, D width, M tokens
of all ranks whose rows are here.

Ids go to every rank, as int32, behind one number from each that says how many: so all know who sends how much. An owner adds
gradients up in the order of the global batch, which is that of ranks and of tokens within each, by the function that one
process uses: the gradient of a row has the bits of one process with the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tierstore.moe.exchange import Charge, gather_counts
from tierstore.parallel import RankGroup
from tierstore.parallel.layout import TableRows


@dataclass(frozen=True)
class RowExchange:
    """How the rows of the present tokens travel. ``local_M``: which of this rank's rows, by source rank and then in token
    order; ``leaving`` of them go to each rank. ``order_T``: where the rows that come, by owner, lie among this rank's
    tokens; ``coming`` of them from each.
    """

    local_M: Tensor
    leaving: list[int]
    order_T: Tensor
    coming: list[int]


def exchange_ids(
    ids_T: Tensor, table: TableRows, group: RankGroup, charge: Charge | None = None
) -> RowExchange:
    """Tells every rank the ids of all. A collective. Raises ValueError on all ranks for an id that is no row of the table,
    PeerError.
    """
    all_A, counts = gather_tokens(ids_T, table, group, charge)
    owner_A = torch.div(all_A, table.each, rounding_mode="floor")
    here_A = owner_A == group.rank
    local_M = all_A[here_A] - group.rank * table.each
    leaving = [int(part.sum()) for part in torch.split(here_A, counts)]
    own_T = torch.split(owner_A, counts)[group.rank]
    coming = torch.bincount(own_T, minlength=group.size).tolist()
    return RowExchange(local_M, leaving, torch.argsort(own_T, stable=True), coming)


def gather_tokens(
    ids_T: Tensor, table: TableRows, group: RankGroup, charge: Charge | None = None
) -> tuple[Tensor, list[int]]:
    """The ids of every rank, (A,) int64, and how many of each. A collective. Raises ValueError as ``exchange_ids``."""
    tokens = ids_T.numel()
    counts: list[int] = gather_counts(torch.tensor([tokens]), group, charge).flatten().tolist()
    # Clamped, an id that does not fit an int32 is still none of the table.
    sent = ids_T.clamp(-1, table.rows).to(torch.int32).repeat(group.size)
    all_A = sent.new_empty(sum(counts))
    group.all_to_all(all_A, sent, counts, [tokens] * group.size).wait(charge)
    all_A = all_A.long()
    wrong = ((all_A < 0) | (all_A >= table.rows)).nonzero()
    if len(wrong):
        token, rank = int(wrong[0]), 0
        while token >= counts[rank]:
            token, rank = token - counts[rank], rank + 1
        raise ValueError(
            f"token {token} of rank {group.ranks[rank]}: expected an id of 0 to {table.rows - 1}, the vocabulary's"
        )
    return all_A, counts


class _Lookup(torch.autograd.Function):
    """(R, D) rows to (T, D), scaled and rounded to the compute type where they are, so that they travel in it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        exchange: RowExchange,
        group: RankGroup,
        scale: float,
        dtype: torch.dtype,
        charge: Charge | None,
    ) -> Tensor:
        leaving_MD = (F.embedding(exchange.local_M, rows_RD) * scale).to(dtype)
        came_TD = leaving_MD.new_empty((len(exchange.order_T), rows_RD.shape[1]))
        group.all_to_all(came_TD, leaving_MD, exchange.coming, exchange.leaving).wait(charge)
        x_TD = torch.empty_like(came_TD)
        x_TD[exchange.order_T] = came_TD
        ctx.call = (exchange, group, scale, charge, rows_RD.shape[0], rows_RD.dtype)
        return x_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        exchange, group, scale, charge, rows, dtype = ctx.call
        leaving_TD = gradients[0].index_select(0, exchange.order_T)
        came_MD = leaving_TD.new_empty((len(exchange.local_M), leaving_TD.shape[1]))
        group.all_to_all(came_MD, leaving_TD, exchange.leaving, exchange.coming).wait(charge)
        summed_RD = torch.ops.aten.embedding_dense_backward(
            came_MD.to(dtype) * scale, exchange.local_M, rows, -1, False
        )
        return summed_RD, None, None, None, None, None


def divided_embedding(
    ids_T: Tensor,
    rows_RD: Tensor,
    table: TableRows,
    group: RankGroup,
    *,
    scale: float,
    dtype: torch.dtype,
    charge: Charge | None = None,
) -> Tensor:
    """``(embedding[ids_T] * scale).to(dtype)``, (T, D), of a table of which this rank has ``rows_RD``. A collective, as its
    backward pass is. Raises ValueError on all ranks for an id that is no row of the table, PeerError.
    """
    exchange = exchange_ids(ids_T, table, group, charge)
    x_TD: Tensor = _Lookup.apply(rows_RD, exchange, group, scale, dtype, charge)  # type: ignore[no-untyped-call]
    return x_TD
