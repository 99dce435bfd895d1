"""Real ranks on Gloo for tests: processes that live for the whole session and run one case after another.

``ranks.run(2, case, *arguments)`` calls the module-level function ``case(mesh, *arguments)`` on two ranks and
gives what each returned, in rank order. Arguments and results are pickled (tensors too). ``ranks.fresh(2)`` is
a world of its own, for cases that end ranks.
"""

from __future__ import annotations

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

    pids: list[int] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

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
        for rank in range(len(self.pids)):
            self.send(rank, case, *arguments)
        answers: list[Any] = []
        failures: list[str] = []
        for rank in range(len(self.pids)):
            try:
                # Once one has failed, the others may be waiting for it.
                answers.append(self.receive(rank, _CASE_S if not failures else 5.0))
            except (RankFailedError, EOFError) as error:
                failures.append(str(error) or f"rank {rank} ended")
        if failures:
            raise RankFailedError("\n".join(failures))
        return answers

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
    """Starts worlds, and keeps the last few of those whose cases all passed for the next test. ``simulated_device``:
    where it was built; each rank then has a simulated GPU instead of the CPU.
    """

    def __init__(self, simulated_device: Path | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._address = str(Path(self._directory.name, "socket"))
        self._listener = Listener(self._address, "AF_UNIX", backlog=64)
        program = Path(__file__).with_name("rank_server.py")
        # The server and its ranks import what this process would, from where it would.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        device = [] if simulated_device is None else [str(simulated_device)]
        self._server = subprocess.Popen(
            [sys.executable, str(program), self._address, *device], env=environment
        )
        self._control = self._accept()
        self._control.recv()
        self._worlds: dict[tuple[int, ParallelConfig], World] = {}

    def run(self, size: int, case: Case, *arguments: Any, **layout: Any) -> list[Any]:
        """``case(mesh, *arguments)`` on ``size`` ranks that are laid out as ``layout``, settings of ParallelConfig, says."""
        config = ParallelConfig(timeout_s=30.0, **layout)
        key = (size, config)
        world = self._worlds.pop(key, None)
        if world is None:
            while len(self._worlds) >= _KEPT:
                self.kill(self._worlds.pop(next(iter(self._worlds))))
            world = self._start(size, config, None)
        self._worlds[key] = world  # the one that was used last is last
        try:
            return world.run(case, *arguments)
        except RankFailedError:
            self.kill(self._worlds.pop(key))
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
            self.kill(world)

    def exit_code(self, pid: int) -> int:
        """Waits for a rank of this session to end: its exit code, or minus the signal. Raises RankFailedError when it
        does not.
        """
        self._control.send(("wait", pid, _END_S))
        code: int | None = self._control.recv()
        if code is None:
            raise RankFailedError(f"process {pid} has not ended within {_END_S:g} s")
        return code

    def kill(self, world: World) -> None:
        """Ends every rank of ``world`` at once."""
        self._control.send(("kill", world.pids))
        self._control.recv()
        world.end()

    def rest(self) -> None:
        """Ends the worlds that are kept."""
        while self._worlds:
            self.kill(self._worlds.popitem()[1])

    def close(self) -> None:
        for world in self._worlds.values():
            world.end()
        self._control.close()
        self._server.wait(30)
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
        self._control.send(
            ("start", local_environments(size), config, None if stderr is None else str(stderr), modules)
        )
        pids: list[int] = self._control.recv()
        called = [self._accept() for _ in pids]
        by_pid = {connection.recv()[1]: connection for connection in called}
        world = World(pids, [by_pid[pid] for pid in pids])
        for rank, connection in enumerate(world.connections):
            if not connection.poll(_JOIN_S):
                self.kill(world)
                raise RankFailedError(f"rank {rank} did not join within {_JOIN_S:g} s")
            connection.recv()
        return world
