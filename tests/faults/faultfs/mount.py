"""The tests' end of a mounted fault file system."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from faultfs import protocol
from faultfs.rules import Rule

_HERE = Path(__file__).resolve().parent.parent


class FaultFs:
    """``directory/behind`` seen through ``directory/mount``; a context manager that takes the mount away.

    Raises OSError where it cannot be mounted.
    """

    def __init__(self, directory: Path, *, keep_log: bool = False) -> None:
        self.behind, self.mount = directory / "behind", directory / "mount"
        self.behind.mkdir(parents=True, exist_ok=True)
        self.mount.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faultfs.server", self.behind, self.mount, "log" if keep_log else "no"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(_HERE)},
            cwd=_HERE,
        )
        first = self._answer()
        if first != "ready":
            self._end()
            raise OSError(first["error"])

    def _answer(self) -> Any:
        return json.loads(self._process.stdout.readline() or b'{"error": "the server ended"}')

    def _ask(self, **line: object) -> Any:
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def add(self, rule: Rule) -> None:
        self._ask(rule=rule.as_json())

    def clear(self) -> None:
        self._ask(clear=1)

    @property
    def fired(self) -> list[int]:
        """How often each rule has gone off."""
        return list(self._ask(fired=1))

    @property
    def log_length(self) -> int:
        return int(self._ask(length=1))

    def log(self) -> list[tuple[str, int, str, str, int, bytes]]:
        """Every change asked for so far; see ``server.Event``."""
        with tempfile.NamedTemporaryFile() as file:
            self._ask(log=file.name)
            return list(pickle.load(file))

    def vanish(self) -> None:
        """The drive is pulled out: what is in flight fails, and everything that comes."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        protocol.unmount(str(self.mount))
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> FaultFs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def unavailable() -> str:
    """Why no fault file system can be mounted here; empty when it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            FaultFs(Path(directory)).close()
        except OSError as error:
            return str(error)
    return ""
