"""A training run in its own process that does a few steps at each request.

``bench train`` compares runs in turns. Each has its own process and so its own peak memory; the runs are open side by
side, and one rests while the other steps: both see the same disk and the same neighbours.

The protocol is one JSON object per line. The parent sends ``{"config": .., "trace": ..}``, then any number of
``{"steps": n}``, then closes the pipe. The child answers each with one line: what it opened, then ``RoundSteps``; a
failure is ``{"error": text}``.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.bench.probes import MemoryLimit
from tierstore.bench.processes import end, receive, send, serve, start_module
from tierstore.config import as_dict, from_dict

if TYPE_CHECKING:
    from tierstore.train.trainer import Trainer

#: The parts of a step's time that are shown (``tierstore.train.step_time``).
PARTS = (
    "computing_s",
    "torch_cpu_s",
    "engine_cpu_s",
    "run_queue_s",
    "stolen_s",
    "threads_s",
    "unaccounted_s",
)
_COUNTERS = ("read_bytes", "written_bytes", "hits", "misses", "wasted_prefetch_bytes")
_SPILLED = ("boundary_read_bytes", "boundary_written_bytes")


@dataclass(frozen=True, kw_only=True)
class RoundSteps:
    """Some steps of a run: the time and loss of each, and what all of them took."""

    step_s: Sequence[float]
    losses: Sequence[float]
    cpu_s: float
    stall_s_by_cause: Mapping[str, float]
    peak_resident_bytes: int
    read_bytes: int
    written_bytes: int
    wasted_prefetch_bytes: int
    hits: int
    misses: int
    #: Parts of ``StepTime``, in seconds over all steps, without those that the kernel does not count.
    part_s: Mapping[str, float]
    #: Bytes of block inputs that were written to disk and read back, in layer order.
    spilled_bytes: int = 0


class TrainingProcess:
    """The parent's end, after ``warmup`` steps. ``limit``: a memory cgroup to run the process in."""

    def __init__(
        self,
        name: str,
        config: object,
        *,
        warmup: int = 0,
        trace: Path | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:
        self._name = name
        self._process = start_module("tierstore.bench.train_process")
        try:
            if limit is not None:
                limit.add(self._process.pid)
            send(self._process, {"config": as_dict(config), "trace": None if trace is None else str(trace)})
            #: The memory that the run always holds (``fixed_resident_bytes``), and its own description (``effective``).
            self.opened = receive(self._process, name)
            if warmup:
                self.run(warmup)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def run(self, steps: int) -> RoundSteps:
        """Train ``steps`` steps. Raises WorkerError."""
        send(self._process, {"steps": steps})
        return RoundSteps(**receive(self._process, self._name))

    def close(self) -> None:
        """End the process and wait for it; its trace is complete then."""
        end(self._process)


# The child's end --------------------------------------------------------------------------------------------


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    from tierstore.machine import keep_freed_memory
    from tierstore.plan.order import choose_order, in_order, order_lines
    from tierstore.train.config import TrainConfig
    from tierstore.train.ranks import Opening
    from tierstore.train.session import open_session

    first = next(requests, None)
    if first is None:
        return
    config = from_dict(TrainConfig, first["config"])
    trace = None if first["trace"] is None else Path(first["trace"])
    keep_freed_memory()
    order = choose_order(config)
    config = in_order(config, order)
    with open_session(config, Opening.CREATE, trace=trace) as trainer:
        yield {
            "fixed_resident_bytes": trainer.account.nbytes - config.host_budget,
            "effective": [*trainer.store.describe(), trainer.describe_weights(), *order_lines(order)],
        }
        for request in requests:
            yield asdict(_steps(trainer, request["steps"]))


def _steps(trainer: Trainer, count: int) -> RoundSteps:
    from tierstore.machine import peak_resident_bytes
    from tierstore.train.report import counters

    before, stalls, cpu = counters(trainer), _stalls(trainer), time.process_time()
    results, times = [], []
    for _ in range(count):
        results.append(trainer.step())
        times += [trainer.timer.last] if trainer.timer.last is not None else []
    cpu, after = time.process_time() - cpu, counters(trainer)
    return RoundSteps(
        step_s=[result.seconds for result in results],
        losses=[result.loss for result in results],
        cpu_s=cpu,
        stall_s_by_cause={
            cause: (total - stalls.get(cause, 0)) / 1e9 for cause, total in _stalls(trainer).items()
        },
        peak_resident_bytes=peak_resident_bytes(),
        part_s={
            name: sum(getattr(one, name) for one in times)
            for name in PARTS
            if times and all(getattr(one, name) is not None for one in times)
        },
        spilled_bytes=sum(after.get(name, 0) - before.get(name, 0) for name in _SPILLED),
        **{name: after[name] - before[name] for name in _COUNTERS},
    )


def _stalls(trainer: Trainer) -> dict[str, int]:
    totals = trainer.ledger.totals(lambda key: key.cause.value)
    return {str(cause): spent for cause, spent in totals.items()}


if __name__ == "__main__":
    serve(_answers)
