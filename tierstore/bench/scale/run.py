"""How a store's costs grow with n, the number of its records: each a curve with the exponent that fits it.

For each n a store is made with n small records in layers of 256, committed, opened in a new process, changed in 1% of its
records and committed again, several times, in turn with durable writes of the same bytes in the same sizes; then it is
verified, and collected. Decisions are taken without a store, to ten times as many records and more. Every record is on
disk whole: n of 12 KiB take 12 KiB x n twice, for a commit never overwrites the one before it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tierstore.bench.checks import at_least, require_free, work_directory
from tierstore.bench.probes.disk import Bytes, DiskProbe, Durable
from tierstore.bench.processes.spawn import end, receive, send, start_module
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, named, prefixed, ratios
from tierstore.bench.scale.decisions import EXPERTS, DecisionProgram, access_times
from tierstore.bench.scale.fitting import Exponent, fit_exponent, n_log_n_exponent
from tierstore.store import NewRecord, ParameterStore, RecordSchema, StoreConfig
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.gc import Mode, collect

_NUMEL = 12  # bytes a parameter
_SMALL = 1  # records of the store whose memory is taken off
_CREATED = 256  # records of one registration after another
_KEPT = 1 << 27  # free disk to leave

_DECIDE = "decide an access"

#: What is to hold at the largest store: at most so much.
TARGETS = {"open": 1.0, _DECIDE: 100e-6, "index memory a record": 400.0, "commit to write": 1.2}


@dataclass(frozen=True, kw_only=True)
class ScaleBench:
    """What to measure. ``records``: numbers of records of stores; ``decided``: further ones, of decisions alone."""

    records: Sequence[int]
    decided: Sequence[int] = ()
    record_bytes: int = 12 << 10
    host_budget: int = 64 << 20
    policies: Sequence[str] = ("lfu-decay", "next-use")
    #: Sizes of the records that are dirty in further commits, among ``record_bytes``.
    dirty_bytes: Sequence[int] = ()
    accesses: int = 4000
    rounds: int = 5

    def __post_init__(self) -> None:
        at_least(
            100,
            records=min(self.records, default=0),
            **({"decided": min(self.decided)} if self.decided else {}),
        )
        at_least(2, sizes=len(set(self.records)))
        at_least(1, accesses=self.accesses, rounds=self.rounds)
        at_least(1, policies=len(self.policies))
        at_least(_NUMEL, record_bytes=min([self.record_bytes, *self.dirty_bytes]))

    @property
    def numel(self) -> int:
        return self.record_bytes // _NUMEL

    @property
    def disk_bytes(self) -> int:
        """What the largest store takes, with the second copy of its records, and the probe's file."""
        slot = sum(-(-part * self.numel // 4096) * 4096 for part in (4, 8))
        further = 3 * max(self.dirty_bytes, default=0) * -(-self.middle // 100)
        return max(self.records) * (2 * slot + 2048) + further + _KEPT

    @property
    def middle(self) -> int:
        """The records of the stores of ``dirty_bytes``."""
        return sorted(set(self.records))[len(set(self.records)) // 2]


@dataclass(frozen=True, kw_only=True)
class GrowthPoint(Figures):
    """One cost of ``records`` records."""

    records: int
    unit: str = field(metadata=INTERNAL)
    median: float = field(metadata=named("median_{unit}"))


@dataclass(frozen=True, kw_only=True)
class GrowthCurve(Figures):
    """One cost, by n. ``exponent``: of the medians. ``limit``: the most that it may be, beyond twice its spread."""

    unit: str
    samples: Mapping[int, Sequence[float]] = field(metadata=INTERNAL)
    medians: Sequence[GrowthPoint]
    exponent: Exponent = field(metadata=prefixed(""))
    limit: float = field(metadata=named("exponent_limit_ratio"))

    @property
    def by_size(self) -> dict[int, float]:
        """The medians by n."""
        return {point.records: point.median for point in self.medians}

    @property
    def within(self) -> bool:
        """Whether the exponent is not above its limit, as far as its spread can tell."""
        return self.exponent.value - 2 * self.exponent.spread <= self.limit


@dataclass(frozen=True, kw_only=True)
class Dirty(Figures):
    """A commit of 1% dirty to writing the same bytes, where those records have ``record_bytes``."""

    records: int
    record_bytes: int
    samples: Sequence[float] = field(metadata=INTERNAL)
    median: float = field(metadata=named("median_ratio"))


@dataclass(frozen=True, kw_only=True)
class ScaleResult(Figures):
    """What ``run`` found: curves by name."""

    bench: str = "scale"
    record_bytes: int
    policies: str
    disk_bytes: int
    curves: Mapping[str, GrowthCurve]
    dirty: Sequence[Dirty]
    #: From which size of dirty records on a commit is within its target; 0 if from none.
    target_from_bytes: int


def run(
    asked: ScaleBench, directory: Path, *, announce: Callable[[str], None] = lambda line: None
) -> ScaleResult:
    """Measures in ``directory``, made and removed here. Raises ConfigError, OSError."""
    require_free(directory, asked.disk_bytes, "the largest store takes")
    samples: dict[str, dict[int, Sequence[float]]] = {}
    sizes = sorted(set(asked.records))
    with work_directory(directory):
        _make(asked, directory / "small", _SMALL)
        for size in sizes:
            announce(f"{size} records: a store")
            with work_directory(directory / "store"):
                for name, values in _measure_store(asked, directory, size).items():
                    samples.setdefault(name, {})[size] = values
        further = {}
        if asked.dirty_bytes:
            announce(f"{asked.middle} records: commits of larger ones")
            further = _by_record_bytes(asked, directory, asked.middle)
    for policy in asked.policies:
        decisions = samples.setdefault(f"{_DECIDE}, {policy}", {})
        for size in sorted({*sizes, *asked.decided}):
            announce(f"{size} records: decisions of {policy}")
            decisions[size] = access_times(
                DecisionProgram(size), policy, accesses=asked.accesses, repeats=asked.rounds
            )
    dirty = [
        Dirty(records=asked.middle, record_bytes=nbytes, samples=values, median=statistics.median(values))
        for nbytes, values in sorted(further.items())
    ]
    return ScaleResult(
        record_bytes=asked.record_bytes,
        policies=", ".join(asked.policies),
        disk_bytes=asked.disk_bytes,
        curves={name: _curve(name, of) for name, of in samples.items()},
        dirty=dirty,
        target_from_bytes=_target_from(dirty),
    )


def _target_from(dirty: Sequence[Dirty]) -> int:
    found = 0
    for one in reversed(dirty):
        if one.median > TARGETS["commit to write"]:
            break
        found = one.record_bytes
    return found


_UNITS = {
    "index memory": "bytes",
    "index memory a record": "bytes",
    "commit to write": "ratio",
}
#: Costs that do not depend on n: their exponent is 0.
_CONSTANT = frozenset({_DECIDE, "index memory a record", "commit to write"})
_SLACK = 0.1  # caches and pages: memory is slower the more there is of it


def _curve(name: str, samples: Mapping[int, Sequence[float]]) -> GrowthCurve:
    medians = {size: statistics.median(values) for size, values in samples.items()}
    sizes, unit = list(medians), _UNITS.get(name, "s")
    return GrowthCurve(
        unit=unit,
        samples=samples,
        medians=[GrowthPoint(records=n, unit=unit, median=median) for n, median in medians.items()],
        exponent=fit_exponent(sizes, [max(medians[size], 1e-9) for size in sizes]),
        limit=_SLACK + (0.0 if name.partition(",")[0] in _CONSTANT else n_log_n_exponent(sizes)),
    )


def _config(asked: ScaleBench) -> StoreConfig:
    return StoreConfig(host_budget=asked.host_budget)


def _make(asked: ScaleBench, directory: Path, count: int) -> tuple[float, float]:
    """A store of ``count`` records; returns the seconds of its creation, and of its first commit."""
    weight = np.full(asked.numel, 1e-2, np.float32)
    begun = time.perf_counter()
    with ParameterStore.create(directory, [RecordSchema("expert", asked.numel)], _config(asked)) as store:
        store.register_many([NewRecord(key, "expert", layer, weight) for key, layer in keys(count)])
        created = time.perf_counter()
        store.commit()
        return created - begun, time.perf_counter() - created


def keys(count: int) -> Iterator[tuple[str, int]]:
    """Keys and layers of ``count`` records, named as an import does."""
    for number in range(count):
        layer, expert = divmod(number, EXPERTS)
        yield f"expert.{layer:04d}.{expert:05d}", layer


def _measure_store(asked: ScaleBench, directory: Path, count: int) -> dict[str, Sequence[float]]:
    place = directory / "store" / "measured"
    found: dict[str, Sequence[float]] = {}
    created, first = _make(asked, place, count)
    found["create"], found["first commit"] = [created], [first]
    found |= _opening(asked, directory, place, count)
    changed = [key for key, _ in keys(count)][50::100]
    with ParameterStore.open(place, _config(asked)) as store:
        commits, writes = commit_times(store, changed, asked.numel, directory, asked.rounds)
        found |= {
            "commit 1% dirty": commits,
            "write the same bytes": writes,
            "commit to write": ratios(commits, writes),
        }
        begun = time.perf_counter()
        report = store.verify()
        found["verify"] = [time.perf_counter() - begun]
    assert not report.failures, report.failures[:3]
    begun = time.perf_counter()
    collect(place, Mode.REMOVE)
    found["gc"] = [time.perf_counter() - begun]
    return found


def _opening(asked: ScaleBench, directory: Path, place: Path, count: int) -> dict[str, Sequence[float]]:
    """Times of openings in one process, and their memory in another, whose Python is slower for it."""
    request = {
        "small": str(directory / "small"),
        "large": str(place),
        "host_budget": asked.host_budget,
        "repeats": asked.rounds,
    }
    answers = []
    for environ in ({}, {"PYTHONMALLOC": "malloc"}):
        child = start_module("tierstore.bench.scale.memory", environ=environ)
        try:
            send(child, request)
            answers.append(receive(child, "the process that opens the store"))
        finally:
            end(child)
    nbytes = answers[1]["index_bytes"]
    return {
        "open": answers[0]["open_s"],
        "index memory": nbytes,
        "index memory a record": [one / count for one in nbytes],
    }


def commit_times(
    store: ParameterStore, changed: Sequence[str], numel: int, directory: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of commits in which the records ``changed`` are dirty, and of durable writes of the same bytes, in turn."""
    gradients = dict.fromkeys(changed, np.full(numel, 1e-3, np.float32))
    commits, writes = [], []
    engine = store.core.engine
    probe_bytes = len(changed) * 3 * (numel * 4 + 4096)
    with closing(DiskProbe(directory, probe_bytes, (numel * 4, numel * 8), store.config.io)) as probe:
        for turn in range(rounds + 2):  # two that do not count: the first writes to fresh slots
            store.update(gradients, lr=1e-3)
            store.core.wait([t for key in changed for t in _ready(store, key)])
            before = int(engine.stats()["written_bytes"])
            begun = time.perf_counter()
            store.commit()
            seconds = time.perf_counter() - begun
            dirty = int(engine.stats()["written_bytes"]) - before
            speed = probe.bytes_per_s(Bytes(0, dirty), durable=Durable.YES)
            if turn >= 2:
                commits.append(seconds)
                writes.append(dirty / speed)
    return commits, writes


def _by_record_bytes(asked: ScaleBench, directory: Path, count: int) -> dict[int, list[float]]:
    """ "commit to write" where the 1% of ``count`` records that are dirty have other sizes than the rest."""
    found = {}
    for nbytes in asked.dirty_bytes:
        numel = nbytes // _NUMEL
        named = list(keys(count))
        changed = [key for key, _ in named][50::100]
        large = frozenset(changed)
        schemas = [RecordSchema("expert", asked.numel), RecordSchema("large", numel)]
        # All that is dirty at once, each with its gradient.
        config = StoreConfig(host_budget=asked.host_budget + 2 * len(changed) * nbytes)
        with (
            work_directory(directory / "store"),
            ParameterStore.create(directory / "store" / "measured", schemas, config) as store,
        ):
            store.register_many(
                [NewRecord(key, "large" if key in large else "expert", layer) for key, layer in named]
            )
            store.commit()
            commits, writes = commit_times(store, changed, numel, directory / "store", asked.rounds)
        found[nbytes] = ratios(commits, writes)
    return found


def _ready(store: ParameterStore, key: str) -> list[int]:
    record, cache = store.core.record(key), store.core.cache
    return [ticket for group in COMMITTED_GROUPS for ticket in cache.ready(record.entry(group))]


def measurements(result: ScaleResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document: a curve over ``records`` for each cost, and its exponent."""
    for name, curve in result.curves.items():
        for size, values in curve.samples.items():
            target = TARGETS.get(name.partition(",")[0])
            yield measured(
                name, values, curve.unit, Better.LOWER, parameters={"records": size}, target=target
            )
        yield derived(
            "exponent",
            curve.exponent.value,
            "ratio",
            Better.LOWER,
            parameters={"of": name},
            target=curve.limit,
        )
    for one in result.dirty:
        yield measured(
            "commit to write, by record size",
            one.samples,
            "ratio",
            Better.LOWER,
            parameters={"record_bytes": one.record_bytes},
            target=TARGETS["commit to write"],
        )
