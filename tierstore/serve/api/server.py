"""The HTTP server: a socket, signals, connection limits, and a shutdown that lets accepted requests finish.

The first SIGTERM or SIGINT drains: new requests are refused with 503, accepted ones continue for at most
``limits.drain_s`` seconds. The second ends the process at once.

uvicorn limits only how long a connection may idle between requests: a client that sends its header one byte at a time, or
does not read its answer, would keep a descriptor for as long as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import ClassVar

import aiofiles
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tierstore.serve.config import LimitsConfig
from tierstore.serve.engine import ServingEngine


class LimitedProtocol(H11Protocol):
    """A connection that is closed if a header takes longer than ``receive_s`` to arrive, or the client takes longer than
    ``send_s`` to accept what was sent. ``limited_protocol`` sets ``limits``.
    """

    limits: ClassVar[LimitsConfig]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        # Writing pauses as soon as the socket accepts no more; ``send_s`` counts from then on.
        transport.set_write_buffer_limits(high=0)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request():
            self._received()
        else:
            self._await_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0] and not self._in_request():
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        self._sent()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self.limits.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sent()

    def _in_request(self) -> bool:
        """Whether a request's header is complete and its response is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_header(self) -> None:
        if self._receiving is None:
            self._receiving = self.loop.call_later(self.limits.receive_s, self.transport.abort)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _sent(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def limited_protocol(limits: LimitsConfig) -> type[LimitedProtocol]:
    """A class of connections with ``limits``: uvicorn creates connections itself and cannot pass them."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


_LAST_WORDS_S = 5  # for computed answers to reach their clients, and log lines to be written


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; clients that connect before the server runs wait for it. Port 0 takes a free port.

    Raises OSError naming the address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sets TCP_NODELAY only if the protocol is given; without it a response of two writes takes 40 ms more.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), f"{host}:{port}") from error
    return bound


def url(bound: socket.socket) -> str:
    """The URL of the server that listens on ``bound``."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class ServerLog:
    """Writes log lines to a descriptor (default: standard error), which stays open.

    While the event loop runs, ``write`` never waits: aiofiles writes the lines on a thread of the loop's executor, so a
    stream that blocks (a full pipe, a disk that hangs) stops neither the loop nor the model. The last ``KEPT`` unwritten
    lines are kept; lines whose write fails are dropped.
    """

    KEPT = 1000

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._lines: deque[str] = deque(maxlen=self.KEPT)  # append and popleft are atomic
        self._ready = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def write(self, line: str) -> None:
        """Write a line, from any thread."""
        if self._loop is None:
            with open(self._fd, "a", closefd=False) as file:
                print(line, file=file)
            return
        self._lines.append(line)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._ready.set)

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write lines as they come. At the end, the remaining lines get ``_LAST_WORDS_S`` seconds."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.create_task(self._write_all())
        try:
            yield
        finally:
            self._loop = None
            self._ready.set()
            await asyncio.wait({task}, timeout=_LAST_WORDS_S)
            task.cancel()

    async def _write_all(self) -> None:
        # Not closed: each line is flushed, and closing would wait for a write that hangs.
        file = await aiofiles.open(self._fd, "a", closefd=False)
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._lines:
                with contextlib.suppress(OSError):
                    await file.write(f"{self._lines.popleft()}\n")
                    await file.flush()
            if self._loop is None:
                return


class ApiServer(uvicorn.Server):
    """Serves ``app`` while ``engine`` runs. ``opened`` is called once, when the model is open."""

    def __init__(
        self,
        app: FastAPI,
        engine: ServingEngine,
        limits: LimitsConfig,
        *,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=limited_protocol(limits),
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=limits.connections,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        self._engine = engine
        self._opened: Callable[[], None] | None = opened
        self._drain_s = limits.drain_s
        self._until_s = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. The second exits at once: the store is open for reading only, and a pass may take seconds."""
        if self._until_s < math.inf:
            os._exit(128 + sig)
        self._until_s = time.monotonic() + self._drain_s
        self._engine.drain()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._opened is not None and self._engine.opened:
            opened, self._opened = self._opened, None
            await asyncio.to_thread(opened)  # it prints
        if time.monotonic() >= self._until_s:
            self._engine.close()
        if not self._engine.alive:
            self.should_exit = True
        return await super().on_tick(counter)
