"""A rival in a process of its own, which answers one request after another until its parent closes the pipe.

The parent sends the limit of the process's heap, then a task, then requests. The task opens the rival; for each request
the child sends what the rival returned. What libraries print goes to a log file; its last line is the reason of a rival
that ends without an answer. This module imports no library: the process is in its memory cgroup before it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

#: Where memory ends for all, the kernel is to kill a rival and not the driver.
_FIRST_TO_DIE = "1000"
#: What opening a rival gives: what of its configuration matters, a line each; and what answers its requests.
Opened = tuple[Sequence[str], Callable[[Any], Any]]


class RivalError(Exception):
    """A rival failed, was killed, or did not answer in time."""


class Task(Protocol):
    """What a rival is to do. It is pickled, and opened in the child."""

    def opened(self) -> AbstractContextManager[Opened]: ...


class RivalProcess:
    """The parent's end: ``description`` and ``open_s`` are the rival's. Raises RivalError, also from ``ask``.

    ``directory``: made here, for the log. ``group``: a MemoryLimit to join; ``data_bytes``: RLIMIT_DATA (0: none).
    ``omp_wait``: how OpenMP's threads wait, None for its default.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        directory: Path,
        *,
        timeout_s: float,
        group: Any = None,
        data_bytes: int = 0,
        omp_wait: str | None = "passive",
    ) -> None:
        directory.mkdir(parents=True)
        self._name, self._timeout_s, self._log = name, timeout_s, directory / "log"
        environ = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        if omp_wait is not None:
            environ["OMP_WAIT_POLICY"] = omp_wait
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._pipe, theirs = Pipe()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ | {"PYTHONPATH": os.pathsep.join(path)},
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        try:
            if group is not None:
                group.add(self._process.pid)
            self._send(data_bytes)
            self.description, self.open_s = self.ask(task)
        except BaseException:
            self.close()
            raise

    def ask(self, request: object) -> Any:
        """What the rival returns for ``request``."""
        self._send(request)
        if not self._pipe.poll(self._timeout_s):
            self._process.kill()
            raise RivalError(f"{self._name}: no answer within {self._timeout_s:g} s")
        try:
            answered, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RivalError(f"{self._name}: {self._ended()}") from None
        if not answered:
            raise RivalError(f"{self._name}: {answer}")
        return answer

    def _send(self, value: object) -> None:
        with contextlib.suppress(ConnectionError):  # a missing answer says so
            self._pipe.send(value)

    def _ended(self) -> str:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}; its last line: {said[-1][:300]}" if said else how

    def close(self) -> None:
        """Ends the process and waits for it. Safe to call twice."""
        self._pipe.close()
        timer = threading.Timer(min(self._timeout_s, 60.0), self._process.kill)
        timer.start()
        self._process.wait()
        timer.cancel()


def answer_requests(pipe: Connection) -> None:
    """The child's end."""
    data_bytes = pipe.recv()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    if data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    try:
        task: Task = pipe.recv()
        begun = time.perf_counter()
        with task.opened() as (description, answer):
            pipe.send((True, (list(description), time.perf_counter() - begun)))
            with contextlib.suppress(EOFError):
                while True:
                    pipe.send((True, answer(pipe.recv())))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        pipe.send((False, f"{type(error).__name__}: {lines[0][:300]}"))


if __name__ == "__main__":
    answer_requests(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    # A library's threads may not outlive the interpreter's end in order; there is nothing left to save.
    os._exit(0)
