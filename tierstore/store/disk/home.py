"""The directory of a store: its identity, written last, and the files allowed beside it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierstore.errors import StoreExistsError, StoreFormatError, StoreInUseError, StoreMissingError
from tierstore.store.config import StripeConfig
from tierstore.store.disk.lease import DirectoryLease, try_lock
from tierstore.store.format import FORMAT_VERSION

IDENTITY = "tierstore.json"
#: The file in a job's directory in which an import describes its model.
MODEL_DIRECTORY = "model"
#: Names allowed in a store's directory besides the identity.
OWN_NAMES = {"lease", "index", "extents", "scratch", MODEL_DIRECTORY, "tokens", f"{IDENTITY}.new"}


@dataclass(frozen=True)
class Identity:
    """The store that a directory belongs to. Number 0 is the store's own directory; each stripe directory has an ``own``
    uuid, and records the store's ``home`` and its own ``path``, both absolute, as of the last opening.
    """

    uuid: str
    number: int
    directories: int
    own: str = ""
    home: str = ""
    path: str = ""

    def as_json(self) -> dict[str, object]:
        content: dict[str, object] = {
            "format": FORMAT_VERSION,
            "uuid": self.uuid,
            "directory": self.number,
            "directories": self.directories,
        }
        return content | ({"own": self.own, "home": self.home, "path": self.path} if self.number else {})


@dataclass
class Home:
    """The directory of a store. ``made``: directories made by its creation, the outermost last."""

    given: Path
    uuid: str
    made: tuple[Path, ...] = ()
    #: Whether it has an identity. Before the first commit it has none, and is not a store.
    published: bool = False
    #: Of an open store.
    lease: DirectoryLease | None = None
    #: The number of directories in the announced identity; 0 without one.
    _announced: int = field(default=0, init=False)

    @property
    def directory(self) -> Path:
        """Its current path: an open store's directory may have been renamed."""
        return self.given if self.lease is None else self.lease.directory

    def sync_names(self) -> None:
        """Makes the names of the directory and its lease durable: after a power cut they mark an unfinished creation."""
        for directory in (self.directory, *(made.parent for made in self.made)):
            fsync_directory(directory)

    def announce(self, directories: int) -> None:
        """Writes the identity under a preliminary name, where ``unfinished_creation`` finds it."""
        write_identity(self.directory, Identity(self.uuid, 0, directories), f"{IDENTITY}.new")
        self._announced = directories

    def publish(self, directories: int = 1) -> None:
        """Writes the identity atomically after the first commit: a directory with an identity is a complete store."""
        # A power cut during a second write could lose it, and with it the owner of the stripe directories.
        if self._announced != directories:
            self.announce(directories)
        # After a power cut everything that the identity vouches for must exist: sync the directory of the names.
        fsync_directory(self.directory / "index")
        fsync_directory(self.directory / "extents")
        fsync_directory(self.directory)
        (self.directory / f"{IDENTITY}.new").rename(self.directory / IDENTITY)
        if self.lease is not None:
            self.lease.watch(IDENTITY)
        self._announced = 0
        fsync_directory(self.directory)
        self.published = True

    def remove_unpublished(self) -> None:
        """Removes a creation that never had a commit. The caller holds the lease."""
        if not self.published and (self.lease is None or self.lease.is_at(self.directory)):
            remove_unfinished(self.directory)

    def remove_made(self) -> None:
        if not self.published:
            remove_directories(self.made)


def write_identity(directory: Path, identity: Identity, name: str) -> None:
    """Writes and fsyncs the file; the caller fsyncs the directory."""
    with open(directory / name, "w") as file:
        file.write(json.dumps(identity.as_json()) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_identity(directory: Path) -> str:
    """The uuid of the store in ``directory``. Raises StoreMissingError or StoreFormatError."""
    identity = read_directory_identity(directory)
    if identity is None:
        raise StoreMissingError(f"{directory}: no store here ({IDENTITY} is missing)")
    if identity.number:
        raise StoreFormatError(
            f"{directory}: directory {identity.number} of the store in {identity.home}, not a store by itself"
        )
    return identity.uuid


def read_directory_identity(directory: Path, name: str = IDENTITY) -> Identity | None:
    """The identity of ``directory``, or None. Raises StoreFormatError."""
    path = directory / name
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise StoreFormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT_VERSION:
        found = value.get("format") if isinstance(value, dict) else None
        raise StoreFormatError(f"{path}: format version {found}, expected {FORMAT_VERSION}")
    number, count = value.get("directory"), value.get("directories")
    texts = [value.get(key, "") for key in ("uuid", "own", "home", "path")]
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < count:
        raise StoreFormatError(f"{path}: expected the identity of a store's directory, found {value}")
    if not texts[0] or not all(isinstance(text, str) for text in texts):
        raise StoreFormatError(f"{path}: expected the identity of a store's directory, found {value}")
    return Identity(texts[0], number, count, *texts[1:])


def unfinished_creation(directory: Path) -> str:
    """The uuid of a store whose creation was killed here just before it was published; empty if there is none."""
    if (directory / IDENTITY).exists():
        return ""
    with contextlib.suppress(StoreFormatError):  # cut short at an early point
        identity = read_directory_identity(directory, f"{IDENTITY}.new")
        return "" if identity is None else identity.uuid
    return ""


def refuse_foreign(directory: Path) -> None:
    """Raises StoreExistsError for a store, StoreFormatError for content that is not the remains of a creation.

    A creation that was killed before its first commit leaves no store (it has no identity), but always a
    lease.
    """
    if not directory.exists():
        return
    names = sorted(child.name for child in directory.iterdir())
    if IDENTITY in names:
        raise StoreExistsError(f"{directory}: there is a store here already")
    foreign = [name for name in names if name not in OWN_NAMES or "lease" not in names]
    if foreign:
        raise StoreFormatError(
            f"{directory}: expected an empty or missing directory for a new store, found {foreign[0]!r}"
        )


def refuse_shared(home: Home, path: Path, identity: Identity) -> None:
    """Raises StoreFormatError if ``path``, with ``identity``, belongs to another copy of the store in ``home``.

    A copy of only a store's own directory shares its stripe directories, but has an index of its own: a slot that is free
    in one may be in use by the other's last commit. A store may be moved, or copied with all of its directories.
    """
    other = Path(identity.home)
    if same_directory(other, home.directory) or not same_directory(Path(identity.path), path):
        return
    found = read_directory_identity(other)
    if found is not None and (found.uuid, found.number) == (home.uuid, 0):
        raise StoreFormatError(
            f"{path}: belongs to the store in {other}, but the one in {home.directory} is a copy of it: name copies of "
            f"its stripe directories in stripe.directories, or remove {other}"
        )


def same_directory(one: Path, other: Path) -> bool:
    """Whether both names refer to one directory; if one does not exist, whether the names are equal."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.absolute() == other.absolute()


def make_directories(directory: Path) -> tuple[Path, ...]:
    """Makes ``directory`` with its parents; returns the directories that were missing, the outermost last."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return tuple(missing)


def remove_directories(made: tuple[Path, ...]) -> None:
    """Removes the directories that ``make_directories`` made, except those that are no longer empty."""
    with contextlib.suppress(OSError):
        for directory in made:
            directory.rmdir()


def remove_content(directory: Path) -> None:
    """Removes everything but the lease, which keeps other processes out meanwhile."""
    for child in directory.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        elif child.name != "lease":
            child.unlink()


def remove_unfinished(directory: Path) -> None:
    """Removes everything that a creation without a commit has made here; the lease last, since it marks the rest as
    debris."""
    remove_content(directory)
    with contextlib.suppress(OSError):  # the drive fails, and the first error has been reported
        fsync_directory(directory)
    (directory / "lease").unlink(missing_ok=True)


def fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(fd)


def write_durably(path: Path, content: bytes) -> None:
    """Writes and fsyncs ``content`` beside ``path``, then renames it; the caller fsyncs the directory."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


# The directories of a job -----------------------------------------------------------------------------------


def rank_directory(store: Path, rank: int, world: int) -> Path:
    """The directory of the store of rank ``rank`` of ``world``; it may be a link to the rank's own drive."""
    return store if world == 1 else store / f"rank-{rank:04d}"


def rank_stripe(config: StripeConfig, rank: int, world: int) -> StripeConfig:
    """The stripe directories of rank ``rank``'s store: a subdirectory of each of the job's."""
    return replace(
        config, directories=tuple(rank_directory(path, rank, world) for path in config.directories)
    )


def building_directory(target: Path) -> Path:
    """The directory in which a store for ``target`` is built; it is renamed when complete."""
    if target.name in ("", ".."):  # ``.`` and ``..`` do not end in the store's own name
        target = target.resolve()
    return target.parent / f"{target.name}.partial"


@contextlib.contextmanager
def building(directory: Path) -> Iterator[None]:
    """Locks ``directory``, in which a store is built. Raises StoreInUseError if another process has it locked."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(fd, fcntl.LOCK_EX, directory):
            raise StoreInUseError(f"{directory}: another process is building a store here")
        yield
    finally:
        os.close(fd)


def rank_directories(store: Path) -> list[Path]:
    """The stores of several ranks under ``store``, in rank order; none for a single rank's store."""
    return sorted(found.parent for found in store.glob(f"rank-*/{IDENTITY}"))
