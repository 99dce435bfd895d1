"""The LMDB index of a store: one synchronous transaction acknowledges a whole commit.

Databases: ``meta`` (uuid, schemas, optimizer, generation), ``records`` (key -> RecordEntry), ``state`` (name
-> bytes: random state, data position, schedules) and ``snapshots`` (name -> a commit's whole table, see
``docs/FORMAT.md``). Between commits the live index is in memory only; what is here is always the last commit.

The file has its full size, blocks included, before LMDB writes into it: LMDB would otherwise allocate as it
commits, and meet a full disk in the middle of the one operation that must not fail. And since the size is
always there, a file cut short is noticed before its map is touched, where it would be a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import lmdb

from tierstore.errors import StoreFormatError
from tierstore.store.format import RecordEntry, pack_table, unpack_table

__all__ = ["PREVIOUS", "Commit", "Index", "index_bytes"]

#: The snapshot that a prepared commit keeps of the one before it.
PREVIOUS = ".previous"

_PAGE = 4096
_FIRST_BYTES = 1 << 20
_ENTRY_BYTES = 256  # a record's key and entry with LMDB's overhead, rounded up


def index_bytes(records: int, retain: int) -> int:
    """Bytes to reserve for the index of ``records`` records: the table, ``retain`` snapshots of it, the
    one being added and the previous commit, and as much again, for LMDB writes pages anew before it frees the
    old ones."""
    needed = _FIRST_BYTES + records * _ENTRY_BYTES * 2 * (3 + retain)
    return -(-needed // _FIRST_BYTES) * _FIRST_BYTES


@dataclass(frozen=True)
class Commit:
    """All that one commit says: ``generation`` counts commits, ``records`` and ``state`` are whole tables."""

    generation: int
    records: dict[str, RecordEntry]
    state: dict[str, bytes]


class Index:
    """The index in ``directory``, which ``create`` made. Raises StoreFormatError where there is none, and from whatever
    reads it where it is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data.mdb"
        try:
            size = self._data.stat().st_size
        except FileNotFoundError as error:
            raise StoreFormatError(f"{self._data}: the index is missing") from error
        self._map_bytes = max(size, _FIRST_BYTES)
        try:
            # lock=False: the store's lease already admits one process, and one thread commits.
            self._env = lmdb.open(
                str(directory), map_size=self._map_bytes, max_dbs=4, lock=False, create=False
            )
        except lmdb.Error as error:
            raise StoreFormatError(f"{self._data}: not an index: {error}") from error
        try:
            used = (int(self._env.info()["last_pgno"]) + 1) * _PAGE
            if size < used:
                raise StoreFormatError(f"{self._data}: truncated: it has {size} bytes, and {used} are in use")
            self._meta = self._env.open_db(b"meta")
            self._records = self._env.open_db(b"records")
            self._state = self._env.open_db(b"state")
            self._snapshots = self._env.open_db(b"snapshots")
        except lmdb.Error as error:
            self._env.close()
            raise StoreFormatError(f"{self._data}: damaged: {error}") from error
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def create(cls, directory: Path) -> Index:
        """A new index. Raises OSError (ENOSPC) when its space is not to be had."""
        directory.mkdir()
        try:
            with lmdb.open(str(directory), map_size=_FIRST_BYTES, max_dbs=4, lock=False) as env:
                for name in (b"meta", b"records", b"state", b"snapshots"):
                    env.open_db(name)
        except lmdb.DiskError as error:
            raise OSError(errno.ENOSPC, str(error), str(directory / "data.mdb")) from error
        except lmdb.Error as error:
            raise OSError(errno.EIO, str(error), str(directory / "data.mdb")) from error
        _allocate(directory / "data.mdb", _FIRST_BYTES)
        return cls(directory)

    def reserve(self, nbytes: int) -> None:
        """Makes room for ``nbytes`` in all. Raises OSError (ENOSPC) naming the file and the bytes needed."""
        nbytes = -(-nbytes // _FIRST_BYTES) * _FIRST_BYTES
        if nbytes > self._map_bytes:
            _allocate(self._data, nbytes)
            self._env.set_mapsize(nbytes)
            self._map_bytes = nbytes

    def read_meta(self) -> dict[str, object]:
        with self._reading() as txn:
            raw = txn.get(b"store", db=self._meta)
        if raw is None:
            return {}
        try:
            value = json.loads(bytes(raw))
        except ValueError as error:
            raise StoreFormatError(f"{self._data}: meta is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise StoreFormatError(f"{self._data}: meta is not a table")
        return value

    def read_commit(self, snapshot: str | None = None) -> Commit:
        """The last commit, or the snapshot named. Raises KeyError for an unknown snapshot."""
        with self._reading() as txn:
            if snapshot is not None:
                raw = txn.get(snapshot.encode(), db=self._snapshots)
                if raw is None:
                    raise KeyError(snapshot)
                table = unpack_table(bytes(raw), where=f"{self._data}: snapshot {snapshot!r}")
                generation = int(table.pop("generation"))
                packed = {k.removeprefix("record/"): v for k, v in table.items() if k.startswith("record/")}
                state = {k.removeprefix("state/"): v for k, v in table.items() if k.startswith("state/")}
            else:
                generation = int(bytes(txn.get(b"generation", db=self._meta, default=b"0")))
                packed = {bytes(k).decode(): bytes(v) for k, v in txn.cursor(db=self._records)}
                state = {bytes(k).decode(): bytes(v) for k, v in txn.cursor(db=self._state)}
        records = {k: RecordEntry.unpack(v, where=f"{self._data}: record {k!r}") for k, v in packed.items()}
        return Commit(generation, records, state)

    def snapshots(self) -> dict[str, int]:
        """Names of the retained snapshots, oldest first, with their generations."""
        names = {}
        with self._reading() as txn:
            for name, raw in txn.cursor(db=self._snapshots):
                where = f"{self._data}: snapshot {bytes(name)!r}"
                names[bytes(name).decode()] = int(unpack_table(bytes(raw), where=where)["generation"])
        return dict(sorted(names.items(), key=lambda item: item[1]))

    def write(
        self,
        *,
        generation: int,
        meta: Mapping[str, object],
        changed: Mapping[str, RecordEntry],
        state: Mapping[str, bytes],
        add_snapshots: Mapping[str, Commit] = MappingProxyType({}),
        drop_snapshots: Sequence[str] = (),
    ) -> None:
        """Commits: when this returns, all of it is durable. When it raises, a reopened index has all or none
        of it.

        ``changed`` and ``state`` are merged into what is there. An index that is too small grows.
        """

        def work(txn: lmdb.Transaction) -> None:
            txn.put(b"store", json.dumps(meta, sort_keys=True).encode(), db=self._meta)
            txn.put(b"generation", str(generation).encode(), db=self._meta)
            self._put(txn, changed, state)
            for name in drop_snapshots:
                txn.delete(name.encode(), db=self._snapshots)
            for name, commit in add_snapshots.items():
                txn.put(name.encode(), _pack_snapshot(commit), db=self._snapshots)

        self._transact(work)

    def drop_snapshots(self, names: Sequence[str]) -> None:
        """Forgets snapshots; durable when this returns."""

        def work(txn: lmdb.Transaction) -> None:
            for name in names:
                txn.delete(name.encode(), db=self._snapshots)

        self._transact(work)

    def roll_back(self, snapshot: str) -> None:
        """Makes ``snapshot`` the last commit, and forgets it and those after it. Raises KeyError.

        Generations go on counting, so that what is written next is newer than what is given up.
        """
        commit = self.read_commit(snapshot)
        later = [name for name, generation in self.snapshots().items() if generation > commit.generation]

        def work(txn: lmdb.Transaction) -> None:
            txn.drop(self._records, delete=False)
            txn.drop(self._state, delete=False)
            self._put(txn, commit.records, commit.state)
            for name in {snapshot, *later}:
                txn.delete(name.encode(), db=self._snapshots)

        self._transact(work)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """A read transaction. What LMDB cannot follow in it, and what is not of the form written, is damage."""
        try:
            with self._env.begin() as txn:
                yield txn
        except (lmdb.Error, ValueError) as error:
            raise StoreFormatError(f"{self._data}: damaged: {error}") from error

    def _put(
        self, txn: lmdb.Transaction, records: Mapping[str, RecordEntry], state: Mapping[str, bytes]
    ) -> None:
        for key, entry in records.items():
            txn.put(key.encode(), entry.pack(), db=self._records)
        for name, value in state.items():
            txn.put(name.encode(), value, db=self._state)

    def _transact(self, work: Callable[[lmdb.Transaction], None]) -> None:
        """Runs ``work`` in one synchronous transaction. An index that is too small grows."""
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    work(txn)
                return
            except lmdb.MapFullError:  # nothing was written
                self.reserve(2 * self._map_bytes)
            except lmdb.DiskError as error:
                raise OSError(errno.ENOSPC, str(error), str(self._data)) from error
            except lmdb.Error as error:
                raise OSError(errno.EIO, str(error), str(self._data)) from error

    def close(self) -> None:
        self._env.close()


def _pack_snapshot(commit: Commit) -> bytes:
    table = {f"record/{key}": entry.pack() for key, entry in commit.records.items()}
    table |= {f"state/{name}": value for name, value in commit.state.items()}
    table["generation"] = str(commit.generation).encode()
    return pack_table(table)


def _allocate(path: Path, nbytes: int) -> None:
    """Makes the file at ``path`` ``nbytes`` long, with blocks; what it holds stays."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, size, nbytes - size)
        except OSError as error:
            os.ftruncate(fd, size)
            message = f"{os.strerror(error.errno or 0)}: the index needs {nbytes - size} more bytes"
            raise OSError(error.errno, message, str(path)) from error
    finally:
        os.close(fd)
