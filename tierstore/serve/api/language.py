"""What makes tokens of text and text of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tierstore.serve.api.parameters import Parameters
from tierstore.serve.scheduler.interface import Sampler, TextStream


class Language(Protocol):
    """The text side of a model. Its methods may be called by any thread, one at a time."""

    @property
    def vocabulary(self) -> int:
        """Tokens are below this."""
        ...

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, each message with ``role`` and ``content``, up to where the assistant speaks. Raises
        DataError where the model has no template for it, or the template refuses it.
        """
        ...

    def sampler(self, parameters: Parameters) -> Sampler:
        """Chooses the tokens of one answer."""
        ...

    def text(self, stop: Sequence[str]) -> TextStream:
        """Makes the text of one answer, which ends before the first of ``stop``."""
        ...
