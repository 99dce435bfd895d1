"""One process at a time has a store open.

The lease is an exclusive ``flock`` on the file ``lease``. A flock lives as long as its open file description, so
the descriptor is also registered in the engine's ring: after SIGKILL the ring, torn down by the kernel only when
its last direct write has landed, keeps the lock until then. (With the thread backend the process's threads, and
with them the descriptor table, end only after their last system call has.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from tierstore.errors import StoreInUseError

__all__ = ["Lease"]


class Lease:
    """An exclusive hold on the store in ``directory``; a context manager.

    Raises StoreInUseError naming the holder's pid when another process holds it and does not let go within
    ``patience_s`` seconds (a killed holder's last I/O may take a moment to land).
    """

    def __init__(self, directory: Path, *, patience_s: float = 2.0) -> None:
        self._path = directory / "lease"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire(patience_s)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(self._fd)
            raise

    def _acquire(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            alive = holder.isdigit() and Path(f"/proc/{holder}").exists()
            if alive or time.monotonic() > deadline:
                raise StoreInUseError(
                    f"{self._path.parent}: the store is open in another process (pid {holder or 'unknown'})"
                )
            time.sleep(0.02)

    @property
    def fd(self) -> int:
        """The locked descriptor, to be registered where the lock must outlive this process's I/O."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            # Nothing is in flight any more: let go at once, also of what a ring still has registered.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
