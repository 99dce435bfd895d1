"""Checksums over what records hold, wherever their bytes lie.

They change nothing: no cache decision, no record, no file. What is not resident is read into memory of its own, one
record's beside the host budget, and missed steps are replayed there and forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tierstore import _native
from tierstore._native import Buffer
from tierstore.store.format import COMMITTED_GROUPS, Group, GroupLayout
from tierstore.store.opening import scratch_buffers
from tierstore.store.optimizer import CachedRecord
from tierstore.store.records import StoreRecords

__all__ = ["cached_crc32c", "direct_crc32c"]


def cached_crc32c(store: StoreRecords, record: CachedRecord, crc: int) -> int:
    """``crc`` continued over a cached record's sections, caught up to the last applied step."""
    behind = store.optimizer.behind(record) > 0
    with contextlib.ExitStack() as stack:
        sections: list[Buffer] = []
        tickets: list[int] = []
        for group in COMMITTED_GROUPS:
            entry = record.entry(group)
            resident, ready = store.cache.sections(entry), store.cache.ready(entry)
            if resident and not behind:
                sections += resident
                tickets += ready
                continue
            scratch = stack.enter_context(scratch_buffers(_layout(store, record.slot_number, group)))
            sections += scratch
            if resident:
                copies = zip(scratch, resident, strict=True)
                tickets += [store.engine.copy(copy, source, after=ready) for copy, source in copies]
            else:
                tickets.append(_read(store, record.slot_number, group, scratch))
        if behind:
            tickets = [store.optimizer.replay_copy(record, sections, after=tickets)]
        store.wait(tickets)
        return _continued(sections, crc)


def direct_crc32c(store: StoreRecords, number: int, crc: int) -> int:
    """``crc`` continued over a DIRECT record's sections as they were last written through."""
    for group in COMMITTED_GROUPS:
        with scratch_buffers(_layout(store, number, group)) as sections:
            store.wait([_read(store, number, group, sections)])
            crc = _continued(sections, crc)
    return crc


def _layout(store: StoreRecords, number: int, group: Group) -> GroupLayout:
    return store.slots.schemas[store.slots.records[number].schema].layout(group)


def _read(store: StoreRecords, number: int, group: Group, sections: Sequence[Buffer]) -> int:
    return store.slots.read(number, group, sections, (), _native.Priority.DEMAND)


def _continued(sections: Sequence[Buffer], crc: int) -> int:
    for section in sections:
        for piece in section.arrays():
            crc = _native.crc32c(piece, crc)
    return crc
