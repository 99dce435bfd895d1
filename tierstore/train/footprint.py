"""Memory of a training run: what was used, and what its fixed part will be.

The fixed part is everything outside ``host_budget``: the interpreter with torch and its libraries, dense parameters,
activations, the text. It does not depend on how many experts there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from dataclasses import dataclass

import psutil

from tierstore.train.config import TrainConfig
from tierstore.train.files import text_bytes

__all__ = [
    "DENSE_STATE_BYTES",
    "WORKING_BYTES",
    "FixedCost",
    "fixed_cost",
    "give_back_freed_memory",
    "keep_freed_memory",
    "peak_resident_bytes",
    "resident_bytes",
]

#: A dense parameter: fp32 weight, gradient, exp_avg and exp_avg_sq.
DENSE_STATE_BYTES = 16
#: What torch, its thread pools and the fragmentation of freed activations take beyond that, bytes (measured).
WORKING_BYTES = 160 << 20


def resident_bytes() -> int:
    """Bytes of this process in memory now, huge pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most bytes that this process has had in memory, huge pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class FixedCost:
    """What a run takes outside of its budgets, in bytes, part by part."""

    process: int
    dense: int
    activations: int
    text: int
    working: int

    @property
    def nbytes(self) -> int:
        return self.process + self.dense + self.activations + self.text + self.working


def fixed_cost(config: TrainConfig, process: int) -> FixedCost:
    """The fixed cost of a run whose process holds ``process`` bytes after its imports. Raises DataError."""
    return FixedCost(
        process=process,
        dense=config.model.dense_parameters * DENSE_STATE_BYTES,
        activations=config.model.activation_bytes(config.tokens_per_micro_batch),
        text=text_bytes(config.data),
        working=WORKING_BYTES,
    )


def keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of giving them back to the kernel.

    First touch of fresh memory is slower than any disk here (0.4 to 1.9 GB/s with 4 KiB pages), and every step
    would pay it for all of its activations. Without glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold, top_pad = -1, -3, -2
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 16 << 20)


def give_back_freed_memory() -> None:
    """Gives freed memory back to the kernel once: what setting up has used need not count all run long."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
