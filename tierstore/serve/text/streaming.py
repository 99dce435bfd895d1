"""Text as its tokens come: whole characters, and nothing that may become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tierstore.errors import ConfigError

#: What decoders put for bytes that are no character, or not yet.
_REPLACED = "\ufffd"
#: Tokens after which bytes that are no character are taken as such.
_LONGEST_CHARACTER = 16


class PieceDecoder(Protocol):
    """Makes text of tokens, one after another."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        ...

    def finish(self) -> str:
        """No token follows: the text of what was incomplete."""
        ...


class BytePieces:
    """Of a model that reads bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token % 256]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenPieces:
    """Of a model with a tokenizer, by its ``decode``.

    A token's text can depend on those before it (a blank, a character of several tokens): the last tokens are decoded with
    the new one, and what is new in the text is the piece.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        #: The last tokens whose text has been given, and the new ones behind them, which begin at ``_given``.
        self._window: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        new = len(self._window) - self._given
        if text.endswith(_REPLACED) and new < _LONGEST_CHARACTER:
            return ""
        return self._give(text)

    def finish(self) -> str:
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        before = len(self._decode(self._window[: self._given]))
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text[before:]


class StreamedText:
    """The text of one answer, which ends before the first of ``stop``. Raises ConfigError for an empty stop string."""

    def __init__(self, pieces: PieceDecoder, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ConfigError("stop: expected strings of at least one character")
        self._pieces = pieces
        self._stop = tuple(stop)
        #: The text that is not given yet: a stop string may begin in it.
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string was met: what came before it has been given."""
        return self._stopped

    def push(self, token: int) -> str:
        """The text that is certain now; nothing once it has stopped."""
        if self._stopped:
            return ""
        return self._certain(self._pieces.push(token))

    def finish(self) -> str:
        """No token follows: the rest of the text."""
        if self._stopped:
            return ""
        text = self._certain(self._pieces.finish()) + self._held
        self._held = ""
        return text

    def _certain(self, piece: str) -> str:
        self._held += piece
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if found:
            self._stopped = True
            return self._take(min(found), rest="")
        certain = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)
        return self._take(certain, rest=self._held[certain:])

    def _take(self, count: int, *, rest: str) -> str:
        text, self._held = self._held[:count], rest
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``."""
    return next(
        (count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0
    )
