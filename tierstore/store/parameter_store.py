"""``ParameterStore``: parameter states on disk, a budgeted part of them in memory, commits that cannot be lost.

::

    with ParameterStore.create(path, [RecordSchema("expert", numel=1 << 20)], StoreConfig(host_budget=64 << 20)) as store:
        store.register("expert.0", "expert", weight=initial)
        store.commit()
        with store.fetch(["expert.0"]) as lease:
            y = x @ lease["expert.0"].view("weight").reshape(1024, 1024)
        store.update({"expert.0": gradient}, lr=1e-3)
        store.commit()

One serialised caller. ``commit`` is the only acknowledgement: a process killed at any instant reopens at its last
commit, whole. Failures of the operating system are ``OSError``; a failed write or sync poisons the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.cache.host_cache import HostCache
from tierstore.errors import (
    BudgetError,
    ChecksumError,
    StoreError,
    StoreExistsError,
    StorePoisonedError,
)
from tierstore.store import opening
from tierstore.store.adamw import AdamWConfig, StepHistory
from tierstore.store.awaiting import TicketAwaiter
from tierstore.store.config import StoreConfig
from tierstore.store.fetching import Lease, RecordView
from tierstore.store.format import COMMITTED_GROUPS, Group, Placement, RecordEntry, RecordSchema, WeightFormat
from tierstore.store.index import Commit
from tierstore.store.optimizer import CachedRecord, RecordOptimizer
from tierstore.store.slots import LiveRecord

__all__ = ["NewRecord", "ParameterStore"]

_HISTORY = "adamw-history"
_NEED = {Group.WEIGHTS: Need.WEIGHTS, Group.MOMENTS: Need.MOMENTS}


@dataclass(frozen=True)
class NewRecord:
    """A record to register; ``weight`` makes its initial weights (float32 [numel]), or None for zeros."""

    key: str
    schema: str
    layer: int = 0
    weight: Callable[[], npt.NDArray[np.float32] | None] = lambda: None


class ParameterStore:
    """An open store; made by ``create`` or ``open``, closed by ``close`` or as a context manager."""

    def __init__(self, parts: opening.Parts) -> None:
        self._parts = parts
        self.directory = parts.directory
        self.config = parts.config
        self.engine = parts.engine
        self.slots = parts.slots
        self.cache: HostCache = parts.cache
        self.history = StepHistory(parts.adamw)
        self.optimizer = RecordOptimizer(self.engine, self.cache, self.slots, self.history)
        self._awaiter = TicketAwaiter(self.engine)
        self._records: dict[str, CachedRecord] = {}
        self._direct: dict[str, int] = {}
        self._direct_writes: list[int] = []
        self._committed: dict[str, RecordEntry] = {}
        self._snapshots: dict[str, Commit] = {}
        self._state: dict[str, bytes] = {}
        self._poison: str | None = None
        self._closed = False

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
        """A new store in ``directory`` (made if missing), holding records of ``schemas``.

        ``trace`` records every residency decision's input; ``io_log`` every write and sync (for crash replay).
        Raises StoreExistsError, BudgetError, OSError; on failure nothing is left behind.
        """
        path = Path(directory)
        if (path / opening.IDENTITY).exists():
            raise StoreExistsError(f"{path}: there is a store here already")
        parts = opening.create(path, schemas, config or StoreConfig(), adamw or AdamWConfig(), trace, io_log)
        return cls(parts)

    @classmethod
    def open(
        cls,
        directory: Path | str,
        config: StoreConfig | None = None,
        *,
        adamw: AdamWConfig | None = None,
        trace: Path | None = None,
        io_log: Path | None = None,
    ) -> ParameterStore:
        """The store in ``directory`` as of its last commit.

        Raises StoreMissingError, StoreInUseError, StoreFormatError, BudgetError, OSError.
        """
        parts = opening.open_existing(
            Path(directory), config or StoreConfig(), adamw or AdamWConfig(), trace, io_log
        )
        store = cls(parts)
        try:
            store._load()
        except BaseException:
            store.close()
            raise
        return store

    def _load(self) -> None:
        commit = self._parts.index.read_commit()
        self.slots.generation = commit.generation
        self._state = dict(commit.state)
        for key, entry in commit.records.items():
            self._attach(self.slots.add_record(key, entry.schema, entry.layer, entry), stored=True)
        self._committed = commit.records
        self.slots.retain(commit.records.values())
        for name in self._parts.index.snapshots():
            self._snapshots[name] = self._parts.index.read_commit(name)
            self.slots.retain(self._snapshots[name].records.values())
        self.slots.adopt_free_slots()
        if _HISTORY in self._state:
            self.history.unpack(self._state[_HISTORY])

    # Records ------------------------------------------------------------------------------------------------

    def register(
        self,
        key: str,
        schema: str,
        *,
        layer: int = 0,
        weight: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Adds a record with ``weight`` (float32 [numel], zeros if None) and zero moments.

        It is durable after the next commit. Raises StoreError for a key that exists, ValueError for a wrong shape.
        """
        self.register_many([NewRecord(key, schema, layer, lambda: weight)])

    def register_many(self, records: Iterable[NewRecord]) -> None:
        """``register`` for many records, whose weights are made one at a time."""
        self._check_open()
        added = []
        for new in records:
            if new.key in self._records or new.key in self._direct:
                raise StoreError(f"record {new.key!r} exists already")
            live = self.slots.add_record(new.key, self._schema_index(new.schema), new.layer)
            live.step = self.history.applied
            self._attach(live, stored=False)
            added.append(new)
        for new in added:
            if new.key in self._records:
                record = self._records[new.key]
                shape = self.slots.schemas[record.live.schema]
                weight = new.weight()
                if weight is not None and weight.shape != (shape.numel,):
                    raise ValueError(
                        f"record {new.key!r}: weight has shape {weight.shape}, expected ({shape.numel},)"
                    )
                self._fill(record, shape, weight)

    def _schema_index(self, name: str) -> int:
        for index, schema in enumerate(self.slots.schemas):
            if schema.name == name:
                return index
        known = ", ".join(schema.name for schema in self.slots.schemas)
        raise StoreError(f"unknown schema {name!r}; this store has: {known}")

    def _attach(self, live: LiveRecord, *, stored: bool) -> None:
        number = len(self.slots.records) - 1
        schema = self.slots.schemas[live.schema]
        if schema.placement is Placement.DIRECT:
            self._direct[live.key] = number
            return
        layouts = [schema.layout(group) for group in Group]
        cached = self.cache.add_record(
            live.layer,
            [[section.nbytes for section in layout.sections] for layout in layouts],
            [layout.slot_bytes for layout in layouts],
            backing_record=number,
            stored=stored,
        )
        self._records[live.key] = CachedRecord(cached, number, live)

    def _fill(self, record: CachedRecord, shape: RecordSchema, weight: npt.NDArray[np.float32] | None) -> None:
        for _ in self.access(Phase.INIT, record.live.layer, [record], Need.STEP):
            weights = self.cache.sections(record.entry(Group.WEIGHTS))
            moments = self.cache.sections(record.entry(Group.MOMENTS))
            values = np.zeros(shape.numel, np.float32) if weight is None else np.ascontiguousarray(weight)
            parts: list[npt.NDArray[np.generic]] = [values]
            if shape.weight_format is WeightFormat.SPLIT_BF16:
                high, low = np.empty(shape.numel, np.uint16), np.empty(shape.numel, np.int16)
                _native.split_bf16(high, low, values)
                parts = [high, low]
            for group in COMMITTED_GROUPS:
                entry = record.entry(group)
                self.engine.wait_all(self.cache.before_write(entry))
                self.cache.wrote(entry, 0)
            for section, part in zip((*weights, *moments[:-2]), parts, strict=True):
                section.copy_from(part.view(np.uint8))
            zeroed = self.engine.barrier([self.engine.fill_zero(section) for section in moments[-2:]])
            self.cache.wrote(record.entry(Group.MOMENTS), zeroed)

    def reserve(self, counts: Mapping[str, int] | None = None) -> None:
        """Reserves disk for the live records, their last commit and the retained snapshots.

        ``counts`` says how many records of each schema there will be; without it, as many as there are. Raises
        OSError (ENOSPC) naming the file and the bytes needed, with nothing changed but reservations.
        """
        self.slots.reserve(2 + self.config.retain, counts or {})

    def reserve_scratch(self, schema: str) -> None:
        """Reserves disk to spill one gradient of each record of ``schema``. Raises OSError (ENOSPC)."""
        self.slots.reserve_scratch(self._schema_index(schema))

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return sorted([*self._records, *self._direct])

    def schema_of(self, key: str) -> RecordSchema:
        return self.slots.schemas[self._live(key).schema]

    def step_of(self, key: str) -> int:
        """Optimizer steps that the record's content has had applied."""
        return self._live(key).step

    def record(self, key: str) -> CachedRecord:
        """The cached record ``key``. Raises KeyError."""
        return self._records[key]

    def _live(self, key: str) -> LiveRecord:
        if key in self._records:
            return self._records[key].live
        return self.slots.records[self._direct[key]]

    # Fetching -----------------------------------------------------------------------------------------------

    def begin_access(
        self, phase: Phase, layer: int, numbers: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]
    ) -> int:
        """Opens an access of the host cache; returns its groups. A unit that cannot fit is a BudgetError."""
        try:
            return self.cache.begin_access(self.history.applied, phase, layer, numbers, flags)
        except _native.CapacityError as error:
            raise BudgetError(f"host_budget: {error}") from error

    def access(
        self, phase: Phase, layer: int, records: Sequence[CachedRecord], need: Need
    ) -> Iterator[CachedRecord]:
        """Walks ``records`` of ``layer`` (ascending) as one atomic event; each is pinned while it is yielded."""
        if not records:
            return
        numbers = np.array([record.number for record in records], np.uint32)
        groups = self.begin_access(phase, layer, numbers, np.full(len(records), need, np.uint16))
        for _ in range(groups):
            plan = self.cache.next_group()
            for unit in range(plan.begin, plan.end):
                yield records[unit]
                self.cache.end_unit(unit)
            self.cache.end_group()

    def fetch(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> Lease:
        """Pins ``keys`` with ``groups`` in memory and waits for them; a context manager that releases them.

        Weights are caught up with the optimizer first. Raises KeyError, BudgetError (the set does not fit at once),
        ChecksumError naming key, section and file, OSError.
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
            with self._translated():
                await self._awaiter.wait(lease.tickets)
        except BaseException:
            lease.release()
            raise
        return lease

    def _begin_fetch(self, keys: Sequence[str], groups: Sequence[Group]) -> Lease:
        self._check_open()
        records = sorted((self._records[key] for key in dict.fromkeys(keys)), key=lambda r: r.number)
        numbers, flags = self._needs(records, groups)
        count = self.begin_access(Phase.USER, 0, numbers, flags)
        views, tickets = {}, []
        for _ in range(count):
            plan = self.cache.next_group()
            for record in records[plan.begin : plan.end] if count == 1 else []:
                self.optimizer.catch_up(record)
                sections = {group: self.cache.sections(record.entry(group)) for group in groups}
                views[record.live.key] = RecordView(self.slots.schemas[record.live.schema], sections)
                tickets += [ticket for group in groups for ticket in self.cache.ready(record.entry(group))]
            if count == 1:
                self.cache.pin(numbers, flags)
            self.cache.end_group()
        if count > 1:
            raise BudgetError(
                f"host_budget: {len(records)} records do not fit at once; fetch fewer, or in {count} parts"
            )
        return Lease(views, tickets, lambda: self.cache.unpin(numbers, flags))

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
        self._check_open()
        records = sorted((self._records[key] for key in keys), key=lambda record: record.number)
        numbers, flags = self._needs(records, groups)
        return self.cache.prefetch(self.history.applied, Phase.USER, 0, numbers, flags)

    # Updating -----------------------------------------------------------------------------------------------

    def update(self, gradients: Mapping[str, npt.NDArray[np.float32]], *, lr: float) -> None:
        """One AdamW step of the whole store: records in ``gradients`` (float32 [numel]) are stepped now, the others
        as ``inactive`` says. Queued when this returns; ``fetch`` waits for what it needs."""
        self._check_open()
        self.history.begin(lr)
        try:
            for layer, records in _by_layer(self._records[key] for key in gradients):
                for record in self.access(Phase.OPTIMIZER, layer, records, Need.STEP):
                    self._step_from(record, gradients[record.live.key])
        except BaseException:
            self._poison = self._poison or "an update was interrupted"
            raise
        self.history.finish()
        self.cache.end_step(self.history.applied)

    def _step_from(self, record: CachedRecord, gradient: npt.NDArray[np.float32]) -> None:
        schema = self.slots.schemas[record.live.schema]
        if gradient.shape != (schema.numel,):
            raise ValueError(f"{record.live.key}: gradient has shape {gradient.shape}, expected ({schema.numel},)")
        values = np.ascontiguousarray(gradient, np.float32)
        arena = _native.Arena(-(-values.nbytes // 4096) * 4096, _native.HugePages.OFF)
        staged = _native.Buffer(arena, [(0, arena.nbytes)], values.nbytes)
        staged.copy_from(values.view(np.uint8))
        self.optimizer.step(record, staged)

    # Records that their owner holds ---------------------------------------------------------------------------

    def write_through(self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]], *, step: int) -> None:
        """Queues the write of a DIRECT record from the owner's memory, which must not change until ``commit``."""
        self._check_open()
        number = self._direct[key]
        for group, sections in groups.items():
            self._direct_writes.append(self.slots.write(number, group, sections, ()))
        self.slots.records[number].step = step
        self.slots.touch(number)

    def read_through(self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]]) -> None:
        """Reads a DIRECT record into the owner's memory and waits for it."""
        self._check_open()
        number = self._direct[key]
        tickets = [
            self.slots.read(number, group, sections, (), _native.Priority.DEMAND)
            for group, sections in groups.items()
        ]
        self.wait(tickets)

    # Commits ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Mapping[str, bytes]:
        """Small named state as of the last commit."""
        return self._state

    @property
    def generation(self) -> int:
        """How many commits the store has had."""
        return self.slots.generation

    def commit(self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None) -> int:
        """Makes everything so far durable, with ``state`` merged into the named state; returns the generation.

        With ``snapshot`` the commit is also kept under that name; the oldest snapshots beyond ``retain`` are let go.
        When this returns the commit is acknowledged; when it raises, the one before stands.
        """
        self._check_open()
        self.cache.clean()
        writes = [*self.cache.take_pending_writes(), *self._direct_writes]
        self._direct_writes = []
        try:
            self.wait(writes)
            syncs = self.slots.syncs(())
            for directory in self.slots.take_unsynced_directories():
                _fsync_directory(directory)
            self.wait(syncs)
            self._write_index(dict(state or {}), snapshot)
        except BaseException as error:
            self._poison = self._poison or f"a commit failed: {error}"
            raise
        return self.generation

    async def commit_async(self, state: Mapping[str, bytes] | None = None) -> int:
        """``commit``, awaiting the write-backs; only the syncs and the index transaction block the loop."""
        self._check_open()
        self.cache.clean()
        pending = self.cache.take_pending_writes()
        self._direct_writes += pending
        with self._translated():
            await self._awaiter.wait(pending)
        return self.commit(state)

    def snapshot(self, name: str, state: Mapping[str, bytes] | None = None) -> int:
        """``commit`` kept under ``name``. It costs the dirty bytes, not a copy of the store."""
        if self.config.retain < 1:
            raise StoreError("snapshot: the store was opened with retain = 0, so no space is reserved for snapshots")
        if name in self._snapshots:
            raise StoreError(f"snapshot {name!r} exists already")
        return self.commit(state, snapshot=name)

    @property
    def snapshots(self) -> list[str]:
        """Names of the retained snapshots, oldest first."""
        return list(self._snapshots)

    def _write_index(self, state: dict[str, bytes], snapshot: str | None) -> None:
        reached = [record.live.step for record in self._records.values()]
        self.history.forget_before(self.history.oldest(reached))
        state[_HISTORY] = self.history.pack()
        changed = self.slots.changed_entries()
        generation = self.slots.generation + 1
        table, merged = self._committed | changed, self._state | state
        added = (snapshot, Commit(generation, table, merged)) if snapshot is not None else None
        dropped = list(self._snapshots)[: len(self._snapshots) + 1 - self.config.retain] if added else []
        self._parts.index.write(
            generation=generation,
            meta=self._parts.meta(self.slots.schemas),
            changed=changed,
            state=state,
            add_snapshot=added,
            drop_snapshots=tuple(dropped),
        )
        if not self._parts.published:
            opening.publish(self.directory, self._parts.identity)
            self._parts.published = True
        # The transaction is durable: only now may the slots that it left behind be used again.
        self.slots.generation = generation
        self.slots.retain(changed.values())
        self.slots.let_go(self._committed[key] for key in changed if key in self._committed)
        if added is not None:
            self.slots.retain(table.values())
            self._snapshots[added[0]] = added[1]
        for name in dropped:
            self.slots.let_go(self._snapshots.pop(name).records.values())
        self._committed, self._state = table, merged
        self.slots.committed()

    def committed_tables(self) -> list[tuple[str, Mapping[str, RecordEntry]]]:
        """The index tables that are durable: the last commit's, then each snapshot's, oldest first."""
        named = [(f"snapshot {name!r}", commit.records) for name, commit in self._snapshots.items()]
        return [("last commit", self._committed), *named]

    # Content ------------------------------------------------------------------------------------------------

    def records_crc32c(self) -> int:
        """CRC-32C over every record's content in key order, caught up to the last applied step.

        Two stores with equal content have equal values, wherever their bytes lie. Raises ChecksumError, OSError.
        """
        self._check_open()
        crc = 0
        for key in self.keys:
            if key in self._direct:
                crc = self._direct_crc(key, crc)
                continue
            record = self._records[key]
            need = Need.STEP if self.optimizer.behind(record) else Need.WEIGHTS | Need.MOMENTS
            for _ in self.access(Phase.EXPORT, record.live.layer, [record], need):
                self.optimizer.catch_up(record)
                for group in COMMITTED_GROUPS:
                    entry = record.entry(group)
                    self.wait(self.cache.ready(entry))
                    for section in self.cache.sections(entry):
                        for piece in section.arrays():
                            crc = _native.crc32c(piece, crc)
        return crc

    def _direct_crc(self, key: str, crc: int) -> int:
        number = self._direct[key]
        live = self.slots.records[number]
        for group in COMMITTED_GROUPS:
            layout = self.slots.schemas[live.schema].layout(group)
            with opening.scratch_buffers(layout) as sections:
                self.wait([self.slots.read(number, group, sections, (), _native.Priority.DEMAND)])
                for section in sections:
                    crc = _native.crc32c(section.array(), crc)
        return crc

    def end_trace(self) -> None:
        """Completes the recorded trace, if there is one; what follows is not part of it."""
        if self._parts.recording is not None:
            self._parts.recording.close()

    def describe(self) -> list[str]:
        """One line for each capability: what is in effect, and why where AUTO fell back."""
        engine, budget = self.engine, self._parts.arena.nbytes
        huge = self._parts.arena.huge_bytes
        direct = self.slots.direct_reason
        return [
            f"I/O: {engine.backend}" + (f" ({engine.backend_reason})" if engine.backend_reason else ""),
            "direct I/O: " + (f"off ({direct})" if direct else "on"),
            f"host cache: {budget} bytes, {huge} of them in huge pages",
        ]

    # Failure and closing --------------------------------------------------------------------------------------

    def wait(self, tickets: Sequence[int]) -> None:
        """Waits for engine tickets; checksum failures are raised naming key, section and file."""
        with self._translated():
            self.engine.wait_all([ticket for ticket in tickets if ticket])

    def _translated(self) -> opening.Translation:
        return opening.Translation(self._explain)

    def _explain(self, error: _native.ChecksumMismatch) -> ChecksumError:
        message, path, offset, section = error.args
        key = self.slots.describe_offset(path, offset)
        return ChecksumError(f"record {key!r}, section {self._section_name(path, section)}, {path}: {message}")

    def _section_name(self, path: str, index: int) -> str:
        for number, schema in enumerate(self.slots.schemas):
            for group in COMMITTED_GROUPS:
                if str(self.slots.extent_path(number, group)) == path:
                    return schema.layout(group).sections[index].name
        return "gradient"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.directory}: the store is closed")
        reason = self._poison or self.engine.poisoned
        if reason:
            raise StorePoisonedError(f"{self.directory}: {reason}; reopen the store at its last commit")

    def close(self) -> None:
        """Stops; what was not committed is gone. Safe to call twice, and after a failure."""
        if not self._closed:
            self._closed = True
            self._parts.close()

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _by_layer(records: Iterable[CachedRecord]) -> list[tuple[int, list[CachedRecord]]]:
    """Records grouped by layer, both ascending: accesses are of one layer."""
    ordered = sorted(records, key=lambda record: (record.live.layer, record.number))
    return [(layer, list(group)) for layer, group in groupby(ordered, key=lambda record: record.live.layer)]


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
