"""Awaiting engine tickets from asyncio, with no thread: it signals an eventfd that the loop watches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tierstore._native import Engine


class TicketAwaiter:
    """Turns tickets of ``engine`` into futures of the running event loop. One loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._futures: dict[int, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, tickets: Iterable[int]) -> None:
        """Returns when all have finished; raises the first failure, in the order given.

        Cancelling the awaiting task stops the waiting, not the operations: what was queued is carried out.
        """
        loop = asyncio.get_running_loop()
        for ticket in tickets:
            if ticket and not self._engine.done(ticket):
                future: asyncio.Future[None] = loop.create_future()
                self._watch(loop)
                self._futures.setdefault(ticket, []).append(future)
                self._engine.notify(ticket)
                self._engine.promote(ticket)  # as a blocking wait does
                try:
                    await future
                finally:
                    self._unwatch_if_idle(loop)
            if ticket:
                self._engine.wait(ticket)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("the store is awaited in another event loop; one at a time")
            self._futures = {}  # of a loop that was closed with tasks unfinished
            loop.add_reader(self._engine.event_fd(), self._drain)
            self._loop = loop

    def _unwatch_if_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._futures = {
            ticket: live
            for ticket, futures in self._futures.items()
            if (live := [future for future in futures if not future.done()])
        }
        if not self._futures and self._loop is loop:
            loop.remove_reader(self._engine.event_fd())
            self._loop = None

    def _drain(self) -> None:
        for ticket in self._engine.drain_notified():
            for future in self._futures.get(ticket, ()):
                if not future.done():
                    future.set_result(None)
