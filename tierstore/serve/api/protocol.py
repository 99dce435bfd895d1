"""Connections whose clients neither send nor take.

uvicorn bounds how long a connection may idle between requests, and nothing else: a client that sends its header one byte
at a time, or reads nothing of its answer, would keep a descriptor for as long as it likes.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from tierstore.serve.config import LimitsConfig


class LimitedProtocol(H11Protocol):
    """A connection that is cut when a header takes more than ``receive_s`` to come, or what was sent more than ``send_s`` to
    be taken. ``limits`` is set by ``limited_protocol``.
    """

    limits: ClassVar[LimitsConfig]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        # The writer is paused as soon as the socket takes no more, so that the time below counts from there.
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
        """Whether a header is complete and its response is not."""
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
    """The class of connections under ``limits``; uvicorn makes them itself, without arguments of ours."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})
