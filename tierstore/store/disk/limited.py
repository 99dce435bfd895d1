"""Transfers at the speed of emulated links (see ``tierstore.links``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierstore._native import Activity, Buffer, CrcTable, Engine, File, Link, Priority
from tierstore.links import limited

__all__ = ["Transfer", "over_links"]


class Transfer(Protocol):
    """``Engine.read`` or ``Engine.write``, or either over links."""

    def __call__(
        self,
        file: File,
        offset: int,
        sections: Sequence[Buffer],
        crcs: CrcTable,
        first_crc: int,
        /,
        *,
        align: int,
        after: Sequence[int],
        priority: Priority,
    ) -> int: ...


def over_links(transfer: Transfer, engine: Engine, links: Sequence[Link], activity: Activity) -> Transfer:
    """``transfer``, a transfer of ``engine``, that also passes each of ``links``; without any it is itself."""

    def run(
        file: File,
        offset: int,
        sections: Sequence[Buffer],
        crcs: CrcTable,
        first_crc: int,
        /,
        *,
        align: int,
        after: Sequence[int],
        priority: Priority,
    ) -> int:
        ticket = transfer(
            file, offset, sections, crcs, first_crc, align=align, after=after, priority=priority
        )
        nbytes = sum(-(-section.nbytes // align) * align for section in sections)
        for link in links:
            ticket = limited(engine, link, ticket, nbytes, activity=activity, after=after, priority=priority)
        return ticket

    return run if links else transfer
