"""The store of a job: one directory, or one for each of its ranks below it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tierstore.errors import StoreInUseError
from tierstore.store.config import StripeConfig
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.home import IDENTITY
from tierstore.store.disk.lease import try_lock
from tierstore.store.opening import read_drives
from tierstore.store.parameter_store import verify_store
from tierstore.store.verify import VerifyReport


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


def drives_of(store: Path) -> list[DriveReport]:
    """The directories of a store, or of those of all its ranks, as of their last commits; see ``read_drives``."""
    return [drive for directory in rank_directories(store) or [store] for drive in read_drives(directory)]


def verify_all(store: Path, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """``verify_store`` of every rank, in rank order; ``progress`` follows one after another."""
    total = VerifyReport()
    for directory in rank_directories(store) or [store]:
        report = verify_store(directory, progress)
        total.records += report.records
        total.sections += report.sections
        total.snapshots = max(total.snapshots, report.snapshots)
        total.bytes_read += report.bytes_read
        total.failures += report.failures
        total.drives += report.drives
    return total
