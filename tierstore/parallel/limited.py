"""Emulation of collectives over links slower than the machine's, outside the group itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from tierstore._native import Link
from tierstore.links import CollectiveLink, LinksConfig, open_link, wait_until
from tierstore.parallel.collectives import Channel, Collective, RankGroup, Work


def limited_groups(config: LinksConfig) -> Callable[..., RankGroup]:
    """The class of a run's groups: ``RankGroup`` itself if ``config`` limits no collective."""
    if not (config.gather.on or config.exchange.on or config.node.on):
        return RankGroup
    link, exchange = CollectiveLink(open_link(config.gather)), open_link(config.exchange)
    return functools.partial(LimitedGroup, link=link, exchange=exchange, node=open_link(config.node))


class LimitedGroup(RankGroup):
    """A group whose collectives each take a turn on a link: ``exchange``, if given, carries those of the channel EXCHANGE,
    and ``link`` all others.

    ``node``, if given, carries messages to ranks of other nodes instead, and there each message to a rank has its own
    turn. Each rank has its own links: processes share none, so if the ranks of a node share an adapter, each is given its
    part of the bandwidth.
    """

    def __init__(
        self,
        *arguments: Any,
        link: CollectiveLink | Link,
        exchange: CollectiveLink | Link | None = None,
        node: CollectiveLink | Link | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._links = {Channel.STREAM: link, Channel.EXCHANGE: exchange or link}
        self._node = node

    def sending(self, nbytes: int, channel: Channel = Channel.EXCHANGE) -> int:
        """Reserve the message's turn on the link, from now; returns when it ends."""
        super().sending(nbytes, channel)
        return self._links[channel].reserve(nbytes)

    def _issue(
        self,
        operation: Collective,
        channel: Channel,
        sent: Sequence[int],
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        deadline_ns = self._deadline_ns(self._links[channel], sent)
        return _LimitedWork(super()._issue(operation, channel, sent, start, finish), deadline_ns)

    def _deadline_ns(self, link: CollectiveLink | Link, sent: Sequence[int]) -> int:
        """When everything sent has passed its links."""
        others = [(rank, nbytes) for rank, nbytes in enumerate(sent) if rank != self.rank]
        if self._node is None:
            return link.reserve(sum(nbytes for _, nbytes in others))
        leaving = [nbytes for rank, nbytes in others if nbytes and self._elsewhere[rank]]
        within = sum(nbytes for rank, nbytes in others if not self._elsewhere[rank])
        # A collective that stays within the node takes its turn even if it carries nothing.
        deadlines_ns = [] if leaving and not within else [link.reserve(within)]
        return max(deadlines_ns + [self._node.reserve(nbytes) for nbytes in leaving])


class _LimitedWork(Work):
    """Complete when ``work`` is and its time on the link has passed."""

    def __init__(self, work: Work, deadline_ns: int) -> None:
        super().__init__(work)
        self._work = work
        self._deadline_ns = deadline_ns

    def done(self) -> bool:
        return self._work.done() and time.monotonic_ns() >= self._deadline_ns

    def _complete(self) -> None:
        self._work.wait()
        wait_until(self._deadline_ns)
        super()._complete()
