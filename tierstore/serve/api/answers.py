"""Answers as OpenAI's API sends them: one JSON object, or server-sent events while the answer grows."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tierstore.serve.admission import AnswerError, GenerationRequest, RequestOutcome, Update
from tierstore.serve.api.bodies import ApiError
from tierstore.serve.engine import ServingEngine


class RequestKind(Enum):
    """The kind of a request. The value is the prefix of its answer's id."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Builds the objects of one answer, which share an id and a time. ``usage``: whether its events include token counts."""

    style: RequestKind
    model: str
    usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, text: str, finish: RequestOutcome, usage: dict[str, int], *, reasoning: str = ""
    ) -> dict[str, object]:
        """The answer as one object. A chat includes its reasoning, if there is any."""
        if self.style is RequestKind.CHAT:
            message = {"role": "assistant", "content": text, "refusal": None}
            thought = {"reasoning_content": reasoning} if reasoning else {}
            return self._object("chat.completion", [_choice(finish, message=message | thought)]) | {
                "usage": usage
            }
        return self._object("text_completion", [_choice(finish, text=text)]) | {"usage": usage}

    def opening(self) -> bytes | None:
        """The event before any text; None for a completion."""
        if self.style is RequestKind.COMPLETION:
            return None
        return self._chunk([_choice(None, delta={"role": "assistant", "content": ""})])

    def added(self, text: str, reasoning: str = "") -> bytes:
        """The event with more text. A chat includes reasoning, too."""
        if self.style is RequestKind.CHAT:
            named = {"reasoning_content": reasoning, "content": text}
            return self._chunk([_choice(None, delta={name: value for name, value in named.items() if value})])
        return self._chunk([_choice(None, text=text)])

    def closing(self, finish: RequestOutcome, usage: dict[str, int]) -> bytes:
        """The events after the text."""
        empty: dict[str, object] = {"delta": {}} if self.style is RequestKind.CHAT else {"text": ""}
        events = self._chunk([_choice(finish, **empty)])
        if self.usage:
            events += event(self._object(self._chunk_kind, []) | {"usage": usage})
        return events + b"data: [DONE]\n\n"

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.style is RequestKind.CHAT else "text_completion"

    def _chunk(self, choices: list[dict[str, object]]) -> bytes:
        chunk = self._object(self._chunk_kind, choices)
        return event(chunk | {"usage": None} if self.usage else chunk)

    def _object(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"{self.style.value}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


def _choice(finish: RequestOutcome | None, **content: object) -> dict[str, object]:
    reason = None if finish is None else finish.value
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def event(body: dict[str, object]) -> bytes:
    """A server-sent event. JSON escapes line breaks in strings, so the body is one line."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def model_body(name: str, created: int) -> dict[str, object]:
    """The served model, as /v1/models lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tierstore"}


T = TypeVar("T")


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of ``work``; None if the client leaves first, which cancels ``work``. The body must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class Answering:
    """Answers one accepted request. ``request_s``: seconds that it may take from now on."""

    def __init__(
        self, engine: ServingEngine, request: GenerationRequest, shape: Shape, *, request_s: float
    ) -> None:
        self._engine = engine
        self._request = request
        self._shape = shape
        self._request_s = request_s
        self._deadline_s = asyncio.get_running_loop().time() + request_s

    def usage(self, tokens: int) -> dict[str, int]:
        """Token counts under OpenAI's names; ``tokens``: those of the answer."""
        prompt = len(self._request.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Yield the answer as it grows. Raises ApiError if it ends early. Closing the generator cancels the request."""
        outcome = RequestOutcome.CANCELLED
        try:
            while True:
                async with asyncio.timeout_at(self._deadline_s):
                    update = await self._request.take()
                yield update
                if update.finish is not None:
                    return
        except TimeoutError as error:
            outcome = RequestOutcome.TIMEOUT
            raise ApiError(504, f"the answer was not complete within {self._request_s:g} s") from error
        except AnswerError as error:
            raise ApiError(500, str(error)) from error
        finally:
            self._engine.cancel(self._request, outcome)

    def leave(self) -> None:
        """Cancel the request, unless it has ended: the client has left."""
        self._engine.cancel(self._request)

    async def whole(self) -> Response:
        """Wait for the answer and return it as one object."""
        text = reasoning = ""
        async for update in self.updates():
            text, reasoning = text + update.text, reasoning + update.reasoning
        assert update.finish is not None
        usage = self.usage(update.tokens)
        return JSONResponse(self._shape.whole(text, update.finish, usage, reasoning=reasoning))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events. If it ends early, the last event is the error."""
        if (opening := self._shape.opening()) is not None:
            yield opening
        tokens, finish = 0, RequestOutcome.STOP
        updates = self.updates()
        try:
            async for update in updates:
                if update.text or update.reasoning:
                    yield self._shape.added(update.text, update.reasoning)
                if update.finish is not None:
                    tokens, finish = update.tokens, update.finish
        except ApiError as error:
            yield event(error.body())
            return
        finally:
            await updates.aclose()
        yield self._shape.closing(finish, self.usage(tokens))


class EventStream(Response):
    """Sends the events of an answer, which is cancelled if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the last event, or until the client leaves."""
        try:
            await while_there(receive, self._send(send))
        finally:
            self._answering.leave()  # also if not even the first event could be sent

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = self._answering.events()
        try:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
