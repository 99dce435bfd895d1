"""``ParameterStore``: parameter states on disk, a budgeted part of them in memory, commits that cannot be
lost.

::

    schema, config = RecordSchema("expert", numel=1 << 20), StoreConfig(host_budget=64 << 20)
    with ParameterStore.create(path, [schema], config) as store:
        store.register("expert.0", "expert", weight=initial)
        store.commit()
        with store.fetch(["expert.0"]) as lease:
            y = x @ lease["expert.0"].view("weight").reshape(1024, 1024)
        store.update({"expert.0": gradient}, lr=1e-3)
        store.commit()

One serialised caller. ``commit`` is the only acknowledgement: a process killed at any instant reopens at its
last commit, whole. Failures of the operating system are ``OSError``; a failed write or sync poisons the
store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.cache.config import Scope
from tierstore.errors import BudgetError, StoreError
from tierstore.store import content, opening
from tierstore.store.adamw import AdamWConfig
from tierstore.store.awaiting import TicketAwaiter
from tierstore.store.committing import Keep
from tierstore.store.config import StoreConfig
from tierstore.store.fetching import Lease, RecordView
from tierstore.store.format import COMMITTED_GROUPS, Group, RecordSchema, WeightFormat, check_name
from tierstore.store.optimizer import CachedRecord
from tierstore.store.records import StoreRecords, by_layer
from tierstore.store.verify import VerifyReport, verify_tables

__all__ = ["NewRecord", "ParameterStore", "verify_store"]

_NEED = {Group.WEIGHTS: Need.WEIGHTS, Group.MOMENTS: Need.MOMENTS}


@dataclass(frozen=True)
class NewRecord:
    """A record to register; ``weight`` makes its initial weights (float32 [numel]), or None for zeros.

    A record that comes from another store has ``sections`` instead: what makes all of them, in the schema's order,
    as they were after ``step`` optimizer steps.
    """

    key: str
    schema: str
    layer: int = 0
    weight: Callable[[], npt.NDArray[np.float32] | None] = lambda: None
    sections: Callable[[], Sequence[npt.NDArray[np.generic]]] | None = None
    step: int | None = None


class ParameterStore(StoreRecords):
    """An open store; made by ``create`` or ``open``, closed by ``close`` or as a context manager."""

    def __init__(self, parts: opening.Parts) -> None:
        super().__init__(parts)
        self._awaiter = TicketAwaiter(self.engine)
        self._leased: Counter[str] = Counter()

    # Opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directory: Path | str,
        schemas: Sequence[RecordSchema],
        config: StoreConfig | None = None,
        *,
        adamw: AdamWConfig | None = None,
        trace: Path | None = None,
        io_log: Path | None = None,
    ) -> ParameterStore:
        """A new store in ``directory`` (made if missing), holding records of ``schemas``; a store once it has
        a commit.

        ``trace`` records every residency decision's input; ``io_log`` every write and sync (for crash
        replay). Raises StoreExistsError, ConfigError, BudgetError, OSError; on failure nothing is left
        behind.
        """
        config, adamw = config or StoreConfig(), adamw or AdamWConfig()
        return cls(opening.create(Path(directory), schemas, config, adamw, trace, io_log))

    @classmethod
    def open(
        cls,
        directory: Path | str,
        config: StoreConfig | None = None,
        *,
        adamw: AdamWConfig | None = None,
        at: opening.OpenAt = opening.OpenAt.LAST,
        trace: Path | None = None,
        io_log: Path | None = None,
    ) -> ParameterStore:
        """The store in ``directory`` as of its last commit, or of the one before a prepared one, which is
        then undone.

        ``adamw`` may differ from the last time but in ``inactive``, which None takes from the store. Raises
        StoreMissingError, StoreInUseError, StoreFormatError, BudgetError, OSError.
        """
        store = cls(opening.open_existing(Path(directory), config or StoreConfig(), adamw, at, trace, io_log))
        try:
            for key, entry in store._committer.load().items():
                store._attach(store.slots.add_record(key, entry.schema, entry.layer, entry), stored=True)
        except BaseException:
            store.close()
            raise
        return store

    # Registering --------------------------------------------------------------------------------------------

    def register(
        self,
        key: str,
        schema: str,
        *,
        layer: int = 0,
        weight: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Adds a record with ``weight`` (float32 [numel], zeros if None) and zero moments.

        It is durable after the next commit. Raises StoreError for a key that exists, ValueError for a wrong
        shape or name, OSError (ENOSPC), each with nothing changed.
        """
        self.register_many([NewRecord(key, schema, layer, lambda: weight)])

    def register_many(self, records: Iterable[NewRecord]) -> None:
        """``register`` for many records, whose weights are made one by one; those before a failure stay."""
        self._failures.check()
        records = list(records)
        schemas = self._check_new(records)
        needed = Counter(record.schema for record in self.slots.records) + Counter(schemas)
        self.reserve({self.slots.schemas[schema].name: count for schema, count in needed.items()})
        for new, schema in zip(records, schemas, strict=True):
            live = self.slots.add_record(new.key, schema, new.layer)
            # A new record is up to date; where missed steps are dropped each counts its own, from nothing.
            fresh = self.history.applied if self.history.replays else 0
            live.step = fresh if new.step is None else new.step
            self._attach(live, stored=False)
        unfilled = [new for new in records if new.key in self._records]
        try:
            while unfilled:
                self._fill(self._records[unfilled[0].key], unfilled[0])
                unfilled.pop(0)
        except BaseException:
            for new in unfilled:
                del self._records[new.key]
            raise

    def _check_new(self, records: Sequence[NewRecord]) -> list[int]:
        """Schema numbers of ``records``. Raises StoreError or ValueError before anything changes."""
        known = {*self._records, *self._direct}
        for new in records:
            check_name("record", new.key)
            if new.key in known:
                raise StoreError(f"record {new.key!r} exists already")
            known.add(new.key)
            layers = self.config.layers
            if self.config.cache.scope is Scope.LAYER and new.layer not in layers:
                raise ValueError(
                    f"record {new.key!r}: layer {new.layer} has no quota; StoreConfig.layers is {layers}"
                )
            if not 0 <= new.layer <= 0xFFFF:
                raise ValueError(f"record {new.key!r}: expected a layer from 0 to 65535, got {new.layer}")
        return [self._schema_index(new.schema) for new in records]

    def _content(self, new: NewRecord) -> list[npt.NDArray[np.generic]]:
        """The leading sections of a new record; those that are not there begin as zeros."""
        shape = self.slots.schemas[self._schema_index(new.schema)]
        if new.sections is not None:
            parts = [np.ascontiguousarray(part) for part in new.sections()]
            layout = [section for group in COMMITTED_GROUPS for section in shape.layout(group).sections]
            sizes = [section.nbytes for section in layout]
            if [part.nbytes for part in parts] != sizes:
                raise ValueError(
                    f"record {new.key!r}: sections of {[part.nbytes for part in parts]} bytes, expected {sizes}"
                )
            return parts
        weight = new.weight()
        values = np.zeros(shape.numel, np.float32) if weight is None else weight
        _check_array(f"record {new.key!r}: weight", values, shape.numel)
        if shape.weight_format is not WeightFormat.SPLIT_BF16:
            return [np.ascontiguousarray(values)]
        high, low = np.empty(shape.numel, np.uint16), np.empty(shape.numel, np.int16)
        _native.split_bf16(high, low, np.ascontiguousarray(values))
        return [high, low]

    def _fill(self, record: CachedRecord, new: NewRecord) -> None:
        parts = self._content(new)
        for _ in self.access(Phase.INIT, record.live.layer, [record], Need.STEP):
            try:
                moments = record.entry(Group.MOMENTS)
                sections = [*self.cache.sections(record.entry(Group.WEIGHTS)), *self.cache.sections(moments)]
                for group in COMMITTED_GROUPS:
                    self.wait(self.cache.before_write(record.entry(group)))
                    self.cache.wrote(record.entry(group), 0)
                for section, part in zip(sections, parts, strict=False):
                    section.copy_from(part.view(np.uint8))
                for section in sections[len(parts) :]:
                    self.cache.wrote(moments, self.engine.fill_zero(section, after=self.cache.ready(moments)))
            except BaseException as error:
                self._failures.poison(f"registering {record.live.key!r} was interrupted: {error}")
                raise

    def reserve_scratch(self, schema: str) -> None:
        """Reserves disk to spill one gradient of each record of ``schema``. Raises OSError (ENOSPC)."""
        self.slots.reserve_scratch(self._schema_index(schema))

    # Fetching -----------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> Lease:
        """Pins ``keys`` with ``groups`` in memory and waits for them; a context manager that releases them.

        Weights are caught up with the optimizer first. Raises KeyError, BudgetError (the set does not fit at
        once), ChecksumError naming key, section and file, OSError.
        """
        lease = self._begin_fetch(keys, groups)
        try:
            self.wait(lease.tickets)
        except BaseException:
            lease.release()
            raise
        return lease

    async def fetch_async(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> Lease:
        """``fetch``, awaited: decisions are made now, the waiting yields to the event loop."""
        lease = self._begin_fetch(keys, groups)
        try:
            with self._failures.translated():
                await self._awaiter.wait(lease.tickets)
        except BaseException:
            lease.release()
            raise
        return lease

    def _begin_fetch(self, keys: Sequence[str], groups: Sequence[Group]) -> Lease:
        self._failures.check()
        wanted = [self._records[key] for key in dict.fromkeys(keys)]
        views: dict[str, RecordView] = {}
        tickets: list[int] = []
        pinned: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]] = []

        def unpin() -> None:
            for numbers, flags in pinned:
                self.cache.unpin(numbers, flags)

        def release() -> None:
            self._leased.subtract(list(views))
            unpin()

        try:
            for layer, records in by_layer(wanted):
                numbers, flags = self._needs(records, groups)
                self._fetch_layer(layer, records, numbers, flags)
                pinned.append((numbers, flags))
                for record in records:
                    sections = {Group(g): self.cache.sections(record.entry(g)) for g in groups}
                    views[record.live.key] = RecordView(self.slots.schemas[record.live.schema], sections)
                    tickets += [ticket for g in groups for ticket in self.cache.ready(record.entry(g))]
        except BaseException:
            unpin()
            raise
        self._leased.update(list(views))
        return Lease(views, tickets, release)

    def _fetch_layer(
        self,
        layer: int,
        records: Sequence[CachedRecord],
        numbers: npt.NDArray[np.uint32],
        flags: npt.NDArray[np.uint16],
    ) -> None:
        """One access that catches ``records`` up and leaves them pinned. Raises BudgetError if it takes
        several groups.
        """
        count = self.begin_access(Phase.USER, layer, numbers, flags)
        for _ in range(count):
            for unit in self.cache.next_group():
                self.optimizer.catch_up(records[unit])
            if count == 1:
                self.cache.pin(numbers, flags)
            self.cache.end_group()
        if count > 1:
            raise BudgetError(
                f"host_budget: {len(records)} records do not fit at once; fetch fewer, or in {count} parts"
            )

    def _needs(
        self, records: Sequence[CachedRecord], groups: Sequence[Group]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        base = Need(0)
        for group in groups:
            base |= _NEED[Group(group)]
        flags = [base | (Need.STEP if self.optimizer.behind(record) else Need(0)) for record in records]
        return np.array([record.number for record in records], np.uint32), np.array(flags, np.uint16)

    def release(self, lease: Lease) -> None:
        """Unpins what ``lease`` holds; its views must not be used any more."""
        lease.release()

    def prefetch(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> int:
        """Starts to bring ``keys`` in, within the ``lookahead`` budget; returns how many are covered."""
        self._failures.check()
        covered = 0
        for layer, records in by_layer(self._records[key] for key in dict.fromkeys(keys)):
            numbers, flags = self._needs(records, groups)
            taken = self.cache.prefetch(self.history.applied, Phase.USER, layer, numbers, flags)
            covered += taken
            if taken < len(records):
                break
        return covered

    # Updating -----------------------------------------------------------------------------------------------

    def update(self, gradients: Mapping[str, npt.NDArray[np.float32]], *, lr: float) -> None:
        """One AdamW step of the whole store: records in ``gradients`` (float32 [numel]) are stepped now, the
        others as ``inactive`` says. Queued when this returns; ``fetch`` waits for what it needs.

        Each gradient is copied into the host budget while its record is there. Raises KeyError, ValueError,
        StoreError (a record is leased), OSError (ENOSPC) and BudgetError with nothing changed; when it is
        interrupted later the store is poisoned.
        """
        self._begin_update(gradients, lr)

    async def update_async(self, gradients: Mapping[str, npt.NDArray[np.float32]], *, lr: float) -> None:
        """``update``, then awaits the steps. Cancelling stops the waiting, not the update."""
        tickets = self._begin_update(gradients, lr)
        with self._failures.translated():
            await self._awaiter.wait(tickets)

    def _begin_update(self, gradients: Mapping[str, npt.NDArray[np.float32]], lr: float) -> list[int]:
        self._failures.check()
        records = [self._records[key] for key in gradients]
        for record in records:
            key = record.live.key
            _check_array(f"record {key!r}: gradient", gradients[key], self.schema_of(key).numel)
            if self._leased[key]:
                raise StoreError(f"update: record {key!r} is leased; release it first")
        if records and not self._space_reserved:
            self.reserve()  # a full disk is found out while nothing has changed
        tickets: list[int] = []
        self.history.begin(lr)
        try:
            for layer, group in by_layer(records):
                for record in self.access(Phase.OPTIMIZER, layer, group, Need.STEP_SPILLED):
                    tickets.append(self._step(record, gradients[record.live.key]))
        except BaseException as error:
            self.history.abandon()
            if tickets or not isinstance(error, BudgetError):
                self._failures.poison(f"an update was interrupted: {error}")
            raise
        self.history.finish()
        self.cache.end_step(self.history.applied)
        return tickets

    def _step(self, record: CachedRecord, gradient: npt.NDArray[np.float32]) -> int:
        entry = record.entry(Group.GRADIENTS)
        self.wait(self.cache.before_write(entry))  # for the last owners of its frames
        staged = self.cache.sections(entry)[0]
        staged.copy_from(np.ascontiguousarray(gradient).view(np.uint8))
        self.cache.wrote(entry, 0)
        ticket = self.optimizer.step(record, staged)
        self.cache.reads(entry, ticket)
        return ticket

    # Records that their owner holds -------------------------------------------------------------------------

    def write_through(
        self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]], *, step: int
    ) -> list[int]:
        """Queues the write of a DIRECT record from the owner's memory, which must not change until
        ``commit``, or until the tickets that are returned have been waited for.
        """
        self._failures.check()
        if not self._space_reserved:
            self.reserve()
        number = self._direct[key]
        tickets = [self.slots.write(number, group, sections, ()) for group, sections in groups.items()]
        self._committer.writes += tickets
        self.slots.records[number].step = step
        self.slots.touch(number)
        return tickets

    def read_through(self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]]) -> None:
        """Reads a DIRECT record into the owner's memory and waits for it."""
        self._failures.check()
        number = self._direct[key]
        self.wait(
            [
                self.slots.read(number, group, sections, (), _native.Priority.DEMAND)
                for group, sections in groups.items()
            ]
        )

    # Commits ------------------------------------------------------------------------------------------------

    def commit(self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None) -> int:
        """Makes everything so far durable, with ``state`` merged into the named state; returns the
        generation.

        With ``snapshot`` the commit is also kept under that name; the oldest snapshots beyond ``retain`` are
        let go. When this returns the commit is acknowledged. StoreError and ValueError leave all as it was (a
        lease holds what must be written, say); after any other error the store is poisoned, and reopens at
        this commit or the one before.
        """
        self._failures.check()
        reached = [record.live.step for record in self._records.values()]
        return self._committer.commit(reached, state or {}, snapshot, Keep.NOTHING)

    def prepare(self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None) -> int:
        """``commit``, keeping the one before until ``acknowledge``: the local half of a commit of several
        ranks.

        Until then ``open(at=OpenAt.PREVIOUS)`` goes back to it. It takes no more space than a commit does, for
        nothing may be written before the acknowledgement.
        """
        self._failures.check()
        reached = [record.live.step for record in self._records.values()]
        return self._committer.commit(reached, state or {}, snapshot, Keep.PREVIOUS)

    def acknowledge(self) -> None:
        """Every rank has its prepared commit: the one before it is let go, durably."""
        self._failures.check()
        self._committer.acknowledge()

    async def commit_async(
        self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None
    ) -> int:
        """``commit``, awaiting the write-backs; only the syncs and the index transaction block the loop."""
        self._failures.check()
        self._committer.check(state or {}, snapshot)
        self._committer.write_back()
        with self._failures.translated():
            await self._awaiter.wait(list(self._committer.writes))
        return self.commit(state, snapshot=snapshot)

    def snapshot(self, name: str, state: Mapping[str, bytes] | None = None) -> int:
        """``commit`` kept under ``name``. It costs the dirty bytes, not a copy of the store."""
        return self.commit(state, snapshot=name)

    # Content ------------------------------------------------------------------------------------------------

    def records_crc32c(self, progress: Callable[[int, int], None] | None = None) -> int:
        """CRC-32C over every record's content in key order, caught up to the last applied step.

        Two stores with equal content have equal values, wherever their bytes lie. It reads what is not resident, and
        changes nothing. ``progress`` is called with the records done and in all. Raises ChecksumError, OSError.
        """
        self._failures.check()
        crc, keys = 0, self.keys
        for done, key in enumerate(keys, start=1):
            if key in self._direct:
                crc = content.direct_crc32c(self, self._direct[key], crc)
            else:
                crc = content.cached_crc32c(self, self._records[key], crc)
            if progress is not None:
                progress(done, len(keys))
        return crc

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Reads every section of the last commit and of the snapshots and checks it; see ``verify_store``."""
        self._failures.check()
        return verify_tables(self.slots, self.engine, self._committer.tables(), progress)

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_array(what: str, array: npt.NDArray[np.float32], numel: int) -> None:
    if array.shape != (numel,) or array.dtype != np.float32:
        raise ValueError(f"{what} is {array.dtype} {array.shape}, expected float32 ({numel},)")


def verify_store(directory: Path, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Verifies the store in ``directory``; ``progress`` is told groups done and groups in all.

    Raises StoreMissingError, StoreInUseError, StoreFormatError (a truncated file, say).
    """
    budget = opening.minimum_host_budget(opening.read_schemas(directory))
    with ParameterStore.open(directory, StoreConfig(host_budget=budget)) as store:
        return store.verify(progress)
