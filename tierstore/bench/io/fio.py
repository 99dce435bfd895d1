"""The same jobs through fio, where it is installed: same files, block size, depth, direct flag and number of seconds.

fio uses io_uring where the job does, and one process a transfer in flight (``psync``) where the job has threads.
Its CPU time is that of its jobs, by its own account, without what it takes to start. Its latencies are its ``clat``: from
submission to completion.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.bench.io.load import Job, Pattern, Sample, TransferKind
from tierstore.bench.probes.latency import Latencies
from tierstore.capabilities import Capability
from tierstore.errors import TierstoreError
from tierstore.store.config import IoBackendName

_ENGINES = {IoBackendName.URING: "io_uring", IoBackendName.THREADS: "psync"}
_NAMES = {TransferKind.READ: "read", TransferKind.WRITE: "write", TransferKind.MIXED: "rw"}
_MOST_JOBS = 64
_PATIENCE_S = 60.0  # beyond its run time


class FioError(TierstoreError):
    """fio failed, or wrote what is not its JSON."""


@dataclass(frozen=True)
class Fio:
    """An installed fio."""

    program: str
    version: str

    def can_run(self, job: Job) -> bool:
        """Whether fio has such a job: it has no mapped files, and no threads that share one sequence or one pass."""
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
            "--scramble_buffers=0",  # the engine writes the same bytes again, too
            "--allow_file_create=0",
            "--fallocate=none",
            "--output-format=json+",
        ]

    def run(self, job: Job, paths: Sequence[Path], nbytes: int, seconds: float) -> Sample:
        """Runs ``job`` for ``seconds``. An interrupt ends fio first. Raises FioError, OSError."""
        command = self.arguments(job, paths, nbytes, seconds)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=seconds + _PATIENCE_S)
            except subprocess.TimeoutExpired as error:
                raise FioError(f"fio did not end within {_PATIENCE_S:g} s of its time") from error
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
    """The sample in the output of ``--output-format=json+`` of one group of jobs. Raises FioError."""
    # Notes for people may stand before the object.
    start = text.find("{")
    try:
        found = json.loads(text[max(start, 0) :])
        job = found["jobs"][0]
        error = int(job["error"])
        if error:
            raise FioError(f"fio's job failed with error {error}")
        ways = [job[way] for way in ("read", "write") if job[way]["total_ios"]]
        latencies = Latencies()
        for way in ways:
            _add(latencies, way["clat_ns"])
        # A job's run time is the sum over its processes, of which the percentages are.
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        elapsed_s = max(way["runtime"] for way in ways) / 1e3
        return Sample(
            nbytes=sum(way["io_bytes"] for way in ways),
            elapsed_s=elapsed_s,
            cpu_s=cpu_s,
            operations=sum(way["total_ios"] for way in ways),
            latencies=latencies,
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioError(f"fio's output is not what it was expected to be: {error!r}") from error


def _add(latencies: Latencies, clat: Mapping[str, Any]) -> None:
    bins, greatest = clat["bins"], int(clat["max"])
    # A bin goes by its upper end, which may lie beyond the greatest latency.
    values = [min(int(value), greatest) for value in bins]
    latencies.add(values, [int(count) for count in bins.values()])


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a message"
