"""Ranks of a benchmark: processes of their own that meet on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierstore.bench.worker import WorkerError

__all__ = ["run_ranks"]


def run_ranks(module: str, arguments: Sequence[str], *, ranks: int, timeout_s: float) -> list[Any]:
    """Runs ``python -m module arguments`` as ``ranks`` ranks; the JSON that each printed last, in rank order.

    Raises WorkerError when one fails or does not end within ``timeout_s`` seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = str(Path(__file__).resolve().parents[2])
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
        )
    try:
        return [_answer(rank, process, timeout_s) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _answer(rank: int, process: subprocess.Popen[str], timeout_s: float) -> Any:
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"rank {rank}: no answer within {timeout_s:g} s") from error
    if process.returncode != 0 or not printed.strip():
        raise WorkerError(f"rank {rank}: exited with status {process.returncode}")
    return json.loads(printed.strip().splitlines()[-1])
