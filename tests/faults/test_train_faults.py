"""``tierstore train`` on a drive that fails: one line, its exit status, and a store that resumes as if nothing was."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import tiny_run
from faultfs import Action, FaultFs, Rule, unavailable
from forked_python import ForkServer

from tierstore.store import verify_store

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "FUSE can be mounted")

SECONDS = 60.0
EXTENTS, INDEX = "s/extents/*", "s/index/data.mdb"


class Trainer:
    """Runs ``tierstore train`` in processes of their own."""

    def __init__(self, directory: Path, server: ForkServer) -> None:
        self.directory, self.server = directory, server

    def run(self, store: Path, backend: str, *options: str) -> tuple[int, dict[str, Any], str]:
        """Exit status, the JSON and the error output of one run, which must end by itself."""
        settings = {"steps": 6, "commit_every": 2, "eval_every": 0, "io.backend": backend}
        file = tiny_run(self.directory, settings)
        argv = ["train", str(file), "--store", str(store), "--json", "--checksum", *options]
        command = [sys.executable, "-m", "tierstore.cli.main", *argv]
        with self.server.forking():
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        lines = done.stdout.splitlines()
        return done.returncode, json.loads(lines[-1]) if done.returncode == 0 else {}, done.stderr


@pytest.fixture(scope="module")
def trainer(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("train"), fork_server)


@pytest.fixture(scope="module")
def expected(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The checksum of the run that nothing happens to."""
    status, summary, errors = trainer.run(tmp_path_factory.mktemp("plain") / "s", "auto")
    assert status == 0, errors
    assert isinstance(summary["records_crc32c"], int)
    return int(summary["records_crc32c"])


RULES = {
    name: (rule, status, words)
    for name, rule, status, words in [
        ("read", Rule(op="read", action=Action.FAIL, path=EXTENTS, after=9), 2, "Input/output error"),
        ("write", Rule(op="write", action=Action.FAIL, path=EXTENTS, after=150), 2, "Input/output error"),
        ("fsync", Rule(op="fsync", action=Action.FAIL, path=EXTENTS, after=4), 2, "Input/output error"),
        (
            "index",
            Rule(op="write", action=Action.FAIL, path=INDEX, after=16, errno=errno.ENOSPC),
            2,
            "No space left",
        ),
        ("flip", Rule(op="read", action=Action.FLIP, path=EXTENTS, after=9, bit=100), 1, "crc32c is"),
        ("gone-read", Rule(op="read", action=Action.VANISH, path=EXTENTS, after=9), 2, "mount/s"),
        ("gone-write", Rule(op="write", action=Action.VANISH, path=EXTENTS, after=150), 2, "mount/s"),
    ]
}
CASES = [
    ("threads", "read"),
    *(
        pytest.param(backend, name, marks=pytest.mark.slow)
        for backend, names in (("uring", RULES), ("threads", ["gone-write"]), ("pmem", ["read", "gone-read"]))
        for name in names
    ),
]


@pytest.mark.parametrize(("backend", "fault"), CASES)
def test_a_run_stops_with_one_line_and_resumes(
    trainer: Trainer, expected: int, fast_path: Path, backend: str, fault: str
) -> None:
    rule, status, words = RULES[fault]
    fs = FaultFs(fast_path)
    store = fs.mount / "s"
    try:
        fs.add(rule)
        ended, _, errors = trainer.run(store, backend)
        assert ended == status, errors
        last = errors.splitlines()[-1]
        assert last.startswith("tierstore: error: ")
        assert words in last
        assert "Traceback" not in errors
    finally:
        fs.close()
    with FaultFs(fast_path) as again:  # the drive is back
        store = again.mount / "s"
        resumed = (store / "tierstore.json").exists()
        if resumed:
            assert verify_store(store).failures == []
        ended, summary, errors = trainer.run(store, backend, *(["--resume"] if resumed else []))
        assert ended == 0, errors
        assert summary["records_crc32c"] == expected


@pytest.mark.slow
def test_a_slow_drive_changes_times_alone(trainer: Trainer, expected: int, fast_path: Path) -> None:
    with FaultFs(fast_path) as fs:
        for op, after in (("read", 3), ("write", 20), ("fsync", 3)):
            fs.add(Rule(op=op, action=Action.DELAY, path="s/*", seconds=0.03, after=after, times=12))
        status, summary, errors = trainer.run(fs.mount / "s", "auto")
        assert status == 0, errors
        assert summary["records_crc32c"] == expected
        assert min(fs.fired) > 0
