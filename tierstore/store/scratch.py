"""Memory of its own for the content of records, beside the host cache."""

from __future__ import annotations

from tierstore._native import Arena, Buffer, HugePages
from tierstore.store.format import GroupLayout


def scratch_buffers(layout: GroupLayout) -> list[Buffer]:
    """Memory for one slot of ``layout``, which lives as long as these do: one Buffer a section."""
    arena = Arena(layout.slot_bytes, HugePages.OFF)
    sections, offset = [], 0
    for section in layout.sections:
        sections.append(Buffer(arena, [(offset, section.padded_nbytes)], section.nbytes))
        offset += section.padded_nbytes
    return sections
