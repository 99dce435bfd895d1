"""A memory cgroup for one process: proof that a run fits, since the kernel kills what does not.

The page cache that the process fills counts too, as it does in a container. Version 1 and version 2 of
cgroups; the caller needs the right to make one (root, or a delegated subtree).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierstore.bench.results.figures import Figures
from tierstore.errors import CapabilityError

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class MemoryUse(Figures):
    """What a group has seen: its greatest use (page cache included), and processes killed."""

    limit_bytes: int
    peak_bytes: int
    kills_count: int


class MemoryLimit:
    """A cgroup limited to ``limit_bytes``, without swap; ``close`` removes it. ``name`` tells several of one process apart.

    Raises CapabilityError where the machine does not let this process make one.
    """

    def __init__(self, limit_bytes: int, *, root: Path = _ROOT, name: str = "") -> None:
        self.limit_bytes = limit_bytes
        self._unified = (root / "cgroup.controllers").exists()
        parent = root if self._unified else root / "memory"
        self._path = parent / "-".join(filter(None, ["tierstore-bench", str(os.getpid()), name]))
        try:
            self._path.mkdir()
            limit = "memory.max" if self._unified else "memory.limit_in_bytes"
            (self._path / limit).write_text(f"{limit_bytes}\n")
            if self._unified:
                (self._path / "memory.swap.max").write_text("0\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.rmdir()
            raise CapabilityError(f"memory limit: {error.filename}: {error.strerror}") from error

    def add(self, pid: int) -> None:
        """Puts process ``pid`` into the group."""
        (self._path / "cgroup.procs").write_text(f"{pid}\n")

    def use(self) -> MemoryUse:
        """What the group has seen so far."""
        peak = "memory.peak" if self._unified else "memory.max_usage_in_bytes"
        events = "memory.events" if self._unified else "memory.oom_control"
        kills = 0
        for line in (self._path / events).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                kills = int(count)
        peak_bytes = int((self._path / peak).read_text())
        return MemoryUse(limit_bytes=self.limit_bytes, peak_bytes=peak_bytes, kills_count=kills)

    def close(self) -> None:
        """Removes the group; its processes must have ended."""
        for _ in range(50):  # a process that has just ended may still be leaving
            try:
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
            else:
                return


def page_cache_bytes(files: Iterable[Path]) -> int | None:
    """Bytes of ``files`` that the page cache holds, as fincore (util-linux) says; None without it."""
    names = [str(path) for path in files]
    tool = shutil.which("fincore")
    if tool is None or not names:
        return None
    done = subprocess.run(
        [tool, "--bytes", "--json", "--output", "RES", *names], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return None
    return sum(int(row["res"]) for row in json.loads(done.stdout)["fincore"])
