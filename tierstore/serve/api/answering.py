"""An answer as one JSON object, or as server-sent events while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tierstore.serve.api.errors import ApiError
from tierstore.serve.api.receiving import while_there
from tierstore.serve.api.shapes import Shape, TokenUsage, event
from tierstore.serve.scheduler.engine import ServingEngine
from tierstore.serve.scheduler.interface import Finish, RequestOutcome
from tierstore.serve.scheduler.queue import Waiting
from tierstore.serve.scheduler.request import AnswerError, Update


class Answering:
    """One request that was accepted. ``request_s``: how long it may take from then on."""

    def __init__(self, engine: ServingEngine, waiting: Waiting, shape: Shape, *, request_s: float) -> None:
        self._engine = engine
        self._waiting = waiting
        self._shape = shape
        self._request_s = request_s
        self._deadline_s = asyncio.get_running_loop().time() + request_s

    @property
    def shape(self) -> Shape:
        """The objects of the answer."""
        return self._shape

    def usage(self, tokens: int) -> TokenUsage:
        """With ``tokens`` of answer."""
        return TokenUsage(prompt=len(self._waiting.generation.prompt), answer=tokens)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """The answer as it grows. Raises ApiError where it ends early; leaving before the end cancels the request."""
        outcome = RequestOutcome.CANCELLED
        try:
            while True:
                async with asyncio.timeout_at(self._deadline_s):
                    update = await self._waiting.answer.take()
                yield update
                if update.finish is not None:
                    return
        except TimeoutError as error:
            outcome = RequestOutcome.TIMEOUT
            raise ApiError(504, f"the answer was not complete within {self._request_s:g} s") from error
        except AnswerError as error:
            raise ApiError(500, str(error)) from error
        finally:
            self._engine.cancel(self._waiting, outcome)

    def leave(self) -> None:
        """Nobody waits for it any more, if it has not ended."""
        self._engine.cancel(self._waiting)

    async def whole(self) -> Response:
        """The answer as one object."""
        text = reasoning = ""
        async for update in self.updates():
            text, reasoning = text + update.text, reasoning + update.reasoning
        assert update.finish is not None
        usage = self.usage(update.tokens)
        return JSONResponse(self._shape.whole(text, update.finish, usage, reasoning=reasoning))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events. Where it ends early, the last is the error."""
        if (opening := self._shape.opening()) is not None:
            yield opening
        tokens, finish = 0, Finish.STOP
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
    """Sends the events of an answer. A client that leaves cancels it."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the last event, or until the client leaves."""
        try:
            await while_there(receive, self._send(send))
        finally:
            self._answering.leave()  # also where not even the first event could be sent

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = self._answering.events()
        try:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
