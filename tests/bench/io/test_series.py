"""Jobs through the engine, turns, ratios and plans. No test asserts a speed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tierstore import _native
from tierstore.bench.io.fio import Fio
from tierstore.bench.io.load import (
    IN_FLIGHT_LIMIT,
    Checksums,
    DataFiles,
    Job,
    Load,
    Pages,
    Pattern,
    Reuse,
    Sample,
    TransferKind,
    check_space,
)
from tierstore.bench.io.series import (
    Coverage,
    IoBench,
    JobPlan,
    ProgramComparison,
    Series,
    compare,
    jobs,
    take_turns,
    with_checksums,
    with_fio,
)
from tierstore.bench.probes.latency import Latencies
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.store.config import IoBackendName

MIB = 1 << 20
CACHED = Job(
    kind=TransferKind.READ,
    block_bytes=64 << 10,
    depth=4,
    backend=IoBackendName.THREADS,
    direct=Capability.OFF,
    pages=Pages.SMALL,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataFiles]:
    places = [tmp_path_factory.mktemp(name) for name in "ab"]
    with closing(DataFiles(places, 4 * MIB)) as made:
        yield made
    assert [list(place.iterdir()) for place in places] == [[], []]


def sample(nbytes: int, elapsed_s: float, cpu_s: float = 1.0, latency_ns: int = 5) -> Sample:
    latencies = Latencies()
    latencies.add([latency_ns])
    return Sample(nbytes=nbytes, elapsed_s=elapsed_s, cpu_s=cpu_s, operations=1, latencies=latencies)


@dataclass
class FakeArm:
    program: str
    samples: list[Sample]
    log: list[str]
    _next: int = field(default=0)

    def measure(self) -> Sample:
        self.log.append(self.program)
        self._next += 1
        return self.samples[self._next - 1]


def test_turns_turn_round() -> None:
    log: list[str] = []
    programs = [FakeArm(name, [sample(number, 1) for number in (1, 2, 3)], log) for name in "abc"]
    ticks: list[int] = []
    series = take_turns(programs, 3, lambda: ticks.append(len(log)))
    assert log == [*"abc", *"cba", *"abc"]
    assert ticks == list(range(1, 10))
    assert [(one.program, [s.nbytes for s in one.samples]) for one in series] == [
        (n, [1, 2, 3]) for n in "abc"
    ]


def test_ratios_by_hand() -> None:
    """Ours 100, 200, 400 bytes/s; theirs 100, 100, 100. Ratios 1, 2, 4: the median 2.

    CPU for 1 GB: ours 1/100, 1/200, 1/400 of 1e9; theirs 2/100 each. Ratios 1/2, 1/4, 1/8.
    """
    ours = Series.of("tierstore", [sample(n, 1.0) for n in (100, 200, 400)])
    theirs = Series.of("fio", [sample(100, 1.0, cpu_s=2.0) for _ in range(3)])
    found = ProgramComparison.of("by hand", [ours, theirs], {"fio": 2.5})
    assert ours.median_bytes_per_s == 200
    (ratio,) = found.ratios
    assert found.to("fio") is ratio
    assert found.to("aiofiles") is None
    assert (ratio.median_ratio, ratio.cpu_ratio) == (2, 0.25)
    assert (ratio.least_ratio, ratio.greatest_ratio, ratio.met) == (1, 4, False)
    assert found.small_pages_to_fio is None
    slow = Series.of("tierstore, 4 KiB pages", theirs.samples)
    small = ProgramComparison.of("by hand", [ours, slow, theirs], {}).small_pages_to_fio
    assert small is not None
    assert small.median_ratio == 1
    idle = Series.of("fio", [replace(one, cpu_s=0.0) for one in theirs.samples])
    assert ProgramComparison.of("by hand", [ours, idle], {}).ratios[0].cpu_ratio is None


def test_latencies_of_all_rounds() -> None:
    series = Series.of("x", [sample(1, 1, latency_ns=3), sample(1, 1, latency_ns=9)])
    assert (series.latency.p50_s, series.latency.greatest_s) == (3e-9, 9e-9)


@pytest.mark.parametrize("backend", ["AUTO", "THREADS", "PMEM"])
@pytest.mark.parametrize("kind", list(TransferKind))
@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_load_moves_what_it_says(
    files: DataFiles, backend: str, kind: TransferKind, pattern: Pattern
) -> None:
    job = replace(CACHED, backend=IoBackendName[backend], kind=kind, pattern=pattern)
    with closing(Load(job, files.striped)) as load:
        before = load.stats()
        found = load.run(0.01)
        after = load.stats()
    moved = {
        key: int(after[key]) - int(before[key]) for key in ("read_bytes", "written_bytes", "reads", "writes")
    }
    assert moved["read_bytes"] + moved["written_bytes"] == found.nbytes == found.operations * job.block_bytes
    assert moved["reads"] + moved["writes"] == found.operations == found.latencies.count
    assert (moved["reads"] > 0) == (kind is not TransferKind.WRITE)
    assert (moved["writes"] > 0) == (kind is not TransferKind.READ)
    assert found.operations >= job.depth
    assert 0 < found.latencies.greatest_ns / 1e9 <= found.elapsed_s


@pytest.mark.parametrize("kind", list(TransferKind))
def test_writes_through_the_page_cache_end_on_the_disk(files: DataFiles, kind: TransferKind) -> None:
    """Without a sync in the time it would be the speed of memory."""
    job = replace(CACHED, kind=kind)
    with closing(Load(job, files.striped)) as load:
        before = int(load.stats()["syncs"])
        load.run(0.01)
        assert int(load.stats()["syncs"]) - before == (
            0 if kind is TransferKind.READ else len(files.striped.paths)
        )


def test_through_the_page_cache_one_pass(files: DataFiles) -> None:
    with closing(Load(CACHED, files.striped)) as load:
        found = load.run(60)
    assert found.nbytes == files.striped.total_bytes == 8 * MIB


@pytest.mark.parametrize("pattern", list(Pattern))
def test_one_pass_touches_every_block(files: DataFiles, pattern: Pattern) -> None:
    """In any order: what came twice would come from memory."""
    job = replace(CACHED, kind=TransferKind.WRITE, pattern=pattern, block_bytes=4096, depth=2)
    for path in files.striped.paths:
        path.write_bytes(bytes(4 * MIB))
    with closing(Load(job, files.striped)) as load:
        load.run(60)
    for path in files.striped.paths:
        content = path.read_bytes()
        assert all(any(content[at : at + 4096]) for at in range(0, len(content), 4096))


def test_buffers_that_are_used_late_hold_all_that_was_read(files: DataFiles) -> None:
    """One pass over 64 blocks, each read into memory of its own; used soon again, 8 buffers serve for all."""
    blocks = np.fromfile(files.alone[0].paths[0], np.uint8).reshape(64, 64 << 10)
    for reuse, count in ((Reuse.LATE, 64), (Reuse.SOON, 8)):
        with closing(Load(replace(CACHED, pattern=Pattern.SEQUENTIAL, reuse=reuse), files.alone[0])) as load:
            load.run(60)
            held = np.array([buffer.array() for (buffer,) in load._buffers])
        assert np.array_equal(held, blocks[-count:])


def test_checksums_are_compared(files: DataFiles) -> None:
    job = replace(CACHED, checksums=Checksums.ON, block_bytes=MIB, depth=2)
    with closing(Load(job, files.alone[0])) as load:
        load.run(60)
        with open(files.alone[0].paths[0], "r+b") as file:
            file.write(os.urandom(16))
            file.seek(MIB)
            file.write(os.urandom(16))
            file.seek(2 * MIB)
            file.write(os.urandom(16))
            file.seek(3 * MIB)
            file.write(os.urandom(16))
        with pytest.raises(_native.ChecksumMismatch):
            load.run(60)


def test_a_comparison_of_real_arms(files: DataFiles) -> None:
    ticks: list[None] = []
    plan = with_checksums(replace(CACHED, block_bytes=MIB))
    found = compare(plan, files.striped, seconds=0.01, rounds=2, tick=lambda: ticks.append(None))
    assert [series.program for series in found.series] == ["tierstore, checksums", "tierstore"]
    assert all(len(series.samples) == 2 for series in found.series)
    assert len(ticks) == 4
    assert found.ratios[0].median_ratio > 0


FIO = Fio("fio", "fio-3.33")


def test_plans_stay_within_memory_and_file(tmp_path: Path) -> None:
    for coverage in Coverage:
        bench = IoBench(directories=(tmp_path,), size=16 * MIB, coverage=coverage, direct=Capability.ON)
        plans = jobs(bench, FIO)
        chosen = [job for plan in plans for job in plan.ours.values()]
        assert len(set(chosen)) == len(chosen)
        assert all(job.in_flight_bytes <= IN_FLIGHT_LIMIT and job.block_bytes <= 16 * MIB for job in chosen)
        assert {job.kind for job in chosen} == set(TransferKind)
        assert {job.pattern for job in chosen} == set(Pattern)
        assert {job.backend for job in chosen} == set(bench.backends)
        assert {job.direct for job in chosen} == {Capability.ON, Capability.OFF}
        assert any(plan.fio for plan in plans)
        assert not any(plan.fio for plan in jobs(bench, None))
    whole = IoBench(directories=(tmp_path,), size=64 * MIB, coverage=Coverage.FULL, direct=Capability.ON)
    blocks = {job.block_bytes for plan in jobs(whole, None) for job in plan.ours.values()}
    assert (min(blocks), max(blocks)) == (4096, 64 * MIB)


def test_targets() -> None:
    plan = with_fio(replace(CACHED, backend=IoBackendName.URING), FIO, "1 MiB")
    assert (plan.programs, dict(plan.targets)) == (3, {"fio": 0.95})
    assert [job.pages for job in plan.ours.values()] == [Pages.SMALL, Pages.SMALL]
    assert with_fio(CACHED, None, "1 MiB") == JobPlan(title="1 MiB", ours={"tierstore": CACHED})


def test_room_is_checked_first(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    check_space([one, two], MIB)
    free = os.statvfs(one).f_bavail * os.statvfs(one).f_frsize
    with pytest.raises(ConfigError, match=rf"needs {free + (2 << 30)} bytes .* are free"):
        check_space([one, two], free // 2 + (1 << 30))  # each alone would fit: they share a disk


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"size": 1000}, "--size"),
        ({"size": 9 * MIB}, "--size"),
        ({"minutes": 0}, "--minutes"),
        ({"rounds": 0}, "--rounds"),
        ({"directories": ()}, "directories"),
        ({"directories": (Path("."), Path("./"))}, "each one once"),
        ({"directories": (Path("nowhere"),)}, "nowhere"),
        ({"record_bytes": 1000}, "records"),
    ],
)
def test_bad_benches(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        IoBench(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"block_bytes": 1000}, "block"),
        ({"block_bytes": 128 * MIB}, "block"),
        ({"depth": 0}, "depth"),
        ({"direct": Capability.AUTO}, "direct"),
    ],
)
def test_bad_jobs(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(CACHED, **wrong)  # type: ignore[arg-type]
