"""The memory of this process: what it will hold, by part, and what it holds.

A command computes its account before it opens anything and prints it; at its end it prints the measured peak beside it.
``memory`` in a configuration is the sum that an account may have: budgets that are not given follow from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from tierstore.errors import BudgetError
from tierstore.machine import memory
from tierstore.units import format_bytes

#: Thread pools, and what libraries allocate when they are first used, in bytes (measured).
_POOL_BYTES = 48 << 20
#: What the allocator keeps between blocks in use: activations of other sizes leave gaps (measured over 60 steps).
_GAPS = 0.25
#: The share of the memory that is available which a process takes if it is not told how much.
_SHARE = 0.8


@dataclass(frozen=True)
class MemoryAccount:
    """What a process will hold in host memory: bytes of each part, by name."""

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

    def check(self, allowed: int, remedies: str) -> None:
        """Raise BudgetError if the sum is more than ``allowed`` bytes; ``remedies`` completes "or reduce ..."."""
        if self.nbytes > allowed:
            raise BudgetError(
                f"memory: expected at least {self.nbytes} bytes, got {allowed} ({format_bytes(allowed)}): this needs "
                f"{self.describe().removeprefix('memory: ')}; set memory to at least that, or reduce {remedies}"
            )


def working_bytes(activations: int) -> int:
    """Memory beside that of any one part, in bytes: of thread pools, and of the gaps between ``activations``."""
    return _POOL_BYTES + int(_GAPS * activations)


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
    """Peak resident bytes of this process, huge pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel.

    The first touch of fresh memory is slow (measured: 0.4 to 1.9 GB/s with 4 KiB pages), and every step would pay it for
    all of its activations. Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold, top_pad = -1, -3, -2
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 16 << 20)


def return_freed_memory() -> None:
    """Returns freed memory to the kernel once, so that memory used only during setup does not count for the whole run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
