"""Transfers at the speed of emulated links (see ``tierstore.links``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from tierstore._native import Activity, Buffer, Engine, File, Link, Priority
from tierstore.links import limited

#: ``Engine.read`` or ``Engine.write``.
Transfer = TypeVar("Transfer", bound=Callable[..., int])


def over_links(transfer: Transfer, engine: Engine, links: Sequence[Link], activity: Activity) -> Transfer:
    """``transfer``, a method of ``engine``, that also passes each of ``links``; without any it is itself."""

    def run(
        file: File,
        offset: int,
        sections: Sequence[Buffer],
        *checksums: object,
        align: int,
        after: Sequence[int],
        priority: Priority,
    ) -> int:
        ticket = transfer(file, offset, sections, *checksums, align=align, after=after, priority=priority)
        nbytes = sum(-(-section.nbytes // align) * align for section in sections)
        for link in links:
            ticket = limited(engine, link, ticket, nbytes, activity=activity, after=after, priority=priority)
        return ticket

    return cast(Transfer, run) if links else transfer
