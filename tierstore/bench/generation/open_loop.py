"""Open-loop load: requests arrive by themselves, as a Poisson process, whether or not earlier ones have been answered.

A closed loop would wait with the next request while the server is slow, and hide the slow ones' latencies from the
percentiles. Here a request's time to its first token begins when it arrives, queueing included.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from tierstore.bench.checks import at_least, more_than_0
from tierstore.bench.generation.workload import GenerationWorkload
from tierstore.serve.batch import BatchRunner


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """``requests`` of ``prompt_tokens`` and ``new_tokens`` arrive at ``requests_per_s``; at most ``sequences`` are continued
    together. Raises ConfigError.
    """

    requests: int
    requests_per_s: float
    sequences: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int
    seed: int = 11

    def __post_init__(self) -> None:
        at_least(1, requests=self.requests, sequences=self.sequences)
        more_than_0(requests_per_s=self.requests_per_s)

    def as_json(self) -> dict[str, float]:
        """The inverse of ``OpenLoop(**..)``."""
        return asdict(self)

    def arrivals(self) -> list[float]:
        """Seconds after the beginning, rising."""
        random = np.random.default_rng(self.seed)
        gaps: list[float] = np.cumsum(random.exponential(1 / self.requests_per_s, self.requests)).tolist()
        return gaps

    def workload(self) -> GenerationWorkload:
        """A sequence for each request."""
        return GenerationWorkload(
            batch=self.requests,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            vocabulary=self.vocabulary,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class OpenLoopResult:
    """Each request's seconds to its first token and to its last, and the seconds between tokens, of all requests.
    ``elapsed_s``: until the last answer.
    """

    first_token_s: list[float]
    complete_s: list[float]
    between_tokens_s: list[float]
    elapsed_s: float
    most_waiting: int


@dataclass
class _Request:
    arrived: float
    prompt: list[int]
    rest: deque[int]  # forced tokens that are still to come
    last: float = 0.0


@dataclass
class _State:
    waiting: deque[_Request] = field(default_factory=deque)
    running: dict[int, _Request] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    complete: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    most_waiting: int = 0


def run_open_loop(
    runner: BatchRunner,
    load: OpenLoop,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenLoopResult:
    """Serves the load: whoever waits joins between two steps, as far as there is room."""
    state, coming, begun = _State(), deque(_requests(load)), clock()
    while coming or state.waiting or state.running:
        now = clock() - begun
        while coming and coming[0].arrived <= now:
            state.waiting.append(coming.popleft())
        state.most_waiting = max(state.most_waiting, len(state.waiting))
        room = load.sequences - len(state.running)
        if state.waiting and room:
            _join(runner, state, room, lambda: clock() - begun)
        elif state.running:
            _step(runner, state, lambda: clock() - begun)
        else:
            sleep(max(coming[0].arrived - (clock() - begun), 0.0))
    return OpenLoopResult(
        first_token_s=state.first,
        complete_s=state.complete,
        between_tokens_s=state.between,
        elapsed_s=clock() - begun,
        most_waiting=state.most_waiting,
    )


def _requests(load: OpenLoop) -> Iterator[_Request]:
    made = load.workload()
    forced = zip(*made.forced(), strict=True)
    for arrived, prompt, tokens in zip(load.arrivals(), made.prompts(), forced, strict=True):
        yield _Request(arrived, prompt, deque(tokens))


def _join(runner: BatchRunner, state: _State, room: int, now: Callable[[], float]) -> None:
    joining = [state.waiting.popleft() for _ in range(min(room, len(state.waiting)))]
    joined = runner.join([one.prompt for one in joining])
    for request, made in zip(joining, joined, strict=True):
        request.last = now()
        state.first.append(request.last - request.arrived)
        state.running[made.number] = request


def _step(runner: BatchRunner, state: _State, now: Callable[[], float]) -> None:
    runner.step({number: request.rest.popleft() for number, request in state.running.items()})
    for number, request in [*state.running.items()]:
        at = now()
        state.between.append(at - request.last)
        request.last = at
        if not request.rest:
            runner.leave(number)
            del state.running[number]
            state.complete.append(at - request.arrived)
