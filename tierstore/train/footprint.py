"""Memory of a training run: what was used, and what its fixed part will be.

The fixed part is everything outside ``host_budget``: the interpreter with torch and its libraries, dense parameters,
activations, the text. It does not depend on how many experts there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource

import psutil

from tierstore.train.config import TrainConfig
from tierstore.train.data import text_files

__all__ = [
    "fixed_bytes",
    "give_back_freed_memory",
    "keep_freed_memory",
    "peak_resident_bytes",
    "resident_bytes",
]

#: What torch, its thread pools and the fragmentation of freed activations take beyond that, bytes (measured).
_WORKING_BYTES = 160 << 20


def resident_bytes() -> int:
    """Bytes of this process in memory now, huge pages included."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most bytes that this process has had in memory, huge pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fixed_bytes(config: TrainConfig, baseline: int) -> int:
    """The fixed cost of a run whose process holds ``baseline`` bytes after its imports, in bytes."""
    dense = config.model.dense_parameters * 16
    activations = config.model.activation_bytes(config.tokens_per_micro_batch)
    return baseline + dense + activations + min(config.data.max_bytes, _text_bytes(config)) + _WORKING_BYTES


def _text_bytes(config: TrainConfig) -> int:
    return sum(path.stat().st_size for path in text_files(config.data))


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
