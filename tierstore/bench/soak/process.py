"""The messages that a soak's worker sends, at the parent's end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from typing import Any


class MessageReader:
    """Messages of a worker, as they come; what is cut off by its death is not one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._pipe, self._stdin = process.stdout, process.stdin
        self._buffer = b""

    def next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, ``{"say": "ended"}`` after the last; None where none arrives in time. Without a time, waits."""
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
