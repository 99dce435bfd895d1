"""bench io: turns and ratios by hand, plans, the choice of the best point, and small runs. No test asserts a speed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from io_jobs import CACHED, MIB
from tiny import TinyBench, bench_status

from tierstore.bench.documents import load_document
from tierstore.bench.io import FINALISTS, GridPoint, IoBench, choose, grid, jobs, search
from tierstore.bench.io_load import (
    IN_FLIGHT_LIMIT,
    FileSet,
    Fio,
    Pages,
    Pattern,
    Sample,
    TransferKind,
    data_files,
)
from tierstore.bench.io_turns import (
    JobPlan,
    ProgramComparison,
    Series,
    compare,
    take_turns,
    with_checksums,
    with_fio,
)
from tierstore.capabilities import Capability
from tierstore.cli.main import cli
from tierstore.machine_profile import load_io_point
from tierstore.store.config import IoBackendName, IoConfig, tune

pytestmark = pytest.mark.usefixtures("forked_python")


def sample(nbytes: int, elapsed_s: float, cpu_s: float = 1.0, latency_ns: int = 5) -> Sample:
    latencies = np.array([latency_ns], np.float32)
    return Sample(nbytes=nbytes, elapsed_s=elapsed_s, cpu_s=cpu_s, operations=1, latencies_ns=latencies)


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
    arms = [FakeArm(name, [sample(number, 1) for number in (1, 2, 3)], log) for name in "abc"]
    programs = {arm.program: arm.measure for arm in arms}
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
    ours = Series("tierstore", [sample(n, 1.0) for n in (100, 200, 400)])
    theirs = Series("fio", [sample(100, 1.0, cpu_s=2.0) for _ in range(3)])
    found = ProgramComparison(title="by hand", series=[ours, theirs], targets={"fio": 2.5})
    assert ours.figures()["median_bytes_per_s"] == 200
    (ratio,) = found.ratios()
    assert ratio == {
        **{"to": "fio", "median_ratio": 2, "least_ratio": 1, "greatest_ratio": 4},
        **{"cpu_ratio": 0.25, "target_ratio": 2.5, "met": False},
    }
    name = "bandwidth in 4 KiB pages to fio, by hand"
    assert name not in [one.name for one in found.measurements()]
    slow = Series("tierstore, 4 KiB pages", theirs.samples)
    small = ProgramComparison(title="by hand", series=[ours, slow, theirs], targets={})
    assert [one.median for one in small.measurements() if one.name == name] == [1]
    idle = Series("fio", [replace(one, cpu_s=0.0) for one in theirs.samples])
    assert (
        ProgramComparison(title="by hand", series=[ours, idle], targets={}).ratios()[0]["cpu_ratio"] is None
    )


def test_latencies_of_all_rounds() -> None:
    series = Series("x", [sample(1, 1, latency_ns=3), sample(1, 1, latency_ns=9)])
    latency = series.figures()["latency"]
    assert (latency["p50_s"], latency["greatest_s"]) == (3e-9, 9e-9)


def test_a_comparison_of_real_arms(files: FileSet) -> None:
    ticks: list[None] = []
    plan = with_checksums(replace(CACHED, block_bytes=MIB))
    found = compare(plan, files, seconds=0.01, rounds=2, tick=lambda: ticks.append(None))
    assert [series.program for series in found.series] == ["tierstore, checksums", "tierstore"]
    assert all(len(series.samples) == 2 for series in found.series)
    assert len(ticks) == 4
    assert found.ratios()[0]["least_ratio"] > 0


FIO = Fio("fio", "fio-3.33")


def test_plans_stay_within_memory_and_file(tmp_path: Path) -> None:
    for full in (False, True):
        bench = IoBench(directories=(tmp_path,), size=16 * MIB, full=full, direct=Capability.ON)
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
    whole = IoBench(directories=(tmp_path,), size=64 * MIB, full=True, direct=Capability.ON)
    blocks = {job.block_bytes for plan in jobs(whole, None) for job in plan.ours.values()}
    assert (min(blocks), max(blocks)) == (4096, 64 * MIB)


def test_targets() -> None:
    plan = with_fio(replace(CACHED, backend=IoBackendName.URING), FIO, "1 MiB")
    assert (plan.programs, dict(plan.targets)) == (3, {"fio": 0.95})
    assert [job.pages for job in plan.ours.values()] == [Pages.SMALL, Pages.SMALL]
    assert with_fio(CACHED, None, "1 MiB") == JobPlan(title="1 MiB", ours={"tierstore": CACHED})


# The best point ---------------------------------------------------------------------------------------------

CANDIDATES = st.builds(
    GridPoint,
    block_bytes=st.integers(1, 64).map(lambda n: n * 4096),
    depth=st.integers(1, 64),
    reads=st.lists(st.floats(0.5, 2), min_size=1, max_size=3),
    writes=st.lists(st.floats(0.5, 2), min_size=1, max_size=3),
)


def candidate(block: int, depth: int, read: float, write: float) -> GridPoint:
    return GridPoint(block_bytes=block, depth=depth, reads=[read], writes=[write])


def test_a_byte_read_and_a_byte_written() -> None:
    """Read at 3, written at 1: two bytes in 1/3 + 1 seconds are 1.5 a second. The middle round counts."""
    assert candidate(4096, 1, 3, 1).bytes_per_s == pytest.approx(1.5)
    several = GridPoint(block_bytes=4096, depth=1, reads=[9, 3, 1], writes=[1, 1, 7])
    assert several.bytes_per_s == pytest.approx(1.5)


def test_little_in_flight_wins_among_the_near() -> None:
    """Best is 100. 98 is near (97 or more) and holds 8 MiB instead of 32; 96 holds less still and is not near."""
    fast, near, slow = candidate(MIB, 32, 100, 100), candidate(MIB, 8, 98, 98), candidate(MIB, 4, 96, 96)
    assert choose([fast, near, slow]) is near
    large, small = candidate(4 * MIB, 2, 99, 99), candidate(MIB, 8, 99, 99)
    assert choose([small, large]) is large  # of as many bytes, fewer transfers


@settings(max_examples=share(60))
@given(st.lists(CANDIDATES, min_size=1, max_size=8))
def test_the_definition(candidates: list[GridPoint]) -> None:
    chosen = choose(candidates)
    best = max(one.bytes_per_s for one in candidates)
    assert chosen.bytes_per_s >= 0.97 * best
    for other in candidates:
        if other.in_flight_bytes < chosen.in_flight_bytes:
            assert other.bytes_per_s < 0.97 * best


def test_a_search(tmp_path: Path) -> None:
    bench = IoBench(
        directories=(tmp_path,),
        size=8 * MIB,
        rounds=2,
        direct=Capability.OFF,
        backends=(IoBackendName.THREADS,),
    )
    ticks: list[None] = []
    with data_files(bench.directories, bench.size) as files:
        best, tried = search(bench, files, seconds=0.005, tick=lambda: ticks.append(None))
    points = len(grid(bench))
    assert len(tried) == points
    assert len(ticks) == 2 * (points + FINALISTS)
    assert sum(len(one.reads) == len(one.writes) == 2 for one in tried) == FINALISTS
    assert best.figures()["rounds_count"] == 2
    point = best.point()
    assert (point.chunk_bytes, point.queue_depth) == (best.block_bytes, best.depth)
    assert point.read_bytes_per_s > 0 < point.write_bytes_per_s


def test_the_full_grid_is_affordable() -> None:
    points = grid(IoBench(full=True, size=512 * MIB))
    assert all(point.in_flight_bytes <= 128 * MIB for point in points)
    assert {64 << 10, 32 * MIB} <= {point.block_bytes for point in points}
    assert len({(point.block_bytes, point.depth) for point in points}) == len(points)


# The command ------------------------------------------------------------------------------------------------

SMALL = ["--size=8MiB", "--minutes=0.001", "--rounds=1", "--records=2", "--record-bytes=64KiB"]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two")]
    for path in made:
        path.mkdir()
    return made


def test_two_directories(
    places: list[Path], profile: Path, tmp_path: Path, tiny_bench: TinyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without fio
    run = tiny_bench("io", *places, *SMALL, "--backend=threads")
    found = run.figures
    assert found["fio"] is None
    assert any(note.startswith("fio: not installed") for note in found["notes"])
    assert len(found["search"]) == 2
    assert found["profile"] == str(profile)
    kinds = {(one["job"]["kind"], one["title"]) for one in found["comparisons"]}
    assert {("read", "1 MiB"), ("write", "best point"), ("read", "checksums"), ("mixed", "")} <= kinds
    assert [one["title"] for one in found["striped"]] == [
        title for title in ("all directories", *map(str, places)) for _ in range(2)
    ]
    assert all(one["series"][0]["latency"]["p50_s"] > 0 for one in found["comparisons"])
    assert found["peers"]["series"][0]["program"] == "tierstore"
    assert "bench io" in run.table  # progress
    assert "cold reads of 2 records of 64 KiB" in run.table
    # What it measured with is gone, and what it found is used.
    assert [list(path.iterdir()) for path in places] == [[], []]
    best = found["search"][1]["best"]
    point = load_io_point(places[1])
    assert (point.chunk_bytes, point.queue_depth) == (best["block_bytes"], best["depth"])
    assert tune(IoConfig(), places[1]).depth_reason.startswith("measured ")
    document = run.document
    assert document.bench == "io"
    assert {one.name for one in document.measurements} >= {"bandwidth", "CPU time of 1 GB", "latency p99"}
    targets = {one.name: one.target for one in document.measurements if one.target is not None}
    assert targets["bandwidth to aiofiles, cold reads of records"] == 2
    assert targets["bandwidth to tierstore, checksums"] == 0.95  # with them to without


@pytest.mark.slow
def test_beside_a_fio_and_shown_by_doctor(
    places: list[Path],
    profile: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Path(__file__).with_name("fio-3.33.json")
    program = tmp_path / "bin/fio"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fio-9.9 || /bin/cat {recorded}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    saved = tmp_path / "saved.json"
    options = ["--backend=threads", f"--save={saved}", f"--html={saved}.html"]
    assert bench_status("io", places[0], *SMALL, *options) == 0
    out = capfd.readouterr().out
    assert "fio: fio-9.9" in out
    assert "/ fio" in out
    names = {(one.name, one.target) for one in load_document(saved).measurements}
    assert {("bandwidth to fio, 1 MiB", 0.95), ("CPU time a byte to fio, best point", 1.3)} <= names
    assert ("bandwidth to fio", None) in names
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--dir", str(places[0]), "--json"])
    assert ended.value.code == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    point = load_io_point(places[0])
    assert (told["io_transfer_bytes"], told["io_in_flight_count"]) == (point.chunk_bytes, point.queue_depth)
    assert told["io_tuning"] == f"measured {point.measured}"
    assert told["io_profile"] == str(profile)


def test_no_profile(places: list[Path], profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench_status("io", places[0], *SMALL, "--backend=threads", "--no-profile") == 0
    assert not profile.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_nothing(places: list[Path], number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "tierstore.cli.main", "bench", "io", str(places[0]), "--size=8MiB"]
    environment = {**os.environ, "TIERSTORE_IO_PROFILE": "none"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        until = time.monotonic() + 60
        while not list(places[0].rglob("data")) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status, err.decode()
    assert list(places[0].iterdir()) == []
