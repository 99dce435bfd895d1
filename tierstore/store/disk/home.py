"""What makes a directory one of a store: its identity, written last, and what may lie beside it."""

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
#: Where an import describes its model, in a job's directory.
MODEL_DIRECTORY = "model"
#: What there may be in a directory besides the identity of a store.
OWN_NAMES = {"lease", "index", "extents", "scratch", MODEL_DIRECTORY, "tokens", f"{IDENTITY}.new"}


@dataclass(frozen=True)
class Identity:
    """Which store a directory belongs to. Number 0 is the store's own; each stripe directory has an ``own`` uuid, and
    records the store's ``home`` and its own ``path``, both absolute, as they were when the store was last opened.
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
    """The directory of a store. ``made``: directories that its creation made, the outermost last."""

    given: Path
    uuid: str
    made: tuple[Path, ...] = ()
    #: Whether it has an identity. Before the first commit it has none, and is no store.
    published: bool = False
    #: Of an open store.
    lease: DirectoryLease | None = None
    #: How many directories the announced identity names; 0 without one.
    _announced: int = field(default=0, init=False)

    @property
    def directory(self) -> Path:
        """Where it is now: an open store's may have been renamed."""
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
        """After the first commit, atomically: a directory with an identity is a whole store."""
        # Written a second time it could be lost to a power cut, and with it the owner of the stripe directories.
        if self._announced != directories:
            self.announce(directories)
        # What the identity vouches for must be found after a power cut: names are synced by their directory.
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
        """Removes a creation that never had a commit. The caller has the lease."""
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
    """The identity of ``directory``; None where it has none. Raises StoreFormatError."""
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
    """The uuid of a store whose creation was killed here just before it was published; empty where there is none."""
    if (directory / IDENTITY).exists():
        return ""
    with contextlib.suppress(StoreFormatError):  # cut short: it had not got far
        identity = read_directory_identity(directory, f"{IDENTITY}.new")
        return "" if identity is None else identity.uuid
    return ""


def refuse_foreign(directory: Path) -> None:
    """Raises StoreExistsError for a store, StoreFormatError for other content that no creation left behind.

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
    """Raises StoreFormatError where ``path``, with ``identity``, belongs to another copy of the store in ``home``.

    A copy of a store's own directory alone shares its stripe directories, with an index of its own: a slot that is free to
    one may be in use by the other's last commit. A store may be moved, or copied with all of its directories.
    """
    other = Path(identity.home)
    if same_directory(other, home.directory) or not same_directory(Path(identity.path), path):
        return
    found = read_directory_identity(other)
    if found is not None and (found.uuid, found.number) == (home.uuid, 0):
        raise StoreFormatError(
            f"{path}: belongs to the store in {other}, and the one in {home.directory} is a copy of it: name copies of "
            f"its stripe directories in stripe.directories, or remove {other}"
        )


def same_directory(one: Path, other: Path) -> bool:
    """Whether both are one directory, by whatever names; where one does not exist, whether the names are the same."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.absolute() == other.absolute()


def make_directories(directory: Path) -> tuple[Path, ...]:
    """Makes ``directory``; returns those that were missing, the outermost last."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return tuple(missing)


def remove_directories(made: tuple[Path, ...]) -> None:
    """Removes what ``make_directories`` made, except directories that are not empty by now."""
    with contextlib.suppress(OSError):
        for directory in made:
            directory.rmdir()


def remove_content(directory: Path) -> None:
    """Everything but the lease: it is what keeps others out meanwhile."""
    for child in directory.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        elif child.name != "lease":
            child.unlink()


def remove_unfinished(directory: Path) -> None:
    """Removes all that a creation without a commit has made here; the lease last, for it marks the rest as debris."""
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


# The directories of a job -----------------------------------------------------------------------------------


def rank_directory(store: Path, rank: int, world: int) -> Path:
    """Where rank ``rank`` of ``world`` keeps its store: a directory of its own, which may be a link to its own drive."""
    return store if world == 1 else store / f"rank-{rank:04d}"


def rank_stripe(config: StripeConfig, rank: int, world: int) -> StripeConfig:
    """The stripe directories of rank ``rank``'s store: one of its own below each of the job's."""
    return replace(
        config, directories=tuple(rank_directory(path, rank, world) for path in config.directories)
    )


def building_directory(target: Path) -> Path:
    """Where a store that is to be at ``target`` is built: it takes its name when it is whole."""
    if target.name in ("", ".."):  # ``.`` and ``..`` do not end in the name that the store has beside its own
        target = target.resolve()
    return target.parent / f"{target.name}.partial"


@contextlib.contextmanager
def building(directory: Path) -> Iterator[None]:
    """Holds ``directory``, in which a store is built. Raises StoreInUseError when another process does."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(fd, fcntl.LOCK_EX, directory):
            raise StoreInUseError(f"{directory}: another process is building a store here")
        yield
    finally:
        os.close(fd)


def rank_directories(store: Path) -> list[Path]:
    """The stores of several ranks that there are under ``store``, in rank order; none for a store of one."""
    return sorted(found.parent for found in store.glob(f"rank-*/{IDENTITY}"))
