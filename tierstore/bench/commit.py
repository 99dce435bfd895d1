"""What a commit costs beyond the bytes that it must write.

Every record of a store is stepped, so that the whole cache is dirty, and the commit is timed from the moment
that nothing is in flight. In turn with it the same bytes, in transfers of the same sizes, are written to a
preallocated file beside the store and synced. Then a commit is awaited, and beside it a heartbeat: how late it comes,
against the same in an idle loop, is how long the commit keeps an event loop from its other work.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.probes.disk import Bytes, DiskProbe, Durable
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import Figures, prefixed, ratios
from tierstore.stats import spread
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

_BEAT_S = 0.002
_TO_WRITE = 1.2  # what a commit may take at most, in times of writing its bytes


@dataclass(frozen=True, kw_only=True)
class RoundTimes(Figures):
    """Seconds of the rounds."""

    samples_s: Sequence[float]
    median_s: float
    least_s: float
    greatest_s: float

    @staticmethod
    def of(samples_s: Sequence[float]) -> RoundTimes:
        found = spread(samples_s)
        return RoundTimes(
            samples_s=samples_s, median_s=found.median, least_s=found.least, greatest_s=found.greatest
        )


@dataclass(frozen=True, kw_only=True)
class CommitResult(Figures):
    """What ``run`` found. ``write``: durable writes of the same bytes. ``heartbeat_late``: the most in each round."""

    bench: str = "commit"
    records: int
    record_bytes: int
    dirty_bytes: int
    rounds: int
    commit_to_write_ratio: float
    commit: RoundTimes = field(metadata=prefixed("commit_"))
    write: RoundTimes = field(metadata=prefixed("write_"))
    heartbeat_late: RoundTimes = field(metadata=prefixed("heartbeat_late_"))
    heartbeat_late_idle: RoundTimes = field(metadata=prefixed("heartbeat_late_idle_"))


def run(directory: Path, *, records: int, record_bytes: int, rounds: int) -> CommitResult:
    """Measures in ``directory``, made and removed here. Raises ConfigError, OSError."""
    at_least(1, records=records, rounds=rounds)
    at_least(12, record_bytes=record_bytes)
    with work_directory(directory):
        return _run(directory, records, record_bytes // 12, rounds)


def _run(directory: Path, records: int, numel: int, rounds: int) -> CommitResult:
    keys = [f"record.{number:05d}" for number in range(records)]
    gradient = np.full(numel, 1e-3, np.float32)
    config = StoreConfig(host_budget=(records + 1) * (numel * 12 + numel // 2 + (1 << 20)))
    commits, writes, late, late_idle = [], [], [], []
    dirty = 0
    with ParameterStore.create(directory / "store", [RecordSchema("record", numel)], config) as store:
        store.reserve({"record": records})
        for key in keys:
            store.register(key, "record", weight=gradient)
        store.commit()
        with closing(DiskProbe(directory, records * numel * 12, (numel * 4, numel * 8), config.io)) as probe:
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
    return CommitResult(
        records=records,
        record_bytes=numel * 12,
        dirty_bytes=dirty,
        rounds=rounds,
        commit_to_write_ratio=statistics.median(ratios(commits, writes)),
        commit=RoundTimes.of(commits),
        write=RoundTimes.of(writes),
        heartbeat_late=RoundTimes.of(late),
        heartbeat_late_idle=RoundTimes.of(late_idle),
    )


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


def measurements(result: CommitResult) -> list[Measurement]:
    """What ``run`` found, for a document."""
    commits, writes = result.commit.samples_s, result.write.samples_s
    return [
        measured("commit", commits, "s", Better.LOWER),
        measured("durable write of the same bytes", writes, "s", Better.LOWER),
        measured("heartbeat late, commit awaited", result.heartbeat_late.samples_s, "s", Better.LOWER),
        measured("heartbeat late, idle loop", result.heartbeat_late_idle.samples_s, "s", Better.LOWER),
        derived("commit to write", ratios(commits, writes), "ratio", Better.LOWER, target=_TO_WRITE),
        counted("dirty", result.dirty_bytes, "bytes"),
    ]
