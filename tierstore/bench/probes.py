"""Measuring tools that benchmarks share: disk speed, latencies, a memory limit, and the resources of a process."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from tierstore import _native
from tierstore.errors import CapabilityError
from tierstore.store.config import IoConfig, tune

# The disk ---------------------------------------------------------------------------------------------------

_PAGE = 4096
_IN_FLIGHT_BYTES = 96 << 20


def drop_pages(path: Path) -> None:
    """Write back a file's dirty pages, then ask the kernel to drop its pages (POSIX_FADV_DONTNEED)."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that moved between disk and memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def per(self, steps: int) -> Bytes:
        """The mean over ``steps``."""
        return Bytes(self.read // steps, self.written // steps)


class Durable(Enum):
    """Whether a measurement ends when the bytes are written, or when they are durable."""

    NO = "no"
    YES = "yes"


class DiskProbe:
    """The disk's speed for the transfer sizes and the mix of reads and writes that a run needs.

    Transfers go through the engine, bypassing the page cache if the file system allows it, between a small arena and a
    file of ``nbytes`` in ``directory``: preallocated and written once beforehand, like extents, and removed by ``close``.
    ``transfer_bytes``: the sizes of transfers, taken in turn. Raises OSError.
    """

    def __init__(self, directory: Path, nbytes: int, transfer_bytes: Sequence[int], io: IoConfig) -> None:
        self._sizes = [-(-size // _PAGE) * _PAGE for size in transfer_bytes]
        self._slot_bytes = max(self._sizes)
        self._slots = max(nbytes // self._slot_bytes, 2)
        self._random = random.Random(0)
        self._order = itertools.cycle(self._random.sample(range(self._slots), self._slots))
        self._path = directory / "bench-disk.tmp"
        buffers = max(_IN_FLIGHT_BYTES // self._slot_bytes, 2)
        arena = _native.Arena(buffers * self._slot_bytes, _native.HugePages.AUTO)
        # A virtual disk may be faster with zeros.
        noise = np.frombuffer(self._random.randbytes(self._slot_bytes), np.uint8)
        for i in range(buffers):
            arena.view(i * self._slot_bytes, self._slot_bytes)[:] = noise
        self._buffers = [
            {
                size: _native.Buffer(arena, [(i * self._slot_bytes, self._slot_bytes)], size)
                for size in {*self._sizes, self._slot_bytes}
            }
            for i in range(buffers)
        ]
        self._tickets = [0] * buffers
        self._turn = 0
        tuning = tune(io, directory)
        self._engine = _native.Engine(
            backend=_native.IoBackend[io.backend.name],
            io_threads=io.threads,
            queue_depth=tuning.queue_depth,
            chunk_bytes=tuning.chunk_bytes,
        )
        try:
            self._file = _native.File(
                self._path, create=_native.FileCreate.YES, direct=_native.DirectIo[io.direct.name]
            )
            self._file.allocate(0, self._slots * self._slot_bytes)
            for slot in range(self._slots):
                self._submit(self._engine.write, slot, self._slot_bytes)
            self._drain(Durable.YES)
        except BaseException:
            self.close()
            raise

    def disk_bytes_per_s(self, mix: Bytes) -> float:
        """``bytes_per_s`` of the disk itself: without O_DIRECT, the file's pages are dropped before and writes are synced
        within the time, since otherwise memory would be measured. Each of the file's bytes is read at most once.
        """
        if self._file.direct:
            return self.bytes_per_s(mix)
        drop_pages(self._path)
        return self.bytes_per_s(mix, durable=Durable.YES)

    def bytes_per_s(self, mix: Bytes, *, durable: Durable = Durable.NO) -> float:
        """Bytes per second over ``mix``, its reads and writes interleaved in proportion, at random slots."""
        read = written = 0
        sizes = itertools.cycle(self._sizes)
        begun = time.perf_counter()
        while read < mix.read or written < mix.written:
            size = next(sizes)
            # The one that is further behind goes next.
            if written >= mix.written or (read < mix.read and written * mix.read >= read * mix.written):
                self._submit(self._engine.read, next(self._order), size)
                read += size
            else:
                self._submit(self._engine.write, next(self._order), size)
                written += size
        self._drain(durable)
        return (read + written) / (time.perf_counter() - begun)

    def _submit(self, call: Callable[..., int], slot: int, size: int) -> None:
        lane = self._turn % len(self._buffers)
        self._turn += 1
        before = self._tickets[lane]
        self._tickets[lane] = call(
            self._file,
            slot * self._slot_bytes,
            [self._buffers[lane][size]],
            after=[before] if before else [],
        )

    def _drain(self, durable: Durable) -> None:
        tickets = [ticket for ticket in self._tickets if ticket]
        if durable is Durable.YES:
            tickets = [self._engine.sync(self._file, after=tickets)]
        self._engine.wait_all(tickets)
        self._tickets = [0] * len(self._tickets)

    def close(self) -> None:
        """Remove the file. May be called twice."""
        self._engine.close()
        self._path.unlink(missing_ok=True)


# Latencies ---------------------------------------------------------------------------------------------------


def latency_summary(latencies_ns: Sequence[float] | NDArray[np.float32]) -> dict[str, float]:
    """Percentiles (nearest rank) and the greatest of ``latencies_ns``, in seconds; empty for none."""
    if not len(latencies_ns):
        return {}
    ordered = np.sort(latencies_ns)
    percents = {f"p{percent:g}_s": percent for percent in (50, 90, 99, 99.9)} | {"greatest_s": 100}
    # 99.9 is not a float: without the tolerance its rank in 1000 would be 1000.
    ranks = {name: math.ceil(percent / 100 * len(ordered) - 1e-9) for name, percent in percents.items()}
    return {name: float(ordered[rank - 1]) / 1e9 for name, rank in ranks.items()}


# Memory ------------------------------------------------------------------------------------------------------

_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A memory cgroup limited to ``limit_bytes``, without swap; ``close`` removes it. It proves that a run fits, since the
    kernel kills a run that does not. The page cache that its processes fill counts too, as in a container. ``name``
    distinguishes several limits of one process.

    Raises CapabilityError if this process cannot create one (cgroups version 1 or 2, as root or in a delegated subtree).
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
        """Move process ``pid`` into the group."""
        (self._path / "cgroup.procs").write_text(f"{pid}\n")

    def use(self) -> dict[str, int]:
        """What the group has recorded so far: its greatest use (page cache included), and processes killed."""
        peak = "memory.peak" if self._unified else "memory.max_usage_in_bytes"
        events = "memory.events" if self._unified else "memory.oom_control"
        kills = 0
        for line in (self._path / events).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                kills = int(count)
        peak_bytes = int((self._path / peak).read_text())
        return {"limit_bytes": self.limit_bytes, "peak_bytes": peak_bytes, "kills_count": kills}

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
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
    """Bytes of ``files`` in the page cache, according to fincore (util-linux); None without it."""
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


# What a process holds ----------------------------------------------------------------------------------------

_BLOCK = 512  # the unit of st_blocks, whatever the file system's
_DEVIATIONS = 3.0
_LEAST_SAMPLES = 12


def usage(*directories: Path) -> dict[str, int]:
    """``resident_bytes`` and open ``descriptors`` of this process, and ``disk_bytes``: those of the blocks of its store in
    ``directories`` and of its open files without a name.
    """
    nameless = 0
    descriptors = os.listdir("/proc/self/fd")
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the listing's own
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                nameless += status.st_blocks * _BLOCK
    return {
        "resident_bytes": int(psutil.Process().memory_info().rss),
        "descriptors": len(descriptors) - 1,
        "disk_bytes": sum(map(disk_bytes, directories)) + nameless,
    }


def disk_bytes(directory: Path) -> int:
    """Bytes of the blocks of all files under ``directory``: occupied space, not length."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_blocks * _BLOCK
    return total


def process_bytes() -> tuple[int, int]:
    """Bytes that this process has caused to be read from and written to storage: direct transfers, page faults, and page
    cache that it made dirty.
    """
    with open("/proc/self/io") as file:
        fields = dict(line.split(": ") for line in file.read().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


def trend_of(
    times: Sequence[float], values: Sequence[float], unit: str, *, tolerance: float, least_span_s: float
) -> dict[str, Any]:
    """The trend of ``values`` at ``times`` (seconds, rising): a straight line fitted to those after the first quarter.

    ``unit``: ``bytes`` or ``count``. ``grows``: the line rises by more than ``tolerance`` within the samples, and by more
    than three standard errors of its slope. ``judged``: there were enough samples over enough time to decide. Raises
    ValueError for no values.
    """
    if not values:
        raise ValueError("a trend of no samples")
    begin = len(values) // 4
    t, y = np.array(times[begin:], np.float64), np.array(values[begin:], np.float64)
    span = float(t[-1] - t[0])
    enough = len(y) >= _LEAST_SAMPLES and span >= least_span_s
    slope, error = slope_of(t, y) if len(y) > 2 and span > 0 else (0.0, math.inf)
    return {
        f"first_{unit}": values[0],
        f"middle_{unit}": values[len(values) // 2],
        f"last_{unit}": values[-1],
        f"slope_{unit}_per_s": slope,
        "unit": unit,
        "span_s": span,
        "judged": enough,
        "grows": enough and slope * span > tolerance and slope > _DEVIATIONS * error,
    }


def slope_of(t: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares: the slope of ``y`` over ``t`` and its standard error (0 for two points)."""
    away = t - t.mean()
    weight = float((away**2).sum())
    slope = float((away * y).sum()) / weight
    rest = y - y.mean() - slope * away
    return slope, math.sqrt(float((rest**2).sum()) / (len(y) - 2) / weight) if len(y) > 2 else 0.0
