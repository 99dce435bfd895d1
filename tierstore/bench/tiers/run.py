"""A store under load: what it serves, how long it takes, what it writes for what was changed, and what it takes.

Points of a sweep over record sizes, host budgets (which make the hit ratio) and dirty ratios. One store a record size,
opened anew for each point; everything through ``ParameterStore`` and the engine, on a real file system. docs/BENCH.md
defines the figures.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from pathlib import Path

import numpy as np

from tierstore.bench.checks import more_than_0, refuse_existing, require_free, work_directory
from tierstore.bench.probes.latency import LatencySummary
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import Figures, prefixed
from tierstore.bench.soak.model import StoreModel
from tierstore.bench.tiers.load import (
    TierLoad,
    TierLoadResult,
    TierTraffic,
    TrafficStep,
    partly_dirty,
    recorded,
    synthetic,
)
from tierstore.endurance import drive_life_s
from tierstore.errors import ConfigError
from tierstore.machine import existing_parent
from tierstore.store import (
    AdamWConfig,
    Inactive,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
)
from tierstore.store.disk.store_extents import extent_bytes, scratch_bytes
from tierstore.store.index.database import index_bytes
from tierstore.store.opening import minimum_host_budget
from tierstore.units import format_bytes

#: Of training traffic: everything that is touched is stepped.
WRITE_AMPLIFICATION_TARGET = 1.05
_PAGE_NUMEL = 1024  # sections of so many elements fill whole pages, in each of their dtypes
_STATE_BYTES = 12  # a parameter
_LEAST_RECORDS = 8
_ROUNDS = 3  # of a point
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

    directory: Path
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
        more_than_0(seconds=self.seconds, fetches_at_once=self.fetches_at_once)
        more_than_0(commit_every=self.commit_every, store_bytes=self.store_bytes)
        more_than_0(endurance_bytes=self.endurance_bytes)
        if self.retain < 0:
            raise ConfigError(f"retain: expected at least 0 snapshots, got {self.retain}")
        refuse_existing(self.directory)

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


def _traffic(bench: TiersBench, record_bytes: int) -> TierTraffic:
    if bench.trace is not None:
        return recorded(bench.trace)
    records = max(bench.store_bytes // schema_of(record_bytes).record_bytes, _LEAST_RECORDS)
    return synthetic(records, bench.seed)


def stored_bytes(bench: TiersBench, record_bytes: int, records: int) -> int:
    """What a store of ``records`` takes of the disk."""
    schema = schema_of(record_bytes)
    extents = extent_bytes(schema, records, bench.retain) + scratch_bytes(schema, records)
    return extents + index_bytes(records, bench.retain)


@dataclass(frozen=True, kw_only=True)
class LoadRates(Figures):
    """A load, by the second."""

    steps_per_s: float
    fetched_bytes_per_s: float
    changed_bytes_per_s: float
    read_bytes_per_s: float
    written_bytes_per_s: float

    @staticmethod
    def of(load: TierLoadResult) -> LoadRates:
        rated = ("steps", "fetched_bytes", "changed_bytes", "read_bytes", "written_bytes")
        return LoadRates(**{f"{name}_per_s": getattr(load, name) / load.elapsed_s for name in rated})


@dataclass(frozen=True, kw_only=True)
class RoundFigures(Figures):
    """One round of a point: the noise between rounds is taken from these."""

    rates: LoadRates = field(metadata=prefixed(""))
    fetch: LatencySummary
    commit: LatencySummary
    write_amplification_ratio: float | None

    @staticmethod
    def of(load: TierLoadResult) -> RoundFigures:
        return RoundFigures(
            rates=LoadRates.of(load),
            fetch=load.fetch.summary(),
            commit=load.commit.summary(),
            write_amplification_ratio=load.write_amplification,
        )


@dataclass(frozen=True, kw_only=True)
class PointFigures(Figures):
    """One point, all of its rounds together. None: nothing was changed, dirty or written; or no target."""

    record_bytes: int
    records: int
    host_budget_bytes: int
    budget_ratio: float
    dirty_ratio: float
    elapsed_s: float
    steps: int
    commits: int
    hit_ratio: float
    rates: LoadRates = field(metadata=prefixed(""))
    fetch: LatencySummary
    update: LatencySummary
    commit: LatencySummary
    rounds: Sequence[RoundFigures]
    changed_bytes: int
    dirty_bytes: int
    written_bytes: int
    written_accounted_by: str
    index_written_bytes: int
    write_amplification_ratio: float | None
    write_to_dirty_ratio: float | None
    write_target_met: bool | None
    disk_bytes: int
    space_amplification_ratio: float
    space_target_ratio: float
    space_target_met: bool
    space_needed_ratio: float
    wear_per_step_bytes: float
    drive_life_s: float
    drive_life_steps_count: float | None

    def missed_targets(self) -> Iterator[str]:
        what = f"records of {format_bytes(self.record_bytes)}, budget {self.budget_ratio:.0%}"
        if self.write_target_met is False:
            found, most = self.write_amplification_ratio, WRITE_AMPLIFICATION_TARGET
            yield f"{what}: write amplification {found:.3f}, expected at most {most}"
        if not self.space_target_met:
            found, most = self.space_amplification_ratio, self.space_target_ratio
            yield f"{what}: space amplification {found:.3f}, expected at most {most:.3f}"


@dataclass(frozen=True, kw_only=True)
class TiersResult(Figures):
    """What ``run`` found; ``failures``: targets that were missed, and records that do not verify."""

    bench: str = "tiers"
    traffic: str
    endurance_bytes: float
    commit_every_steps_count: int
    retained_snapshots_count: int
    fetches_at_once_count: int
    write_amplification_target_ratio: float
    seed: int
    effective: Sequence[str]
    points: Sequence[PointFigures]
    failures: Sequence[str]


def run(bench: TiersBench, announce: Callable[[str], None]) -> TiersResult:
    """All points. The directory is made and removed here. Raises ConfigError, DataError, OSError."""
    traffics = {size: _traffic(bench, size) for size in dict.fromkeys(p.record_bytes for p in bench.points)}
    needed = max(stored_bytes(bench, size, len(traffic.layers)) for size, traffic in traffics.items())
    parent = existing_parent(bench.directory)
    announce(
        f"{len(bench.points)} points of {bench.seconds:g} s; stores of up to {format_bytes(needed)} in {parent}"
    )
    require_free(bench.directory, needed, "the largest takes")
    points: list[PointFigures] = []
    failures: list[str] = []
    effective: list[str] = []
    with work_directory(bench.directory):
        for size, traffic in traffics.items():
            store = _FilledStore(bench, size, traffic)
            for point in (point for point in bench.points if point.record_bytes == size):
                announce(
                    f"records of {format_bytes(size)}, budget {point.budget_ratio:.0%}, dirty {point.dirty_ratio:.0%}"
                )
                points.append(store.measure(point))
            failures += store.verify()
            effective = store.effective
            shutil.rmtree(store.directory)
    failures += [failure for point in points for failure in point.missed_targets()]
    return TiersResult(
        traffic=next(iter(traffics.values())).name,
        endurance_bytes=bench.endurance_bytes,
        commit_every_steps_count=bench.commit_every,
        retained_snapshots_count=bench.retain,
        fetches_at_once_count=bench.fetches_at_once,
        write_amplification_target_ratio=WRITE_AMPLIFICATION_TARGET,
        seed=bench.seed,
        effective=effective,
        points=points,
        failures=failures,
    )


class _FilledStore:
    """One store of records of one size, filled once; a point opens it with its own budget."""

    def __init__(self, bench: TiersBench, record_bytes: int, traffic: TierTraffic) -> None:
        self._bench, self._traffic = bench, traffic
        self._schema = schema_of(record_bytes)
        records = len(traffic.layers)
        self._keys = [f"record.{number:07d}" for number in range(records)]
        self._logical = records * self._schema.record_bytes
        self._model = StoreModel(bench.seed, [0] * records, bench.retain)
        self.directory = bench.directory / f"store-{record_bytes}"
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

    def measure(self, point: Point) -> PointFigures:
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
            rounds = asyncio.run(_measured(load, steps, bench.seconds))
            self.effective = store.status().effective
        return self._figures(point, rounds)

    def verify(self) -> Sequence[str]:
        with ParameterStore.open(self.directory, self._config(0.25)) as store:
            return [f"verify: {failure}" for failure in store.verify().failures]

    def _most_disk_bytes(self) -> int:
        """One copy, one of what is dirty between commits (it may be all), one a snapshot; the index."""
        retain, records = self._bench.retain, len(self._keys)
        return extent_bytes(self._schema, records, retain) + index_bytes(records, retain) + _METADATA_BYTES

    def _figures(self, point: Point, rounds: Sequence[TierLoadResult]) -> PointFigures:
        whole = TierLoadResult.joined(rounds)
        seconds, written, amplification = whole.elapsed_s, whole.written_bytes, whole.write_amplification
        endurance, allowed = self._bench.endurance_bytes, self._most_disk_bytes()
        met = amplification is None or amplification <= WRITE_AMPLIFICATION_TARGET
        return PointFigures(
            record_bytes=self._schema.record_bytes,
            records=len(self._keys),
            host_budget_bytes=self._budget(point.budget_ratio),
            budget_ratio=point.budget_ratio,
            dirty_ratio=point.dirty_ratio,
            elapsed_s=seconds,
            steps=whole.steps,
            commits=whole.commits,
            hit_ratio=whole.hits / max(whole.hits + whole.misses, 1),
            rates=LoadRates.of(whole),
            fetch=whole.fetch.summary(),
            update=whole.update.summary(),
            commit=whole.commit.summary(),
            rounds=[RoundFigures.of(one) for one in rounds],
            changed_bytes=whole.changed_bytes,
            dirty_bytes=whole.dirty_bytes,
            written_bytes=written,
            written_accounted_by="kernel" if whole.process_written_bytes else "engine",
            index_written_bytes=written - whole.engine_written_bytes,
            write_amplification_ratio=amplification,
            write_to_dirty_ratio=written / whole.dirty_bytes if whole.dirty_bytes else None,
            # Only training that steps what it touches has the target.
            write_target_met=met if point.dirty_ratio == 1 else None,
            disk_bytes=whole.disk_bytes,
            space_amplification_ratio=whole.disk_bytes / self._logical,
            space_target_ratio=allowed / self._logical,
            space_target_met=whole.disk_bytes <= allowed,
            space_needed_ratio=whole.needed_copies / len(self._keys),
            wear_per_step_bytes=written / whole.steps,
            drive_life_s=drive_life_s(endurance, written, seconds),
            drive_life_steps_count=endurance / written * whole.steps if written else None,
        )


def measurements(result: TiersResult) -> list[Measurement]:
    """What ``run`` found, for a document."""
    return [measurement for point in result.points for measurement in _of_point(point)]


def _of_point(point: PointFigures) -> Iterator[Measurement]:
    what = {
        "record_bytes": point.record_bytes,
        "budget_ratio": point.budget_ratio,
        "dirty_ratio": point.dirty_ratio,
    }
    rates = [one.rates for one in point.rounds]
    for name, speeds in (
        ("fetched", [rate.fetched_bytes_per_s for rate in rates]),
        ("changed", [rate.changed_bytes_per_s for rate in rates]),
    ):
        if any(speeds):
            yield measured(name, speeds, "bytes/s", Better.HIGHER, parameters=what)
    fetches, commits = [one.fetch for one in point.rounds], [one.commit for one in point.rounds]
    for name, times in (
        ("fetch p50", [one.p50_s for one in fetches]),
        ("fetch p99", [one.p99_s for one in fetches]),
        ("fetch p99.9", [one.p99_9_s for one in fetches]),
        ("commit p50", [one.p50_s for one in commits]),
        ("commit p99", [one.p99_s for one in commits]),
    ):
        samples = [time for time in times if time is not None]
        if samples:
            yield measured(name, samples, "s", Better.LOWER, parameters=what)
    yield derived("hits", point.hit_ratio, "ratio", Better.HIGHER, parameters=what)
    amplified = [one.write_amplification_ratio for one in point.rounds]
    found = [ratio for ratio in amplified if ratio is not None]
    if found:
        target = WRITE_AMPLIFICATION_TARGET if point.dirty_ratio == 1 else None
        yield derived("write amplification", found, "ratio", Better.LOWER, target=target, parameters=what)
    space, most = point.space_amplification_ratio, point.space_target_ratio
    yield derived("space amplification", space, "ratio", Better.LOWER, target=most, parameters=what)
    yield measured("wear of a step", point.wear_per_step_bytes, "bytes", Better.LOWER, parameters=what)


async def _measured(load: TierLoad, steps: Iterator[TrafficStep], seconds: float) -> list[TierLoadResult]:
    await load.run(steps, seconds * _WARMUP_RATIO)
    return [await load.run(steps, seconds * (1 - _WARMUP_RATIO) / _ROUNDS) for _ in range(_ROUNDS)]
