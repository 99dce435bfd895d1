"""The records of an open store by key: which the host cache holds, and which their owners hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from tierstore.cache.host_cache import HostCache
from tierstore.errors import StoreError
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.format import Group, Placement, RecordSchema
from tierstore.store.index.entries import RecordEntry
from tierstore.store.index.live import LiveIndex, LiveRecord
from tierstore.store.optimizer import CachedRecord


@dataclass(frozen=True)
class RecordInfo:
    """What the store knows of a record without reading it; ``step``: optimizer steps that its content has had."""

    schema: RecordSchema
    layer: int
    step: int


class Records:
    """The registry of a store: its records by key, and which of them the host cache holds."""

    def __init__(self, live: LiveIndex, extents: StoreExtents, cache: HostCache) -> None:
        self._live = live
        self._extents = extents
        self._cache = cache
        self.cached: dict[str, CachedRecord] = {}
        #: How many leases hold each record.
        self.leased: Counter[str] = Counter()

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return sorted(self._live.records)

    def __len__(self) -> int:
        return len(self._live.records)

    def __contains__(self, key: str) -> bool:
        return key in self._live.records

    def live(self, key: str) -> LiveRecord:
        """The record's live index value. Raises KeyError."""
        return self._live.records[key]

    def direct(self, key: str) -> LiveRecord:
        """The record ``key``, which its owner holds. Raises KeyError, also for one that the host cache holds."""
        if key in self.cached:
            raise KeyError(key)
        return self.live(key)

    def info(self, key: str) -> RecordInfo:
        """Raises KeyError."""
        live = self.live(key)
        return RecordInfo(live.schema, live.layer, live.step)

    def schema_index(self, name: str) -> int:
        """The number of schema ``name``. Raises StoreError, naming those that there are."""
        for index, schema in enumerate(self._extents.schemas):
            if schema.name == name:
                return index
        known = ", ".join(schema.name for schema in self._extents.schemas)
        raise StoreError(f"unknown schema {name!r}; this store has: {known}")

    def counts(self, added: Iterable[int] = ()) -> Counter[str]:
        """How many records each schema has, by its name, with those ``added``, by its number."""
        return self._live.counts() + Counter(self._extents.schemas[schema].name for schema in added)

    def add(self, key: str, schema: int, layer: int, entry: RecordEntry | None = None) -> LiveRecord:
        """Adds a new record, or with ``entry`` one that the opened commit has."""
        live = self._live.add_record(key, schema, layer, entry)
        return self._cached(live, stored=entry is not None)

    def add_stored(self, key: str, schema: int, layer: int) -> LiveRecord:
        """Adds a new record whose content the caller writes to its slots before anything reads it."""
        return self._cached(self._live.add_record(key, schema, layer), stored=True)

    def _cached(self, live: LiveRecord, *, stored: bool) -> LiveRecord:
        if live.schema.placement is Placement.DIRECT:
            return live
        layouts = [live.schema.layout(group) for group in Group]
        cached = self._cache.add_record(
            live.layer,
            [[section.nbytes for section in layout.sections] for layout in layouts],
            [layout.slot_bytes for layout in layouts],
            backing=live,
            stored=stored,
        )
        self.cached[live.key] = CachedRecord(cached, live)
        return live

    def remove(self, key: str) -> None:
        """Removes a record that the host cache holds and that no access has touched.

        Its number in the host cache is not used again.
        """
        del self.cached[key], self._live.records[key]


def by_layer(records: Iterable[CachedRecord]) -> list[tuple[int, list[CachedRecord]]]:
    """Records grouped by layer, both ascending: accesses are of one layer."""
    ordered = sorted(records, key=lambda record: (record.live.layer, record.number))
    return [(layer, list(group)) for layer, group in groupby(ordered, key=lambda record: record.live.layer)]
