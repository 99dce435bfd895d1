"""The records of an open store by key: which the host cache holds, and which their owners hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from tierstore.cache.host_cache import HostCache
from tierstore.errors import StoreError
from tierstore.store.format import Group, Placement, RecordEntry, RecordSchema
from tierstore.store.optimizer import CachedRecord
from tierstore.store.slots import LiveRecord, SlotMap

__all__ = ["RecordInfo", "Records", "by_layer"]


@dataclass(frozen=True)
class RecordInfo:
    """What the store knows of a record without reading it; ``step``: optimizer steps that its content has had."""

    schema: RecordSchema
    layer: int
    step: int


class Records:
    """The registry: every record has a key, a number in the slot map and, if it is CACHED, one in the host cache."""

    def __init__(self, slots: SlotMap, cache: HostCache) -> None:
        self._slots = slots
        self._cache = cache
        self.cached: dict[str, CachedRecord] = {}
        #: Numbers in the slot map of DIRECT records.
        self.direct: dict[str, int] = {}
        #: How many leases hold each record.
        self.leased: Counter[str] = Counter()

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return sorted([*self.cached, *self.direct])

    def __contains__(self, key: str) -> bool:
        return key in self.cached or key in self.direct

    def live(self, key: str) -> LiveRecord:
        """The record's live index value. Raises KeyError."""
        return self.cached[key].live if key in self.cached else self._slots.records[self.direct[key]]

    def info(self, key: str) -> RecordInfo:
        """Raises KeyError."""
        live = self.live(key)
        return RecordInfo(self._slots.schemas[live.schema], live.layer, live.step)

    def schema_index(self, name: str) -> int:
        """The number of schema ``name``. Raises StoreError, naming those that there are."""
        for index, schema in enumerate(self._slots.schemas):
            if schema.name == name:
                return index
        known = ", ".join(schema.name for schema in self._slots.schemas)
        raise StoreError(f"unknown schema {name!r}; this store has: {known}")

    def counts(self, added: Iterable[int] = ()) -> Counter[str]:
        """How many records each schema has, by its name, with those ``added``, by its number."""
        schemas = [*(record.schema for record in self._slots.records), *added]
        return Counter(self._slots.schemas[schema].name for schema in schemas)

    def add(self, key: str, schema: int, layer: int, entry: RecordEntry | None = None) -> LiveRecord:
        """Adds a new record, or with ``entry`` one that the opened commit has."""
        live = self._slots.add_record(key, schema, layer, entry)
        number = len(self._slots.records) - 1
        shape = self._slots.schemas[schema]
        if shape.placement is Placement.DIRECT:
            self.direct[key] = number
            return live
        layouts = [shape.layout(group) for group in Group]
        cached = self._cache.add_record(
            layer,
            [[section.nbytes for section in layout.sections] for layout in layouts],
            [layout.slot_bytes for layout in layouts],
            backing_record=number,
            stored=entry is not None,
        )
        self.cached[key] = CachedRecord(cached, number, live)
        return live

    def remove_last(self) -> None:
        """Takes back the CACHED record that was added last and that no access has touched.

        Its number in the host cache is not used again.
        """
        del self.cached[self._slots.records.pop().key]


def by_layer(records: Iterable[CachedRecord]) -> list[tuple[int, list[CachedRecord]]]:
    """Records grouped by layer, both ascending: accesses are of one layer."""
    ordered = sorted(records, key=lambda record: (record.live.layer, record.number))
    return [(layer, list(group)) for layer, group in groupby(ordered, key=lambda record: record.live.layer)]
