"""The core of an open store: the base of the trainer, its queues and ``ParameterStore``.

It holds the parts of a store (records by key, slots on disk, host cache, optimizer, committer) and offers the operations
that need several of them: accesses, optimizer steps, owner-held records, commits. One serialised caller.

Classes of records: ``CommittedRecords`` is the table of the last commit, and ``RecordEntry`` one of its rows, unpacked.
``LiveIndex`` has the present state in columns, which the next commit makes durable, and ``LiveRecord`` is a handle of one
row. ``RecordInfo`` is what users see. ``Records`` finds live records by key, and knows which the host cache holds and which
their owners hold. ``Parts`` are the parts of the store, not of records.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.cache.host_cache import HostCache
from tierstore.errors import BudgetError, StoreError
from tierstore.stats import OnProgress, no_progress
from tierstore.store.adamw import StepHistory
from tierstore.store.committing import Committer, Failures
from tierstore.store.config import StoreAccess
from tierstore.store.disk.extents import Scratch, read_ahead, scratch_buffers
from tierstore.store.disk.store_extents import copies
from tierstore.store.format import Group
from tierstore.store.index.database import index_bytes
from tierstore.store.index.live import LiveRecord
from tierstore.store.mapped import MappedRecords, maps_weights
from tierstore.store.opening import Parts
from tierstore.store.optimizer import RecordOptimizer, refuse_frozen
from tierstore.store.records import Records, by_layer
from tierstore.units import format_bytes

_DIRTIES = Need.DIRTY_WEIGHTS | Need.DIRTY_MOMENTS


class StoreCore:
    """An open store for programs that drive accesses themselves: the ``core`` of a ``ParameterStore``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.directory = parts.home.directory
        self.config = parts.config
        #: The access it was opened with.
        self.opened_to = parts.access
        #: The optimizer's hyperparameters, except for the learning rate.
        self.adamw = parts.adamw
        self.engine = parts.engine
        self.live = parts.live
        self.extents = parts.extents
        self.cache: HostCache = parts.cache
        #: The daily write budget, if there is one.
        self.write_budget = parts.extents.budget
        self.history = StepHistory(parts.adamw)
        self.optimizer = RecordOptimizer(self.engine, self.cache, self.history)
        self.records = Records(self.live, self.extents, self.cache, self.opened_to)
        self.failures = Failures(self.directory, self.cache, self.live, parts.access)
        self.mapped = MappedRecords(maps_weights(parts.config, parts.drives), self.failures)
        self.committer = Committer(parts, self.records, self.history, self.failures)
        self._space_reserved = False
        if parts.caught_up is not None:
            parts.caught_up.begin(self.optimizer)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the host budget that hold no records: in a store opened to read, memory for replays of missed steps."""
        return 0 if self._parts.caught_up is None else self._parts.caught_up.scratch_bytes

    def record(self, key: str) -> LiveRecord:
        """The cached record ``key``. Raises KeyError."""
        return self.records.cached(key)

    # Space --------------------------------------------------------------------------------------------------

    def reserve(self, counts: Mapping[str, int] | None = None) -> None:
        """See ``ParameterStore.reserve``."""
        self.failures.check_writable("reserve")
        retain = max(self.config.retain, len(self.committer.snapshots))
        wanted = self.records.counts() | Counter(counts or {})
        self.extents.reserve(copies(retain), wanted)
        records = max(len(self.records), sum((counts or {}).values()))
        self._parts.index.reserve(index_bytes(records, retain))
        self._space_reserved = True

    def reserve_scratch(self, schema: str) -> None:
        """Reserves disk to spill one gradient of each record of ``schema``. Raises OSError (ENOSPC)."""
        self.failures.check_writable("reserve")
        number = self.records.schema_index(schema)
        self.extents.of(number, Group.GRADIENTS).reserve(self.records.counts()[schema])

    def _before_change(self) -> None:
        if not self._space_reserved:
            self.reserve()  # a full disk is detected before anything has changed

    # Accesses -----------------------------------------------------------------------------------------------

    def begin_access(
        self, phase: Phase, layer: int, numbers: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint16]
    ) -> int:
        """Opens an access of the host cache; returns the number of its groups. Raises BudgetError if a single request
        does not fit in the unpinned memory.
        """
        self.failures.check()
        if (flags & np.uint16(_DIRTIES)).any():
            self._before_change()
        try:
            return self.cache.begin_access(phase, layer, numbers, flags)
        except _native.CapacityError as error:
            raise BudgetError(f"host_budget: {error}") from error

    def access(
        self, phase: Phase, layer: int, records: Sequence[LiveRecord], need: Need
    ) -> Iterator[LiveRecord]:
        """Walks ``records`` of ``layer`` (ascending) as one atomic event; each is pinned while yielded.

        If they do not fit at once, the resident ones come first.
        """
        if not records:
            return
        numbers = np.array([record.number for record in records], np.uint32)
        groups = self.begin_access(phase, layer, numbers, np.full(len(records), need, np.uint16))
        for group in range(1, groups + 1):
            items = self.cache.next_group()
            try:
                for item in items:
                    yield records[item]
                    self.cache.end_unit(item)
            except BaseException:
                if group < groups:
                    self.failures.poison("an access was left before its end")
                raise
            finally:
                self.cache.end_group()

    def read_again(self, record: LiveRecord) -> None:
        """In a store opened to read: reads the weights of ``record``, which is in an open access, once more, and waits.

        A read also fails if an operation that it follows fails, such as another record's read into the same memory; and a
        drive may fail temporarily. Raises ChecksumError or OSError if it fails again.
        """
        self.failures.check()
        self.wait(self.cache.read_again(record.entry(Group.WEIGHTS)))

    def wait(self, tickets: Sequence[int]) -> None:
        """Waits for engine tickets; raises checksum failures naming key, section and file."""
        self.failures.wait(tickets)

    # Steps --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def optimizer_step(self, lr: float) -> Iterator[OptimizerStep]:
        """As ``ParameterStore.optimizer_step``, without write-backs. The cache's step ends at the end of the block."""
        self.failures.check_writable("optimizer_step")
        step = OptimizerStep(self, self.history.begin(lr), lr)
        try:
            yield step
        except BaseException as error:
            if self.history.taken:
                self.failures.poison(f"optimizer step {step.number} was cut short", error)
            self.history.abandon()
            raise
        if self.history.is_open:
            self.history.finish()
        self.cache.residency.end_step()

    # Owner-held records -------------------------------------------------------------------------------------

    def write_through(
        self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]], *, step: int
    ) -> list[int]:
        """Queues the write of a DIRECT record from the owner's memory, which must not change until ``commit`` or until the
        returned tickets have finished. Raises StoreError for a frozen record that was written before.
        """
        self.failures.check_writable("write_through")
        live = self.records.direct(key)
        if live.schema.frozen and live.slot(Group.WEIGHTS) is not None:
            raise StoreError(f"record {key!r} is frozen: it is written once")
        self._before_change()
        tickets = [live.write(group, sections, ()) for group, sections in groups.items()]
        self.committer.writes += tickets
        live.step, live.changed = step, True
        return tickets

    def read_through(self, key: str, groups: Mapping[Group, Sequence[_native.Buffer]]) -> None:
        """Reads a DIRECT record into the owner's memory and waits for it."""
        self.failures.check()
        live, demand = self.records.direct(key), _native.Priority.DEMAND
        self.wait([live.read(group, into, (), demand) for group, into in groups.items()])

    # Content and status -------------------------------------------------------------------------------------

    def records_crc32c(self, progress: OnProgress = no_progress) -> int:
        """As ``ParameterStore.records_crc32c``."""
        nbytes = {key: self.records.live(key).schema.nbytes for key in self.records.keys}
        crc, done, total = 0, 0, sum(nbytes.values())
        progress(0, total)
        for sections, tickets in read_ahead(nbytes, nbytes.__getitem__, self.queue_sections):
            self.wait(tickets)
            for section in sections:
                for piece in section.arrays():
                    crc = _native.crc32c(piece, crc)
                done += section.nbytes
            progress(done, total)
        return crc

    def sections(self, key: str) -> list[_native.Buffer]:
        """All committed sections of record ``key``, caught up to the last applied step; valid until the store is used again.

        No cache decision, record or file changes: sections that are not resident are read into separate memory, beside
        the host budget, and missed steps are replayed there. Raises KeyError, ChecksumError, OSError.
        """
        sections, tickets = self.queue_sections(key, scratch_buffers)
        self.wait(tickets)
        return sections

    def queue_sections(self, key: str, scratch: Scratch) -> tuple[list[_native.Buffer], list[int]]:
        """As ``sections``, in memory of ``scratch``; and the tickets to wait for."""
        self.failures.check()
        live, cache = self.records.live(key), self.cache
        behind = self.optimizer.behind(live) > 0
        # A reader's cache holds caught-up weights of such a record; the replay needs the version on disk.
        held = live.cached and not (behind and self.opened_to is StoreAccess.READ)
        sections: list[_native.Buffer] = []
        tickets: list[int] = []
        for group in live.schema.groups:
            resident = cache.sections(live.entry(group)) if held else ()
            ready = cache.ready(live.entry(group)) if resident else []
            if resident and not behind:
                sections += resident
                tickets += ready
                continue
            own = scratch(live.schema.layout(group))
            sections += own
            if resident:
                pairs = zip(own, resident, strict=True)
                tickets += [self.engine.copy(copy, source, after=ready) for copy, source in pairs]
            else:
                tickets.append(live.read(group, own, (), _native.Priority.DEMAND))
        if behind:
            tickets = [self.optimizer.replay_copy(live, sections, after=tickets)]
        return sections, tickets

    @property
    def arena(self) -> _native.Arena:
        """The memory of the host cache."""
        return self._parts.arena

    def describe(self) -> list[str]:
        """One line for each capability: its state, and the reason if AUTO fell back."""
        engine, arena, cache = self.engine, self.arena, self.config.cache
        if engine.backend == "pmem":
            reason = self.extents.map_sync_reason
            past_cache = "MAP_SYNC: " + (f"off, extents are synced by msync ({reason})" if reason else "on")
        else:
            reason = self.extents.direct_reason
            past_cache = "direct I/O: " + (f"off ({reason})" if reason else "on")
        drives = self.extents.drive_reports()
        shares = ", ".join(f"{drive.path} {drive.share:.0%}" for drive in drives)
        return [
            f"I/O: {engine.backend}" + (f" ({engine.backend_reason})" if engine.backend_reason else ""),
            f"transfers: {self._parts.tuning}",
            past_cache,
            *([self.mapped.describe()] if engine.backend == "pmem" else []),
            *(
                f"locks: `lease` alone counts in {where} ({why})"
                for where, why in self._parts.drives.unlocked
            ),
            f"host cache: {format_bytes(arena.nbytes)}, {format_bytes(arena.huge_bytes)} of it in huge pages",
            *(
                [f"clock of {cache.policy}: {self.cache.residency.clock.name.lower()}"]
                if cache.counts_steps
                else []
            ),
            *([f"drives: {shares} of new records"] if len(drives) > 1 else []),
            self.extents.discarding.describe(),
            *([] if self.write_budget is None else [self.write_budget.describe()]),
        ]

    @property
    def trace_failure(self) -> OSError | None:
        """The error because of which the recorded trace cannot be completed, if any; ``end_trace`` raises it."""
        return None if self._parts.recording is None else self._parts.recording.failure

    def end_trace(self) -> None:
        """Completes the recorded trace, if there is one; later events are not part of it. Raises OSError."""
        if self._parts.recording is not None:
            self._parts.recording.close()

    def note_in_trace(self, note: str) -> None:
        """Adds a line of text to the recorded trace, if there is one."""
        if self._parts.recording is not None:
            self._parts.recording.note(note)

    def record_slots(self, residency: _native.Residency) -> None:
        """Record the requests to ``residency``, the core of a device's slots, beside the recorded trace, if there is one.
        Raises OSError.
        """
        if self._parts.recording is not None:
            self._parts.recording.record_slots(residency)

    def close(self) -> None:
        """As ``ParameterStore.close``."""
        if not self.failures.closed:
            self.failures.closed = True
            self.mapped.close()
            if not self.failures.forked:
                self._parts.resources.close()


class OptimizerStep:
    """An optimizer step in progress: ``number`` counts the steps of the whole store, from 1."""

    def __init__(self, core: StoreCore, number: int, lr: float) -> None:
        self._core = core
        self.number = number
        self.lr = lr

    def update(self, gradients: Mapping[str, npt.NDArray[np.float32]]) -> list[int]:
        """Steps the records in ``gradients`` (float32 [numel], copied); returns the engine's tickets. Raises KeyError,
        ValueError, StoreError (a record is leased, say), OSError (ENOSPC) and BudgetError.
        """
        core = self._core
        self._check_open()
        records = [core.record(key) for key in gradients]
        for record in records:
            key = record.key
            refuse_frozen(record)
            check_array(f"record {key!r}: gradient", gradients[key], core.records.info(key).schema.numel)
            if core.records.leased[key]:
                raise StoreError(f"update: record {key!r} is leased; release it first")
        tickets: list[int] = []
        for layer, group in by_layer(records):
            for record in core.access(Phase.OPTIMIZER, layer, group, Need.STEP_SPILLED):
                tickets.append(self._update(record, gradients[record.key]))
        return tickets

    def _update(self, record: LiveRecord, gradient: npt.NDArray[np.float32]) -> int:
        cache, entry = self._core.cache, record.entry(Group.GRADIENTS)
        self._core.wait(cache.before_write(entry))  # for the previous owners of its frames
        staged = cache.sections(entry)[0]
        staged.copy_from(np.ascontiguousarray(gradient).view(np.uint8))
        cache.wrote(entry, 0)
        ticket = self._core.optimizer.step(record, staged)
        cache.reads(entry, ticket)
        return ticket

    def abandon(self) -> None:
        """Abandons the step. Raises StoreError if a record has taken it, or it is over."""
        self._check_open()
        if self._core.history.taken:
            raise StoreError(
                f"optimizer step {self.number}: records have taken it, so it cannot be abandoned"
            )
        self._core.history.abandon()

    def _check_open(self) -> None:
        if self._core.history.current != self.number:
            raise StoreError(f"optimizer step {self.number} is over")


def check_array(what: str, array: npt.NDArray[np.float32], numel: int) -> None:
    """Raises ValueError unless ``array`` is float32 [numel]."""
    if array.shape != (numel,) or array.dtype != np.float32:
        raise ValueError(f"{what} is {array.dtype} {array.shape}, expected float32 ({numel},)")
