"""The store of a job: one directory, or one for each of its ranks below it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tierstore.errors import StoreInUseError
from tierstore.store.opening import IDENTITY
from tierstore.store.parameter_store import verify_store
from tierstore.store.verify import VerifyReport

__all__ = ["building", "building_directory", "rank_directories", "rank_directory", "verify_all"]


def rank_directory(store: Path, rank: int, world: int) -> Path:
    """Where rank ``rank`` of ``world`` keeps its store: a directory of its own, which may be a link to its own drive."""
    return store if world == 1 else store / f"rank-{rank:04d}"


def building_directory(target: Path) -> Path:
    """Where a store that is to be at ``target`` is built: it takes its name when it is whole."""
    return target.with_name(f"{target.name}.partial")


@contextlib.contextmanager
def building(directory: Path) -> Iterator[None]:
    """Holds ``directory``, in which a store is built. Raises StoreInUseError when another process does."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreInUseError(f"{directory}: another process is building a store here") from error
        yield
    finally:
        os.close(fd)


def rank_directories(store: Path) -> list[Path]:
    """The stores of several ranks that there are under ``store``, in rank order; none for a store of one."""
    return sorted(found.parent for found in store.glob(f"rank-*/{IDENTITY}"))


def verify_all(store: Path, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """``verify_store`` of every rank, in rank order; ``progress`` is told of one after another."""
    total = VerifyReport()
    for directory in rank_directories(store) or [store]:
        report = verify_store(directory, progress)
        total.records += report.records
        total.sections += report.sections
        total.snapshots = max(total.snapshots, report.snapshots)
        total.bytes_read += report.bytes_read
        total.failures += report.failures
    return total
