"""Checksums over what records hold, wherever their bytes lie."""

from __future__ import annotations

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.index.live import LiveRecord
from tierstore.store.opening import scratch_buffers
from tierstore.store.optimizer import CachedRecord
from tierstore.store.records import StoreRecords

__all__ = ["cached_crc32c", "direct_crc32c"]


def cached_crc32c(store: StoreRecords, record: CachedRecord, crc: int) -> int:
    """``crc`` continued over a cached record's sections, caught up to the last applied step."""
    need = Need.STEP if store.optimizer.behind(record) else Need.WEIGHTS | Need.MOMENTS
    for _ in store.access(Phase.EXPORT, record.live.layer, [record], need):
        store.optimizer.catch_up(record)
        for group in COMMITTED_GROUPS:
            entry = record.entry(group)
            store.wait(store.cache.ready(entry))
            for section in store.cache.sections(entry):
                for piece in section.arrays():
                    crc = _native.crc32c(piece, crc)
    return crc


def direct_crc32c(store: StoreRecords, live: LiveRecord, crc: int) -> int:
    """``crc`` continued over a DIRECT record's sections as they were last written through."""
    for group in COMMITTED_GROUPS:
        with scratch_buffers(live.schema.layout(group)) as sections:
            store.wait([live.read(group, sections, (), _native.Priority.DEMAND)])
            for section in sections:
                crc = _native.crc32c(section.array(), crc)
    return crc
