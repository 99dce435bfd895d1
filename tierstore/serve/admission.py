"""Requests, their answers on the way from the model's thread to the event loop, and the queue in which they wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tierstore.serve.config import LimitsConfig
from tierstore.serve.language import StreamedText
from tierstore.serve.sampling import TokenSampler


class Finish(Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"  # the model ended it, or a stop string did
    LENGTH = "length"  # its tokens are used up


class RequestOutcome(Enum):
    """How a request ended, as metrics count it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # its client left
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a client asks for: at most ``max_tokens`` tokens after ``prompt``, and none after one of ``stop_tokens``, which
    end it besides the model's own.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampler: TokenSampler
    text: StreamedText
    stop_tokens: frozenset[int] = frozenset()

    @property
    def tokens(self) -> int:
        """The tokens that it can come to hold."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Update:
    """``text`` and ``reasoning``: what has been added since the last update; ``tokens``: the tokens of the answer so far.
    ``finish`` comes with the last one.
    """

    text: str
    tokens: int
    finish: Finish | None
    reasoning: str = ""


class AnswerError(Exception):
    """An answer ended too early. The message is one sentence for its client."""


class Answer:
    """What was computed and not yet taken. The thread that runs the model writes and never waits: what a slow client leaves
    here is at most its own answer. The event loop ``loop`` reads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._lock = threading.Lock()  # guards the six below
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens = 0
        self._finish: Finish | None = None
        self._error: AnswerError | None = None
        self._settled = False
        #: Its client wants no more. Written by the event loop, read by the thread that runs the model.
        self.cancelled = False

    def settle(self) -> bool:
        """The request has ended. True for the first who says so: an end is counted once."""
        with self._lock:
            first, self._settled = not self._settled, True
        return first

    def put(self, text: str, tokens: int, finish: Finish | None = None, *, reasoning: str = "") -> None:
        """Add ``text`` and ``reasoning``; the answer has ``tokens`` tokens now."""
        with self._lock:
            self._text.append(text)
            self._reasoning.append(reasoning)
            self._tokens = tokens
            self._finish = finish
        if text or reasoning or finish is not None:
            self._wake()

    def fail(self, message: str) -> None:
        """The answer ends here. What was put before is given first."""
        with self._lock:
            self._error = AnswerError(message)
        self._wake()

    def _wake(self) -> None:
        # The loop is closed when the process ends at once: nobody reads any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> Update:
        """Waits for more of the answer. Raises AnswerError where it failed."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            text, self._text = "".join(self._text), []
            reasoning, self._reasoning = "".join(self._reasoning), []
            if self._error is not None and not (text or reasoning):
                raise self._error
            if self._error is not None:
                self._ready.set()
            return Update(text, self._tokens, self._finish, reasoning)


class RefusedError(Exception):
    """There is no room for the request now. The message is one sentence."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClosingError(Exception):
    """The server is being shut down and accepts no more requests."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request that was accepted. ``since_s``: when, by ``time.monotonic``."""

    generation: Generation
    answer: Answer
    since_s: float = field(default_factory=time.monotonic)


class _State(Enum):
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class RequestQueue:
    """First come, first served. The event loop adds and removes; the thread that runs the model takes.

    ``retry_after_s`` says when a client that is refused may ask again.
    """

    def __init__(self, limits: LimitsConfig, retry_after_s: Callable[[], int]) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._changed = threading.Condition()  # guards the three below
        self._waiting: deque[Waiting] = deque()
        self._tokens = 0
        self._state = _State.OPEN

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """The tokens of the requests that wait, prompts and answers."""
        return self._tokens

    @property
    def accepting(self) -> bool:
        """Whether it is not being drained or closed."""
        return self._state is _State.OPEN

    def add(self, waiting: Waiting) -> None:
        """Raises RefusedError where a limit is reached, ClosingError where nothing is accepted any more."""
        asked = waiting.generation.tokens
        with self._changed:
            if self._state is not _State.OPEN:
                raise ClosingError("the server is shutting down")
            if len(self._waiting) >= self._limits.queue:
                raise RefusedError(
                    f"{len(self._waiting)} requests wait already, and no more may",
                    retry_after_s=self._retry_after_s(),
                )
            if self._waiting and self._tokens + asked > self._limits.queue_tokens:
                raise RefusedError(
                    f"the requests that wait hold {self._tokens} tokens, and with this one's {asked} they would hold "
                    f"more than {self._limits.queue_tokens}",
                    retry_after_s=self._retry_after_s(),
                )
            self._waiting.append(waiting)
            self._tokens += asked
            self._changed.notify()

    def remove(self, waiting: Waiting) -> bool:
        """Its client wants no more; whether it was still waiting."""
        with self._changed:
            self._changed.notify()  # also a sequence of the batch may leave
            if waiting not in self._waiting:
                return False
            self._waiting.remove(waiting)
            self._tokens -= waiting.generation.tokens
            return True

    def give_back(self, waiting: list[Waiting]) -> None:
        """What was taken and found no room: it is first again. Not what nobody waits for any more."""
        with self._changed:
            wanted = [one for one in waiting if not one.answer.cancelled]
            self._waiting.extendleft(reversed(wanted))
            self._tokens += sum(one.generation.tokens for one in wanted)

    def take(self, room: int) -> list[Waiting]:
        """The first of those that wait: at most ``room``, and as many prompts as may be computed together, each padded to
        the longest.
        """
        taken: list[Waiting] = []
        longest = 0
        with self._changed:
            while self._waiting and len(taken) < room:
                longest = max(longest, len(self._waiting[0].generation.prompt))
                if taken and longest * (len(taken) + 1) > self._limits.prefill_tokens:
                    break
                taken.append(self._waiting.popleft())
                self._tokens -= taken[-1].generation.tokens
        return taken

    def prompt_tokens(self) -> int:
        """The tokens of the prompts that wait."""
        with self._changed:
            return sum(len(one.generation.prompt) for one in self._waiting)

    def wait(self) -> bool:
        """Waits until a request is there; False where there are none, and none will come."""
        with self._changed:
            while not self._waiting:
                if self._state is not _State.OPEN:
                    return False
                self._changed.wait()
            return True

    def drain(self) -> None:
        """Accepts nothing more; what waits is still served."""
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.DRAINING
            self._changed.notify()

    def close(self) -> list[Waiting]:
        """Accepts and serves nothing more; returns what waited."""
        with self._changed:
            self._state = _State.CLOSED
            left, self._waiting, self._tokens = list(self._waiting), deque(), 0
            self._changed.notify()
        return left

    @property
    def closed(self) -> bool:
        """Whether what is in the batch must end too."""
        return self._state is _State.CLOSED
