"""What the rivals of generation generate: prompts of random tokens, and random tokens that follow them.

A random model's own choices repeat themselves, and repetitions flatter every cache. So tokens are forced, whatever the
model would choose, where the library allows it; the choice that the model would have made is computed all the same.

Open-loop load: requests arrive by themselves, as a Poisson process, whether or not earlier ones have been answered. A closed
loop would wait with the next request while the server is slow, and hide the slow ones' latencies from the percentiles. A
request's time to its first token begins when it arrives, queueing included.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from process import Opened

from tierstore.bench.probes import process_bytes
from tierstore.config import check_least, check_positive
from tierstore.errors import ConfigError
from tierstore.machine import peak_resident_bytes
from tierstore.serve.batch import BatchRunner

_FIRST_TOKEN = 3  # below are the usual special ones


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``batch`` sequences of ``prompt_tokens``, each continued by ``new_tokens``. Raises ConfigError."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int
    seed: int = 7

    def __post_init__(self) -> None:
        check_least(self, 1, "batch", "prompt_tokens", "new_tokens")
        if self.vocabulary <= _FIRST_TOKEN:
            raise ConfigError(f"vocabulary: expected more than {_FIRST_TOKEN}, got {self.vocabulary}")

    def prompts(self) -> list[list[int]]:
        """The tokens of each sequence's prompt."""
        return self._drawn()[:, : self.prompt_tokens].tolist()

    def forced(self) -> list[list[int]]:
        """The tokens of each step, one of each sequence."""
        return self._drawn()[:, self.prompt_tokens :].T.tolist()

    def _drawn(self) -> Any:
        shape = (self.batch, self.prompt_tokens + self.new_tokens)
        return np.random.default_rng(self.seed).integers(_FIRST_TOKEN, self.vocabulary, shape)


@dataclass(frozen=True, kw_only=True)
class Load:
    """One request a sequence of ``requests``; they arrive at ``requests_per_s`` on average, and at most ``sequences`` are
    continued together. Raises ConfigError.
    """

    requests: Workload
    requests_per_s: float
    sequences: int
    seed: int = 11

    def __post_init__(self) -> None:
        check_least(self, 1, "sequences")
        check_positive(self, "requests_per_s")

    def arrivals(self) -> list[float]:
        """Seconds after the beginning, rising."""
        gaps = np.random.default_rng(self.seed).exponential(1 / self.requests_per_s, self.requests.batch)
        return np.cumsum(gaps).tolist()


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One run of a workload. ``step_s``: by step, or the mean alone where no more is known. ``chosen``: the tokens that the
    model itself would have chosen, by step and sequence, the prompt's first; empty where they are not known.

    Bytes are those that the process had read from storage. ``tiers``: what tierstore counted while it decoded: all that
    was read (``nvme_read``); of those ``speculated`` before any request, of which ``useful_speculated`` were requested
    later and ``late_prefetch`` were still on their way then (bytes); and ``hits`` and ``misses``. Of the whole process are
    the processors' seconds for the workload, and the most memory that it has had so far.
    """

    prefill_s: float
    step_s: Sequence[float]
    prefill_read_bytes: int
    decode_read_bytes: int
    chosen: Sequence[Sequence[int]] = ()
    tiers: Mapping[str, int] | None = None
    cpu_s: float = 0.0
    peak_resident_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerateTask:
    """What a rival is to open.

    ``module``: of this directory; its ``opened(task)`` gives the rival's description, what generates a Workload, and what
    serves a Load (None: nothing does). ``directory``: the rival's own, for what it keeps on disk. ``checkpoint``, ``store``
    and ``gguf`` hold the same weights; None where no rival needs it. ``host_budget``: tierstore's memory for experts, bytes.
    ``trace``: where tierstore records its accesses. ``settings``: of tierstore's configuration, by key.
    """

    rival: str
    module: str
    directory: Path
    threads: int
    sequences: int
    context: int
    checkpoint: Path | None = None
    store: Path | None = None
    gguf: Path | None = None
    host_budget: int = 0
    trace: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """The rival; it answers a Workload by ``Generated``, and a Load by ``LoadResult``."""
        with importlib.import_module(self.module).opened(self) as (description, generate, serve):

            def answer(request: Workload | Load) -> object:
                if isinstance(request, Load):
                    return serve(request)
                cpu = time.process_time()
                generated = generate(request)
                cpu_s = time.process_time() - cpu
                return replace(generated, cpu_s=cpu_s, peak_resident_bytes=peak_resident_bytes())

            yield description, answer


class Continued(Protocol):
    """Sequences that are computed step by step. Both return the token that the model would choose for each sequence."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]: ...
    def step(self, tokens: Sequence[int]) -> list[int]: ...


def timed(
    sequences: Continued, workload: Workload, counts: Callable[[], Mapping[str, int]] | None = None
) -> Generated:
    """Prefill, and every step. ``counts``: tierstore's counters now."""
    before = process_bytes()[0]
    begun = time.perf_counter()
    chosen = [sequences.prefill(workload.prompts())]
    prefill_s, after_prefill = time.perf_counter() - begun, process_bytes()[0]
    counted = counts() if counts else {}
    seconds = []
    for tokens in workload.forced():
        begun = time.perf_counter()
        chosen.append(sequences.step(tokens))
        seconds.append(time.perf_counter() - begun)
    return Generated(
        prefill_s=prefill_s,
        step_s=seconds,
        prefill_read_bytes=after_prefill - before,
        decode_read_bytes=process_bytes()[0] - after_prefill,
        chosen=chosen,
        tiers={key: now - counted[key] for key, now in counts().items()} if counts else None,
    )


# Open-loop load ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LoadResult:
    """Each request's seconds to its first token and to its last, and the seconds between tokens, of all requests.
    ``elapsed_s``: until the last answer.
    """

    first_token_s: list[float] = field(default_factory=list)
    complete_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    most_waiting: int = 0


@dataclass
class _Request:
    arrived: float
    prompt: list[int]
    rest: deque[int]  # forced tokens that are still to come
    last: float = 0.0


def serve_load(
    runner: BatchRunner,
    load: Load,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadResult:
    """Serves the load: requests that wait join between two steps, as far as there is room."""
    asked = load.requests
    coming = deque(
        _Request(arrived, prompt, deque(tokens))
        for arrived, prompt, tokens in zip(
            load.arrivals(), asked.prompts(), zip(*asked.forced(), strict=True), strict=True
        )
    )
    waiting: deque[_Request] = deque()
    running: dict[int, _Request] = {}
    found, begun = LoadResult(), clock()
    while coming or waiting or running:
        now = clock() - begun
        while coming and coming[0].arrived <= now:
            waiting.append(coming.popleft())
        found.most_waiting = max(found.most_waiting, len(waiting))
        room = load.sequences - len(running)
        if waiting and room:
            joining = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            joined = runner.join([one.prompt for one in joining])
            for request, number in zip(joining, joined, strict=True):
                request.last = clock() - begun
                found.first_token_s.append(request.last - request.arrived)
                running[number] = request
        elif running:
            runner.step({number: request.rest.popleft() for number, request in running.items()})
            for number, request in [*running.items()]:
                now = clock() - begun
                found.between_tokens_s.append(now - request.last)
                request.last = now
                if not request.rest:
                    runner.leave(number)
                    del running[number]
                    found.complete_s.append(now - request.arrived)
        else:
            sleep(max(coming[0].arrived - (clock() - begun), 0.0))
    found.elapsed_s = clock() - begun
    return found
