"""SIGKILLs of a process that commits in a loop: what was acknowledged is there, whole."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_process import run_python
from conftest_store import small_store
from effort import share

from tierstore.store import MomentFormat, ParameterStore, StoreConfig

KILLS = share(100)
SECONDS = 30.0  # one child may take: far more than it needs


class Zygote:
    """The other end of ``kill_zygote.py``."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("kill_zygote.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
        )
        self._buffer = b""
        assert self.line() == "ready"

    def line(self, timeout: float = SECONDS) -> str | None:
        """The next line; None when none comes within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            self._buffer += os.read(self.process.stdout.fileno(), 1 << 16)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def storm(self, directory: Path, seed: int, delay: float) -> list[str]:
        """Starts a child, kills it ``delay`` seconds after its first commit began; returns what it said."""
        self.process.stdin.write(f"{directory} {seed}\n".encode())
        self.process.stdin.flush()
        said: list[str] = []
        pid, kill_at = 0, float("inf")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            line = self.line(max(0.0, min(kill_at, deadline) - time.monotonic()))
            if line is None:
                os.kill(pid, signal.SIGKILL)
                kill_at = float("inf")
            elif line == "gone":
                return said
            else:
                said.append(line)
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                elif line.startswith("begin") and len(said) == 2:
                    kill_at = time.monotonic() + delay
        raise AssertionError(f"the child is not gone after {SECONDS} s; it said {said}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(SECONDS)
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "kills"), [(MomentFormat.FP32, KILLS), (MomentFormat.INT8, KILLS // 4)])
def test_kill_storm(
    tmp_path: Path, record_property: Callable[[str, object], None], moments: MomentFormat, kills: int
) -> None:
    path = tmp_path / "store"
    with small_store(path, count=5, numel=1500, moments=moments) as store:
        acknowledged, crcs = (
            store.last_commit.generation,
            {store.last_commit.generation: store.records_crc32c()},
        )
    rng = random.Random(7)
    zygote = Zygote()
    began = 0
    try:
        for number in range(kills):
            said = zygote.storm(path, number, rng.random() * 0.03)
            for line in said:
                word, *rest = line.split()
                assert word in ("pid", "begin", "done"), said
                if word == "begin":
                    crcs[int(rest[0])] = int(rest[1])
                    began += 1
                elif word == "done":
                    acknowledged = int(rest[0])
            with ParameterStore.open(path, StoreConfig(host_budget=1 << 18)) as store:
                assert store.last_commit.generation in (acknowledged, acknowledged + 1)
                assert store.verify().failures == []
                assert store.records_crc32c() == crcs[store.last_commit.generation]
                acknowledged = store.last_commit.generation
    finally:
        zygote.close()
    assert began >= kills
    record_property("commits", acknowledged)


def test_importing_the_store_does_not_import_torch() -> None:
    run_python("import sys, tierstore.store; sys.exit('torch' in sys.modules)")
