"""The records of an open store, and accesses to them: what the trainer and ``ParameterStore`` stand on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.cache.host_cache import HostCache
from tierstore.errors import BudgetError, StoreError
from tierstore.store.adamw import AdamWConfig, StepHistory
from tierstore.store.committing import Committer
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.space import copies
from tierstore.store.failures import Failures
from tierstore.store.format import Group, Placement, RecordSchema
from tierstore.store.index.database import index_bytes
from tierstore.store.index.live import LiveRecord
from tierstore.store.opening import Parts
from tierstore.store.optimizer import CachedRecord, RecordOptimizer
from tierstore.units import format_bytes

__all__ = ["StoreRecords", "by_layer"]

_DIRTIES = Need.DIRTY_WEIGHTS | Need.DIRTY_MOMENTS


class StoreRecords:
    """An open store's records by key, and its host cache's accesses. One serialised caller."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.directory = parts.home.directory
        self.config = parts.config
        self.engine = parts.engine
        self.extents = parts.extents
        self.live = parts.live
        self.cache: HostCache = parts.cache
        self.history = StepHistory(parts.adamw)
        self.optimizer = RecordOptimizer(self.engine, self.cache, self.history)
        self._failures = Failures(self.directory, self.cache, self.live)
        self._committer = Committer(parts, self.history, self._failures)
        self._records: dict[str, CachedRecord] = {}
        self._direct: dict[str, LiveRecord] = {}
        self._space_reserved = False

    # Records ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return sorted([*self._records, *self._direct])

    def record(self, key: str) -> CachedRecord:
        """The cached record ``key``. Raises KeyError."""
        return self._records[key]

    def schema_of(self, key: str) -> RecordSchema:
        return self._live(key).schema

    def step_of(self, key: str) -> int:
        """Optimizer steps that the record's content has had applied."""
        return self._live(key).step

    def _live(self, key: str) -> LiveRecord:
        return self._records[key].live if key in self._records else self._direct[key]

    def _schema_index(self, name: str) -> int:
        for index, schema in enumerate(self.extents.schemas):
            if schema.name == name:
                return index
        known = ", ".join(schema.name for schema in self.extents.schemas)
        raise StoreError(f"unknown schema {name!r}; this store has: {known}")

    def _attach(self, live: LiveRecord, *, stored: bool) -> None:
        if live.schema.placement is Placement.DIRECT:
            self._direct[live.key] = live
            return
        layouts = [live.schema.layout(group) for group in Group]
        cached = self.cache.add_record(
            live.layer,
            [[section.nbytes for section in layout.sections] for layout in layouts],
            [layout.slot_bytes for layout in layouts],
            backing=live,
            stored=stored,
        )
        self._records[live.key] = CachedRecord(cached, live)

    # Space --------------------------------------------------------------------------------------------------

    def reserve(self, counts: Mapping[str, int] | None = None) -> None:
        """Reserves disk for the live records, their last commit and the retained snapshots: 2 + ``retain``
        copies.

        ``counts`` says how many records of each schema there will be; without it, as many as there are.
        Raises OSError (ENOSPC) naming the file and the bytes needed, with nothing changed but reservations. A
        store that was not asked to reserves when records are added, and before the first change after it was
        opened.
        """
        retain = max(self.config.retain, len(self._committer.snapshots))
        wanted = self.live.counts() | Counter(counts or {})
        self.extents.reserve(copies(retain), wanted)
        records = max(len(self.live.records), sum((counts or {}).values()))
        self._parts.index.reserve(index_bytes(records, retain))
        self._space_reserved = True

    # Accesses -----------------------------------------------------------------------------------------------

    def begin_access(
        self, phase: Phase, layer: int, numbers: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]
    ) -> int:
        """Opens an access of the host cache; returns its groups. A unit that cannot fit is a BudgetError."""
        self._failures.check()
        if not self._space_reserved and (flags & np.uint16(_DIRTIES)).any():
            self.reserve()
        try:
            return self.cache.begin_access(phase, layer, numbers, flags)
        except _native.CapacityError as error:
            raise BudgetError(f"host_budget: {error}") from error

    def access(
        self, phase: Phase, layer: int, records: Sequence[CachedRecord], need: Need
    ) -> Iterator[CachedRecord]:
        """Walks ``records`` of ``layer`` (ascending) as one atomic event; each is pinned while yielded.

        If they do not fit at once, those that are resident come first.
        """
        if not records:
            return
        numbers = np.array([record.number for record in records], np.uint32)
        groups = self.begin_access(phase, layer, numbers, np.full(len(records), need, np.uint16))
        for group in range(1, groups + 1):
            units = self.cache.next_group()
            try:
                for unit in units:
                    yield records[unit]
                    self.cache.end_unit(unit)
            except BaseException:
                if group < groups:
                    self._failures.poison("an access was left before its end")
                raise
            finally:
                self.cache.end_group()

    def wait(self, tickets: Sequence[int]) -> None:
        """Waits for engine tickets; checksum failures are raised naming key, section and file."""
        self._failures.wait(tickets)

    # What it is ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> Mapping[str, bytes]:
        """Small named state as of the last commit."""
        return self._committer.state

    @property
    def adamw(self) -> AdamWConfig:
        """The optimizer's hyperparameters, but for the learning rate."""
        return self.history.config

    @property
    def generation(self) -> int:
        """How many commits the store has had."""
        return self.live.generation

    @property
    def snapshots(self) -> list[str]:
        """Names of the retained snapshots, oldest first."""
        return list(self._committer.snapshots)

    def poison(self, reason: str) -> None:
        """The live state is no longer whole, says whoever was changing it: only the last commit counts from
        here on.
        """
        self._failures.poison(reason)

    def drives(self) -> list[DriveReport]:
        """What lies in each of the store's directories, and what each gave; the store's own first."""
        return self.extents.drive_reports()

    def end_trace(self) -> None:
        """Completes the recorded trace, if there is one; what follows is not part of it."""
        if self._parts.recording is not None:
            self._parts.recording.close()

    def describe(self) -> list[str]:
        """One line for each capability: what is in effect, and why where AUTO fell back."""
        engine, budget = self.engine, self._parts.arena.nbytes
        huge = self._parts.arena.huge_bytes
        if engine.backend == "pmem":
            reason = self.extents.map_sync_reason
            past_cache = "MAP_SYNC: " + (f"off, extents are synced by msync ({reason})" if reason else "on")
        else:
            reason = self.extents.direct_reason
            past_cache = "direct I/O: " + (f"off ({reason})" if reason else "on")
        return [
            f"I/O: {engine.backend}" + (f" ({engine.backend_reason})" if engine.backend_reason else ""),
            f"transfers: {self._parts.tuning}",
            past_cache,
            f"host cache: {format_bytes(budget)}, {format_bytes(huge)} of it in huge pages",
            *self._describe_drives(),
            self.extents.describe_discard(),
            *([] if self.extents.budget is None else [self.extents.budget.describe()]),
        ]

    def _describe_drives(self) -> list[str]:
        drives = self.drives()
        shares = ", ".join(f"{drive.path} {drive.share:.0%}" for drive in drives)
        return [f"drives: {shares} of new records"] if len(drives) > 1 else []

    def close(self) -> None:
        """Stops; what was not committed is gone. Safe to call twice, after a failure, and in a forked child,
        where it
        does nothing: the store goes on belonging to the process that opened it."""
        if not self._failures.closed:
            self._failures.closed = True
            if not self._failures.forked:
                self._parts.close()


def by_layer(records: Iterable[CachedRecord]) -> list[tuple[int, list[CachedRecord]]]:
    """Records grouped by layer, both ascending: accesses are of one layer."""
    ordered = sorted(records, key=lambda record: (record.live.layer, record.number))
    return [(layer, list(group)) for layer, group in groupby(ordered, key=lambda record: record.live.layer)]
