"""Jobs through the engine, and through fio: what they move, fio's output and command line. No speed is asserted."""

import json
import os
import shutil
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from io_jobs import CACHED, MIB

from tierstore import _native
from tierstore.bench.io_load import (
    Checksums,
    FileSet,
    Fio,
    FioError,
    Job,
    Load,
    Pattern,
    Reuse,
    TransferKind,
    check_space,
    data_files,
    find_fio,
    parse,
)
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.store.config import IoBackendName


@pytest.mark.parametrize("backend", ["AUTO", "THREADS", "PMEM"])
@pytest.mark.parametrize("kind", list(TransferKind))
@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_load_moves_what_it_says(
    files: FileSet, backend: str, kind: TransferKind, pattern: Pattern
) -> None:
    job = replace(CACHED, backend=IoBackendName[backend], kind=kind, pattern=pattern)
    with closing(Load(job, files)) as load:
        before = load.stats()
        found = load.run(0.01)
        after = load.stats()
    moved = {
        key: int(after[key]) - int(before[key]) for key in ("read_bytes", "written_bytes", "reads", "writes")
    }
    assert moved["read_bytes"] + moved["written_bytes"] == found.nbytes == found.operations * job.block_bytes
    assert moved["reads"] + moved["writes"] == found.operations == len(found.latencies_ns)
    assert (moved["reads"] > 0) == (kind is not TransferKind.WRITE)
    assert (moved["writes"] > 0) == (kind is not TransferKind.READ)
    assert found.operations >= job.depth
    assert 0 < found.latencies_ns.max() / 1e9 <= found.elapsed_s


@pytest.mark.parametrize("kind", list(TransferKind))
def test_writes_through_the_page_cache_end_on_the_disk(files: FileSet, kind: TransferKind) -> None:
    """Without a sync in the time it would be the speed of memory."""
    job = replace(CACHED, kind=kind)
    with closing(Load(job, files)) as load:
        before = int(load.stats()["syncs"])
        load.run(0.01)
        assert int(load.stats()["syncs"]) - before == (0 if kind is TransferKind.READ else len(files.paths))


def test_through_the_page_cache_one_pass(files: FileSet) -> None:
    with closing(Load(CACHED, files)) as load:
        found = load.run(60)
    assert found.nbytes == files.total_bytes == 8 * MIB


@pytest.mark.parametrize("pattern", list(Pattern))
def test_one_pass_touches_every_block(files: FileSet, pattern: Pattern) -> None:
    """In any order: what came twice would come from memory."""
    job = replace(CACHED, kind=TransferKind.WRITE, pattern=pattern, block_bytes=4096, depth=2)
    for path in files.paths:
        path.write_bytes(bytes(4 * MIB))
    with closing(Load(job, files)) as load:
        load.run(60)
    for path in files.paths:
        content = path.read_bytes()
        assert all(any(content[at : at + 4096]) for at in range(0, len(content), 4096))


def test_buffers_that_are_used_late_hold_all_that_was_read(files: FileSet) -> None:
    """One pass over 64 blocks, each read into memory of its own; used soon again, 8 buffers serve for all."""
    blocks = np.fromfile(files.alone[0].paths[0], np.uint8).reshape(64, 64 << 10)
    for reuse, count in ((Reuse.LATE, 64), (Reuse.SOON, 8)):
        with closing(Load(replace(CACHED, pattern=Pattern.SEQUENTIAL, reuse=reuse), files.alone[0])) as load:
            load.run(60)
            held = np.array([buffer.array() for (buffer,) in load._buffers])
        assert np.array_equal(held, blocks[-count:])


def test_checksums_are_compared(files: FileSet) -> None:
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
        ({"block_bytes": 1000}, "block"),
        ({"block_bytes": 128 * MIB}, "block"),
        ({"depth": 0}, "depth"),
        ({"direct": Capability.AUTO}, "direct"),
    ],
)
def test_bad_jobs(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(CACHED, **wrong)  # type: ignore[arg-type]


# fio --------------------------------------------------------------------------------------------------------

#: Two processes of a mix of 1 MiB reads and writes, one at a time each, by fio 3.33.
RECORDED = Path(__file__).with_name("fio-3.33.json")
MIXED = Job(kind=TransferKind.MIXED, block_bytes=1 << 20, depth=2, backend=IoBackendName.THREADS)


def test_a_recorded_output() -> None:
    """25 reads and 34 writes of 1 MiB in 32 ms; 6.557377% of 61 ms of two processes were CPU time: 4 ms."""
    found = parse(RECORDED.read_text())
    assert found.operations == 25 + 34
    assert found.nbytes == 59 << 20
    assert found.elapsed_s == 0.032
    assert found.cpu_s == pytest.approx(0.004)
    assert found.bytes_per_s == pytest.approx((59 << 20) / 0.032)
    assert found.cpu_per_gb_s == pytest.approx(0.004 / ((59 << 20) / 1e9))
    assert len(found.latencies_ns) == 59
    # The 30th of all: 9 reads and 21 writes took no longer than 1044480 ns.
    assert sorted(found.latencies_ns)[29] == 1_044_480
    assert found.latencies_ns.max() == 1_676_553  # by the account of the reads, not by their last bin


def test_notes_before_the_object() -> None:
    assert parse("fio: a note\n" + RECORDED.read_text()).operations == 59


@pytest.mark.parametrize("text", ["", "no object", "{}", '{"jobs": []}', '{"jobs": [{"error": 0}]}', "{"])
def test_other_output(text: str) -> None:
    with pytest.raises(FioError, match="has an unexpected form"):
        parse(text)


def test_a_job_that_failed() -> None:
    plain = json.loads(RECORDED.read_text())
    plain["jobs"][0]["error"] = 5
    with pytest.raises(FioError, match="error 5"):
        parse(json.dumps(plain))


def test_the_command_line_says_what_the_job_says() -> None:
    fio = Fio("/usr/bin/fio", "fio-3.33")
    paths = [Path("/a:b"), Path("/c")]
    given = fio.arguments(replace(MIXED, depth=7), paths, 1 << 30, 0.25)
    assert {
        "--filename=/a\\:b:/c",
        f"--size={2 << 30}",
        "--rw=randrw",
        "--bs=1048576",
        "--direct=1",
        "--ioengine=psync",
        "--iodepth=1",
        "--numjobs=7",
        "--runtime=250ms",
        "--time_based",
        "--norandommap",
    } <= set(given)
    assert "--end_fsync=1" not in given
    cached = replace(
        MIXED,
        kind=TransferKind.READ,
        pattern=Pattern.SEQUENTIAL,
        backend=IoBackendName.URING,
        direct=Capability.OFF,
        depth=7,
    )
    given = fio.arguments(cached, paths, 1 << 30, 2)
    assert {"--rw=read", "--direct=0", "--ioengine=io_uring", "--iodepth=7", "--numjobs=1"} <= set(given)
    assert "--time_based" not in given  # one pass: the second would find it in memory
    assert "--norandommap" not in given  # nor a block that comes twice
    assert "--end_fsync=1" in given  # within the run time, or writes would be measured into memory


def test_what_fio_cannot_do() -> None:
    fio = Fio("fio", "fio-3.33")
    assert fio.can_run(MIXED)
    assert not fio.can_run(replace(MIXED, pattern=Pattern.SEQUENTIAL))
    assert fio.can_run(replace(MIXED, pattern=Pattern.SEQUENTIAL, backend=IoBackendName.URING))
    assert not fio.can_run(replace(MIXED, backend=IoBackendName.PMEM))
    # Each of its processes would make a pass of its own, all but the first from memory.
    assert not fio.can_run(replace(MIXED, direct=Capability.OFF))


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "fio"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_program_that_is_found_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, f'[ "$1" = --version ] && echo fio-9.9 || /bin/cat {RECORDED}')
    monkeypatch.setenv("PATH", str(tmp_path))
    fio = find_fio()
    assert fio.version == "fio-9.9"
    assert fio.run(MIXED, [tmp_path / "data"], 1 << 20, 0.01).operations == 59


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_fio() is None
    script(tmp_path, "exit 3")
    assert find_fio() is None


def test_a_program_that_fails(tmp_path: Path) -> None:
    fio = Fio(script(tmp_path, "echo first >&2; echo the reason >&2; exit 1"), "fio-3.33")
    with pytest.raises(FioError, match="status 1: the reason"):
        fio.run(MIXED, [tmp_path / "data"], 1 << 20, 0.01)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is optional, and not installed here")
@pytest.mark.parametrize("backend", [IoBackendName.URING, IoBackendName.THREADS])
@pytest.mark.parametrize("kind", list(TransferKind))
def test_the_real_one(tmp_path: Path, backend: IoBackendName, kind: TransferKind) -> None:
    fio = find_fio()
    job = Job(kind=kind, block_bytes=64 << 10, depth=2, backend=backend, direct=Capability.OFF)
    with data_files([tmp_path], 4 << 20) as files:
        found = fio.run(job, files.paths, files.nbytes, 0.05)
    assert 0 < found.operations * (64 << 10) == found.nbytes
    assert len(found.latencies_ns) == found.operations
    assert found.elapsed_s > 0
    assert found.cpu_s >= 0
    assert list(tmp_path.iterdir()) == []
