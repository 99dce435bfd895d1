"""The memory that an open store keeps for its records, in a process of its own: it opens a small store twice, then the
large one. What the third opening adds beyond the second is the index. Read line by line: requests are one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import time
import tracemalloc
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from tierstore.bench.processes.spawn import serve
from tierstore.store import ParameterStore, StoreConfig


def anonymous_bytes() -> int:
    """This process's memory that is no file's, with what malloc keeps given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no RssAnon")


def _open(directory: str, host_budget: int) -> tuple[ParameterStore, float, int]:
    """The store, the seconds that opening it took, and the memory that came with it."""
    before = anonymous_bytes()
    begun = time.perf_counter()
    store = ParameterStore.open(directory, StoreConfig(host_budget=host_budget))
    seconds = time.perf_counter() - begun
    store.reserve()
    return store, seconds, anonymous_bytes() - before


def measure(request: Mapping[str, Any]) -> dict[str, object]:
    """``open_s``, and bytes by the resident set and by tracemalloc (of another opening: it slows what it watches)."""
    small, large, budget = request["small"], request["large"], request["host_budget"]
    found: dict[str, object] = {}
    with _open(small, budget)[0]:
        pass
    store, _, least = _open(small, budget)
    store.close()
    del store
    times = []
    for turn in range(int(request["repeats"])):
        store, seconds, nbytes = _open(large, budget)
        times.append(seconds)
        if not turn:
            found["index_bytes"] = max(nbytes - least, 0)
        store.close()
        del store
        gc.collect()
    found["open_s"] = times
    tracemalloc.start()
    traced = {}
    for name, directory in (("small", small), ("large", large)):
        before = tracemalloc.get_traced_memory()[0]
        store, _, _ = _open(directory, budget)
        traced[name] = tracemalloc.get_traced_memory()[0] - before
        store.close()
        del store
        gc.collect()
    tracemalloc.stop()
    found["traced_bytes"] = max(traced["large"] - traced["small"], 0)
    return found


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    for request in requests:
        yield measure(request)


if __name__ == "__main__":
    serve(_answers)
