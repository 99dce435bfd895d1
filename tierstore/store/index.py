"""The LMDB index of a store: one synchronous transaction acknowledges a whole commit.

Databases: ``meta`` (uuid, schemas, generation), ``records`` (key -> RecordEntry), ``state`` (name -> bytes: random
state, data position, schedules) and ``snapshots`` (name -> a commit's whole table, see ``docs/FORMAT.md``). Between commits the
live index is in memory only; what is here is always the last commit.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lmdb

from tierstore.errors import StoreFormatError
from tierstore.store.format import RecordEntry, pack_table, unpack_table

__all__ = ["Commit", "Index"]


@dataclass(frozen=True)
class Commit:
    """All that one commit says: ``generation`` counts commits, ``records`` and ``state`` are whole tables."""

    generation: int
    records: dict[str, RecordEntry]
    state: dict[str, bytes]


class Index:
    """The index in ``directory``; ``map_bytes`` is the most it may grow to, and is reserved on disk.

    LMDB would otherwise allocate blocks as it commits, and meet a full disk in the middle of the one operation that
    must not fail.
    """

    def __init__(self, directory: Path, *, map_bytes: int) -> None:
        directory.mkdir(exist_ok=True)
        self._data = directory / "data.mdb"
        self._map_bytes = max(map_bytes, 1 << 20)
        self._reserve()
        # lock=False: the store's lease already admits one process, and one thread commits.
        self._env = lmdb.open(
            str(directory), map_size=self._map_bytes, max_dbs=4, lock=False, sync=True, metasync=True
        )
        self._meta = self._env.open_db(b"meta")
        self._records = self._env.open_db(b"records")
        self._state = self._env.open_db(b"state")
        self._snapshots = self._env.open_db(b"snapshots")

    def _reserve(self) -> None:
        fd = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Past the end of the file: LMDB takes a file's size for its content, so the size must not change.
            _fallocate_keep_size(fd, self._map_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if error.errno == errno.ENOSPC:
                message = f"{os.strerror(errno.ENOSPC)}: the index needs {self._map_bytes} bytes"
                raise OSError(errno.ENOSPC, message, str(self._data)) from error
            raise OSError(error.errno, error.strerror, str(self._data)) from error
        finally:
            os.close(fd)

    def read_meta(self) -> dict[str, object]:
        with self._env.begin(db=self._meta) as txn:
            raw = txn.get(b"store")
        if raw is None:
            return {}
        value = json.loads(bytes(raw))
        if not isinstance(value, dict):
            raise StoreFormatError(f"{self._data}: meta is not a table")
        return value

    def read_commit(self, snapshot: str | None = None) -> Commit:
        """The last commit, or the snapshot named. Raises KeyError for an unknown snapshot."""
        with self._env.begin() as txn:
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
        with self._env.begin(db=self._snapshots) as txn:
            for name, raw in txn.cursor():
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
        add_snapshot: tuple[str, Commit] | None = None,
        drop_snapshots: tuple[str, ...] = (),
    ) -> None:
        """Commits: when this returns, all of it is durable; when it raises, none of it is visible.

        ``changed`` and ``state`` are merged into what is there.
        """
        try:
            with self._env.begin(write=True) as txn:
                txn.put(b"store", json.dumps(meta, sort_keys=True).encode(), db=self._meta)
                txn.put(b"generation", str(generation).encode(), db=self._meta)
                for key, entry in changed.items():
                    txn.put(key.encode(), entry.pack(), db=self._records)
                for name, value in state.items():
                    txn.put(name.encode(), value, db=self._state)
                for name in drop_snapshots:
                    txn.delete(name.encode(), db=self._snapshots)
                if add_snapshot is not None:
                    name, commit = add_snapshot
                    txn.put(name.encode(), _pack_snapshot(commit), db=self._snapshots)
        except lmdb.MapFullError as error:
            message = f"the index outgrew its reservation of {self._map_bytes} bytes"
            raise OSError(errno.ENOSPC, message, str(self._data)) from error
        except lmdb.DiskError as error:
            raise OSError(errno.EIO, str(error), str(self._data)) from error

    def close(self) -> None:
        self._env.close()


def _pack_snapshot(commit: Commit) -> bytes:
    table = {f"record/{key}": entry.pack() for key, entry in commit.records.items()}
    table |= {f"state/{name}": value for name, value in commit.state.items()}
    table["generation"] = str(commit.generation).encode()
    return pack_table(table)


def _fallocate_keep_size(fd: int, nbytes: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    keep_size = 1
    while True:
        result = libc.fallocate64(fd, keep_size, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        if result == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
