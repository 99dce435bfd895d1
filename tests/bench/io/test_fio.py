"""fio's output, as it wrote it once and as it writes it here; its command line; its failures."""

from __future__ import annotations

import json
import shutil
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.bench.io.fio import Fio, FioError, find_fio, parse
from tierstore.bench.io.load import DataFiles, Job, Pattern, TransferKind
from tierstore.capabilities import Capability
from tierstore.store.config import IoBackendName

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
    assert found.latencies.count == 59
    # The 30th of all: 9 reads and 21 writes took no longer than 1044480 ns.
    assert found.latencies.percentile_ns(50) == pytest.approx(1_044_480, rel=1 / 128)
    assert found.latencies.greatest_ns == 1_676_553  # by the account of the reads, not by their last bin


def test_notes_before_the_object() -> None:
    assert parse("fio: a note\n" + RECORDED.read_text()).operations == 59


@pytest.mark.parametrize("text", ["", "no object", "{}", '{"jobs": []}', '{"jobs": [{"error": 0}]}', "{"])
def test_other_output(text: str) -> None:
    with pytest.raises(FioError, match="not what it was expected"):
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
    assert fio is not None
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
    assert fio is not None
    job = Job(kind=kind, block_bytes=64 << 10, depth=2, backend=backend, direct=Capability.OFF)
    with closing(DataFiles([tmp_path], 4 << 20)) as files:
        found = fio.run(job, files.striped.paths, files.striped.nbytes, 0.05)
    assert 0 < found.operations * (64 << 10) == found.nbytes
    assert found.latencies.count == found.operations
    assert found.elapsed_s > 0
    assert found.cpu_s >= 0
    assert list(tmp_path.iterdir()) == []
