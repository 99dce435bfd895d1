"""Ranks of a benchmark: processes of their own that meet on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from tierstore.bench.processes.namespaces import RankNamespace
from tierstore.bench.processes.spawn import start_ranks
from tierstore.bench.training.worker import WorkerError

__all__ = ["run_ranks"]


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    timeout_s: float,
    namespaces: Sequence[RankNamespace] = (),
) -> list[Any]:
    """Runs ``python -m module arguments`` as ``ranks`` ranks; the JSON that each printed last, in rank order. They live in
    ``namespaces``, if any.

    Raises WorkerError when one fails or does not end within ``timeout_s`` seconds.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    environ = {"GLOO_SOCKET_IFNAME": interface}
    processes = start_ranks(module, ranks, arguments, environ=environ, namespaces=namespaces)
    try:
        return [_answer(rank, process, timeout_s) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _answer(rank: int, process: subprocess.Popen[bytes], timeout_s: float) -> Any:
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"rank {rank}: no answer within {timeout_s:g} s") from error
    if process.returncode != 0 or not printed.strip():
        raise WorkerError(f"rank {rank}: exited with status {process.returncode}")
    return json.loads(printed.strip().splitlines()[-1])
