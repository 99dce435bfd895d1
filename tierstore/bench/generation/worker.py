"""A contestant in a process of its own. It is opened, runs each workload that it is sent, and ends with the pipe.

The parent sends the contestant's task, then any number of ``{"workload": ..}`` or ``{"load": ..}``. The child answers each
with one line: ``Opened``, then ``Ran`` or a ``OpenLoopResult``; a failure is ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierstore.bench.generation.contestant import ContestantTask, Generated, TierUse
from tierstore.bench.processes.spawn import serve
from tierstore.bench.rivals.worker import Ready, begin_child, told
from tierstore.config import from_dict

MODULE = "tierstore.bench.generation.worker"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A workload that ran, and the most memory that the process has had so far."""

    generated: Generated
    cpu_s: float
    peak_resident_bytes: int

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Ran:
        """The inverse of ``asdict``, through JSON."""
        made = dict(answer["generated"])
        tiers = made.pop("tiers")
        return Ran(
            generated=Generated(**made, tiers=None if tiers is None else TierUse(**tiers)),
            cpu_s=answer["cpu_s"],
            peak_resident_bytes=answer["peak_resident_bytes"],
        )


def answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    """What the child sends."""
    # Before torch is imported: all wait as OpenMP does by default, and as ``generate`` and ``serve`` have it.
    os.environ.pop("OMP_WAIT_POLICY", None)
    first = next(requests, None)
    if first is None:
        return
    task = from_dict(ContestantTask, first["config"])
    begin_child(task.directory, first["data_bytes"])
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with told():
            from tierstore.bench.generation.registry import CONTESTANTS

            opener = CONTESTANTS[task.contestant].load()
            contestant = stack.enter_context(opener(task))
            ready = Ready(description=list(contestant.describe()), open_s=time.perf_counter() - begun)
        yield asdict(ready)
        for request in requests:
            with told():
                answer = _load(contestant, request) if "load" in request else _run(contestant, request)
            yield answer


def _run(contestant: Any, request: Mapping[str, Any]) -> dict[str, object]:
    from tierstore.bench.generation.workload import GenerationWorkload
    from tierstore.train.footprint import peak_resident_bytes

    cpu = time.process_time()
    generated = contestant.generate(GenerationWorkload(**request["workload"]))
    ran = Ran(
        generated=generated,
        cpu_s=time.process_time() - cpu,
        peak_resident_bytes=peak_resident_bytes(),
    )
    return asdict(ran)


def _load(contestant: Any, request: Mapping[str, Any]) -> dict[str, object]:
    from tierstore.bench.generation.open_loop import OpenLoop, run_open_loop

    return asdict(run_open_loop(contestant.runner(), OpenLoop(**request["load"])))


if __name__ == "__main__":
    serve(answers)
    # A library's threads may not outlive the interpreter's end in order; there is nothing left to save.
    os._exit(0)
