"""Real ranks on Gloo for tests: processes that live for the whole session and run one case after another.

``ranks.run(2, case, *arguments)`` calls the module-level function ``case(mesh, *arguments)`` on two ranks and
gives what each returned, in rank order. Arguments and results are pickled (tensors too). ``ranks.fresh(2)`` is
a world of its own, for cases that end ranks.
"""

import contextlib
import inspect
import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any

from forked_python import ForkServer

from tierstore.parallel import ParallelConfig
from tierstore.parallel.layout import local_environments

Case = Callable[..., Any]
_JOIN_S = 60.0
_CASE_S = 120.0
_END_S = 60.0
#: Worlds that are kept for the next test. Each rank has threads that poll its sockets, however idle it is.
_KEPT = 3
_TESTS = Path(__file__).parents[1]


class RankFailedError(AssertionError):
    """A case raised, or did not answer, on the ranks named in the message."""


@dataclass
class World:
    """The processes of one world, by rank."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, rank: int, case: Case, *arguments: Any) -> None:
        """Start ``case`` on one rank."""
        # Not send(): its pickler shares tensors' memory instead of sending them.
        self.connections[rank].send_bytes(pickle.dumps((inspect.getfile(case), case.__name__, arguments)))

    def receive(self, rank: int, timeout_s: float = _CASE_S) -> Any:
        """What the case returned. Raises RankFailedError with its traceback, EOFError if the rank ended."""
        connection = self.connections[rank]
        if not connection.poll(timeout_s):
            raise RankFailedError(f"rank {rank}: no answer within {timeout_s:g} s")
        passed, answer = pickle.loads(connection.recv_bytes())
        if not passed:
            raise RankFailedError(f"rank {rank}:\n{answer}")
        return answer

    def run(self, case: Case, *arguments: Any) -> list[Any]:
        """``case`` on all ranks. Raises RankFailedError when it raised on any."""
        for rank in range(len(self.processes)):
            self.send(rank, case, *arguments)
        answers: list[Any] = []
        failures: list[str] = []
        for rank in range(len(self.processes)):
            try:
                # Once one has failed, the others may be waiting for it.
                answers.append(self.receive(rank, _CASE_S if not failures else 5.0))
            except (RankFailedError, EOFError) as error:
                failures.append(str(error) or f"rank {rank} ended")
        if failures:
            raise RankFailedError("\n".join(failures))
        return answers

    def exit_code(self, rank: int) -> int:
        """Waits for a rank to end: its exit code, or minus the signal. Raises subprocess.TimeoutExpired."""
        return self.processes[rank].wait(_END_S)

    def kill(self) -> None:
        """Ends every rank at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.end()

    def end(self) -> None:
        """Ask every rank to leave; they may be gone already."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
            connection.close()


def _of_cases(name: str, module: ModuleType) -> bool:
    """Whether it is a model of transformers, or what test files share."""
    if name.startswith("transformers."):
        return ".modeling_" in name
    file = Path(getattr(module, "__file__", None) or "/")
    return _TESTS in file.parents and not file.name.startswith(("test_", "conftest"))


class Ranks:
    """Starts worlds by ``server``, and keeps the last few of those whose cases all passed for the next test.
    ``simulated_device``: where it was built; each rank then has a simulated GPU instead of the CPU.
    """

    def __init__(self, server: ForkServer, simulated_device: Path | None = None) -> None:
        self._server = server
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        address = str(Path(self._directory.name, "socket"))
        self._listener = Listener(address, "AF_UNIX", backlog=64)
        device = [] if simulated_device is None else [str(simulated_device)]
        self._command = [sys.executable, str(Path(__file__).with_name("rank_program.py")), address, *device]
        self._worlds: dict[tuple[int, ParallelConfig], World] = {}

    def run(self, size: int, case: Case, *arguments: Any, **layout: Any) -> list[Any]:
        """``case(mesh, *arguments)`` on ``size`` ranks that are laid out as ``layout``, settings of ParallelConfig, says."""
        config = ParallelConfig(timeout_s=30.0, **layout)
        key = (size, config)
        world = self._worlds.pop(key, None)
        if world is None:
            while len(self._worlds) >= _KEPT:
                self._worlds.pop(next(iter(self._worlds))).kill()
            world = self._start(size, config, None)
        self._worlds[key] = world  # the one that was used last is last
        try:
            return world.run(case, *arguments)
        except RankFailedError:
            self._worlds.pop(key).kill()
            raise

    @contextlib.contextmanager
    def fresh(
        self, size: int, config: ParallelConfig | None = None, stderr: Path | None = None
    ) -> Iterator[World]:
        """A world of its own; killed at the end if it still stands. ``stderr``: a file for all its ranks."""
        world = self._start(size, config or ParallelConfig(timeout_s=30.0, grace_s=2.0), stderr)
        try:
            yield world
        finally:
            world.kill()

    def rest(self) -> None:
        """Ends the worlds that are kept."""
        while self._worlds:
            self._worlds.popitem()[1].kill()

    def close(self) -> None:
        self.rest()
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> Connection:
        """The next process that calls back. Raises RankFailedError when none does."""
        # The listener itself has no timeout.
        calling = self._listener._listener._socket  # type: ignore[attr-defined]
        if not select.select([calling], [], [], _JOIN_S)[0]:
            raise RankFailedError(f"no process called back within {_JOIN_S:g} s")
        return self._listener.accept()

    def _start(self, size: int, config: ParallelConfig, stderr: Path | None) -> World:
        # What each rank would import by itself: a model of transformers takes a second and a half.
        modules = [name for name, module in sys.modules.items() if _of_cases(name, module)]
        self._server.preload(modules)
        world = World()
        # Ranks import what this process would, from where it would.
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._server.forking(), contextlib.ExitStack() as stack:
            target = None if stderr is None else stack.enter_context(stderr.open("ab"))
            for rank in local_environments(size):
                world.processes.append(subprocess.Popen(self._command, env=environ | rank, stderr=target))
        called = [self._accept() for _ in world.processes]
        by_pid = {connection.recv(): connection for connection in called}
        world.connections += [by_pid[process.pid] for process in world.processes]
        for connection in world.connections:
            connection.send(config)
        for rank, connection in enumerate(world.connections):
            with contextlib.suppress(EOFError):
                if connection.poll(_JOIN_S):
                    connection.recv()
                    continue
            world.kill()
            raise RankFailedError(f"rank {rank} ended, or did not join within {_JOIN_S:g} s")
        return world
