"""One process at a time has a store open to write, or several have it open to read.

The lease is a ``flock`` on the file ``lease``: exclusive for whoever writes, shared for readers. A flock lives as long as
its open file description, so a writer's descriptor is also registered in the engine's ring: after SIGKILL the ring, torn
down by the kernel only when its last direct write has landed, keeps the lock until then. (With the thread backend the
process's threads, and with them the descriptor table, end only after their last system call has.) A reader leaves nothing
in flight that anybody could find, and nothing in the file.

A writer's pid stands in the file. Readers may not write there, so theirs are looked up in ``/proc/locks``; a holder in
another container is not named there.

A forked child shares the description, and so the lock: there ``close`` must not unlock it under its parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from tierstore.errors import StoreFormatError, StoreInUseError
from tierstore.store.config import StoreAccess

_LOCKS = Path("/proc/locks")


class DirectoryLease:
    """A hold on the store in ``directory``, exclusive or, with ``StoreAccess.READ``, shared; a context manager.

    Raises StoreInUseError naming the holder's pid when another process holds it, or when a killed holder's
    does not end within ``patience_s`` seconds (its last I/O may take a moment to land). A reader changes no byte, and
    raises StoreFormatError where there is no file to lock.
    """

    def __init__(
        self, directory: Path, *, access: StoreAccess = StoreAccess.WRITE, patience_s: float = 2.0
    ) -> None:
        self._path = directory / "lease"
        self._access = access
        self._owner = os.getpid()
        self._fd = -1
        deadline = time.monotonic() + patience_s
        while self._fd < 0:
            fd = self._open()
            try:
                self._acquire(fd, deadline)
                if self._is_current(fd):
                    if access is StoreAccess.WRITE:
                        os.ftruncate(fd, 0)
                        os.pwrite(fd, f"{self._owner}\n".encode(), 0)
                    self._fd = fd
            finally:
                if self._fd != fd:
                    os.close(fd)

    def _open(self) -> int:
        if self._access is StoreAccess.WRITE:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise StoreFormatError(
                f"{self._path}: the lease is missing: opening the store to write (tierstore verify does) makes it"
            ) from error

    def _acquire(self, fd: int, deadline: float) -> None:
        kind = fcntl.LOCK_EX if self._access is StoreAccess.WRITE else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            written = os.pread(fd, 32, 0).decode(errors="replace").strip()
            readers = [] if self._access is StoreAccess.READ else _readers(fd)
            if readers:
                raise StoreInUseError(
                    f"{self._path.parent}: the store is open to read in another process (pid {readers[0]})"
                )
            if _runs(written):
                raise StoreInUseError(
                    f"{self._path.parent}: the store is open in another process (pid {written})"
                )
            if time.monotonic() > deadline:
                raise StoreInUseError(
                    f"{self._path.parent}: the store is held for pid {written}, which has "
                    "ended: its I/O, or a process that it forked, has not"
                    if written
                    else f"{self._path.parent}: the store is open in a process that the kernel does not name here "
                    "(one that reads it in another container, say)"
                )
            time.sleep(0.02)

    def _is_current(self, fd: int) -> bool:
        """Whether the locked file is still the one at the path: a creation taken back removes it."""
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    @property
    def fd(self) -> int:
        """The locked descriptor, to be registered where the lock must outlive this process's I/O: a writer's. Of a reader
        -1.
        """
        return self._fd if self._access is StoreAccess.WRITE else -1

    def close(self) -> None:
        if self._fd >= 0 and self._owner == os.getpid():
            if self._access is StoreAccess.WRITE:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            # Nothing is in flight any more: unlock at once, for a ring may still have the descriptor registered.
            # A file system that is gone has released the lock by itself.
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DirectoryLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _readers(fd: int) -> list[str]:
    """Pids of the processes that run and hold a shared flock on the file behind ``fd``, as far as the kernel shows them."""
    inode = str(os.fstat(fd).st_ino)
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  READ 4711 08:02:1311768 0 EOF. File systems of subvolumes have other device numbers there than
    # stat gives, so the inode alone is compared.
    fields = [line.split() for line in lines]
    return [
        row[4]
        for row in fields
        if len(row) >= 6
        and (row[1], row[3]) == ("FLOCK", "READ")
        and row[5].rpartition(":")[2] == inode
        and _runs(row[4])
    ]


def _runs(pid: str) -> bool:
    """Whether the process runs; one that is dead but not yet waited for does not."""
    if not pid.isdigit():
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
