"""A request, and its answer on the way from the thread that runs the model to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from tierstore.serve.scheduler.interface import Finish
from tierstore.serve.text.sampling import TokenSampler
from tierstore.serve.text.streaming import StreamedText


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
