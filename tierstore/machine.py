"""Facts about this machine: cores, memory and its limits, the disk under a directory. And the memory of this process: what
it will hold, by part (its account), and what it holds.

A command computes its account before it opens anything and prints it; at its end it prints the measured peak beside it.
``memory`` in a configuration is the sum that an account may have: budgets that are not given follow from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tierstore.capabilities import filesystem_type, kernel_text
from tierstore.errors import BudgetError
from tierstore.units import format_bytes

_PROC = Path("/proc")
_SYS = Path("/sys")
_CGROUPS = Path("/sys/fs/cgroup")
#: Thread pools, and what libraries allocate when they are first used, in bytes (measured).
_POOL_BYTES = 48 << 20
#: What the allocator keeps between blocks in use, as a share of the activations for a backward pass: in processes without
#: glibc's thread cache (``has_thread_cache``), and in others. (Measured: 0.05 to 0.35, whatever the number of passes; with
#: the cache 0.18 to 0.42 after 5 to 10 passes, 0.47 to 0.82 after 40 to 60, and more later.) Graphs of several micro-batches
#: at once leave as much as the cache does (0.65 with four, the same in each step from the fourth on).
_GAPS, _GAPS_WITH_CACHE = 0.3, 0.6
#: The same where compiled products stay between freed activations (measured: 0.7 to 0.9 after 8 to 16 steps).
_GAPS_WITH_PRODUCTS = 0.8
#: Of ``GLIBC_TUNABLES``: no thread keeps freed memory of its own.
NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"
#: The share of the available memory that a process takes by default.
_SHARE = 0.8


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


def bytes_on_disk(directory: Path) -> int:
    """Disk space of the files below ``directory``, in bytes; 0 if there is none."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def require_space(directories: Sequence[Path], nbytes: int, what: str) -> None:
    """Raises OSError (ENOSPC), naming the first of ``directories``, if ``what`` need more than their file systems have free;
    directories need not exist; the space of their present content counts as free, since it is reused.
    """
    places = [existing_parent(directory) for directory in directories]
    free = sum({place.stat().st_dev: disk(place).free_bytes for place in places}.values())
    if nbytes > free + sum(map(bytes_on_disk, directories)):
        message = f"{what} need {format_bytes(nbytes)}, and {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, message, str(directories[0]))


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


# The memory of this process ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryAccount:
    """The host memory of a process: bytes of each part, by name."""

    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """One line: the sum and its parts, largest first."""
        largest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest_first if nbytes)
        return f"memory: {format_bytes(self.nbytes)}: {parts}"

    def compare(self, peak: int) -> str:
        """One line: the sum beside the measured ``peak``."""
        return (
            f"memory: {format_bytes(self.nbytes)} announced, {format_bytes(peak)} at the peak "
            f"({peak / self.nbytes:.0%})"
        )

    def as_json(self) -> dict[str, object]:
        parts = [{"part": name, "held_bytes": nbytes} for name, nbytes in self.parts.items()]
        return {"announced_bytes": self.nbytes, "parts": parts}

    def check(self, allowed: int, remedies: str = "") -> None:
        """Raise BudgetError if the sum is more than ``allowed`` bytes; ``remedies``: what may be reduced instead."""
        if self.nbytes > allowed:
            raise BudgetError(
                f"memory: expected at least {self.nbytes} bytes, got {allowed} ({format_bytes(allowed)}): this needs "
                f"{self.describe().removeprefix('memory: ')}; set memory to at least that"
                + (f", or reduce {remedies}" if remedies else "")
            )


def working_bytes(activations: int, *, together: bool = False, compiling: bool = False) -> int:
    """Memory beside that of any one part, in bytes: of thread pools, and of the gaps between ``activations``.

    ``together``: the graphs of several micro-batches are in memory at once. ``compiling``: products compiled for AMX lie
    between the activations.
    """
    share = _GAPS_WITH_CACHE if together or has_thread_cache() else _GAPS
    return _POOL_BYTES + int((max(share, _GAPS_WITH_PRODUCTS) if compiling else share) * activations)


def allowed_bytes(given: int) -> int:
    """The memory that this process may take: ``given``, or for 0 a share of what is available, in bytes."""
    if given:
        return given
    found = memory()
    return int(_SHARE * min(found.available_bytes, found.usable_bytes))


def resident_bytes() -> int:
    """Resident bytes of this process, huge pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process, huge pages included; since its exec, where getrusage counts the parent's, too."""
    status = kernel_text(_PROC / "self/status").split("\n")
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def has_thread_cache() -> bool:
    """Whether the C library keeps a cache of freed memory for each thread, which glibc decides when a process starts.

    With it the memory of tensors fragments: torch aligns each tensor, glibc cuts off up to 96 bytes at its ends and keeps
    them in the cache, where they never merge with their neighbours again, so that a tensor of the same size does not fit
    where one was freed. Measured in a model of 139 M parameters: the heap grew from 400 to 900 MiB in 40 steps and went on;
    without the cache it stayed at 436 MiB, and steps took as long.
    """
    try:
        begun_with = (_PROC / "self/environ").read_text(errors="replace")
    except OSError:
        return True
    return NO_THREAD_CACHE not in begun_with


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel. Called before threads
    are started.

    The first touch of fresh memory is slow (measured: 0.4 to 1.9 GB/s with 4 KiB pages), and every step would pay it for
    all of its activations. All threads share one heap: glibc never returns the end of another one, where the threads that
    draw a new store's weights leave some 24 MiB each. Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    mallopt(arena_max, 1)
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 16 << 20)


def return_freed_memory() -> None:
    """Returns freed memory to the kernel once, so that memory used only during setup does not count for the whole run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
