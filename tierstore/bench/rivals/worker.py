"""A rival in a process of its own, that takes a few steps at each request.

The parent sends ``{"rival": .., "config": .., ..}``, then any number of ``{"steps": n}``, then closes the pipe. The child
answers each with one line: ``Ready``, then ``RivalSteps``; a failure is ``{"error": text}``. What libraries print goes to a
log file, whose last line is the reason of a rival that ends without a word.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierstore.bench.probes.memory_limit import MemoryLimit
from tierstore.bench.probes.usage import process_bytes
from tierstore.bench.processes.spawn import WorkerError, end, receive, send, serve, start_module
from tierstore.config import as_dict, from_dict
from tierstore.errors import TierstoreError

_SECTOR = 512  # the unit of /sys/dev/block/*/stat, whatever the device's
_FIRST_TO_DIE = "1000"  # where memory ends for all, the kernel is to take a rival and not who tells of it


class RivalError(TierstoreError):
    """A rival could not be opened, or could not take a step."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A rival that can step."""

    description: Sequence[str]
    open_s: float


@dataclass(frozen=True, kw_only=True)
class RivalSteps:
    """Some steps of a rival. Bytes are those that the process caused, and those of the whole disk (None: not known)."""

    step_s: Sequence[float]
    losses: Sequence[float]
    cpu_s: float
    peak_resident_bytes: int
    read_bytes: int
    written_bytes: int
    disk_read_bytes: int | None
    disk_written_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What a rival's memory is limited by: a cgroup, or RLIMIT_DATA (bytes; 0: neither)."""

    group: MemoryLimit | None = None
    data_bytes: int = 0


class RivalProcess:
    """The parent's end. Raises WorkerError when the rival fails, is killed, or does not answer within ``timeout_s``."""

    def __init__(
        self,
        name: str,
        *,
        config: object,
        directory: Path,
        timeout_s: float,
        checkpoint: Path | None = None,
        trace: Path | None = None,
        settings: Path | None = None,
        confinement: Confinement | None = None,
        module: str = "tierstore.bench.rivals.worker",
    ) -> None:
        directory.mkdir(parents=True)
        confinement = confinement or Confinement()
        self._name, self._timeout_s, self._log = name, timeout_s, directory / "log"
        self._process = start_module(module)
        try:
            if confinement.group is not None:
                confinement.group.add(self._process.pid)
            paths = {"directory": directory, "checkpoint": checkpoint, "trace": trace, "settings": settings}
            send(
                self._process,
                {
                    "rival": name,
                    "config": as_dict(config),
                    "data_bytes": confinement.data_bytes,
                    **{key: None if path is None else str(path) for key, path in paths.items()},
                },
            )
            self.ready = Ready(**self._answer())
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> RivalSteps:
        """Takes ``steps`` steps."""
        return RivalSteps(**self.ask({"steps": steps}))

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The answer to ``request``."""
        send(self._process, request)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._timeout_s, kill)
        timer.start()
        try:
            return receive(self._process, self._name)
        except WorkerError as error:
            if late.is_set():
                raise WorkerError(f"{self._name}: no answer within {self._timeout_s:g} s") from error
            # What it answered is its own word; where it could not, the log may know.
            if self._process.poll() is None or not (said := _last_line(self._log)):
                raise
            raise WorkerError(f"{error}; its last line: {said}") from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """Ends the process and waits for it. Safe to call twice."""
        timer = threading.Timer(min(self._timeout_s, 60.0), self._process.kill)
        timer.start()
        try:
            end(self._process)
        finally:
            timer.cancel()


def _last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


# The child's end --------------------------------------------------------------------------------------------


def answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    """What the child sends."""
    first = next(requests, None)
    if first is None:
        return
    directory = Path(first["directory"])
    begin_child(directory, first["data_bytes"])
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with told():
            rival = stack.enter_context(_opened(first, directory))
            ready = Ready(description=list(rival.describe()), open_s=time.perf_counter() - begun)
        yield asdict(ready)
        for request in requests:
            with told():
                taken = _steps(rival, request["steps"], directory)
            yield asdict(taken)


def begin_child(directory: Path, data_bytes: int) -> None:
    """Sends what is printed to the log in ``directory``, limits the heap to ``data_bytes`` (0: no limit), and lets the
    kernel take this process first.
    """
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.close(log)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Whatever a library raises becomes its reason; the traceback goes to the log."""
    try:
        yield
    except (TierstoreError, OSError):
        raise
    except Exception as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        raise RivalError(f"{type(error).__name__}: {lines[0][:300]}") from error


def _opened(first: Mapping[str, Any], directory: Path) -> Any:
    from tierstore.bench.rivals.registry import RIVALS
    from tierstore.bench.rivals.rival import RivalTask
    from tierstore.train.config import TrainConfig
    from tierstore.train.footprint import keep_freed_memory

    def path(key: str) -> Path | None:
        return None if first[key] is None else Path(first[key])

    keep_freed_memory()
    task = RivalTask(
        config=from_dict(TrainConfig, first["config"]),
        directory=directory,
        checkpoint=path("checkpoint"),
        trace=path("trace"),
        settings=path("settings"),
    )
    return RIVALS[first["rival"]].load()(task)


def _steps(rival: Any, count: int, directory: Path) -> RivalSteps:
    from tierstore.train.footprint import peak_resident_bytes

    own, disk, cpu = process_bytes(), disk_bytes(directory), time.process_time()
    seconds, losses = [], []
    for _ in range(count):
        begun = time.perf_counter()
        losses.append(rival.step())
        seconds.append(time.perf_counter() - begun)
    cpu, own_after, disk_after = time.process_time() - cpu, process_bytes(), disk_bytes(directory)
    known = disk is not None and disk_after is not None
    return RivalSteps(
        step_s=seconds,
        losses=losses,
        cpu_s=cpu,
        peak_resident_bytes=peak_resident_bytes(),
        read_bytes=own_after[0] - own[0],
        written_bytes=own_after[1] - own[1],
        disk_read_bytes=disk_after[0] - disk[0] if known else None,  # type: ignore[index]
        disk_written_bytes=disk_after[1] - disk[1] if known else None,  # type: ignore[index]
    )


def disk_bytes(directory: Path, sys: Path = Path("/sys")) -> tuple[int, int] | None:
    """Bytes that the block device under ``directory`` has read and written, whoever asked; None without one."""
    number = os.stat(directory).st_dev
    try:
        fields = (sys / f"dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
    except OSError:
        return None
    return int(fields[2]) * _SECTOR, int(fields[6]) * _SECTOR


if __name__ == "__main__":
    serve(answers)
