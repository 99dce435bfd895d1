"""Forks ranks from a process that has imported everything once: the program behind ``launcher.Ranks``.

Arguments: the socket of the test process; where the simulated device was built, if ranks are to have it. Each rank
calls back at the socket, joins its world through ``launch``, and then runs cases, one ``(file, function, arguments)``
after another, until it is sent None.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any


def serve(address: str, simulated_device: str | None) -> None:
    """Answers ``("start", environments, config, stderr, modules)`` with pids, ``("wait", pid, seconds)`` with an exit code
    (None: it has not ended), ``("kill", pids)`` with None. Only it signals ranks: it knows which pids are still theirs.
    """
    # What each rank would import for a second or two; numpy.ma is behind median().
    import hypothesis  # noqa: F401 - cases live in test files, which import it
    import numpy.ma  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed.device_mesh
    from torch.utils.checkpoint import checkpoint

    import tierstore.hf.spec
    import tierstore.model
    import tierstore.parallel
    import tierstore.plan.order
    import tierstore.train.session  # noqa: F401
    from tierstore.config import load
    from tierstore.train.config import TrainConfig

    load(TrainConfig, None)  # the declarations are read once
    # Its first call imports for seconds.
    checkpoint(torch.square, torch.ones(1, requires_grad=True), use_reentrant=False)

    if simulated_device is not None:
        import simulated

        simulated.load(Path(simulated_device))
    device = "cpu" if simulated_device is None else "simgpu"
    with Client(address, "AF_UNIX") as control:
        control.send(("server", os.getpid()))
        running: set[int] = set()
        while True:
            try:
                what, *details = control.recv()
            except EOFError:
                return
            if what == "start":
                environments, config, stderr, modules = details
                for name in modules:
                    importlib.import_module(name)
                gc.freeze()  # or each rank's collections would go through, and so copy, all that was imported
                pids = [_fork(control, address, device, e, config, stderr) for e in environments]
                running.update(pids)
                control.send(pids)
            elif what == "wait":
                control.send(_ended(*details, running))
            else:
                for pid in running.intersection(details[0]):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    running.discard(pid)
                control.send(None)


def _ended(pid: int, seconds: float, running: set[int]) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def _fork(
    control: Connection, address: str, device: str, environ: dict[str, str], config: Any, stderr: str | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        control.close()
        os.environ.update(environ)
        if stderr is not None:
            target = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, 2)
        status = _rank(address, device, config)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rank(address: str, device: str, config: Any) -> int:
    from tierstore.parallel import launch

    with Client(address, "AF_UNIX") as test:
        test.send(("rank", os.getpid()))
        with contextlib.suppress(EOFError), launch(config, device=device) as mesh:
            test.send(("joined", mesh.environment.rank))
            modules: dict[str, ModuleType] = {}
            while (case := pickle.loads(test.recv_bytes())) is not None:
                file, name, arguments = case
                try:
                    function = getattr(_module(file, modules), name)
                    answer = (True, function(mesh, *arguments))
                except BaseException:
                    answer = (False, traceback.format_exc())
                test.send_bytes(pickle.dumps(answer))
    return 0


def _module(file: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if file not in loaded:
        spec = importlib.util.spec_from_file_location(f"cases_{len(loaded)}", file)
        loaded[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded[file]
        spec.loader.exec_module(loaded[file])
    return loaded[file]


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
