"""One job of ``bench io``: a stream of transfers over files placed where a store would be, by the engine or by fio.

The engine: N transfers of one block each are in flight, from a larger window of buffers, so that the engine does not wait
for Python, which queues the next ones when the oldest of the window have ended. A latency is the time from when the engine
hands a transfer to the kernel until the kernel has completed it.

fio, if installed, does the same job: same files, block size, depth, direct flag and number of seconds. It uses io_uring if
the job does, and one process per transfer in flight (``psync``) if the job has threads. Its CPU time is that of its jobs,
as it reports it, without its start. Its latencies are its ``clat``: from submission to completion.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore.bench.probes import drop_pages
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError, TierstoreError
from tierstore.machine import cores, disk
from tierstore.store.config import IoBackendName
from tierstore.units import format_bytes

#: Bytes that a job may have in flight; jobs that need more are not measured.
IN_FLIGHT_LIMIT = 256 << 20
_LEAST_BLOCK, _GREATEST_BLOCK = 4 << 10, 64 << 20
_MOST_THREADS = 64
_DOUBLED_BYTES = 32 << 20  # most bytes in flight for a window of twice as many
_LATE_BYTES = 256 << 20  # of buffers that are reused late: several times a processor's cache
_RANDOM_SLOTS = 1 << 16  # taken in turn
_SPANS = 1 << 20
_FILL_BYTES = 4 << 20


class TransferKind(StrEnum):
    READ = "read"
    WRITE = "write"
    MIXED = "mixed"  # as many reads as writes


class Pattern(StrEnum):
    SEQUENTIAL = "sequential"
    RANDOM = "random"


class Checksums(StrEnum):
    OFF = "off"
    ON = "on"  # CRC-32C: stored by writes, compared by reads


class Reuse(StrEnum):
    """When a buffer is used again. A device that writes to memory in the processor's cache, where a checksum has brought it,
    has to wait for the cache: reads were a tenth slower, and more on a fast disk.
    """

    SOON = "soon"  # as soon as it is free, as fio does
    LATE = "late"  # when it has left the processor's cache: a store's memory is larger than that


class Pages(StrEnum):
    """The pages of the buffers. The kernel pins a huge page at once, but small ones one by one."""

    HUGE = "huge"
    SMALL = "small"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kind of load. ``depth``: transfers of ``block_bytes`` in flight at once. Raises ConfigError."""

    kind: TransferKind
    block_bytes: int
    depth: int
    pattern: Pattern = Pattern.RANDOM
    backend: IoBackendName = IoBackendName.URING
    direct: Capability = Capability.ON
    checksums: Checksums = Checksums.OFF
    pages: Pages = Pages.HUGE
    reuse: Reuse = Reuse.SOON

    def __post_init__(self) -> None:
        size = self.block_bytes
        if not _LEAST_BLOCK <= size <= _GREATEST_BLOCK or size % _LEAST_BLOCK:
            raise ConfigError(f"block: expected a multiple of 4 KiB from 4 KiB to 64 MiB, got {size} bytes")
        if not 1 <= self.depth <= 1024:
            raise ConfigError(f"depth: expected 1 to 1024, got {self.depth}")
        if self.direct is Capability.AUTO:
            raise ConfigError("direct: expected on or off")

    @property
    def in_flight_bytes(self) -> int:
        return self.block_bytes * self.depth

    @property
    def past_cache(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.direct is Capability.ON and self.backend is not IoBackendName.PMEM


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one measurement moved, and what it cost. ``cpu_s``: of all threads, in user and kernel mode. ``latencies_ns``: of
    the operations (float32: a full sweep keeps many).
    """

    nbytes: int
    elapsed_s: float
    cpu_s: float
    operations: int
    latencies_ns: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.elapsed_s

    @property
    def cpu_per_gb_s(self) -> float:
        """CPU seconds per 10**9 bytes."""
        return self.cpu_s / self.nbytes * 1e9


@dataclass(frozen=True)
class FileSet:
    """Files of ``nbytes`` each, over which a job is spread transfer by transfer."""

    paths: tuple[Path, ...]
    nbytes: int

    @property
    def total_bytes(self) -> int:
        return self.nbytes * len(self.paths)

    @property
    def alone(self) -> list[FileSet]:
        """Each of the files."""
        return [FileSet((path,), self.nbytes) for path in self.paths]

    def forget(self) -> None:
        """Drop the files' pages from the page cache."""
        for path in self.paths:
            drop_pages(path)


@contextmanager
def data_files(directories: Sequence[Path], nbytes: int) -> Iterator[FileSet]:
    """A file of ``nbytes`` in each of ``directories``, filled with noise; they are removed at exit.

    Raises OSError; see ``check_space``.
    """
    with ExitStack() as stack:
        prefix = "tierstore-bench-io-"
        own = [stack.enter_context(TemporaryDirectory(prefix=prefix, dir=each)) for each in directories]
        files = FileSet(tuple(Path(directory) / "data" for directory in own), nbytes)
        for path in files.paths:
            _fill(path, nbytes)
        yield files


def check_space(directories: Sequence[Path], each_bytes: int) -> None:
    """Raise ConfigError if a directory has less than ``each_bytes`` free; directories may share a disk."""
    needed: dict[int, int] = {}
    for directory in directories:
        device = os.stat(directory).st_dev
        needed[device] = needed.get(device, 0) + each_bytes
    for directory in directories:
        wanted, free = needed[os.stat(directory).st_dev], disk(directory).free_bytes
        if wanted > free:
            raise ConfigError(
                f"{directory}: the measurement needs {wanted} bytes ({format_bytes(wanted)}) of disk, "
                f"{free} bytes ({format_bytes(free)}) are free"
            )


def noise(arena: _native.Arena, seed: int = 0) -> None:
    """Fill an arena with noise: a virtual disk may be faster with zeros, or with content that it has seen before."""
    tile = np.frombuffer(np.random.default_rng(seed).bytes(min(_FILL_BYTES, arena.nbytes)), np.uint8)
    for number, offset in enumerate(range(0, arena.nbytes, _FILL_BYTES)):
        piece = arena.view(offset, min(_FILL_BYTES, arena.nbytes - offset))
        np.add(tile[: piece.nbytes], np.uint8(number % 256), out=piece)


def _fill(path: Path, nbytes: int) -> None:
    arena = _native.Arena(_FILL_BYTES, _native.HugePages.AUTO)
    noise(arena)
    with (
        _native.Engine(chunk_bytes=1 << 20) as engine,
        _native.File(path, create=_native.FileCreate.YES) as file,
    ):
        file.allocate(0, nbytes)
        whole = _native.Buffer(arena, [(0, _FILL_BYTES)], _FILL_BYTES)
        tickets = [engine.write(file, at, [whole]) for at in range(0, nbytes, _FILL_BYTES)]
        engine.wait(engine.sync(file, after=tickets))
        engine.wait_all(tickets)


class Load:
    """An engine, buffers and open files for ``job``. Raises OSError if it is refused."""

    def __init__(self, job: Job, files: FileSet) -> None:
        size, depth = job.block_bytes, job.depth
        self._job, self._set = job, files
        self._block = size
        # The number of transfers that are queued together when the oldest ones have ended.
        self._batch = depth if job.in_flight_bytes <= _DOUBLED_BYTES else max(depth // 2, 1)
        self._window = depth + self._batch
        late = min(_LATE_BYTES, files.total_bytes) if job.reuse is Reuse.LATE else 0
        buffers = max(self._window, late // size)
        self._engine = _native.Engine(
            backend=_native.IoBackend[job.backend.name],
            io_threads=min(depth, _MOST_THREADS),
            queue_depth=depth,
            chunk_bytes=size,
            compute_threads=min(cores(), 4),
        )
        self._files: list[_native.File] = []
        try:
            huge = _native.HugePages.AUTO if job.pages is Pages.HUGE else _native.HugePages.OFF
            arena = _native.Arena(buffers * size, huge)
            noise(arena)
            self._buffers = [[_native.Buffer(arena, [(i * size, size)], size)] for i in range(buffers)]
            direct = _native.DirectIo[job.direct.name]
            for path in files.paths:
                self._files.append(_native.File(path, direct=direct))
            self._slots = max(files.nbytes // size, 1)
            self._table: _native.CrcTable | None = None
            if job.checksums is Checksums.ON:
                self._table = _native.CrcTable(self._slots * len(self._files))
                self._write_checked()
        except BaseException:
            self.close()
            raise
        random = np.random.default_rng(1)
        if job.past_cache:
            self._order = random.integers(0, self._slots, _RANDOM_SLOTS).tolist()
        else:  # each slot once per pass: a second read would come from memory
            self._order = random.permutation(self._slots).tolist()
        self._coins = random.integers(0, 2, _RANDOM_SLOTS).tolist()
        self._submitted = 0

    def run(self, seconds: float) -> Sample:
        """Run transfers for ``seconds``, then wait for those in flight.

        Through the page cache at most one pass over the files, whose pages are dropped before; writes are synced within the
        time, since otherwise memory would be measured.
        """
        batch, most = self._batch, 2**62
        if not self._job.past_cache:
            self._set.forget()
            most = self._slots * len(self._files)
        self._engine.record_spans(_SPANS)
        first, cpu = self._submitted, cpu_s()
        begun = time.perf_counter()
        tickets = [self._submit() for _ in range(min(self._window, most))]
        while time.perf_counter() - begun < seconds and self._submitted - first + batch <= most:
            # The last of the batch ends about last: one sleep for all of them.
            self._engine.wait(tickets[batch - 1])
            self._engine.wait_all(tickets[: batch - 1])
            tickets = tickets[batch:] + [self._submit() for _ in range(batch)]
        self._engine.wait_all(tickets)
        if not self._job.past_cache and self._job.kind is not TransferKind.READ:
            self._engine.wait_all([self._engine.sync(file) for file in self._files])
        elapsed = time.perf_counter() - begun
        cpu = cpu_s() - cpu
        count = self._submitted - first
        moves = (_native.Activity.READ, _native.Activity.WRITE)
        spans = self._engine.drain_spans()[0]
        latencies = [end - start for activity, _, _, start, end, _ in spans if activity in moves]
        return Sample(
            nbytes=count * self._block,
            elapsed_s=elapsed,
            cpu_s=cpu,
            operations=count,
            latencies_ns=np.array(latencies, np.float32),
        )

    def _submit(self) -> int:
        number = self._submitted
        self._submitted += 1
        which = number % len(self._files)
        kind = self._job.kind
        turn = number // len(self._files)
        slot = (
            turn % self._slots
            if self._job.pattern is Pattern.SEQUENTIAL
            else self._order[turn % len(self._order)]
        )
        reads = kind is TransferKind.READ or (
            kind is TransferKind.MIXED and self._coins[number % _RANDOM_SLOTS]
        )
        call = self._engine.read if reads else self._engine.write
        buffers = self._buffers[number % len(self._buffers)]
        if self._table is None:
            return call(self._files[which], slot * self._block, buffers)
        entry = which * self._slots + slot
        return call(self._files[which], slot * self._block, buffers, self._table, entry)

    def _write_checked(self) -> None:
        """Write each slot once, and keep its checksum for the reads."""
        tickets = [
            self._engine.write(
                file,
                slot * self._block,
                self._buffers[slot % len(self._buffers)],
                self._table,
                which * self._slots + slot,
            )
            for which, file in enumerate(self._files)
            for slot in range(self._slots)
        ]
        self._engine.wait_all(tickets)

    def stats(self) -> Mapping[str, Any]:
        """The engine's own statistics of what it moved."""
        return self._engine.stats()

    def close(self) -> None:
        """Wait for what is in flight and close. May be called twice."""
        self._engine.close()
        for file in self._files:
            file.close()


def cpu_s() -> float:
    """CPU time of this process so far, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# fio --------------------------------------------------------------------------------------------------------

_ENGINES = {IoBackendName.URING: "io_uring", IoBackendName.THREADS: "psync"}
_NAMES = {TransferKind.READ: "read", TransferKind.WRITE: "write", TransferKind.MIXED: "rw"}
_MOST_JOBS = 64
_PATIENCE_S = 60.0  # beyond its run time


class FioError(TierstoreError):
    """fio failed, or its output is not the expected JSON."""


@dataclass(frozen=True)
class Fio:
    """An installed fio."""

    program: str
    version: str

    def can_run(self, job: Job) -> bool:
        """Whether fio supports such a job: it has no mapped files, and no threads that share one sequence or one pass."""
        if job.backend is IoBackendName.THREADS:
            return job.pattern is Pattern.RANDOM and job.direct is Capability.ON
        return job.backend in _ENGINES

    def arguments(self, job: Job, paths: Sequence[Path], nbytes: int, seconds: float) -> list[str]:
        """The command line of ``job`` over files of ``nbytes`` each."""
        threads = job.backend is IoBackendName.THREADS
        name = ("rand" if job.pattern is Pattern.RANDOM else "") + _NAMES[job.kind]
        files = ":".join(str(path).replace(":", "\\:") for path in paths)
        return [
            self.program,
            "--name=job",
            f"--filename={files}",
            f"--size={nbytes * len(paths)}",
            f"--rw={name}",
            f"--bs={job.block_bytes}",
            f"--direct={int(job.direct is Capability.ON)}",
            f"--ioengine={_ENGINES[job.backend]}",
            f"--iodepth={1 if threads else job.depth}",
            f"--numjobs={min(job.depth, _MOST_JOBS) if threads else 1}",
            "--group_reporting",
            f"--runtime={max(round(seconds * 1e3), 1)}ms",
            # Through the page cache a second pass would read memory, and writes without a sync would fill it.
            *(["--time_based", "--norandommap"] if job.direct is Capability.ON else ["--end_fsync=1"]),
            "--randrepeat=0",
            "--scramble_buffers=0",  # the engine rewrites the same bytes, too
            "--allow_file_create=0",
            "--fallocate=none",
            "--output-format=json+",
        ]

    def run(self, job: Job, paths: Sequence[Path], nbytes: int, seconds: float) -> Sample:
        """Run ``job`` for ``seconds``. An interrupt ends fio first. Raises FioError, OSError."""
        command = self.arguments(job, paths, nbytes, seconds)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=seconds + _PATIENCE_S)
            except subprocess.TimeoutExpired as error:
                raise FioError(f"fio still ran {_PATIENCE_S:g} s after its time") from error
            finally:
                if process.poll() is None:
                    process.kill()
        if process.returncode != 0:
            raise FioError(f"fio exited with status {process.returncode}: {_last_line(err or out)}")
        return parse(out)


def find_fio() -> Fio | None:
    """The fio on the path; None without one."""
    program = shutil.which("fio")
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return Fio(program, done.stdout.strip()) if done.returncode == 0 else None


def parse(text: str) -> Sample:
    """Parse the output of ``--output-format=json+`` of one group of jobs. Raises FioError."""
    # Notes for people may precede the object.
    start = text.find("{")
    try:
        found = json.loads(text[max(start, 0) :])
        job = found["jobs"][0]
        error = int(job["error"])
        if error:
            raise FioError(f"fio's job failed with error {error}")
        ways = [job[way] for way in ("read", "write") if job[way]["total_ios"]]
        latencies = [np.empty(0, np.float32)]
        for clat in (way["clat_ns"] for way in ways):
            # A bin is represented by its upper end, which may exceed the greatest latency.
            values = np.minimum([int(value) for value in clat["bins"]], int(clat["max"]))
            latencies.append(np.repeat(values, list(clat["bins"].values())).astype(np.float32))
        # A job's run time is the sum over its processes; the percentages refer to it.
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        elapsed_s = max(way["runtime"] for way in ways) / 1e3
        return Sample(
            nbytes=sum(way["io_bytes"] for way in ways),
            elapsed_s=elapsed_s,
            cpu_s=cpu_s,
            operations=sum(way["total_ios"] for way in ways),
            latencies_ns=np.concatenate(latencies),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioError(f"fio's output has an unexpected form: {error!r}") from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a message"
