"""Workers and ranks of benchmarks in their own processes; they exchange JSON objects with the parent, one per line.

A child is a module of this package. Its standard output is reserved for its answers (``answer_channel``); it reports a
failure as ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

from tierstore.bench.namespaces import RankNamespace
from tierstore.errors import TierstoreError
from tierstore.parallel.layout import local_environments

_Process = subprocess.Popen[bytes]


class WorkerError(TierstoreError):
    """A process of a benchmark failed or was killed."""


def start_module(
    module: str,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    inside: Sequence[str] = (),
    new_session: bool = False,
) -> _Process:
    """Start ``python -m module`` with pipes to and from it. ``inside``: a command to run it in (``ip netns``)."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        # -P: import the installed package, whatever is in the current directory.
        [*inside, sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": path, **environ},
        start_new_session=new_session,
    )


def _pipes(process: _Process) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def write_line(pipe: IO[bytes], content: Mapping[str, object]) -> None:
    """Write and flush one object."""
    pipe.write(json.dumps(content).encode() + b"\n")
    pipe.flush()


def send(process: _Process, request: Mapping[str, object]) -> None:
    """Send ``request``. A dead process raises nothing here: ``receive`` reports it."""
    with contextlib.suppress(BrokenPipeError):
        write_line(_pipes(process)[0], request)


def receive(process: _Process, who: str) -> dict[str, Any]:
    """The next answer. Raises WorkerError, naming ``who``, for an error, or if the process has ended."""
    line = _pipes(process)[1].readline()
    if not line:
        raise WorkerError(f"{who}: {how_ended(process)}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise WorkerError(f"{who}: {answer['error']}")
    return answer


def how_ended(process: _Process) -> str:
    """Wait for the end of ``process``, and say how it ended."""
    status = process.wait()
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


def ask_module(
    module: str, request: Mapping[str, object], *, environ: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The answer of ``python -m module``, started and ended for this one request. Raises WorkerError."""
    process = start_module(module, environ=environ)
    try:
        send(process, request)
        return receive(process, module)
    finally:
        end(process)


def close_input(process: _Process) -> None:
    """Close the pipe to ``process``, which ends it. May be called twice."""
    with contextlib.suppress(BrokenPipeError):
        _pipes(process)[0].close()


def end(process: _Process) -> None:
    """Close the pipes of ``process``, and wait for its end. May be called twice."""
    close_input(process)
    process.wait()
    _pipes(process)[1].close()


def answer_channel() -> IO[bytes]:
    """The child's standard output, reserved for its answers: what libraries print goes to stderr from now on."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return channel


def serve(answers: Callable[[Iterator[Any]], Generator[Mapping[str, object]]]) -> None:
    """The child's main function: sends what ``answers`` yields for the requests. A failure is the last answer."""
    channel = answer_channel()
    try:
        with contextlib.closing(answers(json.loads(line) for line in sys.stdin.buffer)) as found:
            for answer in found:
                write_line(channel, answer)
    except (TierstoreError, OSError) as error:
        write_line(channel, {"error": f"{type(error).__name__}: {error}"})


class AskedRanks:
    """``python -m module`` as ``count`` ranks that answer requests until they are closed; a context manager.

    They meet on the loopback interface, or, if given, each in its own one of ``namespaces``.
    """

    def __init__(self, module: str, count: int, *, namespaces: Sequence[RankNamespace] = ()) -> None:
        self._processes = []
        for rank, environ in enumerate(local_environments(count)):
            environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
            inside: Sequence[str] = ()
            if namespaces:
                environ |= namespaces[rank].environment
                inside = namespaces[rank].command(())
            self._processes.append(start_module(module, environ=environ, inside=inside))

    def ask(self, requests: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        """Each rank's answer to its own request, in rank order. Raises WorkerError."""
        for process, request in zip(self._processes, requests, strict=True):
            send(process, request)
        return [receive(process, f"rank {rank}") for rank, process in enumerate(self._processes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes:
            close_input(process)
            if kind is not None:
                process.kill()
        for process in self._processes:
            end(process)
