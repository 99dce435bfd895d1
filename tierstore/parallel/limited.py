"""Collectives over links that are slower than the machine's: emulation, outside the group itself."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from tierstore._native import Link
from tierstore.links import CollectiveLink, LinksConfig, open_link, wait_until
from tierstore.parallel.collectives import Channel, Collective, RankGroup, Work


def limited_groups(config: LinksConfig) -> Callable[..., RankGroup]:
    """What makes the groups of a run: ``RankGroup`` itself where ``config`` limits no collective."""
    if not (config.gather.on or config.exchange.on):
        return RankGroup
    link, exchange = CollectiveLink(open_link(config.gather)), open_link(config.exchange)
    return functools.partial(LimitedGroup, link=link, exchange=exchange)


class LimitedGroup(RankGroup):
    """A group whose messages each take a turn on a link: ``exchange``, where there is one, carries those of the channel
    EXCHANGE, and ``link`` all others.
    """

    def __init__(
        self,
        *arguments: Any,
        link: CollectiveLink | Link,
        exchange: CollectiveLink | Link | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._links = {Channel.STREAM: link, Channel.EXCHANGE: exchange or link}

    def sending(self, nbytes: int, channel: Channel = Channel.EXCHANGE) -> int:
        """The message's turn on the link begins now; returns when it ends."""
        super().sending(nbytes, channel)
        return self._links[channel].reserve(nbytes)

    def _issue(
        self,
        operation: Collective,
        channel: Channel,
        sent: int,
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        deadline_ns = self._links[channel].reserve(sent)
        return _LimitedWork(super()._issue(operation, channel, sent, start, finish), deadline_ns)


class _LimitedWork(Work):
    """Complete when ``work`` is and its time on the link has passed."""

    def __init__(self, work: Work, deadline_ns: int) -> None:
        super().__init__()
        self._work = work
        self._deadline_ns = deadline_ns

    def done(self) -> bool:
        return self._work.done() and time.monotonic_ns() >= self._deadline_ns

    def _complete(self) -> None:
        self._work.wait()
        wait_until(self._deadline_ns)
        super()._complete()
