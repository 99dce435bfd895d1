"""Finds and removes the leftovers of a crash.

- Space of slots that neither the last commit nor a snapshot refers to: written for a commit that did not complete,
  grown for records that were not committed, or reserved for the next run, which reserves it again. The ends of extent
  files are cut off, free slots inside them become holes.
- Files in ``scratch/``, and an identity that was never published.
- Directories of a creation that was killed before its first commit: they have a lease and no identity.
- The directory beside a store in which ``reshard`` was building it (``NAME.partial``).

Other files are named and left alone. A prepared commit that not every rank may have stays, too: the ranks decide which of
two commits counts. All reads and changes happen under the leases of the store's directories; no step depends on an
earlier one, so the next collection finishes one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tierstore._native import DirectIo, File
from tierstore.errors import StoreFormatError, StoreMissingError
from tierstore.store.config import StoreAccess
from tierstore.store.disk.home import (
    IDENTITY,
    OWN_NAMES,
    Home,
    building,
    building_directory,
    fsync_directory,
    read_directory_identity,
    read_identity,
    refuse_shared,
)
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.format import Group, RecordSchema
from tierstore.store.index.database import PREVIOUS, Index
from tierstore.store.reading import read_meta, used_slots

_BLOCK = 512  # of st_blocks


class Mode(Enum):
    """Whether garbage is removed, or only listed."""

    REMOVE = "remove"
    DRY_RUN = "dry run"


@dataclass(frozen=True)
class Garbage:
    """Something that no commit needs, and the ``nbytes`` that it occupies on disk."""

    path: Path
    what: str
    nbytes: int


@dataclass
class GcReport:
    """The garbage found (and removed, except in a dry run); and the files left alone, and why."""

    garbage: list[Garbage] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.garbage)


#: By schema number, group and directory: the slots in use.
_Used = Mapping[tuple[int, Group, int], set[int]]


def collect(store: Path, mode: Mode) -> GcReport:
    """Collects the garbage of ``store``, of all its ranks, and of an interrupted reshard to that name.

    Nothing is written unless there is something to remove: a disk may be full, and in a dry run read-only. Raises
    StoreMissingError, StoreInUseError, StoreFormatError (a truncated extent, say), OSError.
    """
    collector = _Collector(mode)
    partial = building_directory(store)
    if partial.is_dir():
        collector.partial(partial)
    ranks = sorted(path for path in store.glob("rank-*") if path.is_dir())
    looks_like_a_store = any((store / name).exists() for name in (IDENTITY, "lease"))
    if looks_like_a_store or not (partial.is_dir() or ranks or collector.report.garbage):
        collector.directory(store, {path.name for path in ranks})
    for path in ranks:
        if not any(path.iterdir()):
            collector.empty(path)
            continue
        try:
            collector.directory(path, set())
        except StoreMissingError as error:
            collector.report.left.append(str(error))
    return collector.report


class _Collector:
    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._access = StoreAccess.READ if mode is Mode.DRY_RUN else StoreAccess.WRITE
        self.report = GcReport()

    def _found(self, path: Path, what: str, nbytes: int, remove: Callable[[], None]) -> None:
        self.report.garbage.append(Garbage(path, what, nbytes))
        if self._mode is Mode.REMOVE:
            remove()

    def partial(self, directory: Path) -> None:
        """The partial store of an interrupted ``reshard``."""
        foreign = [
            child.name
            for child in directory.iterdir()
            if child.name not in {*OWN_NAMES, IDENTITY} and not child.match("rank-[0-9]*")
        ]
        if foreign:
            self.report.left.append(f"{directory}: {foreign[0]!r} does not belong to a reshard")
            return
        with building(directory):
            self._found(
                directory, "an interrupted reshard", _tree_bytes(directory), lambda: shutil.rmtree(directory)
            )

    def directory(self, directory: Path, ranks: set[str]) -> None:
        """The store in ``directory``, or the remains of its creation. Raises StoreMissingError for neither."""
        names = {child.name for child in directory.iterdir()} if directory.is_dir() else set()
        if IDENTITY in names:
            self._store(directory, ranks)
        elif "lease" in names and names <= OWN_NAMES | ranks:
            with DirectoryLease(directory, access=self._access):
                if not (directory / IDENTITY).exists():  # it became a store meanwhile
                    self._creation(directory)
        else:
            raise StoreMissingError(f"{directory}: no store here ({IDENTITY} is missing)")

    def empty(self, directory: Path) -> None:
        """The directories that a creation makes first, and its removal removes last."""
        self._found(directory, "an interrupted creation", _own_bytes(directory), directory.rmdir)

    def _creation(self, directory: Path) -> None:
        with contextlib.suppress(StoreFormatError):  # cut short at an early point
            begun = read_directory_identity(directory, f"{IDENTITY}.new")
            if begun is not None and begun.directories > 1:
                # Only it names the owner of the others, which a creation with the same directories reuses.
                self.report.left.append(
                    f"{directory}: an interrupted creation in {begun.directories} directories; create it again, or remove "
                    "them all"
                )
                return

        def remove() -> None:
            for name in sorted(OWN_NAMES - {"lease"}):
                path = directory / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            # Removed last: it marks the rest as debris of a creation.
            fsync_directory(directory)
            (directory / "lease").unlink()
            with contextlib.suppress(OSError):  # it contains the directories of ranks
                directory.rmdir()

        self._found(directory, "an interrupted creation", _tree_bytes(directory), remove)

    def _store(self, directory: Path, ranks: set[str]) -> None:
        home = Home(directory, read_identity(directory), published=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(DirectoryLease(directory, access=self._access))
            index = stack.enter_context(
                contextlib.closing(Index(directory / "index", access=StoreAccess.READ))
            )
            schemas, _, known = read_meta(home, index)
            if PREVIOUS in index.snapshots():
                self.report.left.append(f"{directory}: a prepared commit that not every rank may have")
            used = used_slots(index, schemas)
            self._one_directory(directory, 0, schemas, used, ranks | {"index", "model", "tokens", IDENTITY})
            for number, entry in enumerate(known[1:], 1):
                stripe = Path(str(entry["path"]))
                identity = read_directory_identity(stripe)
                if identity is None or (identity.uuid, identity.own) != (home.uuid, entry["own"]):
                    self.report.left.append(
                        f"{stripe}: directory {number} of the store in {directory} is not here"
                    )
                    continue
                try:
                    # By the index of a copy, the original's slots would be garbage.
                    refuse_shared(home, stripe, identity)
                except StoreFormatError as error:
                    self.report.left.append(str(error))
                    continue
                stack.enter_context(DirectoryLease(stripe, access=self._access))
                self._one_directory(stripe, number, schemas, used, {IDENTITY})

    def _one_directory(
        self, directory: Path, number: int, schemas: Sequence[RecordSchema], used: _Used, known: set[str]
    ) -> None:
        for child in sorted(directory.iterdir()):
            if child.name == f"{IDENTITY}.new":
                self._file(child, "an identity that was never published")
            elif child.name not in known | {"lease", "extents", "scratch"}:
                self.report.left.append(f"{child}: not the store's")
        scratch = directory / "scratch"
        for child in sorted(scratch.iterdir()) if scratch.is_dir() else ():
            self._file(child, "scratch of a process that is gone")
        layouts = {
            f"{schema.name}.{group.label}": (index, group, schema.layout(group).slot_bytes)
            for index, schema in enumerate(schemas)
            for group in schema.groups
        }
        for child in sorted((directory / "extents").iterdir()):
            if child.name not in layouts:
                self.report.left.append(f"{child}: not an extent of this store")
                continue
            index, group, slot_bytes = layouts[child.name]
            self._extent(child, slot_bytes, used.get((index, group, number), set()))

    def _file(self, path: Path, what: str) -> None:
        if path.is_dir():
            self.report.left.append(f"{path}: not the store's")
        else:
            self._found(path, what, _own_bytes(path), path.unlink)

    def _extent(self, path: Path, slot_bytes: int, used: set[int]) -> None:
        status = path.stat()
        end = (max(used) + 1 if used else 0) * slot_bytes
        if status.st_size < end:
            raise StoreFormatError(
                f"{path}: truncated: it has {status.st_size} bytes, and {end} of them are in use"
            )
        # Blocks of slots in use are not garbage; a file system's own blocks (its tree of extents) are not worth counting.
        nbytes = status.st_blocks * _BLOCK - len(used) * slot_bytes
        if nbytes < slot_bytes and status.st_size == end:
            return

        def remove() -> None:
            with File(str(path), direct=DirectIo.OFF) as file:
                os.truncate(path, end)
                for first, beyond in _gaps(used):
                    file.punch(first * slot_bytes, (beyond - first) * slot_bytes)
                os.fsync(file.fileno())

        self._found(path, "slots that no commit refers to", max(nbytes, 0), remove)


def _gaps(used: set[int]) -> Iterator[tuple[int, int]]:
    """(first, beyond) of each run of free slots below the last one in use."""
    free_from = 0
    for slot in sorted(used):
        if slot > free_from:
            yield free_from, slot
        free_from = slot + 1


def _own_bytes(path: Path) -> int:
    return path.lstat().st_blocks * _BLOCK


def _tree_bytes(directory: Path) -> int:
    return _own_bytes(directory) + sum(map(_own_bytes, directory.rglob("*")))
