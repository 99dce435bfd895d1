"""``ParameterStore``: parameter states on disk, a budgeted part of them in memory, durable commits.

::

    schema, config = RecordSchema("expert", numel=1 << 20), StoreConfig(host_budget=64 << 20)
    with ParameterStore.create(path, [schema], config) as store:
        store.register("expert.0", "expert", weight=initial)
        store.commit()
        with store.fetch(["expert.0"]) as lease:
            y = x @ lease["expert.0"].view("weight").reshape(1024, 1024)
        store.update({"expert.0": gradient}, lr=1e-3)
        store.commit()

One serialised caller. ``commit`` is the only acknowledgement: after a kill at any instant the store reopens at its
complete last commit. Failures of the operating system are ``OSError``; a failed write or sync poisons the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore._native import Engine
from tierstore.machine import MemoryAccount, resident_bytes
from tierstore.stats import OnProgress, in_parts, no_progress
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import StoreAccess, StoreConfig
from tierstore.store.core import OptimizerStep, StoreCore
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.extents import ahead_bytes
from tierstore.store.disk.home import rank_directories
from tierstore.store.fetching import Lease, begin_fetch, prefetch
from tierstore.store.format import Group, RecordSchema
from tierstore.store.opening import create as create_store
from tierstore.store.opening import minimum_reading_budget, open_existing
from tierstore.store.reading import OpenAt, read_schemas, read_summary
from tierstore.store.records import RecordInfo
from tierstore.store.registering import NewRecord, register_many
from tierstore.store.verify import VerifyReport, verify_tables

#: Rounds in which ``commit_async`` awaits other tasks' changes, before it blocks for the rest.
_ROUNDS = 3
#: Bytes of a verification for each slot that it reads, and those of an engine (measured).
_TABLE_BYTES, _ENGINE_BYTES = 640, 4 << 20


@dataclass(frozen=True)
class LastCommit:
    """The durable state: number of commits, small named state, snapshots (oldest first)."""

    generation: int
    state: Mapping[str, bytes]
    snapshots: list[str]


@dataclass(frozen=True)
class StoreStatus:
    """The ``steps`` taken, lines on the capabilities in effect, and the directories (the store's own first)."""

    steps: int
    effective: list[str]
    drives: list[DriveReport]


class ParameterStore:
    """An open store, made by ``create`` or ``open``. Closed by ``close``, or as a context manager.

    ``core`` is for programs that drive accesses and steps themselves, as the trainer does.
    """

    def __init__(self, core: StoreCore) -> None:
        self.core = core
        self.directory = core.directory
        self.config = core.config
        self._awaiter = TicketAwaiter(core.engine)

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
        populating: OnProgress = no_progress,
    ) -> ParameterStore:
        """Creates a store of ``schemas`` in ``directory`` (made if missing). ``open`` finds it after its first commit.

        ``trace`` records the input of every residency decision, ``io_log`` every write and sync (for crash replay).
        ``populating`` gets the bytes of the host cache that the kernel has given, and all. Raises StoreExistsError,
        ConfigError, BudgetError, OSError; on failure nothing is left behind.
        """
        config, adamw = config or StoreConfig(), adamw or AdamWConfig()
        return cls(
            StoreCore(create_store(Path(directory), schemas, config, adamw, trace, io_log, populating))
        )

    @classmethod
    def open(
        cls,
        directory: Path | str,
        config: StoreConfig | None = None,
        *,
        adamw: AdamWConfig | None = None,
        at: OpenAt = OpenAt.LAST,
        further: Sequence[RecordSchema] = (),
        access: StoreAccess = StoreAccess.WRITE,
        trace: Path | None = None,
        io_log: Path | None = None,
        populating: OnProgress = no_progress,
    ) -> ParameterStore:
        """Opens the store in ``directory`` at its last commit. ``OpenAt.PREVIOUS`` undoes a commit that several ranks
        prepared and did not acknowledge.

        With ``StoreAccess.READ`` nothing is written or undone, several processes may read while none writes, changes
        raise StoreError, and the host cache holds only weights.

        ``adamw`` may differ from the last time, except for ``inactive``; None: the defaults with the store's ``inactive``.
        ``further``: schemas that the store has from its next commit on. ``populating``: as in ``create``. Raises
        StoreMissingError, StoreInUseError, StoreFormatError, StoreError (another schema of that name), BudgetError, OSError.
        """
        config = config or StoreConfig()
        core = StoreCore(
            open_existing(Path(directory), config, adamw, at, trace, io_log, populating, further, access)
        )
        try:
            core.committer.load()
        except BaseException:
            core.close()
            raise
        return cls(core)

    def close(self) -> None:
        """Closes the store; uncommitted changes are lost. Safe to call twice and after a failure. A no-op in a forked
        child: the store belongs to the process that opened it.
        """
        self.core.close()

    def __enter__(self) -> ParameterStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Records ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[str]:
        """Keys of all records, in key order."""
        return self.core.records.keys

    def info(self, key: str) -> RecordInfo:
        """Schema, layer and optimizer steps of a record. Raises KeyError."""
        return self.core.records.info(key)

    def reserve(self, counts: Mapping[str, int] | None = None) -> None:
        """Reserves disk for 2 + ``retain`` copies: the live records, their last commit, and the retained snapshots.

        ``counts``: the expected number of records of each schema (default: the present one). Raises OSError (ENOSPC)
        naming the file and the bytes needed, with nothing changed but reservations. Registering records also reserves
        space, and so does the first change after opening.
        """
        self.core.reserve(counts)

    def register(
        self, key: str, schema: str, *, layer: int = 0, weight: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Adds a record with ``weight`` (float32 [numel], zeros if None) and zero moments; the next commit makes it durable.

        Raises StoreError (the key exists), ValueError (a wrong shape or name), OSError (ENOSPC), with nothing changed.
        """
        register_many(self.core, [NewRecord(key, schema, layer, weight)])

    def register_many(self, records: Iterable[NewRecord]) -> None:
        """``register`` for many records, with space for all of them reserved first. If a callable that makes a weight
        raises, the records before it are registered.
        """
        register_many(self.core, records)

    # Fetching -----------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> Lease:
        """Pins ``keys`` with ``groups`` in memory and waits for them; a context manager that releases them.

        Weights are caught up with the optimizer first. Raises KeyError, ValueError, BudgetError (the set does
        not fit at once), ChecksumError naming key, section and file, OSError.
        """
        lease = begin_fetch(self.core, keys, groups)
        try:
            self.core.wait(lease.tickets)
        except BaseException:
            lease.release()
            raise
        return lease

    async def fetch_async(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> Lease:
        """``fetch`` for asyncio: decides at once, and waits in the event loop."""
        lease = begin_fetch(self.core, keys, groups)
        try:
            await self._wait(lease.tickets)
        except BaseException:
            lease.release()
            raise
        return lease

    def prefetch(self, keys: Sequence[str], groups: Sequence[Group] = (Group.WEIGHTS,)) -> int:
        """Starts to fetch ``keys`` within the ``lookahead`` budget; returns the number covered."""
        return prefetch(self.core, keys, groups)

    # Updating -----------------------------------------------------------------------------------------------

    def update(self, gradients: Mapping[str, npt.NDArray[np.float32]], *, lr: float) -> None:
        """One AdamW step of the whole store: records in ``gradients`` (float32 [numel]) are stepped now, the others
        according to ``inactive``. The step is queued when this returns; ``fetch`` waits for the steps it needs.

        Raises KeyError, ValueError, StoreError (a record is leased), OSError (ENOSPC) and BudgetError with nothing changed;
        an interruption later poisons the store.
        """
        with self.optimizer_step(lr) as step:
            step.update(gradients)

    async def update_async(self, gradients: Mapping[str, npt.NDArray[np.float32]], *, lr: float) -> None:
        """``update``, then awaits the steps. Cancelling stops the waiting, not the update."""
        with self.optimizer_step(lr) as step:
            tickets = step.update(gradients)
        await self._wait(tickets)

    @contextlib.contextmanager
    def optimizer_step(self, lr: float) -> Iterator[OptimizerStep]:
        """``update`` in parts, for gradients that arrive one after another::

            with store.optimizer_step(lr) as step:
                for key in keys:
                    step.update({key: gradient_of(key)})

        The end of the block completes the step, unless ``step.abandon()`` was called. If the block raises, the step is
        not taken. If a record has been stepped by then, the store is also poisoned: every later call raises
        StorePoisonedError, and only the last commit can be opened. Raises StoreError if a step is open.

        After every ``cache.write_back_every`` steps of the store, the write-back of dirty records is queued.
        """
        history, every = self.core.history, self.config.cache.write_back_every
        before = history.applied
        with self.core.optimizer_step(lr) as step:
            yield step
        if every and before < history.applied and history.applied % every == 0:
            self.core.cache.clean()

    # Commits ------------------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> LastCommit:
        """The last commit: the state at which the store would be opened now."""
        committer = self.core.committer
        return LastCommit(self.core.live.generation, committer.state, list(committer.snapshots))

    def commit(self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None) -> int:
        """Makes everything so far durable, with ``state`` merged into the named state; returns the generation.

        ``snapshot`` keeps the commit under that name too, at the cost of the dirty bytes; the oldest snapshots beyond
        ``retain`` are dropped. When this returns the commit is acknowledged. StoreError and ValueError change nothing
        (for example, a lease pins a record that must be written); any other error poisons the store, which reopens at
        this commit or the previous one. OSError (ESTALE) names a file of the store that was removed or replaced.
        """
        return self.core.committer.commit(state, snapshot=snapshot)

    async def commit_async(
        self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None
    ) -> int:
        """``commit`` for asyncio: awaits writes and syncs. It includes changes that other tasks make meanwhile.

        It awaits up to three rounds, each for the changes made during the previous one. Later changes, the index
        transaction and syncs of directories whose extents have grown block the event loop.
        """
        for _ in range(_ROUNDS):
            tickets = self.core.committer.begin(state, snapshot=snapshot)
            if not tickets:
                break
            await self._wait(tickets)
        return self.core.committer.commit(state, snapshot=snapshot)

    async def _wait(self, tickets: Sequence[int]) -> None:
        with self.core.failures.translated():
            await self._awaiter.wait(tickets)

    # Content ------------------------------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        """The capabilities in effect, and the use of the directories."""
        return StoreStatus(self.core.history.applied, self.core.describe(), self.core.extents.drive_reports())

    def records_crc32c(self, progress: OnProgress = no_progress) -> int:
        """CRC-32C over every record's content in key order, caught up to the last applied step: equal for stores of equal
        content, whatever their layout on disk. ``progress`` is called with the bytes done and in all; the store cannot be
        used in it. Raises
        ChecksumError, OSError.
        """
        return self.core.records_crc32c(progress)

    def verify(self, progress: OnProgress = no_progress) -> VerifyReport:
        """Reads and checks every section of the last commit and of the snapshots; see ``verify_store``."""
        self.core.failures.check()
        core = self.core
        return verify_tables(core.extents, core.engine, core.committer.tables(), progress)


def verify_store(directory: Path | str, progress: OnProgress = no_progress) -> VerifyReport:
    """Verifies the store in ``directory``. Calls ``progress`` with the bytes checked and in all; writes nothing.

    Raises StoreMissingError, StoreInUseError, StoreFormatError (a truncated file, say).
    """
    with open_to_read(Path(directory)) as store:
        return store.verify(progress)


def verify_all(
    store: Path,
    progress: OnProgress = no_progress,
    *,
    announced: Callable[[MemoryAccount], None] = lambda account: None,
) -> VerifyReport:
    """``verify_store`` for every rank, in rank order; ``progress`` is of all (``in_parts``). ``announced`` receives what the
    process will hold.
    """
    directories = rank_directories(store) or [store]
    total = VerifyReport(account=_verify_account(directories))
    announced(total.account)
    for directory, part in zip(directories, in_parts(progress, len(directories)), strict=True):
        report = verify_store(directory, part)
        total.records += report.records
        total.sections += report.sections
        total.snapshots = max(total.snapshots, report.snapshots)
        total.bytes_read += report.bytes_read
        total.failures += report.failures
        total.drives += report.drives
    return total


def _verify_account(directories: Sequence[Path]) -> MemoryAccount:
    """What verifying the stores in ``directories``, one after another, will hold. Raises as ``verify_store``."""
    ranks = [read_summary(directory) for directory in directories]
    return MemoryAccount(
        {
            "process": resident_bytes(),
            "host cache": max(minimum_reading_budget(rank.schemas) for rank in ranks),
            "reads ahead": max(
                ahead_bytes(
                    sum(schema.nbytes * rank.records[schema.name] for schema in rank.schemas),
                    max(
                        schema.layout(group).slot_bytes for schema in rank.schemas for group in schema.groups
                    ),
                )
                for rank in ranks
            ),
            "table of sections": max(
                _TABLE_BYTES * sum(len(schema.groups) * rank.records[schema.name] for schema in rank.schemas)
                for rank in ranks
            ),
            "working memory": _ENGINE_BYTES,
        }
    )


def open_to_read(directory: Path, at: OpenAt = OpenAt.LAST) -> ParameterStore:
    """Opens the store in ``directory`` to read, with the smallest budget. Raises as ``ParameterStore.open``."""
    config = StoreConfig(host_budget=minimum_reading_budget(read_schemas(directory)))
    return ParameterStore.open(directory, config, at=at, access=StoreAccess.READ)


class TicketAwaiter:
    """Turns tickets of ``engine`` into futures of the running event loop. One loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._futures: dict[int, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, tickets: Iterable[int]) -> None:
        """Returns when all have finished; raises the first failure, in the order given.

        Cancelling the awaiting task stops only the waiting: queued operations are carried out.
        """
        loop = asyncio.get_running_loop()
        for ticket in tickets:
            if ticket and not self._engine.done(ticket):
                future: asyncio.Future[None] = loop.create_future()
                self._watch(loop)
                self._futures.setdefault(ticket, []).append(future)
                self._engine.notify(ticket)
                self._engine.promote(ticket)  # as a blocking wait does
                try:
                    await future
                finally:
                    self._unwatch_if_idle(loop)
            if ticket:
                self._engine.wait(ticket)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("the store is awaited in another event loop; one at a time")
            self._futures = {}  # of a loop that was closed with tasks unfinished
            loop.add_reader(self._engine.event_fd(), self._drain)
            self._loop = loop

    def _unwatch_if_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._futures = {
            ticket: live
            for ticket, futures in self._futures.items()
            if (live := [future for future in futures if not future.done()])
        }
        if not self._futures and self._loop is loop:
            loop.remove_reader(self._engine.event_fd())
            self._loop = None

    def _drain(self) -> None:
        for ticket in self._engine.drain_notified():
            for future in self._futures.get(ticket, ()):
                if not future.done():
                    future.set_result(None)
