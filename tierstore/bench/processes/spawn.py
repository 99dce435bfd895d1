"""Starting the ranks of a benchmark: processes of their own on this machine, that meet on the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tierstore.bench.processes.namespaces import RankNamespace

__all__ = ["start_ranks"]


def start_ranks(
    module: str,
    count: int,
    arguments: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    namespaces: Sequence[RankNamespace] = (),
) -> list[subprocess.Popen[bytes]]:
    """``python -m module arguments`` as each of ``count`` ranks, with pipes to and from it and ``environ`` besides what
    ranks need; in ``namespaces``, if any.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # -P: the installed package, whatever lies in the directory that this is called from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    started = []
    for rank in range(count):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": path,
            **environ,
        }
        line = command
        if namespaces:
            environment |= namespaces[rank].environment
            line = namespaces[rank].command(command)
        started.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
    return started
