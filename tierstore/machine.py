"""Facts about this machine: cores, memory and its limits, the disk under a directory."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from tierstore.capabilities import filesystem_type, kernel_text

_PROC = Path("/proc")
_SYS = Path("/sys")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of host memory. ``limit_bytes`` is the tightest cgroup limit, None where there is none."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """The most that this process could use: the total, or the limit if that is less."""
        return self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system under a directory: its type, and its bytes free (to this user) and in all."""

    filesystem: str
    free_bytes: int
    total_bytes: int


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor(proc: Path = _PROC) -> str:
    """The processor's name according to the kernel, else the architecture."""
    lines = kernel_text(proc / "cpuinfo").split("\n")
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def kernel() -> str:
    """The kernel's release."""
    return platform.release()


def memory() -> Memory:
    """The host's memory, and the cgroup's limit on this process."""
    host = psutil.virtual_memory()
    limit = cgroup_limit_bytes()
    return Memory(
        total_bytes=int(host.total),
        available_bytes=int(host.available),
        limit_bytes=limit if limit is not None and limit < int(host.total) else None,
    )


def cgroup_limit_bytes(proc: Path = _PROC, root: Path = _CGROUPS) -> int | None:
    """The tightest memory limit of this process's cgroup and of those above it; None for no limit.

    Supports ``memory.max`` (v2, where ``max`` means no limit) and ``memory.limit_in_bytes`` (v1, where no limit is a
    number near 2**63). A container may show its own cgroup as the root of the mount, so a path that does not exist is
    replaced by the root.
    """
    limits: list[int] = []
    for line in filter(None, kernel_text(proc / "self/cgroup").split("\n")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, name = [root, root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            bases, name = [root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for base in bases:
            group = base / path.lstrip("/")
            if not group.is_dir():
                group = base
            limits += [
                limit
                for above in (group, *group.parents)
                if above.is_relative_to(base) and (limit := _limit(above / name)) is not None
            ]
    return min(limits, default=None)


def _limit(path: Path) -> int | None:
    text = kernel_text(path)
    limit = int(text) if text.isdigit() else 2**63
    return limit if limit < 2**60 else None


def existing_parent(directory: Path) -> Path:
    """``directory``, or its nearest ancestor that exists."""
    whole = directory.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def disk(directory: Path) -> FileSystem:
    """The file system under ``directory``. Raises OSError, naming the directory, if it does not exist."""
    space = os.statvfs(directory)
    return FileSystem(
        filesystem=filesystem_type(directory),
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
    )


def block_device(directory: Path, sys: Path = _SYS) -> str:
    """The block device under ``directory``, with its model if known: ``nvme0n1p2 (Samsung SSD 990)``.

    ``unknown`` for file systems without one. Raises OSError if the directory does not exist.
    """
    number = os.stat(directory).st_dev
    entry = sys / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return "unknown"
    place = entry.resolve()
    for holder in (place, place.parent):  # a partition has the model of its disk
        try:
            return f"{place.name} ({(holder / 'device/model').read_text().strip()})"
        except OSError:
            continue
    return place.name
