"""Checksums over what records hold, wherever their bytes lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstore import _native
from tierstore.cache.host_cache import HostCache
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.opening import scratch_buffers
from tierstore.store.optimizer import CachedRecord
from tierstore.store.slots import SlotMap

__all__ = ["cached_crc32c", "stored_crc32c"]

Wait = Callable[[Sequence[int]], None]


def cached_crc32c(cache: HostCache, record: CachedRecord, crc: int, wait: Wait) -> int:
    """``crc`` continued over the sections of a record that is pinned in ``cache``."""
    for group in COMMITTED_GROUPS:
        entry = record.entry(group)
        wait(cache.ready(entry))
        for section in cache.sections(entry):
            for piece in section.arrays():
                crc = _native.crc32c(piece, crc)
    return crc


def stored_crc32c(slots: SlotMap, number: int, crc: int, wait: Wait) -> int:
    """``crc`` continued over the sections of record ``number`` of ``slots`` as they were last written."""
    schema = slots.schemas[slots.records[number].schema]
    for group in COMMITTED_GROUPS:
        with scratch_buffers(schema.layout(group)) as sections:
            wait([slots.read(number, group, sections, (), _native.Priority.DEMAND)])
            for section in sections:
                crc = _native.crc32c(section.array(), crc)
    return crc
