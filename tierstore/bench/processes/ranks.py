"""Ranks of a benchmark: processes of their own on this machine, that meet on the loopback or in network namespaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tierstore.bench.processes.namespaces import RankNamespace
from tierstore.bench.processes.spawn import WorkerError, close_input, end, receive, send, start_module


def start_ranks(
    module: str,
    count: int,
    arguments: Sequence[str] = (),
    *,
    namespaces: Sequence[RankNamespace] = (),
) -> list[subprocess.Popen[bytes]]:
    """``python -m module arguments`` as each of ``count`` ranks; in ``namespaces``, if any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    started = []
    for rank in range(count):
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        inside: Sequence[str] = ()
        if namespaces:
            environ |= namespaces[rank].environment
            inside = namespaces[rank].command(())
        started.append(start_module(module, arguments, environ=environ, inside=inside))
    return started


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    timeout_s: float,
) -> list[Any]:
    """Runs ``python -m module arguments`` as ``ranks`` ranks; the JSON that each printed last, in rank order.

    Raises WorkerError when one fails or does not end within ``timeout_s`` seconds.
    """
    processes = start_ranks(module, ranks, arguments)
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


class AskedRanks:
    """Ranks that answer requests, one JSON object each, until they are closed; a context manager."""

    def __init__(self, module: str, count: int, *, namespaces: Sequence[RankNamespace] = ()) -> None:
        self._processes = start_ranks(module, count, namespaces=namespaces)

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
