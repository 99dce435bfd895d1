"""A training run in a process of its own, that does a few steps whenever it is told to.

``bench train`` compares runs in turns. Each has its own process, so that each has its own peak memory, and
the runs are open side by side, the one resting while the other steps: both see the same disk and the same
neighbours.

The protocol is one JSON object a line. The parent sends ``{"config": .., "trace": ..}``, then any number of
``{"steps": n}``, then closes the pipe. The child answers each with one line; a failure is
``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tierstore.bench.probes.memory_limit import MemoryLimit
from tierstore.config import as_dict, from_dict
from tierstore.errors import TierstoreError

__all__ = ["TrainingProcess", "WorkerError"]


class WorkerError(TierstoreError):
    """A training process that failed, or was killed."""


class TrainingProcess:
    """The parent's end; a context manager. ``limit``: a memory cgroup for the process to live in."""

    def __init__(
        self, name: str, config: object, *, trace: Path | None = None, limit: MemoryLimit | None = None
    ) -> None:
        self._name = name
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        package = str(Path(__file__).resolve().parents[3])
        environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
        self._process = subprocess.Popen(
            # -P: the installed package, whatever lies in the directory that this is called from.
            [sys.executable, "-P", "-m", "tierstore.bench.training.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        try:
            if limit is not None:
                limit.add(self._process.pid)
            #: What the process said when its session was open.
            self.opened = self._ask(
                {"config": as_dict(config), "trace": None if trace is None else str(trace)}
            )
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def run(self, steps: int) -> dict[str, Any]:
        """Trains ``steps`` steps. Raises WorkerError."""
        return self._ask({"steps": steps})

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it died: the empty answer says so
        line = stdout.readline()
        if not line:
            status = self._process.wait()
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            raise WorkerError(f"{self._name}: the training process {how}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self._name}: {answer['error']}")
        return answer

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        """Ends the process and waits for it; its trace is whole then."""
        stdin, stdout = self._pipes()
        if not stdin.closed:
            stdin.close()
        self._process.wait()
        stdout.close()

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# The child's end
# ------------------------------------------------------------------------------------------------


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    def answer(content: Mapping[str, object]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    try:
        first = json.loads(requests.readline() or b"{}")
        if not first:
            return
        _train(first, requests, answer)
    except (TierstoreError, OSError) as error:
        answer({"error": f"{type(error).__name__}: {error}"})


def _train(first: Mapping[str, Any], requests: IO[bytes], answer: Any) -> None:
    from tierstore.train.config import TrainConfig
    from tierstore.train.footprint import fixed_cost, keep_freed_memory, peak_resident_bytes, resident_bytes
    from tierstore.train.session import Opening, open_session

    config = from_dict(TrainConfig, first["config"])
    trace = None if first["trace"] is None else Path(first["trace"])
    keep_freed_memory()
    fixed = fixed_cost(config, resident_bytes()).nbytes
    with open_session(config, Opening.CREATE, trace=trace) as trainer:
        answer({"fixed_resident_bytes": fixed, "effective": trainer.store.describe()})
        for line in requests:
            before, stalls, cpu = _counts(trainer), _stalls(trainer), time.process_time()
            results = [trainer.step() for _ in range(json.loads(line)["steps"])]
            after = _counts(trainer)
            answer(
                {
                    "step_s": [result.seconds for result in results],
                    "cpu_s": time.process_time() - cpu,
                    "losses": [result.loss for result in results],
                    "peak_resident_bytes": peak_resident_bytes(),
                    "stall_s_by_cause": {
                        cause: (total - stalls.get(cause, 0)) / 1e9
                        for cause, total in _stalls(trainer).items()
                    },
                    **{name: after[name] - before[name] for name in after},
                }
            )


def _counts(trainer: Any) -> dict[str, int]:
    from tierstore.train.report import counters

    return counters(trainer)


def _stalls(trainer: Any) -> dict[str, int]:
    totals: dict[Any, int] = trainer.ledger.totals(lambda key: key.cause.value)
    return {str(cause): spent for cause, spent in totals.items()}


if __name__ == "__main__":
    # Answers have a descriptor of their own: whatever a library prints goes to stderr.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, channel)
