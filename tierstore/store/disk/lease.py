"""One process at a time has a store open.

The lease is an exclusive ``flock`` on the file ``lease``. A flock lives as long as its open file description,
so the descriptor is also registered in the engine's ring: after SIGKILL the ring, torn down by the kernel
only when its last direct write has landed, keeps the lock until then. (With the thread backend the process's
threads, and with them the descriptor table, end only after their last system call has.)

A forked child shares the description, and so the lock: there ``close`` must not unlock it under its parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from tierstore.errors import StoreInUseError


class DirectoryLease:
    """An exclusive hold on the store in ``directory``; a context manager.

    Raises StoreInUseError naming the holder's pid when another process holds it, or when a killed holder's
    does not end within ``patience_s`` seconds (its last I/O may take a moment to land).
    """

    def __init__(self, directory: Path, *, patience_s: float = 2.0) -> None:
        self._path = directory / "lease"
        self._owner = os.getpid()
        self._fd = -1
        deadline = time.monotonic() + patience_s
        while self._fd < 0:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._acquire(fd, deadline)
                if self._is_current(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{self._owner}\n".encode(), 0)
                    self._fd = fd
            finally:
                if self._fd != fd:
                    os.close(fd)

    def _acquire(self, fd: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            if _runs(holder):
                raise StoreInUseError(
                    f"{self._path.parent}: the store is open in another process (pid {holder})"
                )
            if time.monotonic() > deadline:
                raise StoreInUseError(
                    f"{self._path.parent}: the store is held for pid {holder or 'unknown'}, which has "
                    "ended: its I/O, or a process that it forked, has not"
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
        """The locked descriptor, to be registered where the lock must outlive this process's I/O."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0 and self._owner == os.getpid():
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


def _runs(pid: str) -> bool:
    """Whether the process runs; one that is dead but not yet waited for does not."""
    if not pid.isdigit():
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
