"""What comes in: keys, and bodies of a limited size in a limited time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from tierstore.errors import ConfigError
from tierstore.serve.api.errors import ApiError
from tierstore.serve.config import LimitsConfig

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_SHORTEST_KEY = 16
# Bodies up to this many times the limit are read to their end, unkept: a client that is still sending when its connection is
# closed sees a reset, not the answer.
_DISCARDED = 8


class Keys:
    """Bearer keys. With none, everybody may ask."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The keys of a file: one a line; empty lines and lines that start with # are passed over. Raises ConfigError for
        a file without keys, or with one that is short or has blanks, OSError for one that cannot be read.
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
                    f"--api-keys: {path}:{number}: expected at least {_SHORTEST_KEY} ASCII characters without blanks"
                )
            keys.append(line)
        if not keys:
            raise ConfigError(f"--api-keys: {path} holds no key")
        return cls(tuple(keys))

    @property
    def required(self) -> bool:
        """Whether a key must be given."""
        return bool(self._digests)

    def check(self, header: str | None) -> None:
        """``header``: the field Authorization. Raises ApiError. The time it takes does not tell how much of a key is right:
        digests are compared, with all keys.
        """
        if not self._digests:
            return
        scheme, _, key = (header or "").partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            message = (
                "a key is needed, as Authorization: Bearer KEY" if header is None else "the key is not known"
            )
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """A JSON request's body. Raises ApiError where it is too large, too slow, or said to be something else."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":  # a page of another origin can send others without being asked
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
            408, f"the body did not come within {limits.receive_s:g} s", headers={"Connection": "close"}
        ) from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its request was complete") from error
    if size > limits.body:
        raise ApiError(413, f"the body is larger than {limits.body} bytes", headers={"Connection": "close"})
    return b"".join(parts)


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """What ``work`` returns; None where the client leaves first: then ``work`` is cancelled. The body has been read."""
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
