"""A store under load: what it serves, how long it takes, what it writes for what was changed, and what it takes.

Points of a sweep over record sizes, host budgets (which make the hit ratio) and dirty ratios. One store a record size,
opened anew for each point; everything through ``ParameterStore`` and the engine, on a real file system.

- Write amplification: bytes that this process caused to be sent to storage (``/proc/self/io``: extents and index, not
  the file system's own journal) over bytes that optimizer steps changed. A record that is stepped twice between
  commits is changed twice, and need be written once; ``write_to_dirty_ratio`` counts it once.
- Space amplification: blocks of all files of the store (``st_blocks``) over bytes of its records. The target is a copy
  of the records, one of what may be dirty between commits (all of them: the store reserves it before it is needed), one
  a retained snapshot, and the index. What this traffic needed of that is counted beside it: a copy of each version of a
  record that is live, committed or in a snapshot.
- Wear: bytes sent to storage. Days to the endurance stated are at the speed of this load, which does nothing but load.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.bench.model import StoreModel
from tierstore.bench.tiers_load import LoadResult, TierLoad, Traffic, partly_dirty, recorded, synthetic
from tierstore.endurance import DAY_S, drive_life_s
from tierstore.errors import ConfigError
from tierstore.store import (
    AdamWConfig,
    Inactive,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
)
from tierstore.store.index import index_bytes
from tierstore.store.opening import minimum_host_budget
from tierstore.store.space import extent_bytes, scratch_bytes
from tierstore.units import format_bytes

__all__ = ["WRITE_AMPLIFICATION_TARGET", "Point", "Sweep", "TiersBench", "run", "stored_bytes"]

#: Of training traffic: everything that is touched is stepped.
WRITE_AMPLIFICATION_TARGET = 1.05
_PAGE_NUMEL = 1024  # sections of so many elements fill whole pages, in each of their dtypes
_STATE_BYTES = 12  # a parameter
_LEAST_RECORDS = 8
_METADATA_BYTES = 1 << 20  # what file systems count as a file's blocks besides its content
_WARMUP_RATIO = 0.25  # of the time of a point


class Sweep(Enum):
    """STAR: from the first value of each list, each list on its own. FULL: every combination."""

    STAR = "star"
    FULL = "full"


@dataclass(frozen=True)
class Point:
    record_bytes: int
    budget_ratio: float
    dirty_ratio: float


@dataclass(frozen=True, kw_only=True)
class TiersBench:
    """``budgets`` are fractions of the store; ``dirty`` the part of what a trace steps that is stepped. Of one store
    ``store_bytes`` of records (eight at least), or as many as ``trace`` has.
    """

    place: Path
    record_bytes: tuple[int, ...] = (1 << 20, 64 << 10, 16 << 20)
    budgets: tuple[float, ...] = (0.25, 0.1, 0.5, 1.0)
    dirty: tuple[float, ...] = (1.0, 0.25, 0.0)
    sweep: Sweep = Sweep.STAR
    store_bytes: int = 192 << 20
    seconds: float = 5.0
    fetches_at_once: int = 4
    commit_every: int = 4
    retain: int = 1
    trace: Path | None = None
    endurance_bytes: float = 600e12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("record_bytes", "budgets", "dirty"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: expected at least one value")
        least = _STATE_BYTES * _PAGE_NUMEL
        if min(self.record_bytes) < least:
            raise ConfigError(f"record_bytes: expected at least {least}, got {min(self.record_bytes)}")
        if not all(0 < budget <= 1 for budget in self.budgets):
            raise ConfigError(f"budgets: expected fractions of the store in (0, 1], got {self.budgets}")
        if not all(0 <= ratio <= 1 for ratio in self.dirty):
            raise ConfigError(f"dirty: expected fractions in [0, 1], got {self.dirty}")
        for name in ("seconds", "fetches_at_once", "commit_every", "store_bytes", "endurance_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.retain < 0:
            raise ConfigError(f"retain: expected at least 0 snapshots, got {self.retain}")
        if self.place.exists():
            raise ConfigError(f"store: {self.place} exists; the benchmark wants a directory of its own")

    @property
    def points(self) -> list[Point]:
        """By record size, in the order given."""
        if self.sweep is Sweep.FULL:
            every = product(self.record_bytes, self.budgets, self.dirty)
            return [Point(size, budget, dirty) for size, budget, dirty in every]
        size, budget, dirty = self.record_bytes[0], self.budgets[0], self.dirty[0]
        star = [Point(size, budget, dirty)]
        star += [Point(size, other, dirty) for other in self.budgets[1:]]
        star += [Point(size, budget, other) for other in self.dirty[1:]]
        return star + [Point(other, budget, dirty) for other in self.record_bytes[1:]]


def schema_of(record_bytes: int) -> RecordSchema:
    """Records of at most ``record_bytes``, whose sections fill whole pages."""
    return RecordSchema("record", record_bytes // _STATE_BYTES // _PAGE_NUMEL * _PAGE_NUMEL)


def _traffic(bench: TiersBench, record_bytes: int) -> Traffic:
    if bench.trace is not None:
        return recorded(bench.trace)
    records = max(bench.store_bytes // schema_of(record_bytes).record_bytes, _LEAST_RECORDS)
    return synthetic(records, bench.seed)


def stored_bytes(bench: TiersBench, record_bytes: int, records: int) -> int:
    """What a store of ``records`` takes of the disk."""
    schema = schema_of(record_bytes)
    extents = extent_bytes(schema, records, bench.retain) + scratch_bytes(schema, records)
    return extents + index_bytes(records, bench.retain)


def run(bench: TiersBench, announce: Callable[[str], None]) -> dict[str, Any]:
    """All points; figures ready for JSON, of which ``failures`` says what is not as it should be. The directory is
    made and removed here. Raises ConfigError, DataError, OSError.
    """
    traffics = {size: _traffic(bench, size) for size in dict.fromkeys(p.record_bytes for p in bench.points)}
    needed = max(stored_bytes(bench, size, len(traffic.layers)) for size, traffic in traffics.items())
    parent = next(path for path in bench.place.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    announce(
        f"{len(bench.points)} points of {bench.seconds:g} s; stores of up to {format_bytes(needed)} in {parent}"
    )
    if free < needed:
        raise ConfigError(f"store: the largest takes {needed} bytes of {parent}, which has {free} free")
    bench.place.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    effective: list[str] = []
    try:
        for size, traffic in traffics.items():
            here = [point for point in bench.points if point.record_bytes == size]
            rig = _Rig(bench, size, traffic)
            for point in here:
                announce(
                    f"records of {format_bytes(size)}, budget {point.budget_ratio:.0%}, dirty {point.dirty_ratio:.0%}"
                )
                rows.append(rig.measure(point))
            failures += rig.verify()
            effective = rig.effective
            shutil.rmtree(rig.directory)
    finally:
        shutil.rmtree(bench.place, ignore_errors=True)
    failures += [failure for row in rows for failure in _missed(row)]
    return {
        "bench": "tiers",
        "traffic": next(iter(traffics.values())).name,
        "endurance_bytes": bench.endurance_bytes,
        "commit_every_steps_count": bench.commit_every,
        "retained_snapshots_count": bench.retain,
        "fetches_at_once_count": bench.fetches_at_once,
        "write_amplification_target_ratio": WRITE_AMPLIFICATION_TARGET,
        "seed": bench.seed,
        "effective": effective,
        "points": rows,
        "failures": failures,
    }


def _missed(row: dict[str, Any]) -> Iterator[str]:
    what = f"records of {format_bytes(row['record_bytes'])}, budget {row['budget_ratio']:.0%}"
    if row["write_target_met"] is False:
        found = row["write_amplification_ratio"]
        yield f"{what}: write amplification {found:.3f}, expected at most {WRITE_AMPLIFICATION_TARGET}"
    if not row["space_target_met"]:
        found, most = row["space_amplification_ratio"], row["space_target_ratio"]
        yield f"{what}: space amplification {found:.3f}, expected at most {most:.3f}"


class _Rig:
    """One store of records of one size, filled once; a point opens it with its own budget."""

    def __init__(self, bench: TiersBench, record_bytes: int, traffic: Traffic) -> None:
        self._bench, self._traffic = bench, traffic
        self._schema = schema_of(record_bytes)
        records = len(traffic.layers)
        self._keys = [f"record.{number:07d}" for number in range(records)]
        self._logical = records * self._schema.record_bytes
        self._model = StoreModel(bench.seed, [0] * records, bench.retain)
        self.directory = bench.place / f"store-{record_bytes}"
        self.effective: list[str] = []
        self._fill()

    def _budget(self, ratio: float) -> int:
        return max(int(self._logical * ratio), 2 * minimum_host_budget([self._schema]))

    def _config(self, ratio: float) -> StoreConfig:
        return StoreConfig(host_budget=self._budget(ratio), retain=self._bench.retain)

    def _fill(self) -> None:
        noise = np.random.default_rng(self._bench.seed).standard_normal(self._schema.numel, np.float32)
        # Records that were not touched stay as they are: otherwise fetching them would make them dirty.
        adamw = AdamWConfig(inactive=Inactive.SKIP)
        new = (
            NewRecord(key, self._schema.name, layer, lambda: noise)
            for key, layer in zip(self._keys, self._traffic.layers, strict=True)
        )
        with ParameterStore.create(self.directory, [self._schema], self._config(0.25), adamw=adamw) as store:
            store.register_many(new)
            store.commit()
            self._model.commit()

    def measure(self, point: Point) -> dict[str, Any]:
        bench = self._bench
        with ParameterStore.open(self.directory, self._config(point.budget_ratio)) as store:
            load = TierLoad(
                store,
                self._keys,
                self._model,
                at_once=bench.fetches_at_once,
                commit_every=bench.commit_every,
            )
            steps = partly_dirty(self._traffic.steps, point.dirty_ratio, bench.seed)
            result = asyncio.run(_measured(load, steps, bench.seconds))
            self.effective = store.describe()
        return self._figures(point, result)

    def verify(self) -> Sequence[str]:
        with ParameterStore.open(self.directory, self._config(0.25)) as store:
            return [f"verify: {failure}" for failure in store.verify().failures]

    def _most_disk_bytes(self) -> int:
        """One copy, one of what is dirty between commits (it may be all), one a snapshot; the index."""
        retain, records = self._bench.retain, len(self._keys)
        return extent_bytes(self._schema, records, retain) + index_bytes(records, retain) + _METADATA_BYTES

    def _figures(self, point: Point, result: LoadResult) -> dict[str, Any]:
        # A file system that is not on a disk (tmpfs) sends nothing to storage: what the engine wrote stands for it.
        accounted = result.process_written_bytes > 0
        written = result.process_written_bytes if accounted else result.engine_written_bytes
        seconds = result.elapsed_s
        amplification = written / result.changed_bytes if result.changed_bytes else None
        met = amplification is None or amplification <= WRITE_AMPLIFICATION_TARGET
        life_s = drive_life_s(self._bench.endurance_bytes, written, seconds)
        allowed = self._most_disk_bytes()
        return {
            "record_bytes": self._schema.record_bytes,
            "records": len(self._keys),
            "host_budget_bytes": self._budget(point.budget_ratio),
            "budget_ratio": point.budget_ratio,
            "dirty_ratio": point.dirty_ratio,
            "elapsed_s": seconds,
            "steps": result.steps,
            "commits": result.commits,
            "steps_per_s": result.steps / seconds,
            "hit_ratio": result.hits / max(result.hits + result.misses, 1),
            "fetched_bytes_per_s": result.fetched_bytes / seconds,
            "changed_bytes_per_s": result.changed_bytes / seconds,
            "read_bytes_per_s": result.read_bytes / seconds,
            "written_bytes_per_s": written / seconds,
            "fetch": result.fetch.as_json(),
            "update": result.update.as_json(),
            "commit": result.commit.as_json(),
            "changed_bytes": result.changed_bytes,
            "dirty_bytes": result.dirty_bytes,
            "written_bytes": written,
            "written_accounted_by": "kernel" if accounted else "engine",
            "index_written_bytes": written - result.engine_written_bytes,
            "write_amplification_ratio": amplification,
            "write_to_dirty_ratio": written / result.dirty_bytes if result.dirty_bytes else None,
            # Only training that steps what it touches has the target.
            "write_target_met": met if point.dirty_ratio == 1 else None,
            "disk_bytes": result.disk_bytes,
            "space_amplification_ratio": result.disk_bytes / self._logical,
            "space_target_ratio": allowed / self._logical,
            "space_target_met": result.disk_bytes <= allowed,
            "space_needed_ratio": result.needed_copies / len(self._keys),
            "wear_bytes_per_step": written / result.steps,
            "drive_life_days": life_s / DAY_S,
            "drive_life_steps": self._bench.endurance_bytes / written * result.steps if written else None,
        }


async def _measured(load: TierLoad, steps: Iterator[Any], seconds: float) -> LoadResult:
    await load.run(steps, seconds * _WARMUP_RATIO)
    return await load.run(steps, seconds * (1 - _WARMUP_RATIO))
