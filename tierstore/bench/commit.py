"""The cost of a commit beyond the bytes that it must write.

Every record of a store is stepped, so that the whole cache is dirty, and the commit is timed from the moment
that nothing is in flight. In turn with it, the same bytes are written in transfers of the same sizes to a preallocated
file beside the store and synced. Then a commit is awaited beside a heartbeat: the delay of the heartbeat, compared with
that in an idle loop, is how long the commit keeps an event loop from other work.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.documents import Better, counted, derived, measured
from tierstore.bench.harness import (
    Benchmark,
    Found,
    Progress,
    prefixed,
    ratios,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.probes import Bytes, DiskProbe, Durable
from tierstore.config import check_least, option
from tierstore.stats import spread
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

_BEAT_S = 0.002
_TO_WRITE = 1.2  # the most that a commit may take, relative to writing its bytes
#: What is timed in each round: the prefix of its keys, and its name.
_TIMED = {
    "commit": "commit",
    "write": "durable write of the same bytes",
    "heartbeat_late": "heartbeat late, commit awaited",
    "heartbeat_late_idle": "heartbeat late, idle loop",
}


@dataclass(frozen=True, kw_only=True)
class CommitBench(Benchmark):
    """A commit of a cache full of dirty records against durable writes of the same bytes."""

    records: int = option(32)
    record_bytes: int = size_option("24MiB")
    rounds: int = option(5)
    store: Path = store_option()

    def __post_init__(self) -> None:
        check_least(self, 1, "records", "rounds")
        check_least(self, 12, "record_bytes")

    def run(self, progress: Progress) -> Found:
        """Measure in ``store``, which is made and removed here."""
        numel = self.record_bytes // 12
        with work_directory(self.store) as directory:
            samples, dirty = _measure(directory, self.records, numel, self.rounds)
        to_write = ratios(samples["commit"], samples["write"])
        figures: dict[str, object] = {
            "bench": "commit",
            "records": self.records,
            "record_bytes": numel * 12,
            "dirty_bytes": dirty,
            "rounds": self.rounds,
            "commit_to_write_ratio": statistics.median(to_write),
        }
        for key, seconds in samples.items():
            figures |= prefixed(f"{key}_", _times(seconds))
        return Found(
            figures=figures,
            measurements=[
                *(measured(name, samples[key], "s") for key, name in _TIMED.items()),
                derived("commit to write", to_write, "ratio", Better.LOWER, target=_TO_WRITE),
                counted("dirty", dirty, "bytes"),
            ],
        )


def _times(samples_s: list[float]) -> dict[str, object]:
    found = spread(samples_s)
    return {
        "samples_s": samples_s,
        "median_s": found.median,
        "least_s": found.least,
        "greatest_s": found.greatest,
    }


def _measure(directory: Path, records: int, numel: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each round for each thing timed, and the bytes that a commit wrote."""
    keys = [f"record.{number:05d}" for number in range(records)]
    gradient = np.full(numel, 1e-3, np.float32)
    config = StoreConfig(host_budget=(records + 1) * (numel * 12 + numel // 2 + (1 << 20)))
    samples: dict[str, list[float]] = {key: [] for key in _TIMED}
    dirty = 0
    with ParameterStore.create(directory / "store", [RecordSchema("record", numel)], config) as store:
        store.reserve({"record": records})
        for key in keys:
            store.register(key, "record", weight=gradient)
        store.commit()
        with closing(DiskProbe(directory, records * numel * 12, (numel * 4, numel * 8), config.io)) as probe:
            for turn in range(rounds + 2):  # two are not counted: the first writes to fresh slots
                _make_dirty(store, keys, gradient)
                seconds, write_s, dirty = commit_and_write(store, probe)
                _make_dirty(store, keys, gradient)
                late = asyncio.run(_lateness(store.commit_async()))
                late_idle = asyncio.run(_lateness(asyncio.sleep(seconds)))
                if turn >= 2:
                    taken = (seconds, write_s, late, late_idle)
                    for found, spent in zip(samples.values(), taken, strict=True):
                        found.append(spent)
    return samples, dirty


def commit_and_write(store: ParameterStore, probe: DiskProbe) -> tuple[float, float, int]:
    """Seconds of a commit and of a durable write of the same bytes, and how many they are."""
    before = int(store.core.engine.stats()["written_bytes"])
    begun = time.perf_counter()
    store.commit()
    seconds = time.perf_counter() - begun
    dirty = int(store.core.engine.stats()["written_bytes"]) - before
    return seconds, dirty / probe.bytes_per_s(Bytes(0, dirty), durable=Durable.YES), dirty


def _make_dirty(store: ParameterStore, keys: list[str], gradient: NDArray[np.float32]) -> None:
    store.update(dict.fromkeys(keys, gradient), lr=1e-3)
    store.fetch(keys).release()  # waits for the steps


async def _lateness(work: Coroutine[Any, Any, object]) -> float:
    """The greatest delay in seconds of a heartbeat while ``work`` is awaited."""
    task = asyncio.create_task(work)
    latest = 0.0
    while not task.done():
        due = time.perf_counter() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        latest = max(latest, time.perf_counter() - due)
    await task
    return latest
