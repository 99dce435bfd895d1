"""Indexed expert parallelism (Pipeline MoE, sections 3.3.2 to 3.3.4): experts divided over ranks that have the same tokens.

Every rank of a tensor-parallel group has all N rows of a layer, sorted by expert, and experts are owned in contiguous
blocks. So the rows of a rank's experts are a run of its own rows: nothing is sent to reach them. On the way back each rank
sends its run to the others, and all N rows are on all ranks.

**Bits.** The paper adds up, over ranks, what each has combined of its own experts (a sum of (S, D)). That has one process's
bits for at most two experts a token, and in fp32 alone: with more, sums are grouped by rank instead of in the router's
order. Here rows travel as experts made them, and every rank combines them as one process does: its bits, for any number of
experts a token, any type, weighting and capacity. Gradients of the router's weights, one number a row, come back in the
same way, so that every rank finds the router's whole gradient: nothing is left to be reduced, and no loss counts twice.

**Bytes** a pass, of S tokens of width D with K experts each, on average over T ranks: ``(T - 1) / T K S D``. The paper's
all-reduce sends ``2 (T - 1) / T S D``: twice as much for K = 1, as much for K = 2, and ``2 / K`` of it for more. (Two
all-to-alls in the same group, whose ranks have S / T tokens each, send ``2 (T - 1) / T**2 K S D``.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from tierstore.moe.dispatch import Dispatch
from tierstore.moe.exchange import Arrival, Charge, RowChunk
from tierstore.parallel import RankGroup


class IndexedRows:
    """The N rows of ``plan`` are on all ranks of ``group``, of which each computes those of its own experts.

    ``starts``: the first expert of each rank, and the number of experts.
    """

    def __init__(
        self,
        group: RankGroup,
        starts: tuple[int, ...],
        plan: Dispatch,
        asked: tuple[int, ...],
        charge: Charge | None = None,
    ) -> None:
        self._group = group
        self._charge = charge
        self._plan = plan
        #: Where each rank's rows begin, and N.
        self._bounds = [plan.offsets[start] for start in starts]
        first, last = starts[group.rank], starts[group.rank + 1]
        self._own = slice(self._bounds[group.rank], self._bounds[group.rank + 1])
        self.rows = self._own.stop - self._own.start
        self.part = slice(0, self.rows)
        self.most_rows = max((_length(plan.span(expert)) for expert in range(first, last)), default=0)
        self.asked = asked

    def span(self, expert: int) -> slice:
        span = self._plan.span(expert)
        return slice(span.start - self._own.start, span.stop - self._own.start)

    def chunks(self, degree: int) -> Sequence[RowChunk]:
        """One: nothing travels to the experts that they could wait for."""
        return (self,)

    def at_experts(self, rows_N: Tensor) -> Tensor:
        return rows_N[self._own]

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Arrival:
        """Nothing: ``rows_M`` must be what ``at_experts`` made of ``rows_N``."""
        return Arrival()

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Arrival:
        """``rows_M`` must be what ``at_experts`` made of ``rows_N``."""
        group, bounds = self._group, self._bounds
        splits = [stop - start for start, stop in itertools.pairwise(bounds)]
        if group.size == 2:  # no byte is copied that does not travel
            other = 1 - group.rank
            splits[group.rank] = 0
            theirs = rows_N[bounds[other] : bounds[other + 1]]
            work = group.all_to_all(
                theirs, rows_M, splits, [0 if r == group.rank else self.rows for r in range(2)]
            )
        else:
            repeated = rows_M.repeat(group.size, *[1] * (rows_M.dim() - 1))
            work = group.all_to_all(rows_N[: bounds[-1]], repeated, splits, [self.rows] * group.size)
        return Arrival(work, charge=self._charge)


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length
