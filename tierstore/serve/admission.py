"""Requests, their answers on the way from the model's thread to the event loop, and the queue in which they wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


class GenerationRequest:
    """At most ``max_tokens`` tokens after ``prompt``, and none after one of ``stop_tokens``, which end it besides the
    model's own; and the answer on its way.

    The event loop makes it and reads the answer. The thread that runs the model writes and never waits: what a slow client
    leaves here is at most its own answer.
    """

    def __init__(
        self,
        *,
        prompt: Sequence[int],
        max_tokens: int,
        sampler: TokenSampler,
        text: StreamedText,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.prompt = tuple(prompt)
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.text = text
        self.stop_tokens = stop_tokens
        #: When it was made, and then when its last token came, by ``time.monotonic``.
        self.last_s = time.monotonic()
        #: The answer so far; its last token is the input of the next step. Owned by the model's thread.
        self.tokens: list[int] = []
        #: Its client wants no more. Written by the event loop, read by the thread that runs the model.
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._updates = asyncio.Queue[Update | AnswerError]()
        self._settled = threading.Lock()  # taken once

    @property
    def most_tokens(self) -> int:
        """The tokens that it can come to hold."""
        return len(self.prompt) + self.max_tokens

    def settle(self) -> bool:
        """The request has ended. True for the first caller: an end is counted once."""
        return self._settled.acquire(blocking=False)

    def put(self, update: Update) -> None:
        """Adds to the answer."""
        if update.text or update.reasoning or update.finish is not None:
            self._put(update)

    def fail(self, message: str) -> None:
        """The answer ends here. What was put before is given first."""
        self._put(AnswerError(message))

    def _put(self, found: Update | AnswerError) -> None:
        # The loop is closed when the process ends at once: there is no reader any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, found)

    async def take(self) -> Update:
        """Waits for more of the answer; what has come by then is one update. Raises AnswerError where it failed."""
        parts = []
        found = await self._updates.get()
        while isinstance(found, Update):
            parts.append(found)
            if self._updates.empty():
                break
            found = self._updates.get_nowait()
        else:
            if not parts:
                raise found
            self._updates.put_nowait(found)
        text, reasoning = ("".join(getattr(part, name) for part in parts) for name in ("text", "reasoning"))
        return Update(text, parts[-1].tokens, parts[-1].finish, reasoning)


class RefusedError(Exception):
    """The queue has no room for the request now. The message is one sentence."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClosingError(Exception):
    """The server is being shut down and accepts no more requests."""


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
        self._waiting: deque[GenerationRequest] = deque()
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

    def add(self, request: GenerationRequest) -> None:
        """Raises RefusedError where a limit is reached, ClosingError where nothing is accepted any more."""
        asked = request.most_tokens
        with self._changed:
            if self._state is not _State.OPEN:
                raise ClosingError("the server is shutting down")
            if len(self._waiting) >= self._limits.queue:
                raise RefusedError(
                    f"the queue is full ({len(self._waiting)} requests are waiting)",
                    retry_after_s=self._retry_after_s(),
                )
            if self._waiting and self._tokens + asked > self._limits.queue_tokens:
                raise RefusedError(
                    f"the requests that wait hold {self._tokens} tokens, and with this one's {asked} they would hold "
                    f"more than {self._limits.queue_tokens}",
                    retry_after_s=self._retry_after_s(),
                )
            self._waiting.append(request)
            self._tokens += asked
            self._changed.notify()

    def remove(self, request: GenerationRequest) -> bool:
        """Its client wants no more; whether it was still waiting."""
        with self._changed:
            self._changed.notify()  # also a sequence of the batch may leave
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            self._tokens -= request.most_tokens
            return True

    def give_back(self, waiting: list[GenerationRequest]) -> None:
        """Puts taken requests that found no room back at the front, without those whose client has left."""
        with self._changed:
            wanted = [one for one in waiting if not one.cancelled]
            self._waiting.extendleft(reversed(wanted))
            self._tokens += sum(one.most_tokens for one in wanted)

    def take(self, room: int) -> list[GenerationRequest]:
        """The first of those that wait: at most ``room``, and as many prompts as may be computed together, each padded to
        the longest.
        """
        taken: list[GenerationRequest] = []
        longest = 0
        with self._changed:
            while self._waiting and len(taken) < room:
                longest = max(longest, len(self._waiting[0].prompt))
                if taken and longest * (len(taken) + 1) > self._limits.prefill_tokens:
                    break
                taken.append(self._waiting.popleft())
                self._tokens -= taken[-1].most_tokens
        return taken

    def prompt_tokens(self) -> int:
        """The tokens of the prompts that wait."""
        with self._changed:
            return sum(len(one.prompt) for one in self._waiting)

    def wait(self) -> bool:
        """Waits for a request; False if the queue is empty and accepts no more."""
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

    def close(self) -> list[GenerationRequest]:
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
