"""Python processes that are forked from one that has imported torch, instead of importing it for seconds each.

In ``ForkServer.forking()`` what ``subprocess`` starts as ``python -m``, ``python -c`` or ``python script`` is a fork of the
server, and so is what that starts in turn (ranks of torchrun, workers of benchmarks). Each is a child of the process that
starts it, with the arguments, environment, directory, pipes and command line that it would have; signals, exit statuses and
kills are real. It differs in what was imported before it begins, and ends without taking the interpreter apart. A process
whose environment has other variables that libraries read when they are loaded starts afresh. Linux only.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

#: numpy.ma is behind median(); the cases of ranks live in test files, which import hypothesis and pytest.
PRELOADED = (
    "hypothesis",
    "numpy.ma",
    "pytest",
    "torch.distributed.device_mesh",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "tierstore.cli.main",
    "tierstore.hf.spec",
    "tierstore.model",
    "tierstore.parallel",
    "tierstore.plan.order",
    "tierstore.train.session",
)
_READ_AT_LOAD = ("OMP_", "KMP_", "MKL_", "LD_", "MALLOC_", "PYTHON")
_READ_LATER = {"PYTHONPATH", "PYTHONSAFEPATH"}
_AT_START = dict(os.environ)
#: Bytes of a process's command line, which a fork writes over: /proc shows the arguments that it was started with.
_COMMAND_LINE_BYTES = 4096
_MESSAGE_BYTES = 1 << 18
_MOST_DESCRIPTORS = 64
_PR_SET_CHILD_SUBREAPER = 36
_start_afresh: Callable[..., int] = _posixsubprocess.fork_exec
#: Arguments of fork_exec, which is private, in Python 3.11 and 3.12; with others all processes start afresh.
_ARGUMENTS = 23


@dataclass(frozen=True)
class Job:
    """A Python process to start. ``numbers``: of the descriptors that it gets; ``base_path``: ends its ``sys.path``."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    new_session: bool
    parent: int
    numbers: list[int]

    def run(self, descriptors: Sequence[int], base_path: Sequence[str]) -> None:
        """Becomes the process, after a fork; ``descriptors``: what ``numbers`` are to be. Never returns."""
        status = 70
        try:
            _receive_signals_as_a_new_process()
            _number(descriptors, self.numbers)
            if self.new_session:
                os.setsid()
            os.chdir(self.directory)
            os.environ.clear()
            os.environ.update(self.environment)
            # A command that restarts itself would start what this process has begun as.
            os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
            _write_command_line(self.arguments)
            options, rest = _parsed(self.arguments) or (set(), [])
            _open_standard_streams(unbuffered="-u" in options)
            until = time.monotonic() + 1
            while (
                os.getppid() != self.parent and time.monotonic() < until
            ):  # until what stands between has ended
                time.sleep(0.0005)
            _install(lambda *given: _fork_here(given, base_path))
            safe = "-P" in options or bool(self.environment.get("PYTHONSAFEPATH"))
            first = filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))
            status = _status_of(lambda: _run_main(rest, safe, [*first, *base_path]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _receive_signals_as_a_new_process() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def _number(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Makes ``descriptors`` these numbers, and closes all others."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in descriptors]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
    wanted = sorted(numbers)
    for number, following in zip(wanted, [*wanted[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(number + 1, following)


def _write_command_line(arguments: Sequence[str]) -> None:
    # Fields 48 and 49 of proc_pid_stat(5). The second, the name, may have blanks.
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


#: Streams of the process that was forked: collected, they would write what it has not written yet.
_INHERITED: list[object] = []


def _open_standard_streams(*, unbuffered: bool) -> None:
    _INHERITED.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__])
    files = [io.FileIO(number, "rb" if number == 0 else "wb", closefd=False) for number in range(3)]
    out, err = io.BufferedWriter(files[1]), io.BufferedWriter(files[2])
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(files[0]))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, write_through=unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)  # type: ignore[misc]


def _parsed(arguments: Sequence[str]) -> tuple[set[str], list[str]] | None:
    """The interpreter's options, and what it is to run; None with options that a fork cannot follow."""
    options = set()
    rest = list(arguments[1:])
    while rest and rest[0] in ("-u", "-P", "-B"):
        options.add(rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return None
    return options, rest


def _run_main(rest: Sequence[str], safe: bool, path: Sequence[str]) -> None:
    """Runs what stands behind the options of ``python``."""
    kind, *arguments = rest
    if kind == "-c":
        program, *arguments = arguments
        sys.argv, sys.path = ["-c", *arguments], [*([] if safe else [""]), *path]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        name = arguments[0]
        sys.argv, sys.path = arguments, [*([] if safe else [os.getcwd()]), *path]
        sys.modules.pop(name, None)  # runpy would warn of it
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = (
            [kind, *arguments],
            [*([] if safe else [str(Path(kind).parent.resolve())]), *path],
        )
        runpy.run_path(kind, run_name="__main__")


def _status_of(main: Callable[[], None]) -> int:
    """Runs ``main``, threads and exit handlers to their end: the exit status that Python would give."""
    status = 0
    interrupted = False
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status


def _asked(given: Sequence[Any]) -> tuple[Job, list[int]] | None:
    """The job that the arguments of fork_exec ask for, and its descriptors here; None if a fork cannot do it."""
    if len(given) != _ARGUMENTS:
        return None
    arguments = [os.fsdecode(argument) for argument in given[0]]
    environment = dict(os.environ)
    if given[5] is not None:
        entries = (os.fsdecode(entry).partition("=") for entry in given[5])
        environment = {name: value for name, _, value in entries}
    streams = {number: fd for number, fd in enumerate((given[6], given[9], given[11])) if fd >= 0}
    kept = {fd: fd for fd in given[3] if fd != given[13]}  # the pipe on which a failed exec is reported
    passed = {0: 0, 1: 1, 2: 2} | kept | streams
    # Inherits all descriptors; another process group, user or umask; a function to call before.
    special = not given[2] or given[16] != -1 or any(given[17:20]) or given[20] != -1 or given[21] is not None
    if special or arguments[0] != sys.executable or _parsed(arguments) is None:
        return None
    if _read_at_load(environment) != _read_at_load(_AT_START):
        return None
    directory = os.getcwd() if given[4] is None else os.fsdecode(given[4])
    job = Job(arguments, environment, directory, bool(given[15]), os.getpid(), list(passed))
    return job, list(passed.values())


def _read_at_load(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_LOAD) and name not in _READ_LATER
    }


def _install(fork_exec: Callable[..., int]) -> None:
    """``subprocess`` and ``multiprocessing`` start processes by ``fork_exec``."""
    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _fork_here(given: Sequence[Any], base_path: Sequence[str]) -> int:
    """fork_exec of a process that is a fork itself, and has the imports."""
    asked = _asked(given)
    if asked is None:
        return _start_afresh(*given)
    job, descriptors = asked
    pid = os.fork()
    if pid == 0:
        job.run(descriptors, base_path)
    return pid


class ForkServer:
    """The server, with the environment and the path of this process. A context manager."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        program = (
            f"import sys; base, sys.path[:] = list(sys.path), {sys.path!r}; "
            f"import forked_python; forked_python.serve({theirs.fileno()}, base)"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, "-" * _COMMAND_LINE_BYTES],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Within it ``subprocess`` starts Python by a fork."""
        before = _posixsubprocess.fork_exec
        _install(self._fork_exec)
        try:
            yield
        finally:
            _install(before)

    def preload(self, modules: Sequence[str]) -> None:
        """Imports more modules for the processes to come."""
        with self._lock:
            self._socket.send(pickle.dumps(list(modules)))
            self._socket.recv(_MESSAGE_BYTES)

    def _fork_exec(self, *given: Any) -> int:
        asked = _asked(given)
        if asked is None:
            return _start_afresh(*given)
        job, descriptors = asked
        with self._lock:
            # The job's parent, a child of the server, ends at once: the job becomes this process's child.
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [pickle.dumps(job)], descriptors)
                pid = int(self._socket.recv(_MESSAGE_BYTES))
                self._socket.recv(_MESSAGE_BYTES)
            finally:
                _adopt_orphans(False)
        return pid


def _adopt_orphans(adopt: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(number: int, base_path: Sequence[str]) -> None:
    """The server: forks the jobs that come on socket ``number``, and imports the modules that do, until it is closed."""
    for module in PRELOADED:
        importlib.import_module(module)
    _make_first_calls()
    with socket.socket(fileno=number) as ours:
        while True:
            gc.freeze()  # or each fork's collections would go through, and so copy, all that was imported
            message, descriptors, _, _ = socket.recv_fds(ours, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
            if not message:
                return
            asked = pickle.loads(message)
            if isinstance(asked, Job):
                _fork_orphan(asked, descriptors, ours, base_path)
            else:
                for module in asked:
                    importlib.import_module(module)
            ours.send(b"done")


def _make_first_calls() -> None:
    """What costs seconds at its first call."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from tierstore.config import load
    from tierstore.train.config import TrainConfig

    load(TrainConfig, None)  # the declarations are read once
    checkpoint(torch.square, torch.ones(1, requires_grad=True), use_reentrant=False)


def _fork_orphan(job: Job, descriptors: Sequence[int], ours: socket.socket, base_path: Sequence[str]) -> None:
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            job.run(descriptors, base_path)
        ours.send(str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    for fd in descriptors:
        os.close(fd)
