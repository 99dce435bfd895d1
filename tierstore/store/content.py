"""What records hold, wherever their bytes lie.

Reading it changes nothing: no cache decision, no record, no file. What is not resident is read into memory of its own, one
record's beside the host budget, and missed steps are replayed there and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstore._native import Buffer, Priority
from tierstore.cache.host_cache import HostCache
from tierstore.store.config import StoreAccess
from tierstore.store.index.live import LiveRecord
from tierstore.store.optimizer import CachedRecord, RecordOptimizer
from tierstore.store.scratch import scratch_buffers


def record_sections(
    live: LiveRecord,
    cached: CachedRecord | None,
    *,
    cache: HostCache,
    optimizer: RecordOptimizer,
    wait: Callable[[Sequence[int]], None],
    opened_to: StoreAccess,
) -> list[Buffer]:
    """The sections of ``live``, caught up to the last applied step: the cache's memory, or copies.

    ``cached`` is the record in ``cache``, None where the cache does not hold it. Raises ChecksumError, OSError.
    """
    behind = cached is not None and optimizer.behind(cached) > 0
    # A reader's cache holds caught-up weights of such a record; what is on disk is what must be replayed.
    held = None if behind and opened_to is StoreAccess.READ else cached
    sections: list[Buffer] = []
    tickets: list[int] = []
    for group in live.schema.groups:
        resident = () if held is None else cache.sections(held.entry(group))
        ready = cache.ready(held.entry(group)) if held is not None and resident else []
        if resident and not behind:
            sections += resident
            tickets += ready
            continue
        scratch = scratch_buffers(live.schema.layout(group))
        sections += scratch
        if resident:
            copies = zip(scratch, resident, strict=True)
            tickets += [cache.engine.copy(copy, source, after=ready) for copy, source in copies]
        else:
            tickets.append(live.read(group, scratch, (), Priority.DEMAND))
    if cached is not None and behind:
        tickets = [optimizer.replay_copy(cached, sections, after=tickets)]
    wait(tickets)
    return sections
