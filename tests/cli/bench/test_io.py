"""tierstore bench io, end to end on small files: what it prints, keeps, saves and removes. No test asserts a speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tierstore.bench.results.document import load_document
from tierstore.cli.main import cli
from tierstore.io_profile import load_io_point
from tierstore.store.config import IoConfig, tune

SMALL = ["--size=8MiB", "--minutes=0.001", "--rounds=1", "--records=2", "--record-bytes=64KiB"]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(arg) for arg in args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("TIERSTORE_IO_PROFILE", str(path))
    return path


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two")]
    for path in made:
        path.mkdir()
    return made


def last_object(out: str) -> dict[str, Any]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_two_directories(
    places: list[Path],
    profile: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without fio
    saved = tmp_path / "saved.json"
    assert run("bench", "io", *places, *SMALL, "--backend=threads", "--json", f"--save={saved}") == 0
    out, err = capfd.readouterr()
    found = last_object(out)
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
    assert "bench io" in err  # progress
    assert "cold reads of 2 records of 64 KiB" in err
    # What it measured with is gone, and what it found is used.
    assert [list(path.iterdir()) for path in places] == [[], []]
    best = found["search"][1]["best"]
    point = load_io_point(places[1])
    assert point is not None
    assert (point.chunk_bytes, point.queue_depth) == (best["block_bytes"], best["depth"])
    assert tune(IoConfig(), places[1]).depth_reason.startswith("measured ")
    document = load_document(saved)
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
    recorded = Path(__file__).parents[2] / "bench/io/fio-3.33.json"
    program = tmp_path / "bin/fio"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fio-9.9 || /bin/cat {recorded}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    saved = tmp_path / "saved.json"
    assert (
        run("bench", "io", places[0], *SMALL, "--backend=threads", f"--save={saved}", f"--html={saved}.html")
        == 0
    )
    out = capfd.readouterr().out
    assert "fio: fio-9.9" in out
    assert "/ fio" in out
    names = {(one.name, one.target) for one in load_document(saved).measurements}
    assert {("bandwidth to fio, 1 MiB", 0.95), ("CPU time a byte to fio, best point", 1.3)} <= names
    assert ("bandwidth to fio", None) in names
    assert run("doctor", "--dir", places[0], "--json") == 0
    told = last_object(capfd.readouterr().out)
    point = load_io_point(places[0])
    assert point is not None
    assert (told["io_transfer_bytes"], told["io_in_flight_count"]) == (point.chunk_bytes, point.queue_depth)
    assert told["io_tuning"] == f"measured {point.measured}"
    assert told["io_profile"] == str(profile)


def test_no_profile(places: list[Path], profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run("bench", "io", places[0], *SMALL, "--backend=threads", "--no-profile") == 0
    assert not profile.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--size=1000TiB"], "are free"),
        (["--size=1000"], "--size: expected a multiple of 4 MiB"),
        (["--minutes=0"], "--minutes: expected more than 0"),
        (["nowhere"], "nowhere: expected a directory"),
        (["--backend=tape"], "tape"),
    ],
)
def test_bad_input(
    args: list[str],
    says: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("bench", "io", *args) == 2
    err = capfd.readouterr().err
    assert says in err
    assert len([line for line in err.splitlines() if line.startswith("tierstore: error")]) == 1
    assert list(tmp_path.iterdir()) == []


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
