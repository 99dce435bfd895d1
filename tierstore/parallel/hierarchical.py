"""Exchanges of rows between all ranks of an expert group: at once, or in two steps (SE-MoE, section 4.2).

Shapes: S ranks, on m nodes with p places each (S = m p; rank = node * p + place); ``rows_SS[s, d]`` rows go from rank s to
rank d. All ranks know the whole matrix, since they know the loads of all experts: no message announces sizes.

In two steps each rank gives every neighbour on its node the rows for the ranks with the neighbour's place, on any node;
then the ranks with the same place exchange between nodes. Between nodes a rank sends m - 1 messages instead of
(m - 1) p, with the same bytes in total; within the node p - 1 messages as before, with m times the bytes. Rows arrive
in the order of their sources, so the results are bit-identical to those of one all-to-all.

Copies. Rows are ordered by destination rank, so either order of the steps copies all rows twice: by place before the
node's step and by node before the other, or by place between both and by source at the end. With the node's step first,
no copy is left to do when the last rows have arrived over the slow link. A node step of m collectives, one for each
destination node, would need no copies, but m (p - 1) messages; and two steps pay only if messages are small.

Order. The second step can be issued when the first has arrived, and all ranks must issue their second steps in the same
order, that of the exchanges: waiting for an exchange first issues the second steps of all earlier ones, whichever
exchange a rank waits for first. Issuing an exchange, and waiting for one, also issues the second steps whose first has
arrived meanwhile, in the same order, so that they travel while the rank computes. So between an exchange and its wait a
rank must not block on what another rank of the group does only after that wait.
With CUDA a wait blocks no thread, and the second step is issued with the first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tierstore.machine_profile import Cost
from tierstore.parallel.collectives import RankGroup, Work, check_rows
from tierstore.parallel.layout import NodeGrid
from tierstore.units import format_bytes, format_seconds


class Exchange(Protocol):
    """An all-to-all of rows over an expert group. ``rank``: this rank's number there; ``groups``: those it sends over."""

    rank: int
    groups: tuple[RankGroup, ...]

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, rows_SS: Tensor) -> Work:
        """``rows_SS[s, d]`` rows (int64, on the host, the same on all ranks) go from rank s to rank d: ``in_rows`` by
        destination, ``out_rows`` by source. A collective. Raises ValueError for tensors that do not fit, PeerError.
        """
        ...


class FlatExchange:
    """One all-to-all over ``group``."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.groups: tuple[RankGroup, ...] = (group,)

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, rows_SS: Tensor) -> Work:
        came, go = rows_SS[:, self.rank].tolist(), rows_SS[self.rank].tolist()
        return self._group.all_to_all(out_rows, in_rows, came, go)


class HierarchicalExchange:
    """Within the node, over ``neighbours``; then over ``rail``, the ranks of this one's place on all nodes."""

    def __init__(self, neighbours: RankGroup, rail: RankGroup) -> None:
        self._neighbours, self._rail = neighbours, rail
        self._places, self._nodes = neighbours.size, rail.size
        self.rank = rail.rank * neighbours.size + neighbours.rank
        self.groups: tuple[RankGroup, ...] = (neighbours, rail)
        #: Exchanges whose second step has not been issued, oldest first.
        self._first_steps: deque[_TwoSteps] = deque()

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, rows_SS: Tensor) -> Work:
        node, place = self._rail.rank, self._neighbours.rank
        # Rows by node of the source, its place, node of the destination, its place.
        rows_npnp = rows_SS.reshape(self._nodes, self._places, self._nodes, self._places)
        # Checked here, since otherwise the second step would be the first to find it.
        check_rows(out_rows, in_rows, int(rows_SS[:, self.rank].sum()), int(rows_SS[self.rank].sum()))
        by_place = _transposed(in_rows, rows_npnp[node, place])
        gone_pn = rows_npnp[node, :, :, place]  # from each neighbour, to each node
        gathered = in_rows.new_empty((int(gone_pn.sum()), *in_rows.shape[1:]))
        first = self._neighbours.all_to_all(
            gathered, by_place, gone_pn.sum(dim=1).tolist(), rows_npnp[node, place].sum(dim=0).tolist()
        )

        def second() -> Work:
            by_node = _transposed(gathered, gone_pn)
            came, go = rows_npnp[:, :, node, place].sum(dim=1).tolist(), gone_pn.sum(dim=0).tolist()
            return self._rail.all_to_all(out_rows, by_node, came, go)

        work = _TwoSteps(first, second, self._issue_through)
        self._first_steps.append(work)
        if in_rows.is_cuda:
            self._issue_through(work)
        else:
            self._issue_ready()
        return work

    def _issue_through(self, work: _TwoSteps) -> None:
        """Issue the second steps of ``work`` and all before it, waiting for their first ones; then those that are ready."""
        while work.second is None:
            self._first_steps[0].issue_second()
            self._first_steps.popleft()
        self._issue_ready()

    def _issue_ready(self) -> None:
        while self._first_steps and self._first_steps[0].first.done():
            self._first_steps[0].issue_second()
            self._first_steps.popleft()


class _TwoSteps(Work):
    """Complete when the second step is. ``through`` issues it, after those before it."""

    def __init__(self, first: Work, start: Callable[[], Work], through: Callable[[_TwoSteps], None]) -> None:
        super().__init__(first)
        self.first, self._start, self._through = first, start, through
        self.second: Work | None = None

    def issue_second(self) -> None:
        self.first.wait()
        self.second = self._start()
        del self._start  # frees the rows that it refers to

    def done(self) -> bool:
        return self.second is not None and self.second.done()

    def _complete(self) -> None:
        self._through(self)
        assert self.second is not None
        self.second.wait()
        super()._complete()


class SizedExchange:
    """Hierarchical if messages have less than ``below_bytes`` on average, else flat. Every rank knows all sizes and
    chooses alike.
    """

    def __init__(self, flat: FlatExchange, hierarchical: HierarchicalExchange, below_bytes: float) -> None:
        self._flat, self._hierarchical = flat, hierarchical
        self._below_bytes = below_bytes
        self.rank = flat.rank
        self.groups: tuple[RankGroup, ...] = (*flat.groups, *hierarchical.groups)

    def all_to_all(self, out_rows: Tensor, in_rows: Tensor, rows_SS: Tensor) -> Work:
        width = in_rows.shape[1:].numel() * in_rows.element_size()
        message_bytes = float(rows_SS.sum()) * width / rows_SS.numel()
        chosen = self._hierarchical if message_bytes < self._below_bytes else self._flat
        return chosen.all_to_all(out_rows, in_rows, rows_SS)


def _transposed(rows: Tensor, count_AB: Tensor) -> Tensor:
    """Reorder ``rows``, which lie in blocks of ``count_AB[a, b]`` by (a, b), by (b, a)."""
    outer, inner = count_AB.shape
    blocks = torch.split(rows, count_AB.flatten().tolist())
    return torch.cat([blocks[a * inner + b] for b in range(inner) for a in range(outer)])


# The cost of an exchange (SE-MoE, section 4.2) --------------------------------------------------------------
#
# m nodes, p ranks of the group on each; every rank sends every other a message of b bytes. Between nodes a message
# costs ``message_s`` and a byte ``byte_s``; the step within the node costs ``step_s``, and each byte that it moves
# ``step_byte_s`` (its collective, two copies and the neighbours' links together); in addition, a collective between
# nodes costs ``fixed_s``:
#
#     flat(b)         = fixed + (m - 1) p message + (m - 1) p b byte
#     hierarchical(b) = fixed + (m - 1) message   + (m - 1) p b byte + step + m (p - 1) b step_byte
#
# Within the node a flat exchange runs in parallel to its slower messages. What travels between nodes is the same, so
# only messages and the extra step decide: two steps pay below one size of messages, or never. ``message_s`` is the time
# that a message keeps a link busy; a latency that concurrent messages share is in ``fixed_s``.


@dataclass(frozen=True, slots=True)
class ExchangeModel:
    """Seconds by bytes of a message: ``flat``, ``hierarchical``, and ``rail``, the second step of the latter."""

    grid: NodeGrid
    flat: Cost
    rail: Cost
    hierarchical: Cost

    @property
    def message_s(self) -> float:
        """Seconds per message between nodes."""
        return (self.flat.latency_s - self.rail.latency_s) / ((self.grid.nodes - 1) * (self.grid.each - 1))

    @property
    def step_s(self) -> float:
        """Seconds of the step within the node, without its bytes."""
        return self.hierarchical.latency_s - self.rail.latency_s

    @property
    def step_byte_s(self) -> float:
        """Seconds per byte of the step within the node."""
        byte_s = 1 / self.hierarchical.per_s - 1 / self.rail.per_s
        return byte_s / (self.grid.nodes * (self.grid.each - 1))

    @property
    def below_bytes(self) -> float:
        """Two steps are faster for messages below this size (0: never; infinite: always)."""
        gain_s = self.flat.latency_s - self.hierarchical.latency_s
        if gain_s <= 0:
            return 0.0
        loss_s = 1 / self.hierarchical.per_s - 1 / self.flat.per_s
        return gain_s / loss_s if loss_s > 0 else math.inf

    def describe(self) -> str:
        """The costs that decide, in a few words."""
        byte_s = self.step_byte_s
        speed = f" and {format_bytes(round(1 / byte_s))}/s" if byte_s > 0 else ""
        return (
            f"a message between nodes costs {format_seconds(max(self.message_s, 0.0))}, the step within a node "
            f"{format_seconds(max(self.step_s, 0.0))}{speed}"
        )
