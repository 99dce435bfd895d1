"""How a store's costs grow with n, the number of its records: one curve per cost, with a fitted exponent.

For each n, a store is created with n small records in layers of 256, committed, opened in a new process, changed in 1% of
its records and committed again, several times, in turn with durable writes of the same bytes in the same sizes; then it is
verified and garbage-collected. Decisions are timed without a store, up to ten times as many records. Every record is whole
on disk: n records of 12 KiB take 12 KiB x n twice, since a commit never overwrites the previous one.

Run as a module, it is the process that opens stores, for ``_opening``.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._native import Residency
from tierstore.bench.commit import commit_and_write
from tierstore.bench.documents import Better, Measurement, derived, measured, shown
from tierstore.bench.harness import (
    Benchmark,
    FigureTable,
    Found,
    Progress,
    ratios,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.probes import DiskProbe, slope_of
from tierstore.bench.processes import ask_module, serve
from tierstore.cache.access import Need, Phase
from tierstore.config import check_least, option
from tierstore.errors import ConfigError
from tierstore.machine import require_space
from tierstore.store import NewRecord, ParameterStore, RecordSchema, StoreConfig
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.gc import Mode, collect
from tierstore.units import format_bytes, parse_size

_NUMEL = 12  # bytes per parameter
_SMALL = 1  # records of the store whose memory is subtracted
_KEPT = 1 << 27  # free disk to leave
_DIRTY = ("48KiB", "192KiB", "1MiB", "4MiB")

_DECIDE = "decide an access"
_TO_WRITE = "commit to write"

#: Upper limits at the largest store.
TARGETS = {"open": 1.0, _DECIDE: 100e-6, "index memory a record": 400.0, _TO_WRITE: 1.2}
_UNITS = {"index memory": "bytes", "index memory a record": "bytes", _TO_WRITE: "ratio"}
#: Costs that do not depend on n: their exponent is 0.
_CONSTANT = frozenset({_DECIDE, "index memory a record", _TO_WRITE})
_SLACK = 0.1  # of an exponent, for caches and pages: more memory is slower memory

#: Samples of a cost (seconds, bytes or ratios) by number of records.
_Curve = Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class ScaleBench(Benchmark):
    """The costs of one machine's store with 1,000 to 100,000 records: curves, and the exponents that fit them.

    The largest store takes 2.4 GB of disk by default.
    """

    records: tuple[int, ...] = option((1000, 10_000, 100_000), "Sizes of stores.")
    decided: tuple[int, ...] = option((1_000_000,), "Further sizes, for decisions only.")
    record_bytes: int = size_option("12KiB", "Size of a record (12 bytes a parameter).")
    dirty_bytes: tuple[int, ...] = option(
        tuple(map(parse_size, _DIRTY)),
        "Sizes of dirty records in further commits, in the middle store.",
        size=True,
        typed=_DIRTY,
    )
    policies: tuple[str, ...] = option(
        ("lfu-decay", "next-use"), "Cache policies whose decisions are timed.", "--policy"
    )
    accesses: int = option(4000, "Accesses timed in each round.")
    rounds: int = option(5)
    store: Path = store_option()
    host_budget: int = 64 << 20

    def __post_init__(self) -> None:
        check_least(self, 1, "accesses", "rounds")
        for name, least, found in (
            ("records", 100, min(self.records, default=0)),
            ("decided", 100, min(self.decided, default=100)),
            ("sizes", 2, len(self.sizes)),
            ("policies", 1, len(self.policies)),
            ("record_bytes", _NUMEL, min([self.record_bytes, *self.dirty_bytes])),
        ):
            if found < least:
                raise ConfigError(f"{name}: expected at least {least}, got {found}")

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.records))

    @property
    def numel(self) -> int:
        return self.record_bytes // _NUMEL

    @property
    def disk_bytes(self) -> int:
        """Bytes of the largest store, with the second copy of its records, and of the probe's file."""
        slot = sum(-(-part * self.numel // 4096) * 4096 for part in (4, 8))
        further = 3 * max(self.dirty_bytes, default=0) * -(-self.middle // 100)
        return max(self.records) * (2 * slot + 2048) + further + _KEPT

    @property
    def middle(self) -> int:
        """The number of records of the stores for ``dirty_bytes``."""
        return self.sizes[len(self.sizes) // 2]

    def run(self, progress: Progress) -> Found:
        """Measure in ``store``, which is made and removed here."""
        require_space([self.store], self.disk_bytes, "the records of the largest store")
        samples: dict[str, dict[int, Sequence[float]]] = {}
        with work_directory(self.store) as directory:
            _make(self, directory / "small", _SMALL)
            for size in self.sizes:
                progress.say(f"{size} records: a store")
                with work_directory(directory / "store"):
                    for name, values in _measure_store(self, directory, size).items():
                        samples.setdefault(name, {})[size] = values
            dirty = {}
            for nbytes in sorted(set(self.dirty_bytes)):
                progress.say(f"{self.middle} records: commits of records of {format_bytes(nbytes)}")
                dirty[nbytes] = _commits_of(self, directory, nbytes)
        for policy in self.policies:
            decisions = samples.setdefault(f"{_DECIDE}, {policy}", {})
            for size in sorted({*self.sizes, *self.decided}):
                progress.say(f"{size} records: decisions of {policy}")
                decisions[size] = access_times(
                    DecisionProgram(size), policy, accesses=self.accesses, repeats=self.rounds
                )
        return _found(self, samples, dirty)


# What was found ---------------------------------------------------------------------------------------------


def _found(bench: ScaleBench, samples: Mapping[str, _Curve], dirty: _Curve) -> Found:
    """``samples``: curves by name; ``dirty``: the ratio of commits to writes by the bytes of a dirty record."""
    curves, measurements = {}, []
    for name, curve in samples.items():
        curves[name] = found = _growth(name, curve)
        measurements += list(_measurements(name, curve, found))
    rows = [
        {"records": bench.middle, "record_bytes": nbytes, "median_ratio": statistics.median(values)}
        for nbytes, values in dirty.items()
    ]
    measurements += [
        measured(
            "commit to write, by record size",
            values,
            "ratio",
            Better.LOWER,
            parameters={"record_bytes": nbytes},
            target=TARGETS[_TO_WRITE],
        )
        for nbytes, values in dirty.items()
    ]
    #: The size of dirty records from which on a commit is within its target; 0 if there is none.
    within = 0
    for nbytes, values in reversed(list(dirty.items())):
        if statistics.median(values) > TARGETS[_TO_WRITE]:
            break
        within = nbytes
    return Found(
        figures={
            "bench": "scale",
            "record_bytes": bench.record_bytes,
            "policies": ", ".join(bench.policies),
            "disk_bytes": bench.disk_bytes,
            "curves": curves,
            "dirty": rows,
            "target_from_bytes": within,
        },
        measurements=measurements,
        shown=[_table(bench, curves)],
    )


def _growth(name: str, samples: _Curve) -> dict[str, Any]:
    """A curve's medians, the fitted exponent and its standard error, and the exponent's limit."""
    unit, sizes = _UNITS.get(name, "s"), list(samples)
    medians = [statistics.median(values) for values in samples.values()]
    exponent, spread = fit_exponent(sizes, [max(median, 1e-9) for median in medians])
    constant = name.partition(",")[0] in _CONSTANT
    return {
        "unit": unit,
        "medians": [
            {"records": size, f"median_{unit}": median} for size, median in zip(sizes, medians, strict=True)
        ],
        "exponent_ratio": exponent,
        "exponent_spread_ratio": spread,
        "exponent_limit_ratio": _SLACK + (0.0 if constant else n_log_n_exponent(sizes)),
    }


def _measurements(name: str, samples: _Curve, found: Mapping[str, Any]) -> Iterator[Measurement]:
    target = TARGETS.get(name.partition(",")[0])
    for size, values in samples.items():
        yield measured(name, values, found["unit"], Better.LOWER, parameters={"records": size}, target=target)
    limit = found["exponent_limit_ratio"]
    how = {"of": name}
    yield derived("exponent", found["exponent_ratio"], "ratio", Better.LOWER, parameters=how, target=limit)


def _table(bench: ScaleBench, curves: Mapping[str, Mapping[str, Any]]) -> FigureTable:
    sizes = sorted({point["records"] for curve in curves.values() for point in curve["medians"]})
    rows = []
    for name, curve in curves.items():
        unit = curve["unit"]
        row = {str(point["records"]): shown(point[f"median_{unit}"], unit) for point in curve["medians"]}
        exponent = f"{curve['exponent_ratio']:.2f} +- {curve['exponent_spread_ratio']:.2f}"
        rows.append({"cost": name, **row, "exponent": exponent, "limit_ratio": curve["exponent_limit_ratio"]})
    columns = {
        "": "cost",
        **{f"{size:,}": str(size) for size in sizes},
        "n **": "exponent",
        "limit": "limit_ratio",
    }
    title = f"records of {format_bytes(bench.record_bytes)}, policies {', '.join(bench.policies)}"
    return FigureTable(title, columns, rows)


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """The least-squares slope of log(cost) over log(size), and its standard error (0 for two points).

    Raises ValueError for fewer than two sizes, or numbers without a logarithm.
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 2:
        raise ValueError(f"expected costs of two sizes or more, got {len(costs)} of {len(set(sizes))}")
    return slope_of(
        np.array([math.log(size) for size in sizes]), np.array([math.log(cost) for cost in costs])
    )


def n_log_n_exponent(sizes: Sequence[float]) -> float:
    """The result of ``fit_exponent`` for n log n over ``sizes``: a little above 1."""
    return fit_exponent(sizes, [size * math.log(size) for size in sizes])[0]


# Stores -----------------------------------------------------------------------------------------------------


def _make(bench: ScaleBench, directory: Path, count: int) -> tuple[float, float]:
    """Create a store of ``count`` records; returns the seconds of its creation and of its first commit."""
    weight = np.full(bench.numel, 1e-2, np.float32)
    begun = time.perf_counter()
    with ParameterStore.create(
        directory, [RecordSchema("expert", bench.numel)], StoreConfig(host_budget=bench.host_budget)
    ) as store:
        store.register_many([NewRecord(key, "expert", layer, weight) for key, layer in keys(count)])
        created = time.perf_counter()
        store.commit()
        return created - begun, time.perf_counter() - created


def keys(count: int) -> Iterator[tuple[str, int]]:
    """Keys and layers of ``count`` records, named as by an import."""
    for number in range(count):
        layer, expert = divmod(number, EXPERTS)
        yield f"expert.{layer:04d}.{expert:05d}", layer


def _measure_store(bench: ScaleBench, directory: Path, count: int) -> dict[str, Sequence[float]]:
    place = directory / "store" / "measured"
    found: dict[str, Sequence[float]] = {}
    created, first = _make(bench, place, count)
    found["create"], found["first commit"] = [created], [first]
    found |= _opening(bench, directory, place, count)
    changed = [key for key, _ in keys(count)][50::100]
    with ParameterStore.open(place, StoreConfig(host_budget=bench.host_budget)) as store:
        commits, writes = commit_times(store, changed, bench.numel, directory, bench.rounds)
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


def _opening(bench: ScaleBench, directory: Path, place: Path, count: int) -> dict[str, Sequence[float]]:
    """Times of openings in one process, and their memory in another, whose malloc counts it but is slower."""
    request = {
        "small": str(directory / "small"),
        "large": str(place),
        "host_budget": bench.host_budget,
        "repeats": bench.rounds,
    }
    answers = [
        ask_module("tierstore.bench.scale", request, environ=environ)
        for environ in ({}, {"PYTHONMALLOC": "malloc"})
    ]
    nbytes = answers[1]["index_bytes"]
    return {
        "open": answers[0]["open_s"],
        "index memory": nbytes,
        "index memory a record": [one / count for one in nbytes],
    }


def commit_times(
    store: ParameterStore, changed: Sequence[str], numel: int, directory: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of commits with the records ``changed`` dirty, and of durable writes of the same bytes, in turn."""
    gradients = dict.fromkeys(changed, np.full(numel, 1e-3, np.float32))
    commits, writes = [], []
    probe_bytes = len(changed) * 3 * (numel * 4 + 4096)
    with closing(DiskProbe(directory, probe_bytes, (numel * 4, numel * 8), store.config.io)) as probe:
        for turn in range(rounds + 2):  # two are not counted: the first writes to fresh slots
            store.update(gradients, lr=1e-3)
            store.core.wait([t for key in changed for t in _ready(store, key)])
            commit_s, write_s, _ = commit_and_write(store, probe)
            if turn >= 2:
                commits.append(commit_s)
                writes.append(write_s)
    return commits, writes


def _commits_of(bench: ScaleBench, directory: Path, nbytes: int) -> list[float]:
    """Ratios of commits to writes if the 1% dirty records have ``nbytes`` and the others ``record_bytes``."""
    numel, named = nbytes // _NUMEL, list(keys(bench.middle))
    changed = [key for key, _ in named][50::100]
    large = frozenset(changed)
    schemas = [RecordSchema("expert", bench.numel), RecordSchema("large", numel)]
    # The budget holds everything dirty at once, each record with its gradient.
    config = StoreConfig(host_budget=bench.host_budget + 2 * len(changed) * nbytes)
    with (
        work_directory(directory / "store"),
        ParameterStore.create(directory / "store" / "measured", schemas, config) as store,
    ):
        store.register_many(
            [NewRecord(key, "large" if key in large else "expert", layer) for key, layer in named]
        )
        store.commit()
        return ratios(*commit_times(store, changed, numel, directory / "store", bench.rounds))


def _ready(store: ParameterStore, key: str) -> list[int]:
    record, cache = store.core.record(key), store.core.cache
    return [ticket for group in COMMITTED_GROUPS for ticket in cache.ready(record.entry(group))]


# Decisions --------------------------------------------------------------------------------------------------

EXPERTS = 256  # per layer
_WIDTH = 64  # experts per access
_CAPACITY = 0.1  # of all frames
_FRAMES = (1, 2, 1)  # of weights, moments and a gradient
_VARIANTS = 16  # different choices of experts, taken in turn


@dataclass(frozen=True)
class DecisionProgram:
    """The walk of a training program through ``records`` records, to time the decisions of the residency core without a
    store or any I/O.

    Experts are in layers of 256, as in the largest models. A step passes the layers forward, needing weights, and backward,
    needing moments too; each access requests 64 experts of its layer, some more often than others. A tenth of the records
    fits, so nearly every access evicts. The number of timed accesses is the same for every n.
    """

    records: int

    @property
    def layers(self) -> int:
        return max(self.records // EXPERTS, 1)

    @property
    def width(self) -> int:
        """Experts of one access."""
        return min(_WIDTH, self.records // self.layers)

    def layer_of(self, record: int) -> int:
        return min(record // (self.records // self.layers), self.layers - 1)

    def choices(self) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
        """Sets of experts, by their places in a layer: the r-th with a probability proportional to 1/r."""
        rng = np.random.default_rng(0)
        experts = self.records // self.layers
        odds = 1 / np.arange(1, experts + 1)
        return [
            np.sort(rng.choice(experts, self.width, replace=False, p=odds / odds.sum())).astype(np.uint32)
            for _ in range(_VARIANTS)
        ]

    def passes(self) -> Iterator[tuple[Phase, int, Need]]:
        """One step: each access's phase, layer and need."""
        for layer in range(self.layers):
            yield Phase.FORWARD, layer, Need.WEIGHTS
        for layer in reversed(range(self.layers)):
            yield Phase.BACKWARD, layer, Need.STEP


def make_core(program: DecisionProgram, policy: str) -> Residency:
    """A residency core with the records of ``program``, all of them on disk."""
    capacity = max(int(program.records * sum(_FRAMES[:2]) * _CAPACITY), program.width * sum(_FRAMES))
    core = Residency(capacity, policy=policy)
    for record in range(program.records):
        core.add_record(program.layer_of(record), list(_FRAMES), [4096 * f for f in _FRAMES], 3)
    return core


def access_times(program: DecisionProgram, policy: str, *, accesses: int, repeats: int) -> list[float]:
    """Seconds per access in each of ``repeats`` runs of ``accesses``, after one whole step that is not timed."""
    core, choices = make_core(program, policy), program.choices()
    width, stride = program.width, program.records // program.layers
    flags = {need: np.full(width, need, np.uint16) for need in (Need.WEIGHTS, Need.STEP)}
    turn = itertools.count()

    def walk(wanted: Iterator[tuple[Phase, int, Need]]) -> None:
        for phase, layer, need in wanted:
            records = choices[next(turn) % _VARIANTS] + np.uint32(layer * stride)
            groups, _ = core.begin_access(phase, layer, records, flags[need])
            for _ in range(groups):
                core.next_group()
                core.end_group()
            if phase is Phase.BACKWARD and layer == 0:
                core.end_step()

    walk(program.passes())
    forever = (each for _ in itertools.count() for each in program.passes())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        walk(itertools.islice(forever, accesses))
        times.append((time.perf_counter() - begun) / accesses)
    return times


# Opening, in a process of its own ---------------------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, of all arenas together.

    It counts what malloc has given out and nobody has freed: natively, and, with ``PYTHONMALLOC=malloc``, to Python and
    numpy. The resident set is less precise: freed memory stays in it. The host budget is mapped, not malloc's. The memory
    of a small store is subtracted: what is left is the index.
    """

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Bytes that malloc has given out, mapped blocks included. Raises OSError if libc does not count them."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise OSError("mallinfo2: needs glibc 2.33")
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _open(directory: str, host_budget: int) -> tuple[float, int]:
    """The seconds that opening the store took, and the memory that it added."""
    before = allocated_bytes()
    begun = time.perf_counter()
    with ParameterStore.open(directory, StoreConfig(host_budget=host_budget)) as store:
        seconds = time.perf_counter() - begun
        store.reserve()
        return seconds, allocated_bytes() - before


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    """``open_s`` and ``index_bytes``, one of each per turn; a first turn, which fills caches, is not counted."""
    for request in requests:
        times, nbytes = [], []
        for turn in range(int(request["repeats"]) + 1):
            _, least = _open(request["small"], request["host_budget"])
            seconds, most = _open(request["large"], request["host_budget"])
            if turn:
                times.append(seconds)
                nbytes.append(max(most - least, 0))
        yield {"open_s": times, "index_bytes": nbytes}


if __name__ == "__main__":
    serve(_answers)
