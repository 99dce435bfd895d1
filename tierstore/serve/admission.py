"""Requests, their answers on the way from the model's thread to the event loop, and the queue of waiting requests."""

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


class RequestOutcome(Enum):
    """How a request ended, as metrics count it; the first two are OpenAI's reasons to finish an answer."""

    STOP = "stop"  # at an end-of-sequence token, or at a stop string
    LENGTH = "length"  # at its limit of tokens
    CANCELLED = "cancelled"  # its client left
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Update:
    """A part of an answer: ``text`` and ``reasoning`` since the last update; ``tokens``: the number of tokens so far.
    ``finish``, STOP or LENGTH, is set in the last update.
    """

    text: str
    tokens: int
    finish: RequestOutcome | None
    reasoning: str = ""


class AnswerError(Exception):
    """An answer ended early. The message is one sentence for the client."""


class GenerationRequest:
    """A request for at most ``max_tokens`` tokens after ``prompt``, and its answer as it grows. ``stop_tokens`` end the
    answer, like the model's end-of-sequence tokens.

    The event loop creates it and reads the answer. The model's thread writes the answer and never waits: for a slow client
    at most its own answer is buffered here.
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
        #: When the request was made, and later when its last token was chosen, by ``time.monotonic``.
        self.last_s = time.monotonic()
        #: The answer so far; its last token is the input of the next step. Owned by the model's thread.
        self.tokens: list[int] = []
        #: The client has left. Written by the event loop, read by the model's thread.
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._updates = asyncio.Queue[Update | AnswerError]()
        self._settled = threading.Lock()  # acquired once, at the end

    @property
    def most_tokens(self) -> int:
        """The most tokens that prompt and answer can have together."""
        return len(self.prompt) + self.max_tokens

    def settle(self) -> bool:
        """Mark the request as ended. True for the first caller only, so that an end is counted once."""
        return self._settled.acquire(blocking=False)

    def put(self, update: Update) -> None:
        """Add ``update`` to the answer, unless it is empty."""
        if update.text or update.reasoning or update.finish is not None:
            self._put(update)

    def fail(self, message: str) -> None:
        """End the answer with an error. Earlier updates are delivered first."""
        self._put(AnswerError(message))

    def _put(self, found: Update | AnswerError) -> None:
        # The loop is closed if the process ends at once: then nothing reads the answer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, found)

    async def take(self) -> Update:
        """Wait for more of the answer; return all that has arrived as one update. Raises AnswerError if it failed."""
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
    """The queue is full. The message is one sentence."""

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
    """First come, first served. The event loop adds and removes requests; the model's thread takes them.

    ``retry_after_s`` returns the seconds after which a refused client may try again.
    """

    def __init__(self, limits: LimitsConfig, retry_after_s: Callable[[], int]) -> None:
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._changed = threading.Condition()  # guards the three below
        self._waiting: deque[GenerationRequest] = deque()
        #: The most tokens of all waiting requests, prompts and answers.
        self.tokens = 0
        self._state = _State.OPEN

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def accepting(self) -> bool:
        """Whether new requests are accepted: the queue is neither draining nor closed."""
        return self._state is _State.OPEN

    def add(self, request: GenerationRequest) -> None:
        """Add a request. Raises RefusedError if a limit is reached, ClosingError if the queue is draining or closed."""
        asked = request.most_tokens
        with self._changed:
            if self._state is not _State.OPEN:
                raise ClosingError("the server is shutting down")
            if len(self._waiting) >= self._limits.queue:
                raise RefusedError(
                    f"the queue is full ({len(self._waiting)} requests are waiting)",
                    retry_after_s=self._retry_after_s(),
                )
            if self._waiting and self.tokens + asked > self._limits.queue_tokens:
                raise RefusedError(
                    f"the queue is full (waiting requests have {self.tokens} tokens; with {asked} more they would "
                    f"exceed {self._limits.queue_tokens})",
                    retry_after_s=self._retry_after_s(),
                )
            self._waiting.append(request)
            self.tokens += asked
            self._changed.notify()

    def remove(self, request: GenerationRequest) -> None:
        """Remove a request whose client left, if it still waits."""
        with self._changed:
            self._changed.notify()  # also if the request is in the batch
            if request in self._waiting:
                self._waiting.remove(request)
                self.tokens -= request.most_tokens

    def give_back(self, waiting: list[GenerationRequest]) -> None:
        """Put taken requests that did not fit the batch back at the front, except those whose client has left."""
        with self._changed:
            wanted = [one for one in waiting if not one.cancelled]
            self._waiting.extendleft(reversed(wanted))
            self.tokens += sum(one.most_tokens for one in wanted)

    def take(self, most: int) -> list[GenerationRequest]:
        """Take the first waiting requests: at most ``most``, and no more than ``limits.prefill_tokens`` tokens when each
        prompt is padded to the longest (but at least one request).
        """
        taken: list[GenerationRequest] = []
        longest = 0
        with self._changed:
            while self._waiting and len(taken) < most:
                longest = max(longest, len(self._waiting[0].prompt))
                if taken and longest * (len(taken) + 1) > self._limits.prefill_tokens:
                    break
                taken.append(self._waiting.popleft())
                self.tokens -= taken[-1].most_tokens
        return taken

    def prompt_tokens(self) -> int:
        """The tokens of the waiting prompts."""
        with self._changed:
            return sum(len(one.prompt) for one in self._waiting)

    def wait(self, most_s: float | None = None) -> bool:
        """Wait for a request, for at most ``most_s`` seconds; False if the queue is empty and accepts no more."""
        with self._changed:
            while not self._waiting:
                if self._state is not _State.OPEN:
                    return False
                if not self._changed.wait(most_s):
                    break
            return True

    def drain(self) -> None:
        """Accept no more requests; those that wait are still served."""
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.DRAINING
            self._changed.notify()

    def close(self) -> list[GenerationRequest]:
        """Accept and serve no more requests; return those that waited."""
        with self._changed:
            self._state = _State.CLOSED
            left, self._waiting, self.tokens = list(self._waiting), deque(), 0
            self._changed.notify()
        return left

    @property
    def closed(self) -> bool:
        """Whether the queue was closed, so that the batch must end too."""
        return self._state is _State.CLOSED
