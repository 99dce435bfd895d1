"""A table over the vocabulary of which this rank has some rows: its first values, lookups, logits and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.model.vocabulary.cross_entropy import divided_cross_entropy, divided_logits
from tierstore.model.vocabulary.embedding import divided_embedding
from tierstore.moe.exchange import Charge
from tierstore.parallel import RankGroup
from tierstore.parallel.layout import SLICE_ALIGNMENT, TableRows

#: About so many elements are drawn at once.
_DRAWN = 1 << 22


@dataclass(frozen=True)
class DividedTable:
    """``table``, whose rows are divided over the ranks of ``group``. Waiting for them is charged to ``charge``.

    Its methods but ``first_rows`` are collectives: see ``divided_embedding``, ``divided_cross_entropy`` and
    ``divided_logits``.
    """

    table: TableRows
    group: RankGroup
    charge: Charge | None = None

    def first_rows(self, *, std: float, generator: torch.Generator) -> Tensor:
        """This rank's rows (R, D) of ``nn.init.normal_`` of the whole table, which is never there; padding is zero."""
        rows, width = self.table.rows, self.table.width
        own = self.table.owned(self.group.rank)
        kept = torch.zeros(self.table.each, width)
        # torch draws normal values in blocks of 16, the last of which may begin anywhere: so chunks are whole blocks, and
        # the last one has a whole block at least.
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
        """(B, T, D), scaled, in ``dtype``."""
        x_TD = divided_embedding(
            ids_BT.flatten(),
            rows_RD,
            self.table,
            self.group,
            scale=scale,
            dtype=dtype,
            charge=self.charge,
        )
        return x_TD.view(*ids_BT.shape, self.table.width)

    def cross_entropy(self, x_TD: Tensor, rows_RD: Tensor, targets_T: Tensor) -> Tensor:
        """The mean loss of this rank's tokens, in nats."""
        return divided_cross_entropy(x_TD, rows_RD, targets_T, self.table, self.group, charge=self.charge)

    def logits(self, x_BTD: Tensor, rows_RD: Tensor) -> Tensor:
        """(B, T, V), in the type of ``x_BTD``, without a graph."""
        logits_TV = divided_logits(x_BTD.flatten(0, 1), rows_RD, self.table, self.group, charge=self.charge)
        return logits_TV.view(*x_BTD.shape[:2], self.table.rows)
