"""The parent's end of a soak's worker: a process, what it is told, and the messages that it sends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["MessageReader", "start_worker", "tell"]


def start_worker() -> subprocess.Popen[bytes]:
    """A worker, in a session of its own, with pipes to and from it."""
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        # -P: the installed package, whatever lies in the directory that this is called from.
        [sys.executable, "-P", "-m", "tierstore.bench.soak.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        # An interrupt from the terminal is this process's to handle: the worker is told to stop.
        start_new_session=True,
    )


def tell(process: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    """Sends ``request``; a worker that is dead already says so by the end of what it says."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()


class MessageReader:
    """Messages of a worker, as they come; what is cut off by its death is not one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._pipe, self._stdin = process.stdout, process.stdin
        self._buffer = b""

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next one, ``{"say": "ended"}`` after the last; None when none comes in time (None: wait for it)."""
        while b"\n" not in self._buffer:
            wait = None if timeout_s is None else max(timeout_s, 0.0)
            if not select.select([self._pipe], [], [], wait)[0]:
                return None
            data = os.read(self._pipe.fileno(), 1 << 16)
            if not data:
                return {"say": "ended"}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._pipe.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
