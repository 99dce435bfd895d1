"""The lock of a store's directory: one process may have it open to write, or several to read.

The lease is a ``flock``, exclusive for a writer, shared for readers, on the directory and on the file ``lease`` in it.
Cleaners of temporary directories remove old files, and a lock on a removed file excludes nobody, so the directory, which
such cleaners do not remove while it holds files, is locked too. The file holds the writer's pid; only the file is locked if
the file system cannot lock directories, or locks them only on this machine (NFS). Readers lock only the directory if there
is no such file.

A flock lives as long as its open file description, so a writer's descriptors are also registered in the engine's ring:
after SIGKILL the kernel destroys the ring only when its last direct write has finished, and the locks stay until then.
(With the thread backend the descriptor table ends only after the threads' last system calls.) A reader writes nothing.

Readers must not write their pids, and on a full disk a writer cannot: such holders are looked up in ``/proc/locks``,
which does not list processes of other containers. A forked child shares the descriptions, and so the locks: ``close``
must not unlock them there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from tierstore.capabilities import kernel_text
from tierstore.errors import StoreFormatError, StoreInUseError
from tierstore.store.config import StoreAccess

_LOCKS = Path("/proc/locks")
#: Errors of a drive on which no file can be created.
_NO_FILE = (errno.ENOSPC, errno.EDQUOT)


def try_lock(fd: int, kind: int, path: Path) -> bool:
    """Whether a ``flock`` of ``kind`` on ``fd``, which is ``path``, was granted; False if another lock excludes it.
    Raises OSError naming ``path`` if its file system has no such locks.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        message = (
            f"{os.strerror(error.errno or 0)}: no lock (flock), without which other processes could open the store: the "
            "file system needs locks (NFS needs its lock service, or the mount option local_lock=flock where no other "
            "machine uses the directory)"
        )
        raise OSError(error.errno, message, str(path)) from error
    return True


class DirectoryLease:
    """The lease of the store in ``directory``; a context manager.

    Raises StoreInUseError naming the holder's pid if another process holds it, or if a killed holder's lock does not end
    within ``patience_s`` seconds (its last I/O may take a moment). Raises OSError naming a path that cannot be locked,
    and StoreFormatError if a reader finds nothing to lock.
    """

    def __init__(
        self, directory: Path, *, access: StoreAccess = StoreAccess.WRITE, patience_s: float = 2.0
    ) -> None:
        self._given = directory
        self._access = access
        self._kind = fcntl.LOCK_EX if access is StoreAccess.WRITE else fcntl.LOCK_SH
        self._owner = os.getpid()
        self._fd = self._directory_fd = -1
        #: Why only the file is locked; empty if the directory is.
        self.directory_reason = ""
        #: Why a locked directory has no file to lock, for the error at a writer's first commit.
        self._no_file: OSError | None = None
        # By name in the directory: device and inode.
        self._files: dict[str, tuple[int, int]] = {}
        self._kept: list[int] = []
        deadline = time.monotonic() + patience_s
        try:
            while not self._take(deadline):
                self._release()
        except BaseException:
            self._release()
            raise
        if access is StoreAccess.WRITE and self._fd >= 0:
            self.watch("lease", self._fd)
            with contextlib.suppress(OSError):  # a courtesy: the disk may be full
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{self._owner}\n".encode(), 0)

    def _take(self, deadline: float) -> bool:
        """Locks directory and file; False if they were replaced meanwhile: an undone creation removes them."""
        self._directory_fd = os.open(self._given, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._acquire(self._directory_fd, self._given, deadline)
        except OSError as error:
            self.directory_reason = os.strerror(error.errno or 0)
        path = self._given / "lease"
        found = path.exists()
        self._open(path)
        if self._fd < 0:
            return self.is_at(self._given)
        try:
            self._acquire(self._fd, path, deadline)
        except OSError:  # leave no file if nothing can be locked
            if not found and self._access is StoreAccess.WRITE:
                path.unlink(missing_ok=True)
            raise
        try:
            current = os.stat("lease", dir_fd=self._directory_fd)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), current) and self.is_at(self._given)

    def _open(self, path: Path) -> None:
        """Opens the file to lock. A locked directory may have none, for a reader or on a full disk."""
        writes = self._access is StoreAccess.WRITE
        try:
            flags = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            if writes:
                raise
            if self.directory_reason:
                raise StoreFormatError(
                    f"{path}: the lease is missing, and the file system cannot lock the directory instead: opening the "
                    "store to write makes it"
                ) from error
        except OSError as error:
            if not writes or self.directory_reason or error.errno not in _NO_FILE:
                raise
            self._no_file = error

    def _acquire(self, fd: int, path: Path, deadline: float) -> None:
        while not try_lock(fd, self._kind, path):
            written = ""
            with contextlib.suppress(OSError):
                written = (self._given / "lease").read_text(errors="replace")[:32].strip()
            readers = [] if self._access is StoreAccess.READ else _holders(fd, "READ")
            if readers:
                raise StoreInUseError(
                    f"{self._given}: the store is open to read in another process (pid {readers[0]})"
                )
            for pid in (written, *_holders(fd, "WRITE")):
                if _runs(pid):
                    raise StoreInUseError(f"{self._given}: the store is open in another process (pid {pid})")
            if time.monotonic() > deadline:
                raise StoreInUseError(
                    f"{self._given}: the store is held for pid {written}, which has "
                    "ended: its I/O, or a process that it forked, has not"
                    if written
                    else f"{self._given}: the store is open in a process that the kernel does not name here "
                    "(one that reads it in another container, say)"
                )
            time.sleep(0.02)

    def is_at(self, path: Path) -> bool:
        """Whether the directory that was opened is at ``path``."""
        try:
            return self._directory_fd >= 0 and os.path.samestat(os.fstat(self._directory_fd), path.stat())
        except OSError:
            return False

    @property
    def directory(self) -> Path:
        """The current path of the directory, which may have been renamed since it was opened; its old path, if it is
        gone."""
        if self._directory_fd >= 0 and not self.is_at(self._given):
            with contextlib.suppress(OSError):
                moved = Path(os.readlink(f"/proc/self/fd/{self._directory_fd}"))
                if self.is_at(moved):
                    return moved
        return self._given

    @property
    def fds(self) -> list[int]:
        """A writer's locked descriptors, for the engine's ring; none for a reader."""
        held = (self._fd, self._directory_fd) if self._access is StoreAccess.WRITE else ()
        return [fd for fd in held if fd >= 0]

    def watch(self, name: str, fd: int | None = None) -> None:
        """From now on ``check`` expects the file ``name`` to be the one open as ``fd`` (None: the one now there)."""
        if fd is None:  # kept open: the inode number of a removed file is soon reused
            fd = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)
            self._kept.append(fd)
        status = os.fstat(fd)
        self._files[name] = (status.st_dev, status.st_ino)

    def check(self) -> None:
        """Raises OSError (ESTALE) naming the first file that was removed or replaced: writes to it would be lost."""
        if self._no_file is not None:
            raise self._no_file
        for name, known in self._files.items():
            try:
                status = os.stat(name, dir_fd=self._directory_fd)
            except (FileNotFoundError, NotADirectoryError):
                what = "removed"
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._given / name)) from error
            else:
                if (status.st_dev, status.st_ino) == known:
                    continue
                what = "replaced"
            raise OSError(
                errno.ESTALE, f"the file was {what} while the store was open", str(self.directory / name)
            )

    def close(self) -> None:
        if self._owner == os.getpid():
            if self._access is StoreAccess.WRITE and self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            self._release()

    def _release(self) -> None:
        for fd in (self._fd, self._directory_fd):
            if fd >= 0:
                # Nothing is in flight any more: unlock at once, since a ring may still have the descriptor registered.
                # A file system that is gone has released the lock by itself.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                self._kept.append(fd)
        for fd in self._kept:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._kept.clear()
        self._fd = self._directory_fd = -1

    def __enter__(self) -> DirectoryLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _holders(fd: int, kind: str) -> list[str]:
    """Pids of running processes that hold a flock of ``kind`` (READ or WRITE) on the file of ``fd``, if the kernel shows
    them.
    """
    inode = str(os.fstat(fd).st_ino)
    # 1: FLOCK  ADVISORY  READ 4711 08:02:1311768 0 EOF. File systems of subvolumes have other device numbers there than
    # stat gives, so the inode alone is compared.
    fields = [line.split() for line in kernel_text(_LOCKS).split("\n")]
    return [
        row[4]
        for row in fields
        if len(row) >= 6
        and (row[1], row[3]) == ("FLOCK", kind)
        and row[5].rpartition(":")[2] == inode
        and _runs(row[4])
    ]


def _runs(pid: str) -> bool:
    """Whether the process runs; a zombie does not."""
    status = kernel_text(Path(f"/proc/{pid}/stat")) if pid.isdigit() else ""
    return status.rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])
