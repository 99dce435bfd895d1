"""What opening a store takes, in a process of its own. Read line by line: requests are one JSON object.

Its memory is what malloc has given out and nobody has given back: natively, and, with ``PYTHONMALLOC=malloc``, to Python
and numpy. The resident set says less: memory that is free again stays in it, more of it here than there. The host budget is
mapped, not malloc's. A small store is taken off: what is left is the index.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from tierstore.bench.processes.spawn import serve
from tierstore.store import ParameterStore, StoreConfig


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, of all arenas together."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Bytes that malloc has given out, mapped blocks included. Raises OSError where it does not count them."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise OSError("mallinfo2: needs glibc 2.33")
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _open(directory: str, host_budget: int) -> tuple[float, int]:
    """The seconds that opening the store took, and the memory that came with it."""
    before = allocated_bytes()
    begun = time.perf_counter()
    with ParameterStore.open(directory, StoreConfig(host_budget=host_budget)) as store:
        seconds = time.perf_counter() - begun
        store.reserve()
        return seconds, allocated_bytes() - before


def measure(request: Mapping[str, Any]) -> dict[str, object]:
    """``open_s`` and ``index_bytes``, one of each a turn; a first turn, which fills caches, does not count."""
    times, nbytes = [], []
    for turn in range(int(request["repeats"]) + 1):
        _, least = _open(request["small"], request["host_budget"])
        seconds, most = _open(request["large"], request["host_budget"])
        if turn:
            times.append(seconds)
            nbytes.append(max(most - least, 0))
    return {"open_s": times, "index_bytes": nbytes}


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    for request in requests:
        yield measure(request)


if __name__ == "__main__":
    serve(_answers)
