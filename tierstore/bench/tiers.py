"""A store under load: throughput, latencies, bytes written for each byte changed, and disk space.

Points of a sweep over record sizes, host budgets (which determine the hit ratio) and dirty ratios. One store per record
size, opened anew for each point; everything goes through ``ParameterStore`` and the engine, on a real file system.
docs/BENCH.md defines the figures. With --minutes it is a soak (``tierstore.bench.soak``).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.bench.documents import Better, Measurement, derived, measured
from tierstore.bench.harness import (
    Benchmark,
    FigureTable,
    Found,
    Progress,
    refuse_existing,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.probes import latency_summary
from tierstore.bench.soak import Soak
from tierstore.bench.soak_plan import SoakShape, StoreModel
from tierstore.bench.tiers_load import (
    TierLoad,
    TierLoadResult,
    TierTraffic,
    TrafficStep,
    partly_dirty,
    recorded,
    synthetic,
)
from tierstore.config import PathKind, check_least, check_positive, option
from tierstore.errors import ConfigError
from tierstore.machine import require_space
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
from tierstore.units import drive_life_s, format_bytes

#: For training traffic: everything that is touched is stepped.
WRITE_AMPLIFICATION_TARGET = 1.05
_RECORD_BYTES = (1 << 20, 64 << 10, 16 << 20)
_FULL_RECORD_BYTES = tuple(size << 10 for size in (1024, 64, 256, 4096, 16384, 65536, 262144))
_BUDGETS, _DIRTY = (0.25, 0.1, 0.5, 1.0), (1.0, 0.25, 0.0)
_STORE_BYTES, _SECONDS, _FULL_SECONDS, _RETAIN = 192 << 20, 5.0, 10.0, 1
_FETCHES_AT_ONCE, _COMMIT_EVERY = 4, 4
_PAGE_NUMEL = 1024  # sections of this many elements fill whole pages in every dtype
_STATE_BYTES = 12  # per parameter
_LEAST_RECORDS = 8
_ROUNDS = 3  # per point
_METADATA_BYTES = 1 << 20  # what file systems count as a file's blocks besides content
_WARMUP_RATIO = 0.25  # of the time of a point


@dataclass(frozen=True)
class Point:
    record_bytes: int
    budget_ratio: float
    dirty_ratio: float


@dataclass(frozen=True, kw_only=True)
class TiersBench(Benchmark):
    """The store under load: throughput, latencies, write and space amplification, wear.

    A sweep of about a minute or, with --minutes, a soak: a worker is killed at random moments, and every byte is checked.
    """

    store: Path = store_option()
    record_bytes: tuple[int, ...] = option(
        (), "Size of a record; may be repeated (default: 1MiB, ..).", size=True
    )
    budget: tuple[float, ...] = option(
        (), "Host budget as a fraction of the store; may be repeated (default: 0.25, ..)."
    )
    dirty: tuple[float, ...] = option(
        (), "Fraction of touched records that a step changes; may be repeated (default: 1.0, ..)."
    )
    store_bytes: int | None = option(None, "Size of one store's records.", size=True)
    seconds: float | None = option(None, "Seconds per point.")
    trace: Path | None = option(None, "Replay the load of this trace.", path=PathKind.EXISTING_FILE)
    endurance: int = size_option("600TB", "Bytes that the drive can take.")
    full: bool = option(False, "Every combination, with records from 64 KiB to 256 MiB.")
    minutes: float | None = option(None, "Soak instead of the sweep.")
    kill_every: float = option(10.0, "Soak: mean seconds between kills (0: no kills).")
    drives: tuple[Path, ...] = option(
        (),
        "Soak: spread the store over a directory to create and remove on another drive.",
        "--drive",
    )
    retain: int | None = option(None, "Snapshots kept.")
    seed: int = option(0)

    def __post_init__(self) -> None:
        check_positive(self, "minutes", "seconds", "store_bytes", "endurance")
        check_least(self, 0, "kill_every", "retain")
        if self.minutes is not None:
            self._check_soak()
            return
        if self.drives:
            raise ConfigError("--drive: requires --minutes")
        least = _STATE_BYTES * _PAGE_NUMEL
        if min(self.sizes) < least:
            raise ConfigError(f"record_bytes: expected at least {least}, got {min(self.sizes)}")
        if not all(0 < budget <= 1 for budget in self.budget):
            raise ConfigError(f"budget: expected fractions of the store in (0, 1], got {self.budget}")
        if not all(0 <= ratio <= 1 for ratio in self.dirty):
            raise ConfigError(f"dirty: expected fractions in [0, 1], got {self.dirty}")

    def _check_soak(self) -> None:
        refused = {"dirty": self.dirty, "trace": self.trace, "seconds": self.seconds, "full": self.full}
        for name, value in refused.items():
            if value:
                raise ConfigError(f"--{name} cannot be combined with --minutes")
        for name, values in (("record-bytes", self.record_bytes), ("budget", self.budget)):
            if len(values) > 1:
                raise ConfigError(f"--{name}: expected one with --minutes, got {len(values)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.record_bytes or (_FULL_RECORD_BYTES if self.full else _RECORD_BYTES)

    @property
    def point_s(self) -> float:
        return self.seconds if self.seconds is not None else _FULL_SECONDS if self.full else _SECONDS

    @property
    def one_store_bytes(self) -> int:
        return _STORE_BYTES if self.store_bytes is None else self.store_bytes

    @property
    def snapshots(self) -> int:
        return _RETAIN if self.retain is None else self.retain

    @property
    def as_soak(self) -> Soak:
        """The soak that --minutes requests."""
        asked = {"store_bytes": self.store_bytes, "retain": self.retain}
        asked |= {"record_bytes": next(iter(self.record_bytes), None)}
        shape = SoakShape(seed=self.seed, **{key: value for key, value in asked.items() if value is not None})
        if self.budget:
            shape = replace(shape, host_budget_bytes=int(shape.store_bytes * self.budget[0]))
        seconds = (self.minutes or 0.0) * 60
        return Soak(self.store, shape, seconds, further=self.drives, kill_every_s=self.kill_every)

    @property
    def points(self) -> list[Point]:
        """All points, by record size, in the order given."""
        budgets, dirty_ratios = self.budget or _BUDGETS, self.dirty or _DIRTY
        if self.full:
            return [Point(*each) for each in product(self.sizes, budgets, dirty_ratios)]
        size, budget, dirty = self.sizes[0], budgets[0], dirty_ratios[0]
        star = [Point(size, budget, dirty)]
        star += [Point(size, other, dirty) for other in budgets[1:]]
        star += [Point(size, budget, other) for other in dirty_ratios[1:]]
        return star + [Point(other, budget, dirty) for other in self.sizes[1:]]

    def run(self, progress: Progress) -> Found:
        """Measure all points, or run the soak. Raises ConfigError, DataError, OSError."""
        return self._sweep(progress) if self.minutes is None else self.as_soak.run(progress)

    def _sweep(self, progress: Progress) -> Found:
        refuse_existing(self.store)
        traffics = {size: _traffic(self, size) for size in dict.fromkeys(p.record_bytes for p in self.points)}
        needed = max(_stored_bytes(self, size, len(traffic.layers)) for size, traffic in traffics.items())
        progress.say(
            f"{len(self.points)} points of {self.point_s:g} s; stores of up to {format_bytes(needed)}"
        )
        require_space([self.store], needed, "the records of the largest store")
        points: list[dict[str, Any]] = []
        failures: list[str] = []
        effective: Sequence[str] = []
        with work_directory(self.store):
            for size, traffic in traffics.items():
                filled = _FilledStore(self, size, traffic)
                for point in (point for point in self.points if point.record_bytes == size):
                    progress.say(
                        f"records of {format_bytes(size)}, budget {point.budget_ratio:.0%}, "
                        f"dirty {point.dirty_ratio:.0%}"
                    )
                    points.append(filled.measure(point))
                failures += filled.verify()
                effective = filled.effective
                shutil.rmtree(filled.directory)
        failures += [failure for point in points for failure in _missed_targets(point)]
        figures = {
            "bench": "tiers",
            "traffic": next(iter(traffics.values())).name,
            "endurance_bytes": float(self.endurance),
            "commit_every_steps_count": _COMMIT_EVERY,
            "retained_snapshots_count": self.snapshots,
            "fetches_at_once_count": _FETCHES_AT_ONCE,
            "write_amplification_target_ratio": WRITE_AMPLIFICATION_TARGET,
            "seed": self.seed,
            "effective": effective,
            "points": points,
            "failures": failures,
        }
        return Found(
            figures=figures,
            measurements=[measurement for point in points for measurement in _measurements(point)],
            shown=[*effective, *_tables(points), *(f"FAILED: {failure}" for failure in failures)],
            failed=bool(failures),
        )


def _tables(points: Sequence[dict[str, Any]]) -> Iterator[FigureTable]:
    what = {"record": "record_bytes", "budget": "budget_ratio", "dirty": "dirty_ratio"}
    times = {
        "hits": "hit_ratio",
        "fetched": "fetched_bytes_per_s",
        "changed": "changed_bytes_per_s",
        "fetch p50": "fetch.p50_s",
        "p99": "fetch.p99_s",
        "p99.9": "fetch.p99.9_s",
        "commit p50": "commit.p50_s",
        "commit p99": "commit.p99_s",
    }
    wear = {
        "written / changed": "write_amplification_ratio",
        "/ dirty": "write_to_dirty_ratio",
        "disk / records": "space_amplification_ratio",
        "allowed": "space_target_ratio",
        "needed": "space_needed_ratio",
        "wear a step": "wear_per_step_bytes",
        "drive's life": "drive_life_s",
    }
    yield FigureTable(
        f"{_FETCHES_AT_ONCE} fetches at once, a commit every {_COMMIT_EVERY} steps", what | times, points
    )
    yield FigureTable("needed: copies of records that cannot be shared", what | wear, points)


# A point ----------------------------------------------------------------------------------------------------


def schema_of(record_bytes: int) -> RecordSchema:
    """Records of at most ``record_bytes`` whose sections fill whole pages."""
    return RecordSchema("record", record_bytes // _STATE_BYTES // _PAGE_NUMEL * _PAGE_NUMEL)


def _traffic(bench: TiersBench, record_bytes: int) -> TierTraffic:
    if bench.trace is not None:
        return recorded(bench.trace)
    records = max(bench.one_store_bytes // schema_of(record_bytes).record_bytes, _LEAST_RECORDS)
    return synthetic(records, bench.seed)


def _stored_bytes(bench: TiersBench, record_bytes: int, records: int) -> int:
    """Disk bytes of a store of ``records``."""
    schema = schema_of(record_bytes)
    extents = extent_bytes(schema, records, bench.snapshots) + scratch_bytes(schema, records)
    return extents + index_bytes(records, bench.snapshots)


class _FilledStore:
    """One store of records of one size, filled once; each point opens it with its own budget."""

    def __init__(self, bench: TiersBench, record_bytes: int, traffic: TierTraffic) -> None:
        self._bench, self._traffic = bench, traffic
        self._schema = schema_of(record_bytes)
        records = len(traffic.layers)
        self._keys = [f"record.{number:07d}" for number in range(records)]
        self._logical = records * self._schema.record_bytes
        self._model = StoreModel(bench.seed, [0] * records, bench.snapshots)
        self.directory = bench.store / f"store-{record_bytes}"
        self.effective: Sequence[str] = []
        self._fill()

    def _budget(self, ratio: float) -> int:
        return max(int(self._logical * ratio), 2 * minimum_host_budget([self._schema]))

    def _config(self, ratio: float) -> StoreConfig:
        return StoreConfig(host_budget=self._budget(ratio), retain=self._bench.snapshots)

    def _fill(self) -> None:
        noise = np.random.default_rng(self._bench.seed).standard_normal(self._schema.numel, np.float32)
        # Untouched records stay unchanged: otherwise fetching them would make them dirty.
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
                at_once=_FETCHES_AT_ONCE,
                commit_every=_COMMIT_EVERY,
            )
            steps = partly_dirty(self._traffic.steps, point.dirty_ratio, bench.seed)
            rounds = asyncio.run(_measured(load, steps, bench.point_s))
            self.effective = store.status().effective
        return self._figures(point, rounds)

    def verify(self) -> Sequence[str]:
        with ParameterStore.open(self.directory, self._config(0.25)) as store:
            return [f"verify: {failure}" for failure in store.verify().failures]

    def _most_disk_bytes(self) -> int:
        """One copy, one of what is dirty between commits (at most everything), one per snapshot; and the index."""
        retain, records = self._bench.snapshots, len(self._keys)
        return extent_bytes(self._schema, records, retain) + index_bytes(records, retain) + _METADATA_BYTES

    def _figures(self, point: Point, rounds: Sequence[TierLoadResult]) -> dict[str, Any]:
        """The figures of all rounds together. None: nothing was changed, dirty or written; or there is no target."""
        whole = TierLoadResult.joined(rounds)
        seconds, written, amplification = whole.elapsed_s, whole.written_bytes, whole.write_amplification
        endurance, allowed = float(self._bench.endurance), self._most_disk_bytes()
        met = amplification is None or amplification <= WRITE_AMPLIFICATION_TARGET
        return {
            "record_bytes": self._schema.record_bytes,
            "records": len(self._keys),
            "host_budget_bytes": self._budget(point.budget_ratio),
            "budget_ratio": point.budget_ratio,
            "dirty_ratio": point.dirty_ratio,
            "elapsed_s": seconds,
            "steps": whole.steps,
            "commits": whole.commits,
            "hit_ratio": whole.hits / max(whole.hits + whole.misses, 1),
            **whole.rates(),
            "fetch": latency_summary(whole.fetch),
            "update": latency_summary(whole.update),
            "commit": latency_summary(whole.commit),
            "rounds": [
                {
                    **one.rates(),
                    "fetch": latency_summary(one.fetch),
                    "commit": latency_summary(one.commit),
                    "write_amplification_ratio": one.write_amplification,
                }
                for one in rounds
            ],
            "changed_bytes": whole.changed_bytes,
            "dirty_bytes": whole.dirty_bytes,
            "written_bytes": written,
            "written_accounted_by": "kernel" if whole.process_written_bytes else "engine",
            "index_written_bytes": written - whole.engine_written_bytes,
            "write_amplification_ratio": amplification,
            "write_to_dirty_ratio": written / whole.dirty_bytes if whole.dirty_bytes else None,
            # Only training that steps everything it touches has the target.
            "write_target_met": met if point.dirty_ratio == 1 else None,
            "disk_bytes": whole.disk_bytes,
            "space_amplification_ratio": whole.disk_bytes / self._logical,
            "space_target_ratio": allowed / self._logical,
            "space_target_met": whole.disk_bytes <= allowed,
            "space_needed_ratio": whole.needed_copies / len(self._keys),
            "wear_per_step_bytes": written / whole.steps,
            "drive_life_s": drive_life_s(endurance, written, seconds),
            "drive_life_steps_count": endurance / written * whole.steps if written else None,
        }


async def _measured(load: TierLoad, steps: Iterator[TrafficStep], seconds: float) -> list[TierLoadResult]:
    await load.run(steps, seconds * _WARMUP_RATIO)
    return [await load.run(steps, seconds * (1 - _WARMUP_RATIO) / _ROUNDS) for _ in range(_ROUNDS)]


def _missed_targets(point: dict[str, Any]) -> Iterator[str]:
    what = f"records of {format_bytes(point['record_bytes'])}, budget {point['budget_ratio']:.0%}"
    if point["write_target_met"] is False:
        found, most = point["write_amplification_ratio"], WRITE_AMPLIFICATION_TARGET
        yield f"{what}: write amplification {found:.3f}, expected at most {most}"
    if not point["space_target_met"]:
        found, most = point["space_amplification_ratio"], point["space_target_ratio"]
        yield f"{what}: space amplification {found:.3f}, expected at most {most:.3f}"


def _measurements(point: dict[str, Any]) -> Iterator[Measurement]:
    what = {key: point[key] for key in ("record_bytes", "budget_ratio", "dirty_ratio")}
    for name in ("fetched", "changed"):
        speeds = [one[f"{name}_bytes_per_s"] for one in point["rounds"]]
        if any(speeds):
            yield measured(name, speeds, "bytes/s", parameters=what)
    for name in ("fetch p50", "fetch p99", "fetch p99.9", "commit p50", "commit p99"):
        operation, percent = name.split()
        times = [one[operation].get(f"{percent}_s") for one in point["rounds"]]
        if samples := [spent for spent in times if spent is not None]:
            yield measured(name, samples, "s", parameters=what)
    yield derived("hits", point["hit_ratio"], "ratio", Better.HIGHER, parameters=what)
    amplified = [one["write_amplification_ratio"] for one in point["rounds"]]
    if found := [ratio for ratio in amplified if ratio is not None]:
        target = WRITE_AMPLIFICATION_TARGET if point["dirty_ratio"] == 1 else None
        yield derived("write amplification", found, "ratio", Better.LOWER, target=target, parameters=what)
    space, most = point["space_amplification_ratio"], point["space_target_ratio"]
    yield derived("space amplification", space, "ratio", Better.LOWER, target=most, parameters=what)
    yield measured("wear of a step", point["wear_per_step_bytes"], "bytes", Better.LOWER, parameters=what)
