"""The records of an open store by key, held by the host cache or by their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tierstore.cache.host_cache import HostCache
from tierstore.errors import StoreError
from tierstore.store.adamw import StepHistory
from tierstore.store.config import StoreAccess
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.format import Group, Placement, RecordSchema
from tierstore.store.index.live import LiveIndex, LiveRecord
from tierstore.store.index.table import CommittedRecords
from tierstore.store.optimizer import replays


@dataclass(frozen=True)
class RecordInfo:
    """A record's properties, known without reading it. ``step``: optimizer steps applied to its content."""

    schema: RecordSchema
    layer: int
    step: int


class Records:
    """The registry of a store: its records by key, and whether the host cache holds them."""

    def __init__(
        self,
        live: LiveIndex,
        extents: StoreExtents,
        cache: HostCache,
        opened_to: StoreAccess = StoreAccess.WRITE,
    ) -> None:
        self._live = live
        self._opened_to = opened_to
        self._extents = extents
        self._cache = cache
        #: The number of leases on each record.
        self.leased: Counter[str] = Counter()

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return self._live.keys.ordered()

    def __len__(self) -> int:
        return len(self._live.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._live.keys

    def live(self, key: str) -> LiveRecord:
        """The record ``key``. Raises KeyError."""
        return self._live.record(key)

    def cached(self, key: str) -> LiveRecord:
        """The record ``key``, held by the host cache. Raises KeyError, also for an owner-held record."""
        record = self.live(key)
        if not record.cached:
            raise KeyError(key)
        return record

    def direct(self, key: str) -> LiveRecord:
        """The record ``key``, held by its owner. Raises KeyError, also for a record of the host cache."""
        record = self.live(key)
        if record.cached:
            raise KeyError(key)
        return record

    def info(self, key: str) -> RecordInfo:
        """Raises KeyError."""
        live = self.live(key)
        return RecordInfo(live.schema, live.layer, live.step)

    def schema_index(self, name: str) -> int:
        """The number of schema ``name``. Raises StoreError naming the existing schemas."""
        for index, schema in enumerate(self._extents.schemas):
            if schema.name == name:
                return index
        known = ", ".join(schema.name for schema in self._extents.schemas)
        raise StoreError(f"unknown schema {name!r}; this store has: {known}")

    def counts(self, added: Iterable[int] = ()) -> Counter[str]:
        """The number of records by schema name, including those ``added``, by schema number."""
        return self._live.counts() + Counter(self._extents.schemas[schema].name for schema in added)

    def trained_steps(self) -> npt.NDArray[np.int64]:
        """The steps of all trained records in the host cache."""
        return self._live.steps_of(
            [number for number, schema in enumerate(self._extents.schemas) if replays(schema)]
        )

    def load(self, table: CommittedRecords, history: StepHistory) -> None:
        """Loads the records of the opened commit, in the order of their keys. In a store opened to
        read, records with missed steps in ``history`` are read whole.
        """
        self._live.load(table)
        rows = table.rows
        schemas = self._extents.schemas
        cached = np.array([schema.placement is Placement.CACHED for schema in schemas])
        held = np.flatnonzero(cached[rows["schema"]])
        stepped = np.array([replays(schema) for schema in schemas])[rows["schema"]]
        reading = self._opened_to is StoreAccess.READ and history.replays
        missed = stepped & (rows["step"] < history.applied) & reading
        # Runs of similar records: the numbers in the host cache ascend with the keys.
        alike = 2 * rows["schema"].astype(np.int64) + missed
        begins = np.flatnonzero(np.diff(alike[held], prepend=-1))
        for run in np.split(held, begins[1:]):
            if len(run):
                schema = schemas[int(rows["schema"][run[0]])]
                layers = np.ascontiguousarray(rows["layer"][run])
                sections, charged = _sizes(schema)
                if missed[run[0]]:  # a read of the weights reads all groups
                    charged = [sum(charged[group] for group in schema.groups), *charged[1:]]
                first = self._cache.add_records(layers, sections, charged, stored=True)
                self._live.hold(run, first)

    def add(self, key: str, schema: int, layer: int, *, stored: bool = False) -> LiveRecord:
        """Adds a new record. ``stored``: the caller writes its content to its slots before anything reads it."""
        live = self._live.add_record(key, schema, layer)
        if live.schema.placement is Placement.CACHED:
            layers = np.array([live.layer], np.uint16)
            number = self._cache.add_records(layers, *_sizes(live.schema), stored=stored)
            self._live.hold(np.array([live.row]), number)
        return live

    def remove(self, key: str) -> None:
        """Removes the record that was added last, which is in the host cache and was never accessed.

        The host cache never reuses its number.
        """
        self._live.remove_last(self._live.record(key))


@cache
def _sizes(schema: RecordSchema) -> tuple[list[list[int]], list[int]]:
    """For each group, the bytes of its sections and of a slot."""
    layouts = [schema.layout(group) for group in Group]
    sections = [[section.nbytes for section in layout.sections] for layout in layouts]
    return sections, [layout.slot_bytes for layout in layouts]


def by_layer(records: Iterable[LiveRecord]) -> list[tuple[int, list[LiveRecord]]]:
    """Records grouped by layer, both ascending: accesses are of one layer."""
    ordered = sorted(records, key=lambda record: (record.layer, record.number))
    return [(layer, list(group)) for layer, group in groupby(ordered, key=lambda record: record.layer)]
