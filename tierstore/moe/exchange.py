"""Where a layer's rows are computed: here, or on the ranks that own their experts.

Shapes: N rows of this rank's tokens, by expert (``Dispatch``); M rows of the experts that this rank owns, by
expert, and within each by source rank and then in token order; S ranks of the expert group, E experts.

Ranks hold contiguous pieces of the global batch, so an expert's M rows are those, in the order, that one process
would give it: its products have the same shapes and operands wherever it is computed. Experts are owned in
contiguous blocks, so rows that are sorted by expert are sorted by owner, and one all-to-all with uneven splits
takes them there (SE-MoE, section 2.3); the same splits the other way bring results back.

Where the ranks of a group have the same tokens, nothing has to travel to the experts: ``tierstore.moe.indexed``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from tierstore.moe.dispatch import Dispatch
from tierstore.parallel import Channel, Exchange, Mesh, RankGroup, Work

Charge = Callable[[], AbstractContextManager[None]]


class Arrival:
    """Rows that may still be on their way. ``charge`` makes the context in which they are waited for."""

    def __init__(self, work: Work | None, take: Callable[[], Tensor], charge: Charge | None = None) -> None:
        self._work = work
        self._take = take
        self._charge = charge
        self._taken: Tensor | None = None

    def rows(self) -> Tensor:
        """The rows, waited for by the first call. Raises PeerError."""
        if self._taken is None:
            if self._work is not None:
                self._work.wait(self._charge)
            self._taken = self._take()
        return self._taken


class Rows(Protocol):
    """The way of a pass's rows to their experts, and back. Collectives, unless all experts are here."""

    #: M
    rows: int
    #: The most rows that one expert has here.
    most_rows: int
    #: The experts to compute here, ascending; in training, also those that only another replica's tokens reach.
    asked: tuple[int, ...]

    def span(self, expert: int) -> slice:
        """The rows of ``expert`` among the M."""
        ...

    def to_experts(self, rows_N: Tensor) -> Arrival:
        """(N, ...) in order of dispatch to (M, ...)."""
        ...

    def results(self, rows_N: Tensor) -> Tensor:
        """Where experts put their M rows, if ``rows_N`` (N rows or more) is where they shall come back to."""
        ...

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Arrival:
        """``results`` to the first N rows of the ``rows_N`` that they were made for."""
        ...


class LocalRows:
    """Every expert is here: rows stay where they are."""

    def __init__(self, plan: Dispatch, asked: tuple[int, ...]) -> None:
        self.rows = plan.rows
        self.most_rows = plan.most_rows
        self.asked = asked
        self.span = plan.span

    def to_experts(self, rows_N: Tensor) -> Arrival:
        return Arrival(None, lambda: rows_N)

    def results(self, rows_N: Tensor) -> Tensor:
        return rows_N

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Arrival:
        return Arrival(None, lambda: rows_N)


class ExchangedRows:
    """Rows go to the owners of their experts, by all-to-all over ``exchange``.

    ``load_SE``: rows of each expert from each rank of the group; ``starts``: the first expert of each rank, and
    the number of experts.
    """

    def __init__(
        self,
        exchange: Exchange,
        starts: tuple[int, ...],
        load_SE: Tensor,
        asked: tuple[int, ...],
        charge: Charge | None = None,
    ) -> None:
        self._exchange = exchange
        self._charge = charge
        self.asked = asked
        self._first, last = starts[exchange.rank], starts[exchange.rank + 1]
        load_SE = load_SE.cpu()
        # All loads are known to all ranks, so every rank knows what each sends to each.
        self._rows_SS = torch.stack(
            [load_SE[:, a:b].sum(dim=1) for a, b in itertools.pairwise(starts)], dim=1
        )
        self._own_rows = int(self._rows_SS[exchange.rank].sum())
        came_SE = load_SE[:, self._first : last]
        per_expert: list[int] = came_SE.sum(dim=0).tolist()
        self.rows = sum(per_expert)
        self.most_rows = max(per_expert, default=0)
        self._offsets = [0]
        for count in per_expert:
            self._offsets.append(self._offsets[-1] + count)
        self._order_M = _by_expert(came_SE) if _needs_sorting(came_SE) else None

    def span(self, expert: int) -> slice:
        place = expert - self._first
        return slice(self._offsets[place], self._offsets[place + 1])

    def to_experts(self, rows_N: Tensor) -> Arrival:
        arrived_M = rows_N.new_empty((self.rows, *rows_N.shape[1:]))
        work = self._exchange.all_to_all(arrived_M, rows_N, self._rows_SS)
        order_M = self._order_M

        def take() -> Tensor:
            return arrived_M if order_M is None else arrived_M.index_select(0, order_M.to(arrived_M.device))

        return Arrival(work, take, self._charge)

    def results(self, rows_N: Tensor) -> Tensor:
        return rows_N.new_empty((self.rows, *rows_N.shape[1:]))

    def to_tokens(self, rows_M: Tensor, rows_N: Tensor) -> Arrival:
        leaving_M = rows_M
        if self._order_M is not None:
            leaving_M = torch.empty_like(rows_M)
            leaving_M[self._order_M.to(rows_M.device)] = rows_M
        work = self._exchange.all_to_all(rows_N[: self._own_rows], leaving_M, self._rows_SS.t())
        return Arrival(work, lambda: rows_N, self._charge)


def gather_counts(own: Tensor, group: RankGroup, charge: Charge | None = None) -> Tensor:
    """The int64 ``own`` (n) of every rank of ``group``, as (R, n). A collective. Raises PeerError."""
    all_Rn = own.new_empty(group.size * own.numel())
    group.all_gather(all_Rn, own, channel=Channel.EXCHANGE).wait(charge)
    return all_Rn.view(group.size, -1)


def rows_of(
    plan: Dispatch, load_RE: Tensor, mesh: Mesh, *, training: bool, charge: Charge | None = None
) -> Rows:
    """The way of the rows of ``plan``, given ``load_RE`` of all data ranks (those of ``mesh.data``).

    In training, replicas must step the same experts: each asks for every expert of its block that any data rank
    reached, in the same order, so that their gradients can be summed one by one.
    """
    if mesh.data.size == 1 and mesh.tensor.size == 1:
        return LocalRows(plan, plan.experts)
    sources = list(mesh.expert_sources)
    blocks = mesh.blocks(load_RE.shape[1])
    load_SE = load_RE[sources]
    reached_E = (load_RE if training else load_SE).sum(dim=0).tolist()
    asked = tuple(expert for expert in blocks.owned(mesh.expert.rank) if reached_E[expert])
    if mesh.expert.size == 1:
        return LocalRows(plan, asked)
    starts = tuple(blocks.start(rank) for rank in range(mesh.expert.size + 1))
    if mesh.tensor.size > 1:
        from tierstore.moe.indexed import IndexedRows  # which is made of what is here

        return IndexedRows(mesh.tensor, starts, plan, asked, charge)
    return ExchangedRows(mesh.exchange, starts, load_SE, asked, charge)


def _needs_sorting(count_SE: Tensor) -> bool:
    """Whether rows by (source, expert) are in another order than by (expert, source)."""
    return bool((count_SE.sum(dim=1) > 0).sum() > 1) and bool((count_SE.sum(dim=0) > 0).sum() > 1)


def _by_expert(count_SE: Tensor) -> Tensor:
    """Which row of those that arrived, by (source, expert), lies at each row by (expert, source)."""
    flat = count_SE.flatten()
    start_SE = (flat.cumsum(0) - flat).view_as(count_SE)
    counts = count_SE.t().flatten()  # of the blocks, in the order they shall have
    shift = start_SE.t().flatten() - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)
