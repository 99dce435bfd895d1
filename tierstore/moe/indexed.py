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

In several chunks, the rows of the first experts of every rank go while later ones are computed; nothing is waited for
before the first. A chunk is one message to each other rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tierstore.moe.dispatch import Dispatch
from tierstore.moe.exchange import Arrival, Charge, MostRows, RowChunk, expert_groups
from tierstore.parallel import RankGroup


class IndexedRows:
    """The N rows of ``plan`` are on all ranks of ``group``, of which each computes those of its own experts.

    ``starts``: the first expert of each rank, and the number of experts.
    """

    travel = False

    def __init__(
        self,
        group: RankGroup,
        starts: tuple[int, ...],
        plan: Dispatch,
        asked: tuple[int, ...],
        charge: Charge | None = None,
    ) -> None:
        self._group = group
        self._starts = starts
        self._plan = plan
        self._charge = charge
        first, last = starts[group.rank], starts[group.rank + 1]
        loads = [stop - start for start, stop in itertools.pairwise(plan.offsets)]
        self._loads = loads
        self._own = slice(plan.offsets[first], plan.offsets[last])
        self.rows = sum(loads[first:last])
        self.most_rows = max(loads[first:last], default=0)
        self.asked = asked

    def span(self, expert: int) -> slice:
        span = self._plan.span(expert)
        return slice(span.start - self._own.start, span.stop - self._own.start)

    def chunks(self, degree: int) -> Sequence[RowChunk]:
        offsets, rank = self._plan.offsets, self._group.rank
        cuts = [
            expert_groups(self._loads, first, last, degree)
            for first, last in itertools.pairwise(self._starts)
        ]
        return [
            _IndexedChunk(
                self._group,
                [slice(offsets[cut[number]], offsets[cut[number + 1]]) for cut in cuts],
                tuple(e for e in self.asked if cuts[rank][number] <= e < cuts[rank][number + 1]),
                self._own.start,
                self._charge,
            )
            for number in range(degree)
        ]

    def at_experts(self, rows_N: Tensor) -> Tensor:
        return rows_N[self._own]

    def most(self) -> MostRows:
        # The rank with most rows sends them to each of the others.
        blocks = [self._loads[first:last] for first, last in itertools.pairwise(self._starts)]
        computed = max(sum(block) for block in blocks)
        return MostRows(
            travelling=computed * (self._group.size - 1),
            computed=computed,
            experts=max(sum(load > 0 for load in block) for block in blocks),
        )


class _IndexedChunk:
    """Some experts of each rank. ``pieces``: their rows among the N, by rank; ``first_row``: of this rank's rows."""

    def __init__(
        self,
        group: RankGroup,
        pieces: Sequence[slice],
        asked: tuple[int, ...],
        first_row: int,
        charge: Charge | None,
    ) -> None:
        own = pieces[group.rank]
        self.asked = asked
        self.part = slice(own.start - first_row, own.stop - first_row)
        self._group = group
        self._pieces = pieces
        self._charge = charge

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Arrival:
        """Nothing travels: ``rows_M`` is a part of ``rows_N``."""
        return Arrival()

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Arrival:
        """This rank's rows are in their places already: ``rows_M`` is a part of ``rows_N``."""
        size, rank = self._group.size, self._group.rank
        own = rows_M[self.part]
        places = [rows_N[piece] for piece in self._pieces]
        to = [0 if other == rank else len(own) for other in range(size)]
        came = [0 if other == rank else len(place) for other, place in enumerate(places)]
        if size == 2:  # no byte is copied that does not travel
            return Arrival(self._group.all_to_all(places[1 - rank], own, came, to), charge=self._charge)
        others = [place for other, place in enumerate(places) if other != rank]
        lengths = [len(place) for place in others]
        arrived = rows_N.new_empty((sum(came), *rows_N.shape[1:]))
        repeated = own.repeat(size - 1, *[1] * (own.dim() - 1))
        work = self._group.all_to_all(arrived, repeated, came, to)

        def spread() -> None:
            for place, rows in zip(others, torch.split(arrived, lengths), strict=True):
                place.copy_(rows)

        return Arrival(work, spread, self._charge)
