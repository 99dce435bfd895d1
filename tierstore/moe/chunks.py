"""Passes over experts in chunks: while one chunk's experts are computed, the rows of others travel (PipeMoE).

All rows of a pass are sent when it begins, chunk by chunk. Experts are computed as their source leases them, each once its
own chunk has arrived. A chunk's results are sent as soon as its last expert has been computed and the results of all
chunks before it have been sent. So every rank issues its all-to-alls in the same order, whatever order its experts come in,
and what is computed and added up does not depend on the number of chunks.

An expert whose rows are divided into parts is leased once and computed part by part. Its gradients are the parts', added
in their order in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tierstore.moe.exchange import RowChunk, Rows
from tierstore.moe.source import Chunking, ExpertLease
from tierstore.parallel import Work
from tierstore.timeline import Moment, Track


class RowsAtExperts:
    """A tensor's M rows at their experts, arriving chunk by chunk."""

    def __init__(self, rows: Rows, chunks: Sequence[RowChunk], rows_N: Tensor) -> None:
        self._chunks = chunks
        self._rows_N: Tensor | None = rows_N
        #: All M rows, including those that have not arrived.
        self.rows = rows.at_experts(rows_N)
        self._arrivals: list[Work] = []

    def send(self, number: int) -> Work:
        """Send chunk ``number``; chunks are sent in ascending order."""
        assert self._rows_N is not None
        self._arrivals.append(self._chunks[number].to_experts(self._rows_N, self.rows))
        if len(self._arrivals) == len(self._chunks):
            self._rows_N = None  # a message holds what it reads
        return self._arrivals[-1]

    def of(self, number: int, span: slice) -> Tensor:
        """Wait for the rows ``span``, which lie in chunk ``number``, and return them. Raises PeerError."""
        self.wait_for(number)
        return self.rows[span]

    def wait_for(self, number: int) -> None:
        """Wait for the rows of chunk ``number``. Raises PeerError."""
        self._arrivals[number].wait()

    def wait(self) -> Tensor:
        """Wait for all rows and return them. Raises PeerError."""
        for arrival in self._arrivals:
            arrival.wait()
        return self.rows


class PlacedLease(NamedTuple):
    """A leased expert that has rows: ``span``, in chunk ``number``, of part ``part``. ``last``: no later part has rows."""

    lease: ExpertLease
    number: int
    span: slice
    part: int
    last: bool


class ExpertWalk(ABC):
    """A pass over the experts of one call: created, driven by a :class:`Travel`, and finished.

    ``sent``: rows that go to the experts; ``returned``: their results, and the tensor that each result goes to.
    """

    def __init__(self, rows: Rows, degree: int) -> None:
        self.parts = rows.parts
        self.asked = tuple(part // self.parts for part in rows.asked[:: self.parts])
        self.chunks = rows.chunks(degree)
        self.sent: list[RowsAtExperts] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        self._rows = rows
        self._number = {expert: number for number, chunk in enumerate(self.chunks) for expert in chunk.asked}
        self._left = [len(chunk.asked) for chunk in self.chunks]
        self._returning: list[Work] = []

    def send(self, number: int) -> list[Work]:
        """Send the rows of chunk ``number`` to the ranks of its experts."""
        return [rows.send(number) for rows in self.sent]

    def chunks_of(self, leases: Sequence[ExpertLease], part: int) -> list[int]:
        """For each leased expert: the number of the chunk that has its part ``part``."""
        return [self._number[lease.expert * self.parts + part] for lease in leases]

    def compute(self, leases: Sequence[ExpertLease], part: int) -> None:
        """Compute the rows of part ``part`` of the leased experts, if they have any."""
        placed, numbers = [], self.chunks_of(leases, part)
        for lease, number in zip(leases, numbers, strict=True):
            expert = lease.expert * self.parts + part
            span = self._rows.span(expert)
            if span.start < span.stop:
                following = self._rows.span(expert + 1) if part + 1 < self.parts else slice(0, 0)
                placed.append(PlacedLease(lease, number, span, part, following.start == following.stop))
            elif not part:  # only tokens of another replica reached it
                lease.zero_gradients()
        self._compute(placed)
        for number in numbers:
            self._left[number] -= 1

    def complete(self, number: int) -> bool:
        """Whether all experts of chunk ``number`` have been computed."""
        return not self._left[number]

    def send_back(self, number: int) -> list[Work]:
        """Send the results of chunk ``number`` to the ranks of their tokens."""
        chunk = self.chunks[number]
        back = [chunk.to_tokens(rows_M, rows_N) for rows_M, rows_N in self.returned]
        self._returning += back
        return back

    def wait(self) -> None:
        """Wait for everything in flight, once all chunks have been sent back. Raises PeerError."""
        for rows in self.sent:
            rows.wait()
        for arrival in self._returning:
            arrival.wait()

    @abstractmethod
    def _compute(self, placed: Sequence[PlacedLease]) -> None:
        """Compute the leased experts' rows."""


class Travel:
    """Sends the rows of ``walks`` and their results, say of several micro-batches, in an order that does not depend on the
    rank: chunk by chunk and, within a chunk, walk by walk; first all rows, then all results.
    """

    def __init__(self, walks: Sequence[ExpertWalk], chunking: Chunking, label: str) -> None:
        self._walks = walks
        self._timeline = chunking.timeline
        self._label = label
        degree = len(walks[0].chunks) if walks else 0
        self._due = deque((number, micro) for number in range(degree) for micro in range(len(walks)))
        #: When the first expert of a chunk was computed.
        self._begun: dict[tuple[int, int], Moment] = {}
        for number, micro in self._due:
            self._draw("dispatch", number, micro, walks[micro].send(number))

    def compute(self, leases: Sequence[ExpertLease], micro: int = 0) -> None:
        """Compute the leased experts for one of the walks, part by part, and send the results of complete chunks."""
        parts = self._walks[micro].parts
        for group in [leases] if parts == 1 else [[lease] for lease in leases]:
            for part in range(parts):
                self._begin(group, part, micro)
                self._walks[micro].compute(group, part)
                self._send_complete()

    def _begin(self, leases: Sequence[ExpertLease], part: int, micro: int) -> None:
        """Note when the first expert of a chunk begins: on a device each moment is an event of its stream."""
        if self._timeline.enabled:
            chunks = {(number, micro) for number in self._walks[micro].chunks_of(leases, part)}
            if new := chunks - self._begun.keys():
                self._begun.update(dict.fromkeys(new, self._timeline.now()))

    def end(self) -> None:
        """Called after the last lease. Raises RuntimeError if experts are missing."""
        self._send_complete()
        if self._due:
            raise RuntimeError(f"{self._label}: not all experts were leased")

    def _send_complete(self) -> None:
        while self._due and self._walks[self._due[0][1]].complete(self._due[0][0]):
            number, micro = self._due.popleft()
            if (number, micro) in self._begun:
                name = self._name("experts", number, micro)
                self._timeline.add(
                    Track.COMPUTE, name, self._begun.pop((number, micro)), self._timeline.now()
                )
            self._draw("combine", number, micro, self._walks[micro].send_back(number))

    def _draw(self, what: str, number: int, micro: int, arrivals: Sequence[Work]) -> None:
        """Draw each of ``arrivals`` on the timeline, from now until it has been waited for."""
        if not self._timeline.enabled:
            return
        started, name = self._timeline.now(), self._name(what, number, micro)
        for arrival in arrivals:
            arrival.observe(lambda: self._timeline.add(Track.EXCHANGES, name, started, self._timeline.now()))

    def _name(self, what: str, number: int, micro: int) -> str:
        several = f", micro-batch {micro}" if len(self._walks) > 1 else ""
        return f"{self._label}: {what} chunk {number}{several}"
