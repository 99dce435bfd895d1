"""Exchange of a layer's rows with the ranks that own their experts.

Shapes: N rows of this rank's tokens, by expert (``Dispatch``); M rows of the experts that this rank owns, by expert, within
each by source rank and then in token order; S ranks of the expert group, E experts.

Ranks hold contiguous pieces of the global batch, so an expert's M rows are the same, in the same order, as in one process:
its matrix products have the same shapes and operands wherever it is computed. Ranks own contiguous blocks of experts, so
rows that are sorted by expert are sorted by owner, and one all-to-all with uneven splits takes them there (SE-MoE, section
2.3); with the splits transposed, another brings the results back.

Rows may also be sent in chunks, one all-to-all each (PipeMoE): chunk c carries the c-th group of every owner's experts.
Every expert is in one chunk, so its products are the same for any number of chunks. For more chunks than a rank has experts,
each expert's rows are divided into parts: to the exchange, each part is an expert (``divide_experts``).

If the ranks of a group have the same tokens, nothing has to be sent to the experts: see experts by index, below.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tierstore.accelerator import upload
from tierstore.moe.dispatch import Dispatch, divide_experts
from tierstore.parallel import Channel, Exchange, Mesh, RankGroup, Work
from tierstore.parallel.collectives import Charge


class RowChunk(Protocol):
    """The rows of some experts of every owner, sent together. Methods are collectives, unless this rank owns all experts;
    rows are in their places when their Work has been waited for.
    """

    #: The chunk's experts to compute on this rank, ascending.
    asked: tuple[int, ...]
    #: The chunk's rows among the M.
    part: slice

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Work:
        """Send the chunk's rows of ``rows_N`` (N, ...), in dispatch order, to its part of ``rows_M``."""
        ...

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Work:
        """Send the chunk's part of ``rows_M`` to its places in the first N rows of ``rows_N``."""
        ...


@dataclass(frozen=True, slots=True)
class PassLoads:
    """Maxima over ranks in one pass over a layer (or means over several passes): rows sent to other ranks or received from
    them, rows computed, and experts that have rows.
    """

    travelling: float = 0
    computed: float = 0
    experts: float = 0


class Rows(Protocol):
    """The exchange of one pass's rows: to their experts, and back. With ``parts``, an expert here is a part of one of the
    layer's experts (``divide_experts``).
    """

    #: The parts of each expert of the layer.
    parts: int
    #: M
    rows: int
    #: The most rows of any expert on this rank.
    most_rows: int
    #: Whether experts receive rows from other ranks, so that a backward pass needs them kept or sent again.
    travel: bool
    #: The experts to compute on this rank, ascending; in training, also those that only another replica's tokens reach.
    asked: tuple[int, ...]

    def span(self, expert: int) -> slice:
        """The rows of ``expert`` among the M."""
        ...

    def chunks(self, degree: int) -> Sequence[RowChunk]:
        """The chunks in which rows are sent, by ascending experts: ``degree`` of them, or one if nothing is sent. The number
        is the same on all ranks.
        """
        ...

    def at_experts(self, rows_N: Tensor) -> Tensor:
        """Memory for the M rows that are exchanged with ``rows_N`` (at least N rows): new memory, or ``rows_N`` or a part of
        it if nothing is sent to the experts.
        """
        ...

    def most(self) -> PassLoads | None:
        """The largest loads of any rank, the same on all ranks. None if nothing is sent."""
        ...


class LocalRows:
    """All experts are on this rank: rows stay in place, in one chunk."""

    travel = False
    parts = 1

    def __init__(self, plan: Dispatch, asked: tuple[int, ...]) -> None:
        self.rows = plan.rows
        self.most_rows = plan.most_rows
        self.asked = asked
        self.span = plan.span
        self.part = slice(0, plan.rows)

    def chunks(self, degree: int) -> Sequence[RowChunk]:
        return (self,)

    def at_experts(self, rows_N: Tensor) -> Tensor:
        return rows_N

    def most(self) -> None:
        return None

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Work:
        return Work()

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Work:
        return Work()


class ExchangedRows:
    """Sends rows to the owners of their experts, by all-to-alls over ``exchange``.

    ``load_SE``: rows of each expert from each rank of the group. ``starts``: the first expert of each rank, and the number
    of experts.
    """

    travel = True

    def __init__(
        self,
        exchange: Exchange,
        starts: tuple[int, ...],
        load_SE: Tensor,
        asked: tuple[int, ...],
        charge: Charge | None = None,
        parts: int = 1,
    ) -> None:
        self.parts = parts
        self._exchange = exchange
        self._charge = charge
        self._starts = starts
        self._load_SE = load_SE
        self.asked = asked
        self._first, last = starts[exchange.rank], starts[exchange.rank + 1]
        per_expert: list[int] = self._load_SE[:, self._first : last].sum(dim=0).tolist()
        self.rows = sum(per_expert)
        self.most_rows = max(per_expert, default=0)
        self._offsets = list(itertools.accumulate(per_expert, initial=0))
        self._chunks: dict[int, tuple[_ExchangedChunk, ...]] = {}

    def span(self, expert: int) -> slice:
        place = expert - self._first
        return slice(self._offsets[place], self._offsets[place + 1])

    def chunks(self, degree: int) -> Sequence[RowChunk]:
        if degree not in self._chunks:
            self._chunks[degree] = tuple(self._cut(degree))
        return self._chunks[degree]

    def at_experts(self, rows_N: Tensor) -> Tensor:
        return rows_N.new_empty((self.rows, *rows_N.shape[1:]))

    def most(self) -> PassLoads:
        blocks = [self._load_SE[:, first:last] for first, last in itertools.pairwise(self._starts)]
        rows_SR = torch.stack([block.sum(dim=1) for block in blocks], dim=1)
        elsewhere_SR = rows_SR - torch.diag(rows_SR.diagonal())
        return PassLoads(
            travelling=int(torch.maximum(elsewhere_SR.sum(dim=0), elsewhere_SR.sum(dim=1)).max()),
            computed=int(rows_SR.sum(dim=0).max()),
            experts=max(int((block.sum(dim=0) > 0).sum()) for block in blocks),
        )

    def _cut(self, degree: int) -> Iterator[_ExchangedChunk]:
        load_E: list[int] = self._load_SE.sum(dim=0).tolist()
        cuts = [
            expert_groups(load_E, first, last, degree) for first, last in itertools.pairwise(self._starts)
        ]
        rank = self._exchange.rank
        own = list(itertools.accumulate(self._load_SE[rank].tolist(), initial=0))
        for chunk in range(degree):
            blocks = [(bounds[chunk], bounds[chunk + 1]) for bounds in cuts]
            first, last = blocks[rank]
            yield _ExchangedChunk(
                self._exchange,
                [slice(own[a], own[b]) for a, b in blocks],
                torch.stack([self._load_SE[:, a:b].sum(dim=1) for a, b in blocks], dim=1),
                self._load_SE[:, first:last],
                tuple(expert for expert in self.asked if first <= expert < last),
                slice(self._offsets[first - self._first], self._offsets[last - self._first]),
                self._charge,
            )


class _ExchangedChunk:
    """One all-to-all of ``ExchangedRows``. ``leaving``: for each owner, the slice of the N rows to send there. ``rows_SS``:
    rows from each rank to each rank. ``came_SE``: rows from each rank of this rank's experts in the chunk.
    """

    def __init__(
        self,
        exchange: Exchange,
        leaving: Sequence[slice],
        rows_SS: Tensor,
        came_SE: Tensor,
        asked: tuple[int, ...],
        part: slice,
        charge: Charge | None,
    ) -> None:
        self.asked = asked
        self.part = part
        self._exchange = exchange
        self._charge = charge
        self._rows_SS = rows_SS
        self._leaving = sum(piece.stop - piece.start for piece in leaving)
        self._pieces = _joined(leaving)
        self._order_M = _by_expert(came_SE) if _needs_sorting(came_SE) else None

    def _order(self, device: torch.device) -> Tensor | None:
        """The order of the rows, on ``device``; None if they are already in order when they arrive."""
        if self._order_M is not None and self._order_M.device != device:
            self._order_M = upload(self._order_M, device)
        return self._order_M

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Work:
        pieces = [rows_N[piece] for piece in self._pieces]
        leaving = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        own_M, order_M = rows_M[self.part], self._order(rows_M.device)
        arrived_M = own_M if order_M is None else torch.empty_like(own_M)
        work = self._exchange.all_to_all(arrived_M, leaving, self._rows_SS)

        def sort() -> None:
            assert order_M is not None
            torch.index_select(arrived_M, 0, order_M, out=own_M)

        return work.then(None if order_M is None else sort, self._charge)

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Work:
        leaving_M, order_M = rows_M[self.part], self._order(rows_M.device)
        if order_M is not None:
            sorted_M, leaving_M = leaving_M, torch.empty_like(leaving_M)
            leaving_M[order_M] = sorted_M
        pieces = [rows_N[piece] for piece in self._pieces]
        direct = len(pieces) == 1
        back = pieces[0] if direct else rows_N.new_empty((self._leaving, *rows_N.shape[1:]))
        work = self._exchange.all_to_all(back, leaving_M, self._rows_SS.t())

        def spread() -> None:
            lengths = [len(piece) for piece in pieces]
            for piece, rows in zip(pieces, torch.split(back, lengths), strict=True):
                piece.copy_(rows)

        return work.then(None if direct else spread, self._charge)


def expert_groups(load_E: Sequence[int], first: int, last: int, degree: int) -> list[int]:
    """Divide the experts from ``first`` up to ``last`` (exclusive) into ``degree`` groups of about equal rows; returns
    ``degree + 1`` ascending bounds. Each bound's rows before it are as close as possible to its share; of two equally close
    bounds, the lower one is taken. Groups may be empty.
    """
    before = list(itertools.accumulate(load_E[first:last], initial=0))
    bounds = [first]
    for number in range(1, degree):
        share = before[-1] * number / degree
        place = bisect.bisect_left(before, share)
        if place and share - before[place - 1] <= before[place] - share:
            place -= 1
        bounds.append(max(first + place, bounds[-1]))
    return [*bounds, last]


def gather_counts(own: Tensor, group: RankGroup, charge: Charge | None = None) -> Tensor:
    """Gather the int64 ``own`` (n) of every rank of ``group``, as (R, n). A collective. Raises PeerError."""
    all_Rn = own.new_empty(group.size * own.numel())
    group.all_gather(all_Rn, own, channel=Channel.EXCHANGE).wait(charge)
    return all_Rn.view(group.size, -1)


def rows_of(
    plan: Dispatch,
    load_RE: Tensor,
    mesh: Mesh,
    *,
    training: bool,
    charge: Charge | None = None,
    parts: int = 1,
) -> tuple[Dispatch, Rows]:
    """The exchange of the rows of ``plan``, given ``load_RE`` of all data ranks (those of ``mesh.data``), on the CPU; and
    ``plan`` itself, whose experts are divided into ``parts`` if rows travel.

    In training, replicas must step the same experts: each requests every expert of its block that any data rank
    reached, in the same order, so that gradients can be summed one by one.
    """
    if mesh.data.size == 1 and mesh.tensor.size == 1:
        return plan, LocalRows(plan, plan.experts)
    sources = list(mesh.expert_sources)
    blocks = mesh.blocks(load_RE.shape[1])
    load_SE = load_RE[sources]
    reached_E = (load_RE if training else load_SE).sum(dim=0).tolist()
    asked = tuple(expert for expert in blocks.owned(mesh.expert.rank) if reached_E[expert])
    if mesh.expert.size == 1:
        return plan, LocalRows(plan, asked)
    starts = tuple(blocks.start(rank) * parts for rank in range(mesh.expert.size + 1))
    if parts > 1:
        plan, load_SE = divide_experts(
            plan, load_SE, 0 if mesh.tensor.size > 1 else mesh.exchange.rank, parts
        )
        asked = tuple(expert * parts + part for expert in asked for part in range(parts))
    if mesh.tensor.size > 1:
        return plan, IndexedRows(mesh.tensor, starts, plan, asked, charge, parts)
    return plan, ExchangedRows(mesh.exchange, starts, load_SE, asked, charge, parts)


def _joined(pieces: Sequence[slice]) -> list[slice]:
    """The same rows in as few slices as possible, but at least one."""
    joined = [slice(0, 0)]
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if joined[-1].start == joined[-1].stop:
            joined[-1] = piece
        elif joined[-1].stop == piece.start:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def _needs_sorting(count_SE: Tensor) -> bool:
    """Whether the orders by (source, expert) and by (expert, source) differ."""
    return bool((count_SE.sum(dim=1) > 0).sum() > 1) and bool((count_SE.sum(dim=0) > 0).sum() > 1)


def _by_expert(count_SE: Tensor) -> Tensor:
    """For each row in order of (expert, source), its index in order of (source, expert), in which rows arrive."""
    flat = count_SE.flatten()
    start_SE = (flat.cumsum(0) - flat).view_as(count_SE)
    counts = count_SE.t().flatten()  # rows of each block, in the target order
    shift = start_SE.t().flatten() - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)


# Experts by index (Pipeline MoE, sections 3.3.2 to 3.3.4) ---------------------------------------------------
#
# Experts are divided over ranks that have the same tokens. Every rank of a tensor-parallel group has all N rows of a
# layer, sorted by expert, and owns a contiguous block of experts. So the rows of its experts are a contiguous part of its
# own rows: nothing is sent to the experts. Afterwards each rank sends its part to the others, so that all have all N rows.
#
# Bits. The paper combines, on each rank, the outputs of its own experts, and sums these (S, D) over ranks. That has the
# same bits as one process only in fp32 and for at most two experts a token: with more, sums are grouped by rank, not in
# the router's order. Here the experts' output rows themselves are sent, and every rank combines them as one process does,
# so the bits are the same for any number of experts a token, any type, weighting and capacity. Gradients of the router's
# weights, one number per row, are sent in the same way, so every rank gets the router's whole gradient: it needs no
# reduction, and no loss counts twice.
#
# Bytes of a pass with S tokens of width D and K experts each, on average over T ranks: (T - 1) / T K S D. The paper's
# all-reduce sends 2 (T - 1) / T S D: twice as much for K = 1, the same for K = 2, and 2 / K times as much for more. (Two
# all-to-alls in the same group, whose ranks have S / T tokens each, send 2 (T - 1) / T**2 K S D.)
#
# With several chunks, the rows of every rank's first experts are sent while later ones are computed; nothing has to be
# waited for before the first. A chunk is one message to each other rank.


class IndexedRows:
    """All ranks of ``group`` have the N rows of ``plan``; each computes those of its own experts.

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
        parts: int = 1,
    ) -> None:
        self.parts = parts
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

    def most(self) -> PassLoads:
        # The rank with the most rows sends them to each of the others.
        blocks = [self._loads[first:last] for first, last in itertools.pairwise(self._starts)]
        computed = max(sum(block) for block in blocks)
        return PassLoads(
            travelling=computed * (self._group.size - 1),
            computed=computed,
            experts=max(sum(load > 0 for load in block) for block in blocks),
        )


class _IndexedChunk:
    """Some experts of each rank. ``pieces``: their rows among the N, by rank. ``first_row``: this rank's first row."""

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

    def to_experts(self, rows_N: Tensor, rows_M: Tensor) -> Work:
        """Nothing is sent: ``rows_M`` is a part of ``rows_N``."""
        return Work()

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Work:
        """Send this rank's rows to the others. They are already in place here: ``rows_M`` is a part of ``rows_N``."""
        size, rank = self._group.size, self._group.rank
        own = rows_M[self.part]
        places = [rows_N[piece] for piece in self._pieces]
        to = [0 if other == rank else len(own) for other in range(size)]
        came = [0 if other == rank else len(place) for other, place in enumerate(places)]
        if size == 2:  # send and receive in place, without extra copies
            return self._group.all_to_all(places[1 - rank], own, came, to).then(None, self._charge)
        others = [place for other, place in enumerate(places) if other != rank]
        lengths = [len(place) for place in others]
        arrived = rows_N.new_empty((sum(came), *rows_N.shape[1:]))
        repeated = own.repeat(size - 1, *[1] * (own.dim() - 1))
        work = self._group.all_to_all(arrived, repeated, came, to)

        def spread() -> None:
            for place, rows in zip(others, torch.split(arrived, lengths), strict=True):
                place.copy_(rows)

        return work.then(spread, self._charge)
