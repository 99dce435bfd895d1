"""What a commit costs beyond the bytes that it must write.

Every record of a store is stepped, so that the whole cache is dirty, and the commit is timed from the moment
that nothing is in flight. In turn with it the same bytes, in transfers of the same sizes, are written to a
preallocated file beside the store and synced.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.probes.disk import Bytes, DiskProbe, Durable
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import Figures, prefixed, ratios
from tierstore.stats import spread
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

__all__ = ["CommitResult", "WriteTimes", "measurements", "run"]

_TO_WRITE = 1.2  # what a commit may take at most, in times of writing its bytes


@dataclass(frozen=True, kw_only=True)
class WriteTimes(Figures):
    """Seconds of the rounds."""

    samples_s: Sequence[float]
    median_s: float
    least_s: float
    greatest_s: float

    @staticmethod
    def of(samples_s: Sequence[float]) -> WriteTimes:
        found = spread(samples_s)
        return WriteTimes(
            samples_s=samples_s, median_s=found.median, least_s=found.least, greatest_s=found.greatest
        )


@dataclass(frozen=True, kw_only=True)
class CommitResult(Figures):
    """What ``run`` found. ``write``: durable writes of the same bytes."""

    bench: str = "commit"
    records: int
    record_bytes: int
    dirty_bytes: int
    rounds: int
    commit_to_write_ratio: float
    commit: WriteTimes = field(metadata=prefixed("commit_"))
    write: WriteTimes = field(metadata=prefixed("write_"))


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
    commits, writes = [], []
    dirty = 0
    with ParameterStore.create(directory / "store", [RecordSchema("record", numel)], config) as store:
        store.reserve({"record": records})
        for key in keys:
            store.register(key, "record", weight=gradient)
        store.commit()
        with DiskProbe(directory, records * numel * 12, (numel * 4, numel * 8), config.io) as probe:
            for turn in range(rounds + 2):  # two that do not count: the first writes to fresh slots
                store.update(dict.fromkeys(keys, gradient), lr=1e-3)
                store.fetch(keys).release()  # waits for the steps
                before = int(store.core.engine.stats()["written_bytes"])
                begun = time.perf_counter()
                store.commit()
                seconds = time.perf_counter() - begun
                dirty = int(store.core.engine.stats()["written_bytes"]) - before
                speed = probe.bytes_per_s(Bytes(0, dirty), durable=Durable.YES)
                if turn >= 2:
                    commits.append(seconds)
                    writes.append(dirty / speed)
    return CommitResult(
        records=records,
        record_bytes=numel * 12,
        dirty_bytes=dirty,
        rounds=rounds,
        commit_to_write_ratio=statistics.median(ratios(commits, writes)),
        commit=WriteTimes.of(commits),
        write=WriteTimes.of(writes),
    )


def measurements(result: CommitResult) -> list[Measurement]:
    """What ``run`` found, for a document."""
    commits, writes = result.commit.samples_s, result.write.samples_s
    return [
        measured("commit", commits, "s", Better.LOWER),
        measured("durable write of the same bytes", writes, "s", Better.LOWER),
        derived("commit to write", ratios(commits, writes), "ratio", Better.LOWER, target=_TO_WRITE),
        counted("dirty", result.dirty_bytes, "bytes"),
    ]
