"""Filling a store: records written straight to disk from memory of the caller, past the host cache.

A new record's moments are zeros, and so is the remainder of a weight that was bf16. A slot that was never written reads as
zeros, for its blocks were allocated and not filled: such sections are not written at all. Where a slot has been in use,
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from tierstore import _native
from tierstore._native import Arena, Buffer, HugePages
from tierstore.errors import StoreError
from tierstore.store.core import StoreCore
from tierstore.store.format import SECTION_ALIGNMENT, GroupLayout
from tierstore.store.index.live import LiveRecord

_CHUNK = 1 << 20


class RecordLoader:
    """Adds records to an open store; space for them must have been reserved. Between commits, one caller."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._zeros: dict[int, Buffer] = {}
        for extents in core.extents:
            for group in extents.schema.groups:
                for extent in extents[group].extents:
                    extent.clear_holes()

    def add(self, key: str, schema: str, layer: int, sections: Sequence[Buffer | None]) -> list[int]:
        """Adds record ``key`` and queues its writes; ``sections`` are all that a commit holds of it, None for zeros.

        Their memory must not change until the tickets that are returned have finished. The record is up to date with the
        store's steps. Raises StoreError, with nothing changed.
        """
        core = self._core
        core.failures.check()
        number = core.records.schema_index(schema)
        if key in core.records:
            raise StoreError(f"record {key!r} exists already")
        shape = core.extents.schemas[number]
        layouts = [shape.layout(group) for group in shape.groups]
        sizes = [section.nbytes for layout in layouts for section in layout.sections]
        given = [None if section is None else section.nbytes for section in sections]
        if len(given) != len(sizes) or any(
            has not in (None, size) for has, size in zip(given, sizes, strict=True)
        ):
            raise StoreError(f"record {key!r}: sections of {given} bytes, expected {sizes}")
        live = core.records.add_stored(key, number, layer)
        live.step, live.changed = (core.history.applied if core.history.replays else 0), True
        tickets: list[int] = []
        for layout in layouts:
            first, count = layout.first_section, len(layout.sections)
            tickets += self._write(live, layout, sections[first : first + count])
        core.committer.writes += tickets
        return tickets

    def wait(self, tickets: Sequence[int]) -> None:
        """Waits for writes. Raises OSError."""
        self._core.wait(tickets)

    def _write(self, live: LiveRecord, layout: GroupLayout, sections: Sequence[Buffer | None]) -> list[int]:
        slot = live.extents[layout.group].allocate()
        live.slots[layout.group] = slot
        count = len(sections)
        if slot.extent.reads_as_zeros(slot.number):
            while count and sections[count - 1] is None:
                count -= 1
        for section, number in zip(
            layout.sections[count:], range(layout.first_section + count, 1 << 30), strict=False
        ):
            live.set_crc(number, _crc_of_zeros(section.nbytes))
        if not count:
            return []
        written = [
            self._zero(layout.sections[i].nbytes) if section is None else section
            for i, section in enumerate(sections[:count])
        ]
        return [live.write(layout.group, written, ())]

    def _zero(self, nbytes: int) -> Buffer:
        if nbytes not in self._zeros:
            size = -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
            self._zeros[nbytes] = Buffer(Arena(size, HugePages.AUTO), [(0, size)], nbytes)
        return self._zeros[nbytes]


@cache
def _crc_of_zeros(nbytes: int) -> int:
    zeros, crc = np.zeros(min(nbytes, _CHUNK), np.uint8), 0
    for start in range(0, nbytes, _CHUNK):
        crc = _native.crc32c(zeros[: nbytes - start], crc)
    return crc
