"""The LMDB index of a store: one synchronous transaction acknowledges a whole commit.

Databases: ``meta`` (uuid, schemas, optimizer, generation), ``records`` (key -> packed entry), ``state`` (name
-> bytes: random state, data position, schedules) and ``snapshots`` (name -> a commit's whole table, see
``docs/FORMAT.md``). Between commits the live index is only in memory; the database always holds the last commit.

The file gets its full size, blocks included, before LMDB writes into it: otherwise LMDB would allocate while it commits,
and find a full disk in the middle of the one operation that must not fail. And since the size is fixed, a truncated file
is detected before its map is accessed, which would be a SIGBUS. The same holds for drive errors: pages are first read
with ``pread``, which reports them.

LMDB has no checksums. ``meta`` holds a checksum over all entries of all databases: every transaction updates it, and
every opening checks it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import lmdb
import numpy as np

from tierstore import _native
from tierstore.errors import StoreFormatError
from tierstore.store.config import StoreAccess
from tierstore.store.format import RecordSchema
from tierstore.store.index.table import Changed, CommittedRecords

_PAGE = 4096
_READ_BYTES = 1 << 20
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUBTREE = 1, 2
_NO_PAGE = 2**64 - 1
_META = struct.Struct("<16xII16x48s48sQQ")
_TREE = struct.Struct("<IHH5Q")
_HEAD = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")


class _Pages:
    """The file's pages in use, and those visited."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", buffering=0) as file:
            self._content = self._read(file.fileno(), 2 * _PAGE)
            metas = [_META.unpack_from(self._content, page * _PAGE) for page in (0, 1)]
            for number, (magic, version, _, _, _, transaction) in enumerate(metas):
                if (magic, version) != (_MAGIC, _VERSION):
                    raise self.damaged(f"page {number} is not a head")
                # Transactions write the two heads alternately; both are of transaction 0 at first.
                if transaction % 2 != number and transaction:
                    raise self.damaged(f"head {number} is of transaction {transaction}")
            if abs(metas[0][-1] - metas[1][-1]) > 1:
                raise self.damaged(f"its heads are of transactions {metas[0][-1]} and {metas[1][-1]}")
            _, _, self.free, self.main, last, _ = max(metas, key=lambda meta: int(meta[-1]))
            self.count = int(last) + 1
            size = os.fstat(file.fileno()).st_size
            if size < self.count * _PAGE:
                message = f"it has {size} bytes, and {self.count * _PAGE} are in use"
                raise StoreFormatError(f"{path}: truncated: {message}")
            self._content = self._read(file.fileno(), self.count * _PAGE)
        self.met = {0, 1}

    def damaged(self, what: str) -> StoreFormatError:
        return StoreFormatError(f"{self.path}: not an index, or damaged: {what}")

    def _read(self, fd: int, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        view, done = memoryview(content), 0
        while done < nbytes:
            try:
                got = os.preadv(fd, [view[done : done + _READ_BYTES]], done)
            except OSError as error:
                message = f"reading the index: {os.strerror(error.errno or 0)}"
                raise OSError(error.errno, message, str(self.path)) from error
            if not got:
                raise StoreFormatError(f"{self.path}: truncated: not an index, it ends at byte {done}")
            done += got
        return content

    def _meet(self, number: int) -> int:
        if not 1 < number < self.count or number in self.met:
            raise self.damaged(f"page {number} is out of place")
        self.met.add(number)
        return number * _PAGE

    def tree(self, raw: bytes, leaves: bool) -> Iterator[tuple[int, bytes, bytes]]:
        """Flags, key and content of each entry of the tree with head ``raw``."""
        _, _, depth, _, _, _, entries, root = _TREE.unpack(raw)
        found = 0
        if root != _NO_PAGE:
            for node in self._walk(root, depth):
                found += 1
                if leaves or node[0] & _SUBTREE:
                    yield node
        if found != entries or (root == _NO_PAGE) != (depth == 0):
            raise self.damaged(f"a tree has {found} entries, not {entries}")

    def _walk(self, number: int, depth: int) -> Iterator[tuple[int, bytes, bytes]]:
        start = self._meet(number)
        own, _, kind, lower, upper = _HEAD.unpack_from(self._content, start)
        count = (lower - _HEAD.size) // 2
        expected = _LEAF if depth == 1 else _BRANCH
        if own != number or kind != expected or not _HEAD.size < lower <= upper <= _PAGE or lower % 2:
            raise self.damaged(f"page {number} does not match its tree")
        for offset in struct.unpack_from(f"<{count}H", self._content, start + _HEAD.size):
            if not upper <= offset <= _PAGE - _NODE.size or offset % 2:
                raise self.damaged(f"page {number} has a node at byte {offset}")
            low, high, flags, key_bytes = _NODE.unpack_from(self._content, start + offset)
            begin = offset + _NODE.size + key_bytes
            nbytes = low | high << 16
            if begin + (0 if kind == _BRANCH else 8 if flags & _BIG else nbytes) > _PAGE:
                raise self.damaged(f"page {number} has a node that ends outside of it")
            key = bytes(self._content[start + begin - key_bytes : start + begin])
            if kind == _BRANCH:
                yield from self._walk(nbytes | flags << 32, depth - 1)
            elif flags & _BIG:
                (first,) = struct.unpack_from("<Q", self._content, start + begin)
                yield flags, key, self._overflow(first, nbytes)
            else:
                yield flags, key, bytes(self._content[start + begin : start + begin + nbytes])

    def _overflow(self, first: int, nbytes: int) -> bytes:
        start = self._meet(first)
        own, _, kind, low, high = _HEAD.unpack_from(self._content, start)
        pages = low | high << 16
        if own != first or kind != _OVERFLOW or pages != -(-(nbytes + _HEAD.size) // _PAGE):
            raise self.damaged(f"page {first} does not match its tree")
        for number in range(first + 1, first + pages):
            self._meet(number)
        return bytes(self._content[start + _HEAD.size : start + _HEAD.size + nbytes])

    def free_list(self, content: bytes) -> None:
        """One entry of the list of free pages: their count, and their numbers."""
        if len(content) < 8 or len(content) % 8:
            raise self.damaged("the list of free pages")
        count, *numbers = struct.unpack(f"<{len(content) // 8}Q", content)
        if count > len(numbers):
            raise self.damaged("the list of free pages")
        for number in numbers[:count]:
            self._meet(number)


def check_pages(path: Path) -> None:
    """Raises StoreFormatError for a damaged LMDB file, OSError if it cannot be read."""
    pages = _Pages(path)
    for _, _, head in pages.tree(pages.main, leaves=False):
        if len(head) != _TREE.size:
            raise pages.damaged("a tree without a head")
        for _ in pages.tree(head, leaves=True):
            pass
    for _, _, content in pages.tree(pages.free, leaves=True):
        pages.free_list(content)
    lost = pages.count - len(pages.met)
    if lost:
        raise pages.damaged(f"{lost} pages are neither free nor in use")


#: The snapshot of the previous commit that a prepared commit keeps.
PREVIOUS = ".previous"

_PAGE = 4096
_TOUCH_BYTES = 1 << 20
_CHECKSUM = b"checksum"
_DATABASES = (b"meta", b"records", b"state", b"snapshots")
_FIRST_BYTES = 1 << 20
_ENTRY_BYTES = 256  # a record's key and entry with LMDB's overhead, rounded up


def index_bytes(records: int, retain: int) -> int:
    """Bytes to reserve for the index of ``records`` records: the table, ``retain`` snapshots of it, the one being added and
    the previous commit, twice, because LMDB writes new pages before it frees the old ones.
    """
    needed = _FIRST_BYTES + records * _ENTRY_BYTES * 2 * (3 + retain)
    return -(-needed // _FIRST_BYTES) * _FIRST_BYTES


@dataclass(frozen=True)
class Commit:
    """The content of one commit: ``generation`` counts commits, ``records`` and ``state`` are whole tables."""

    generation: int
    records: CommittedRecords
    state: dict[str, bytes]


class Index:
    """The index in ``directory``, made by ``create``. Raises StoreFormatError if there is none, and from every method
    that reads a damaged one.
    """

    def __init__(self, directory: Path, *, access: StoreAccess = StoreAccess.WRITE) -> None:
        self._data = directory / "data.mdb"
        mode = os.O_RDONLY if access is StoreAccess.READ else os.O_RDWR
        try:
            self._fd = os.open(self._data, mode | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise StoreFormatError(f"{self._data}: the index is missing") from error
        try:
            self._open(directory, access)
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self, directory: Path, access: StoreAccess) -> None:
        self._map_bytes = max(os.fstat(self._fd).st_size, _FIRST_BYTES)
        check_pages(self._data)
        try:
            # lock=False: the store's lease already admits only one writer or several readers, and one thread commits.
            # Readers would also write to LMDB's own lock file.
            self._env = lmdb.open(
                os.fsencode(directory),  # a str must be UTF-8
                map_size=self._map_bytes,
                max_dbs=4,
                lock=False,
                create=False,
                readonly=access is StoreAccess.READ,
            )
        except lmdb.Error as error:
            if _system_errno(error):
                raise self._os_error(error) from error
            raise StoreFormatError(f"{self._data}: not an index: {error}") from error
        try:
            self._databases = {name: self._env.open_db(name, create=False) for name in _DATABASES}
            self._check_entries()
        except lmdb.Error as error:
            self._env.close()
            raise StoreFormatError(f"{self._data}: damaged: {error}") from error
        except BaseException:
            self._env.close()
            raise
        self._meta, self._records, self._state, self._snapshots = self._databases.values()

    @classmethod
    def create(cls, directory: Path) -> Index:
        """A new index. Raises OSError (ENOSPC)."""
        directory.mkdir()
        try:
            with lmdb.open(os.fsencode(directory), map_size=_FIRST_BYTES, max_dbs=4, lock=False) as env:
                databases = [env.open_db(name) for name in _DATABASES]
                with env.begin(write=True) as txn:
                    txn.put(_CHECKSUM, bytes(8), db=databases[0])
        except lmdb.Error as error:
            code = _system_errno(error) or errno.EIO
            raise OSError(code, str(error), str(directory / "data.mdb")) from error
        index = cls(directory)
        try:
            _allocate(index.fileno(), _FIRST_BYTES, index._data)
        except BaseException:
            index.close()
            raise
        return index

    def fileno(self) -> int:
        """A descriptor of the file."""
        return self._fd

    def _touch(self) -> None:
        """Reads the pages in use into the page cache. Raises OSError naming the file."""
        used = (int(self._env.info()["last_pgno"]) + 1) * _PAGE
        buffer = bytearray(min(used, _TOUCH_BYTES))
        try:
            for offset in range(0, used, _TOUCH_BYTES):
                os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            message = f"reading the index: {os.strerror(error.errno or 0)}"
            raise OSError(error.errno, message, str(self._data)) from error

    def _check_entries(self) -> None:
        """Raises StoreFormatError if the entries do not match their checksum."""
        total = 0
        with self._env.begin() as txn:
            for name, database in self._databases.items():
                entries = [
                    entry
                    for entry in txn.cursor(db=database).iternext()
                    if name != b"meta" or entry[0] != _CHECKSUM
                ]
                total += _native.entries_crc32c(name, entries)
            expected = txn.get(_CHECKSUM, db=self._databases[b"meta"])
        if expected is None or total % 2**64 != int.from_bytes(expected, "little"):
            raise StoreFormatError(f"{self._data}: damaged: its entries do not match its checksum")

    def _os_error(self, error: lmdb.Error) -> OSError:
        return OSError(_system_errno(error) or errno.EIO, str(error), str(self._data))

    def reserve(self, nbytes: int) -> None:
        """Reserves a total of ``nbytes``. Raises OSError (ENOSPC) naming the file and the bytes needed."""
        nbytes = -(-nbytes // _FIRST_BYTES) * _FIRST_BYTES
        if nbytes > self._map_bytes:
            _allocate(self._fd, nbytes, self._data)
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

    def read_schemas(self) -> list[RecordSchema]:
        """The record schemas of the last commit; none before the first. Raises StoreFormatError."""
        raw = self.read_meta().get("schemas", [])
        if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
            raise StoreFormatError(f"{self._data}: the index has no record schemas")
        return [RecordSchema.from_json(item) for item in raw]

    def read_commit(
        self, snapshot: str | None = None, schemas: Sequence[RecordSchema] | None = None
    ) -> Commit:
        """The last commit, or the named snapshot. ``schemas``: those of the index (None), possibly with more after them.
        Raises KeyError for an unknown snapshot, StoreFormatError for an entry that does not fit its schema.
        """
        schemas = self.read_schemas() if schemas is None else schemas
        generation, packed, state = self._read_packed(snapshot)
        return Commit(generation, CommittedRecords.of(schemas, packed, where=str(self._data)), state)

    def _read_packed(self, snapshot: str | None) -> tuple[int, list[tuple[bytes, bytes]], dict[str, bytes]]:
        """Generation, keys with packed entries, and state of a commit."""
        with self._reading() as txn:
            if snapshot is None:
                generation = int(bytes(txn.get(b"generation", db=self._meta, default=b"0")))
                packed = [(bytes(k), bytes(v)) for k, v in txn.cursor(db=self._records)]
                return (
                    generation,
                    packed,
                    {bytes(k).decode(): bytes(v) for k, v in txn.cursor(db=self._state)},
                )
            raw = txn.get(snapshot.encode(), db=self._snapshots)
            if raw is None:
                raise KeyError(snapshot)
            table = unpack_table(bytes(raw), where=f"{self._data}: snapshot {snapshot!r}")
            records, states = (
                {name.removeprefix(prefix): value for name, value in table.items() if name.startswith(prefix)}
                for prefix in ("record/", "state/")
            )
            return int(table["generation"]), [(k.encode(), v) for k, v in records.items()], states

    def layers(self) -> tuple[int, ...]:
        """The layers of the last commit's records, ascending."""
        with self._reading() as txn:
            found = {value[2:4] for value in txn.cursor(db=self._records).iternext(keys=False)}
        return tuple(sorted(int.from_bytes(layer, "little") for layer in found))

    def read_state(self, name: str, snapshot: str | None = None) -> bytes | None:
        """State ``name`` of the last commit, or of the named snapshot; None if it has none. Raises KeyError for an
        unknown snapshot.
        """
        if snapshot is not None:
            return self._read_packed(snapshot)[2].get(name)
        with self._reading() as txn:  # without its records, of which there are many
            raw = txn.get(name.encode(), db=self._state)
            return None if raw is None else bytes(raw)

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
        changed: Changed | CommittedRecords,
        state: Mapping[str, bytes],
        add_snapshots: Mapping[str, Commit] = MappingProxyType({}),
        drop_snapshots: Sequence[str] = (),
    ) -> None:
        """Commits: when this returns, all of it is durable; when it raises, a reopened index has all or none of it.
        ``changed`` and ``state`` are merged into the existing tables.
        """

        def work(changes: _Changes) -> None:
            changes.put(b"meta", b"store", json.dumps(meta, sort_keys=True).encode())
            changes.put(b"meta", b"generation", str(generation).encode())
            changes.put_tables(((key.encode(), value) for key, value in changed.packed()), state)
            for name in drop_snapshots:
                changes.delete(b"snapshots", name.encode())
            for name, commit in add_snapshots.items():
                changes.put(b"snapshots", name.encode(), _pack_snapshot(commit))

        self._transact(work)

    def drop_snapshots(self, names: Sequence[str]) -> None:
        """Drops snapshots; durable when this returns."""

        def work(changes: _Changes) -> None:
            for name in names:
                changes.delete(b"snapshots", name.encode())

        self._transact(work)

    def roll_back(self, snapshot: str) -> None:
        """Makes ``snapshot`` the last commit, and drops it and later snapshots. Raises KeyError.

        Generations continue to count, so that later commits are newer than the dropped ones.
        """
        generation, records, state = self._read_packed(snapshot)
        later = [name for name, other in self.snapshots().items() if other > generation]

        def work(changes: _Changes) -> None:
            changes.clear(b"records")
            changes.clear(b"state")
            changes.put_tables(records, state)
            for name in {snapshot, *later}:
                changes.delete(b"snapshots", name.encode())

        self._transact(work)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """A read transaction. Errors of LMDB and malformed values are reported as damage."""
        try:
            with self._env.begin() as txn:
                yield txn
        except (lmdb.Error, ValueError) as error:
            raise StoreFormatError(f"{self._data}: damaged: {error}") from error

    def _transact(self, work: Callable[[_Changes], None]) -> None:
        """Runs ``work`` in one synchronous transaction. Grows an index that is too small."""
        self._touch()
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    changes = _Changes(txn, self._databases)
                    work(changes)
                    changes.finish()
                return
            except lmdb.MapFullError:  # nothing was written
                self.reserve(2 * self._map_bytes)
            except lmdb.Error as error:
                raise self._os_error(error) from error

    def close(self) -> None:
        self._env.close()
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # of a drive that is gone
                os.close(self._fd)
        self._fd = -1


class _Changes:
    """The changes of one transaction; keeps the checksum over all entries up to date."""

    def __init__(self, txn: lmdb.Transaction, databases: Mapping[bytes, lmdb._Database]) -> None:
        self._txn = txn
        self._databases = databases
        self._total = int.from_bytes(txn.get(_CHECKSUM, b"", db=databases[b"meta"]), "little")

    def put(self, database: bytes, key: bytes, value: bytes) -> None:
        old = self._txn.get(key, db=self._databases[database])
        self._total += _entry_crc32c(database, key, value)
        if old is not None:
            self._total -= _entry_crc32c(database, key, old)
        self._txn.put(key, value, db=self._databases[database])

    def put_tables(self, records: Iterable[tuple[bytes, bytes]], state: Mapping[str, bytes]) -> None:
        items = list(records)
        with self._txn.cursor(db=self._databases[b"records"]) as cursor:
            old = [(bytes(key), bytes(value)) for key, value in cursor.getmulti([key for key, _ in items])]
            self._total -= _native.entries_crc32c(b"records", old)
            self._total += _native.entries_crc32c(b"records", items)
            cursor.putmulti(items)
        for name, value in state.items():
            self.put(b"state", name.encode(), value)

    def delete(self, database: bytes, key: bytes) -> None:
        old = self._txn.pop(key, db=self._databases[database])
        if old is not None:
            self._total -= _entry_crc32c(database, key, old)

    def clear(self, database: bytes) -> None:
        for key, value in self._txn.cursor(db=self._databases[database]):
            self._total -= _entry_crc32c(database, key, value)
        self._txn.drop(self._databases[database], delete=False)

    def finish(self) -> None:
        self._txn.put(_CHECKSUM, (self._total % 2**64).to_bytes(8, "little"), db=self._databases[b"meta"])


def _entry_crc32c(database: bytes, key: bytes | memoryview, value: bytes | memoryview) -> int:
    return _native.crc32c(np.frombuffer(b"\0".join((database, key, value)), np.uint8), 0)


def _system_errno(error: lmdb.Error) -> int:
    """The errno behind ``error``; 0 for an error of LMDB itself."""
    code = int(getattr(error, "code", 0) or 0)
    return errno.ENOSPC if isinstance(error, lmdb.DiskError) else max(code, 0)


def _pack_snapshot(commit: Commit) -> bytes:
    table = {f"record/{key}": value for key, value in commit.records.packed()}
    table |= {f"state/{name}": value for name, value in commit.state.items()}
    table["generation"] = str(commit.generation).encode()
    return pack_table(table)


_TABLE_HEAD = struct.Struct("<HI")


def pack_table(table: dict[str, bytes]) -> bytes:
    """Packs a mapping of keys to values: per item key length (u16), value length (u32), key, value."""
    parts = []
    for key, value in sorted(table.items()):
        encoded = key.encode()
        parts += [_TABLE_HEAD.pack(len(encoded), len(value)), encoded, value]
    return b"".join(parts)


def unpack_table(data: bytes, *, where: str) -> dict[str, bytes]:
    """The inverse of ``pack_table``. Raises StoreFormatError naming ``where``."""
    table: dict[str, bytes] = {}
    offset = 0
    while offset < len(data):
        if offset + _TABLE_HEAD.size > len(data):
            raise StoreFormatError(f"{where}: table ends inside an item at byte {offset}")
        key_length, value_length = _TABLE_HEAD.unpack_from(data, offset)
        offset += _TABLE_HEAD.size
        end = offset + key_length + value_length
        if end > len(data):
            raise StoreFormatError(f"{where}: table ends inside an item at byte {offset}")
        try:
            key = data[offset : offset + key_length].decode()
        except UnicodeDecodeError as error:
            raise StoreFormatError(f"{where}: a key is not UTF-8 at byte {offset}") from error
        table[key] = data[offset + key_length : end]
        offset = end
    return table


def _allocate(fd: int, nbytes: int, path: Path) -> None:
    """Makes the file ``path``, open as ``fd``, ``nbytes`` long, with blocks; its content stays."""
    size = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, size, nbytes - size)
    except OSError as error:
        os.ftruncate(fd, size)
        message = f"{os.strerror(error.errno or 0)}: the index needs {nbytes - size} more bytes"
        raise OSError(error.errno, message, str(path)) from error
