"""The routes; API keys, and limits on the size and time of request bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.resources
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response

from tierstore.errors import ConfigError, DataError
from tierstore.serve.admission import ClosingError, GenerationRequest, RefusedError
from tierstore.serve.api.answers import Answering, EventStream, RequestKind, Shape, model_body, while_there
from tierstore.serve.api.bodies import ApiError, ChatBody, CompletionBody, bad, parse_body, shown
from tierstore.serve.api.metrics import ServerMetrics
from tierstore.serve.api.server import ServerLog
from tierstore.serve.config import LimitsConfig
from tierstore.serve.engine import ServingEngine
from tierstore.serve.sampling import TokenSampler

_SHORTEST_KEY = 16
# Bodies up to this many times the limit are read to their end and discarded: a client that is still sending when its
# connection is closed sees a reset, not the answer.
_DISCARDED = 8


class Keys:
    """The API keys that requests may present as bearer tokens. Without any, requests need no key."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read the keys in a file, one per line; empty lines and lines that start with # are skipped. Raises ConfigError if
        the file has no keys, or one that is too short or has spaces, OSError if it cannot be read.
        """
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise ConfigError(f"--api-keys: {path} is not UTF-8") from error
        keys = []
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            if len(line) < _SHORTEST_KEY or not line.isascii() or " " in line or not line.isprintable():
                raise ConfigError(
                    f"--api-keys: {path}:{number}: expected at least {_SHORTEST_KEY} ASCII characters without spaces"
                )
            keys.append(line)
        if not keys:
            raise ConfigError(f"--api-keys: {path} contains no keys")
        return cls(tuple(keys))

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def check(self, header: str | None) -> None:
        """Check ``header``, the field Authorization. Raises ApiError. Digests are compared in constant time, with all keys,
        so the time does not reveal how much of a key is right.
        """
        if not self._digests:
            return
        scheme, _, key = (header or "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            message = (
                "an API key is required (Authorization: Bearer KEY)" if header is None else "unknown API key"
            )
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def receive_body(request: Request, limits: LimitsConfig) -> bytes:
    """Receive the body of a JSON request. Raises ApiError if it is too large, too slow, or of another content type."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":  # browsers let pages of other origins send other types unasked
        raise ApiError(415, "Content-Type must be application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.receive_s):
            async for part in request.stream():
                size += len(part)
                if size <= limits.body:
                    parts.append(part)
                elif size > _DISCARDED * limits.body:
                    break
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not arrive within {limits.receive_s:g} s", headers={"Connection": "close"}
        ) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its request was complete") from error
    if size > limits.body:
        raise ApiError(413, f"the body is larger than {limits.body} bytes", headers={"Connection": "close"})
    return b"".join(parts)


_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_OPENING = "the model is being opened"


class Service:
    """The routes and their state. ``engine`` has been entered; ``model``: the name of its model."""

    def __init__(
        self,
        *,
        engine: ServingEngine,
        metrics: ServerMetrics,
        limits: LimitsConfig,
        keys: Keys,
        model: str,
        log: ServerLog | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self._limits = limits
        self._keys = keys
        self._model = model
        self._log = log or ServerLog()
        self._created = int(time.time())
        # One thread: tokenizers are not thread-safe, and the event loop must not wait for them.
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="tierstore-text")
        self._page = importlib.resources.files("tierstore.serve.api").joinpath("page.html").read_text("utf-8")

    def app(self) -> FastAPI:
        """Create the ASGI application."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> Any:
            async with self._log.writing():
                yield
            self._texts.shutdown()

        # No documentation pages of FastAPI: they load scripts from other sites.
        app = FastAPI(title="tierstore", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
        app.add_exception_handler(ApiError, self._refuse)
        app.add_exception_handler(HTTPException, self._refuse)
        app.add_exception_handler(Exception, self._fail)
        # Which requests a route takes: all, those with a valid key, or those with a key once the model is open.
        free: list[Any] = []
        keyed = [Depends(self._check_key)]
        opened = [*keyed, Depends(self._check_opened)]
        for method, path, admitted, endpoint in (
            ("GET", "/", free, self._page_at_root),
            ("GET", "/health", free, self._health),
            ("GET", "/metrics", keyed, self._show_metrics),
            ("GET", "/v1/models", opened, self._models),
            ("GET", "/v1/models/{name:path}", opened, self._one_model),
            ("POST", "/v1/completions", opened, self._completions),
            ("POST", "/v1/chat/completions", opened, self._chat),
        ):
            app.add_api_route(path, endpoint, methods=[method], response_model=None, dependencies=admitted)
        return app

    async def _check_key(self, request: Request) -> None:
        self._keys.check(request.headers.get("authorization"))

    async def _check_opened(self) -> None:
        if not self.engine.opened:
            raise ApiError(503, _OPENING, headers={"Retry-After": "1"})

    async def _page_at_root(self) -> Response:
        return HTMLResponse(
            self._page,
            headers={
                "Content-Security-Policy": _PAGE_POLICY,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
            },
        )

    async def _health(self) -> Response:
        engine = self.engine
        if not engine.alive:
            return JSONResponse({"status": "the model has stopped"}, status_code=503)
        if not engine.queue.accepting:
            return JSONResponse({"status": "shutting down"}, status_code=503)
        if not engine.opened:
            return JSONResponse({"status": _OPENING}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [model_body(self._model, self._created)]})

    async def _one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(model_body(self._model, self._created))

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, RequestKind.COMPLETION, CompletionBody)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, RequestKind.CHAT, ChatBody)

    async def _answer(
        self, request: Request, style: RequestKind, kind: type[ChatBody | CompletionBody]
    ) -> Response:
        body = parse_body(kind, await receive_body(request, self._limits))
        self._check_model(body.model)
        answering = Answering(
            self.engine,
            self._submit(body, await self._tokens(body)),
            Shape(style=style, model=self._model, usage=body.include_usage),
            request_s=self._limits.request_s,
        )
        if body.stream:
            return EventStream(answering)
        answered = await while_there(request.receive, answering.whole())
        return _NoResponse() if answered is None else answered

    def _check_model(self, name: str) -> None:
        if name != self._model:
            raise ApiError(
                404,
                f"unknown model {shown(name)!r}: this server serves {self._model!r}",
                param="model",
                code="model_not_found",
            )

    async def _tokens(self, body: ChatBody | CompletionBody) -> list[int]:
        language = self.engine.running.language
        if isinstance(body, ChatBody):
            work = partial(language.encode_chat, [message.spoken() for message in body.messages])
        elif isinstance(body.prompt, str):
            work = partial(language.encode, body.prompt)
        else:
            if any(token >= language.vocabulary for token in body.prompt):
                raise bad("prompt", f"expected tokens below {language.vocabulary}")
            return body.prompt
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts, work)
        except DataError as error:
            raise bad(body.prompt_field, str(error)) from error

    def _submit(self, body: ChatBody | CompletionBody, prompt: list[int]) -> GenerationRequest:
        field, limits, running = body.prompt_field, self._limits, self.engine.running
        if not prompt:
            raise bad(field, "contains no tokens")
        left = running.context - len(prompt)
        if left < 1:
            raise ApiError(
                400,
                f"{field}: {len(prompt)} tokens leave no room for an answer in the context of {running.context}",
                param=field,
                code="context_length_exceeded",
            )
        if any(token >= running.language.vocabulary for token in body.stop_token_ids):
            raise bad("stop_token_ids", f"expected tokens below {running.language.vocabulary}")
        most = min(left, limits.tokens or left)
        asked = body.limit
        if asked is not None and asked > most:
            reason = f"the context of {running.context} leaves" if most == left else "this server allows"
            raise ApiError(
                400,
                f"max_tokens: {asked} exceeds the {most} tokens that {reason} for an answer",
                param="max_tokens",
                code="context_length_exceeded" if most == left else None,
            )
        request = GenerationRequest(
            prompt=prompt,
            max_tokens=min(most, limits.default_tokens) if asked is None else asked,
            sampler=TokenSampler(body.sampled(running.language.defaults), prompt),
            # A completion continues the text of its prompt; a chat's answer is a new text.
            text=running.language.text(
                body.stop, prompt=prompt, context=() if isinstance(body, ChatBody) else prompt
            ),
            stop_tokens=frozenset(body.stop_token_ids),
        )
        try:
            return self.engine.submit(request)
        except RefusedError as error:
            raise ApiError(
                429, str(error), code="rate_limit_exceeded", headers={"Retry-After": str(error.retry_after_s)}
            ) from error
        except ClosingError as error:
            raise ApiError(503, str(error), headers={"Connection": "close"}) from error

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # raised by routing
            reasons = {
                404: f"unknown path {shown(request.url.path)}",
                405: f"{request.method} is not allowed for this path",
            }
            error = ApiError(
                error.status_code,
                reasons.get(error.status_code, str(error.detail)),
                headers=error.headers or {},
            )
        assert isinstance(error, ApiError)
        self.metrics.refused(error.status)
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    async def _fail(self, request: Request, error: Exception) -> Response:
        """Answer an error of the program itself with status 500; log its traceback."""
        self._log.write("".join(traceback.format_exception(error)).rstrip())
        return await self._refuse(request, ApiError(500, "internal error; the server's log has the details"))


class _NoResponse(Response):
    """Sends nothing: the client has left."""

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        return
