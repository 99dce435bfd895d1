"""What a commit costs beyond the bytes that it must write.

Every record of a store is stepped, so that the whole cache is dirty, and the commit is timed from the moment
that nothing is in flight. In turn with it the same bytes, in transfers of the same sizes, are written to a
preallocated file beside the store and synced. Then a commit is awaited, and beside it a heartbeat: how late it comes,
against the same in an idle loop, is how long the commit keeps an event loop from its other work.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.bound import Bytes
from tierstore.bench.disk import DiskProbe, Durable
from tierstore.bench.results import Better, Measurement, counted, derived, measured
from tierstore.errors import ConfigError
from tierstore.stats import spread
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

__all__ = ["measurements", "run"]

_BEAT_S = 0.002
_TO_WRITE = 1.2  # what a commit may take at most, in times of writing its bytes


def run(place: Path, *, records: int, record_bytes: int, rounds: int) -> dict[str, Any]:
    """Measures in ``place``, made and removed here; figures ready for JSON. Raises ConfigError, OSError."""
    for name, value, least in (
        ("records", records, 1),
        ("record_bytes", record_bytes, 12),
        ("rounds", rounds, 1),
    ):
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
    if place.exists():
        raise ConfigError(f"store: {place} exists; the benchmark wants a directory of its own")
    place.mkdir(parents=True)
    try:
        return _run(place, records, record_bytes // 12, rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(place: Path, records: int, numel: int, rounds: int) -> dict[str, Any]:
    keys = [f"record.{number:05d}" for number in range(records)]
    gradient = np.full(numel, 1e-3, np.float32)
    config = StoreConfig(host_budget=(records + 1) * (numel * 12 + numel // 2 + (1 << 20)))
    commits, writes, late, late_idle = [], [], [], []
    dirty = 0
    with ParameterStore.create(place / "store", [RecordSchema("record", numel)], config) as store:
        store.reserve({"record": records})
        for key in keys:
            store.register(key, "record", weight=gradient)
        store.commit()
        with DiskProbe(place, records * numel * 12, (numel * 4, numel * 8), config.io) as probe:
            for turn in range(rounds + 2):  # two that do not count: the first writes to fresh slots
                _make_dirty(store, keys, gradient)
                before = int(store.core.engine.stats()["written_bytes"])
                begun = time.perf_counter()
                store.commit()
                seconds = time.perf_counter() - begun
                dirty = int(store.core.engine.stats()["written_bytes"]) - before
                speed = probe.bytes_per_s(Bytes(0, dirty), durable=Durable.YES)
                _make_dirty(store, keys, gradient)
                lateness = (
                    asyncio.run(_lateness(store.commit_async())),
                    asyncio.run(_lateness(asyncio.sleep(seconds))),
                )
                if turn >= 2:
                    commits.append(seconds)
                    writes.append(dirty / speed)
                    late.append(lateness[0])
                    late_idle.append(lateness[1])
    figures: dict[str, Any] = {
        "bench": "commit",
        "records": records,
        "record_bytes": numel * 12,
        "dirty_bytes": dirty,
        "rounds": rounds,
        "commit_to_write_ratio": statistics.median(a / b for a, b in zip(commits, writes, strict=True)),
    }
    for name, values in (
        ("commit", commits),
        ("write", writes),
        ("heartbeat_late", late),
        ("heartbeat_late_idle", late_idle),
    ):
        figures |= {
            f"{name}_samples_s": values,
            f"{name}_median_s": spread(values).median,
            f"{name}_least_s": spread(values).least,
            f"{name}_greatest_s": spread(values).greatest,
        }
    return figures


def _make_dirty(store: ParameterStore, keys: list[str], gradient: NDArray[np.float32]) -> None:
    store.update(dict.fromkeys(keys, gradient), lr=1e-3)
    store.fetch(keys).release()  # waits for the steps


async def _lateness(work: Coroutine[Any, Any, object]) -> float:
    """By how many seconds, at most, a heartbeat comes late while ``work`` is awaited."""
    task = asyncio.create_task(work)
    latest = 0.0
    while not task.done():
        due = time.perf_counter() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        latest = max(latest, time.perf_counter() - due)
    await task
    return latest


def measurements(result: dict[str, Any]) -> list[Measurement]:
    """What ``run`` found, for a document."""
    commits, writes = result["commit_samples_s"], result["write_samples_s"]
    ratios = [commit / write for commit, write in zip(commits, writes, strict=True)]
    return [
        measured("commit", commits, "s", Better.LOWER),
        measured("durable write of the same bytes", writes, "s", Better.LOWER),
        measured("heartbeat late, commit awaited", result["heartbeat_late_samples_s"], "s", Better.LOWER),
        measured("heartbeat late, idle loop", result["heartbeat_late_idle_samples_s"], "s", Better.LOWER),
        derived("commit to write", ratios, "ratio", Better.LOWER, target=_TO_WRITE),
        counted("dirty", result["dirty_bytes"], "bytes"),
    ]
