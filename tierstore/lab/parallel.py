"""Jobs on all cores: the longest first, so that none is left alone at the end; results in the order given.

Threads are enough: the native simulator releases the interpreter lock, and all of them read the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from tierstore.machine import cores

Result = TypeVar("Result")

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with how many of how many are done."""


def in_parallel(
    jobs: Sequence[Callable[[], Result]],
    *,
    weights: Sequence[float] = (),
    threads: int = 0,
    progress: OnProgress | None = None,
) -> list[Result]:
    """What each of ``jobs`` returns, on ``threads`` threads (0: one for each core).

    ``weights`` say how long each takes, in any unit; without, they are alike. What a job raises ends the rest.
    """
    if weights and len(weights) != len(jobs):
        raise ValueError(f"{len(jobs)} jobs with {len(weights)} weights")
    order = sorted(range(len(jobs)), key=lambda job: -weights[job]) if weights else list(range(len(jobs)))
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(threads or cores()) as pool:
        started = {job: pool.submit(jobs[job]) for job in order}
        try:
            for done, (job, future) in enumerate(started.items(), 1):
                results[job] = future.result()
                if progress is not None:
                    progress(done, len(jobs))
        finally:
            for future in started.values():
                future.cancel()
    return [results[job] for job in range(len(jobs))]
