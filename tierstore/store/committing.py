"""Commits: write back, sync, one index transaction; and the snapshots that keep older commits alive.

The order makes a commit atomic: every write-back finishes, every extent is synced, directories with new names are synced,
and only then the index transaction records the new locations. Slots that the transaction no longer refers to are freed
only when it is durable: until then a crash reopens at the commit that refers to them.

``begin`` queues the write-backs and, after them, the syncs; ``commit`` does so too, waits for all of them, and writes the
index. A caller may await the tickets of ``begin`` first; the next call picks up later changes. The transaction stays on
the caller's thread: it captures the live state of that moment.

A commit of several ranks has two phases. A rank's local commit is a *prepare*: it keeps the previous commit under a
separate name, so that the rank can go back if another rank fails. ``acknowledge`` releases the previous commit when all
ranks have prepared theirs.

In a log of I/O events the marks ``index G`` and ``commit G`` enclose the transaction of generation G, and ``acknowledge
G`` follows the one that drops the previous commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

from tierstore import _native
from tierstore.cache.host_cache import HostCache
from tierstore.errors import ChecksumError, StoreError, StoreFormatError, StorePoisonedError
from tierstore.store.adamw import HISTORY_KEY, StepHistory
from tierstore.store.config import StoreAccess
from tierstore.store.disk.home import fsync_directory
from tierstore.store.disk.store_extents import copies
from tierstore.store.index.database import PREVIOUS, Commit
from tierstore.store.index.live import LiveIndex
from tierstore.store.index.table import CommittedRecords, check_name
from tierstore.store.opening import Parts
from tierstore.store.records import Records


class Failures:
    """Tracks whether the store may still be used, and translates errors of waits."""

    def __init__(
        self,
        directory: Path,
        cache: HostCache,
        live: LiveIndex,
        access: StoreAccess = StoreAccess.WRITE,
    ) -> None:
        self._directory = directory
        self._cache = cache
        self._live = live
        self._access = access
        self._owner = os.getpid()
        self._poison = ""
        self.closed = False

    def poison(self, reason: str, error: BaseException | None = None) -> None:
        """Refuses every later use, with the first ``reason`` (and its ``error``): only the last commit stands."""
        if not self._poison:
            self._poison = reason if error is None else f"{reason}: {str(error) or type(error).__name__}"

    @contextlib.contextmanager
    def poisoning(self, what: str) -> Iterator[None]:
        """Poisons the store when the block raises."""
        try:
            yield
        except BaseException as error:
            self.poison(what, error)
            raise

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the store, without the engine's threads."""
        return os.getpid() != self._owner

    def check(self) -> None:
        """Raises StoreError or StorePoisonedError unless the store can be used."""
        if self.closed:
            raise StoreError(f"{self._directory}: the store is closed")
        if self.forked:
            raise StoreError(
                f"{self._directory}: the store was opened by process {self._owner}, and this is a "
                "fork of it: only the process that opened the store can use it"
            )
        reason = self._poison or self._cache.engine.poisoned or self._cache.broken
        if reason:
            raise StorePoisonedError(f"{self._directory}: {reason}; reopen the store at its last commit")

    def check_writable(self, what: str) -> None:
        """``check``; also raises StoreError, naming the operation ``what``, if the store was opened to read."""
        self.check()
        if self._access is StoreAccess.READ:
            raise StoreError(f"{self._directory}: {what}: the store was opened to read (StoreAccess.READ)")

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translates failures of the engine to errors naming key, section and file: ChecksumError, and OSError of
        transfers."""
        try:
            yield
        except _native.ChecksumMismatch as error:
            message, path, offset, section = error.args
            what = self._live.explain(path, offset, section)
            raise ChecksumError(f"{what}, {path}: {message}") from error
        except OSError as error:
            offset = getattr(error, "file_offset", None)
            if offset is None:
                raise
            what = self._live.explain(str(error.filename), offset)
            raise OSError(error.errno, f"{what}: {error.strerror}", error.filename) from error

    def wait(self, tickets: Sequence[int]) -> None:
        with self.translated():
            self._cache.engine.wait_all([ticket for ticket in tickets if ticket])


_BUDGET = "write-budget"
#: Names of the store's own state, beside its users'.
OWN_STATE = frozenset({HISTORY_KEY, _BUDGET})


class Keep(Enum):
    """Whether the previous commit is kept: a *prepared* commit keeps it until ``acknowledge``."""

    NOTHING = "nothing"
    PREVIOUS = "previous"


class Committer:
    """The durable commits of one open store, and the preparation of the next."""

    def __init__(self, parts: Parts, records: Records, history: StepHistory, failures: Failures) -> None:
        self._parts = parts
        self._records = records
        self._history = history
        self._failures = failures
        #: Writes, syncs and file names that the next commit waits for, besides those queued by the host cache.
        self.writes: list[int] = []
        self._syncs: list[int] = []
        self._directories: list[int] = []
        self.state: dict[str, bytes] = {}
        self.snapshots: dict[str, Commit] = {}
        #: Whether a prepared commit has added a snapshot: its acknowledgement drops the oldest.
        self._replaces = False

    @property
    def table(self) -> CommittedRecords:
        """The last commit's entries."""
        return self._parts.live.table

    def load(self) -> None:
        """Loads the last commit with its records, and the snapshots. Raises StoreFormatError."""
        index, live, extents = self._parts.index, self._parts.live, self._parts.extents
        commit, self._parts.commit = self._parts.commit or index.read_commit(None, extents.schemas), None
        live.generation = commit.generation
        self.state = commit.state
        self.snapshots = {name: index.read_commit(name, extents.schemas) for name in index.snapshots()}
        for where, table in self._named(commit.records):
            live.check_table(table, f"{self._parts.home.directory}: {where}")
            live.retain(table.rows)
        extents.recover()
        if HISTORY_KEY not in self.state:
            raise StoreFormatError(f"{self._parts.home.directory}: the history of optimizer steps is missing")
        self._history.unpack(self.state[HISTORY_KEY])
        if extents.budget is not None and _BUDGET in self.state:
            extents.budget.unpack(self.state[_BUDGET])
        self._parts.cache.residency.start_at(self._history.applied)
        self._records.load(commit.records, self._history)
        if self._parts.access is StoreAccess.READ:
            index.close()  # nothing else needs it, and a process may open an LMDB environment only once

    def _release(self, snapshot: str) -> None:
        self._parts.live.release(self.snapshots.pop(snapshot).records.rows)

    def tables(self) -> list[tuple[str, CommittedRecords]]:
        """The durable index tables: the last commit's, then each snapshot's, oldest first."""
        return self._named(self.table)

    def _named(self, last: CommittedRecords) -> list[tuple[str, CommittedRecords]]:
        named = [(f"snapshot {name!r}", commit.records) for name, commit in self.snapshots.items()]
        return [("last commit", last), *named]

    def _check(self, state: Mapping[str, bytes], snapshot: str | None) -> None:
        self._failures.check_writable("commit")
        for name in state:
            check_name("state", name)
            if name in OWN_STATE:
                raise ValueError(f"state {name!r}: the name is reserved for the store's own state")
        if self._parts.cache.residency.access_open:
            raise StoreError("commit: an access is open; end it first")
        if self._history.is_open:
            raise StoreError(
                f"commit: optimizer step {self._history.current} is in progress; finish or abandon it first"
            )
        unwritten = self._parts.live.unwritten_direct
        if unwritten:
            raise StoreError(
                f"commit: record {unwritten[0]!r} is held by its owner, who has not written it through"
            )
        if snapshot is not None:
            check_name("snapshot", snapshot)
            if snapshot == PREVIOUS:
                raise ValueError(f"snapshot {snapshot!r}: the name is reserved for the store's own snapshots")
            if self._parts.config.retain < 1:
                raise StoreError(
                    "snapshot: the store was opened with retain = 0, so no space is reserved for snapshots"
                )
            if snapshot in self.snapshots:
                raise StoreError(f"snapshot {snapshot!r} exists already")

    def begin(self, state: Mapping[str, bytes] | None = None, *, snapshot: str | None = None) -> list[int]:
        """Queues the work of a commit: the write-back of everything dirty and, after all writes, the syncs. Returns the
        unfinished tickets. Raises StoreError or ValueError, with nothing lost, if a commit is not possible.
        """
        self._check(state or {}, snapshot)
        with self._failures.poisoning(
            "a commit failed"
        ):  # otherwise a later commit would not wait for a sync that is queued already
            held = self._queue()
        if held:
            raise StoreError(
                f"commit: record {held[0]!r} was caught up under a lease that still holds it "
                f"({len(held)} such): release it first"
            )
        return self._unfinished([*self.writes, *self._syncs])

    def _queue(self) -> list[str]:
        """Returns the keys of records that cannot be written back because they are leased; if there are any, queues no
        syncs."""
        cache, extents = self._parts.cache, self._parts.extents
        cache.clean()
        held = sorted({backing.key for backing in cache.unclean()})
        if not held:
            self.writes += cache.write_backs.take()
            self._syncs += extents.syncs(self._unfinished(self.writes))
            self._directories += extents.take_unsynced_directories()
        return held

    def _unfinished(self, tickets: Sequence[int]) -> list[int]:
        return [ticket for ticket in tickets if not self._parts.engine.done(ticket)]

    def commit(
        self,
        state: Mapping[str, bytes] | None = None,
        *,
        snapshot: str | None = None,
        keep: Keep = Keep.NOTHING,
    ) -> int:
        """Makes everything so far durable; returns the generation.

        ``Keep.PREVIOUS`` prepares a commit of several ranks: until ``acknowledge``, ``OpenAt.PREVIOUS`` opens the
        previous commit. It needs no extra space, since nothing may be written before the acknowledgement.
        """
        if keep is Keep.PREVIOUS and PREVIOUS in self.snapshots:
            raise StoreError("prepare: the previous prepared commit was not acknowledged")
        self.begin(state, snapshot=snapshot)
        extents = self._parts.extents
        with self._failures.poisoning("a commit failed"):
            self._failures.wait([*self.writes, *self._syncs])
            self.writes, self._syncs = [], []
            for number in dict.fromkeys(self._directories):
                fsync_directory(self._parts.drives[number].path / "extents")
            self._directories = []
            # Frozen records replay nothing, so they keep no steps alive.
            self._history.forget_before(self._history.oldest(self._records.trained_steps()))
            own = {HISTORY_KEY: self._history.pack()}
            if extents.budget is not None:
                own[_BUDGET] = extents.budget.pack()
            self._write_index({**(state or {}), **own}, snapshot, keep)
        return self._parts.live.generation

    def acknowledge(self) -> None:
        """Durably releases the previous commit, because every rank has its prepared one. Without a prepared commit, a
        no-op."""
        self._failures.check_writable("acknowledge")
        dropped = self._superseded(0)
        if not dropped:
            return
        with self._failures.poisoning("acknowledging a commit failed"), self._counted():
            self._parts.drives.check()
            self._parts.index.drop_snapshots(dropped)
        self._parts.engine.log_mark(f"acknowledge {self._parts.live.generation}")
        for name in dropped:
            self._release(name)
        self._replaces = False
        self._discard()

    def _counted(self) -> contextlib.AbstractContextManager[None]:
        """Counts the index's writes against the write budget, if there is one."""
        budget = self._parts.extents.budget
        return contextlib.nullcontext() if budget is None else budget.counting()

    def _discard(self) -> None:
        named = [name for name in self.snapshots if name != PREVIOUS]
        kept = copies(max(self._parts.config.retain, len(named)))
        self._parts.extents.discard(kept, self._parts.live.counts())

    def _superseded(self, adding: int) -> list[str]:
        """The snapshots to drop with a commit that is final (no prepare, or acknowledged) and adds ``adding`` snapshots."""
        named = [name for name in self.snapshots if name != PREVIOUS]
        excess = max(len(named) + adding - self._parts.config.retain, 0) if adding or self._replaces else 0
        return named[:excess] + ([PREVIOUS] if PREVIOUS in self.snapshots else [])

    def _write_index(self, state: dict[str, bytes], snapshot: str | None, keep: Keep) -> None:
        parts, live = self._parts, self._parts.live
        changed = live.changed_entries()
        generation = live.generation + 1
        merged = self.state | state
        added: dict[str, Commit] = {}
        dropped: list[str] = []
        if snapshot is not None:
            table = live.table.copy()
            table.merge(changed)
            added[snapshot] = Commit(generation, table, merged)
        if keep is Keep.PREVIOUS and live.generation:
            # Older snapshots stay, too: if this commit is undone, so is the snapshot that replaces them.
            self._replaces = bool(added)
            added[PREVIOUS] = Commit(live.generation, live.table.copy(), self.state)
        else:
            dropped = self._superseded(len(added))
        parts.drives.check()  # writes to a file without a name would be lost
        # Directories that it may refer to come first; it includes the shares for later slots.
        parts.drives.publish()
        parts.drives.reweigh()
        parts.engine.log_mark(f"index {generation}")
        with self._counted():
            parts.index.write(
                generation=generation,
                meta=parts.meta(),
                changed=changed,
                state=state,
                add_snapshots=added,
                drop_snapshots=dropped,
            )
        if not parts.home.published:
            parts.home.publish(len(parts.drives))
        parts.drives.committed()
        parts.engine.log_mark(f"commit {generation}")
        # The transaction is durable: only now may its old slots be reused.
        for name, commit in added.items():
            live.retain(commit.records.rows)
            self.snapshots[name] = commit
        live.committed(generation, changed)
        for name in dropped:
            self._release(name)
        self.state = merged
        parts.extents.committed()
        if PREVIOUS not in self.snapshots:
            self._discard()
