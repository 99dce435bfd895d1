"""Text to tokens and back: tokenizers, chat templates, incomplete characters, stop strings, and reasoning.

Models of OpenAI's harmony format (gpt-oss) write messages, each in a channel:
``<|start|>assistant<|channel|>analysis<|message|>...<|end|>``. A message in the channel ``final``, or in none, is the
answer; all others are its reasoning.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from tierstore.errors import ConfigError, DataError
from tierstore.hf.spec import HfSpec
from tierstore.model.spec import ModelSpec
from tierstore.serve.sampling import SamplingOptions, generation_defaults
from tierstore.train.tokens.tokenizing import DocumentTokenizer
from tierstore.units import is_unicode

#: What decoders write for bytes that are not a character, or not yet.
_REPLACED = "\ufffd"
#: Text that may still change is returned after this many tokens at the latest, or four more if it ends in such bytes.
_LONGEST_HELD = 16
#: The end of a text that transformers' clean-up of spaces may change, depending on what follows: " n" before "'t".
_CLEANED_LATER = re.compile(r"[ '][ n'vr]*\Z")
#: The special tokens of the harmony format: those that identify it, and all of them.
_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>"})
_MARKS = _HARMONY | {"<|constrain|>", "<|end|>", "<|return|>", "<|call|>"}
#: The role in a header of an answer, and the role with the recipient of a call that may follow it.
_ROLE = "assistant"
_RECIPIENT = f"{_ROLE} to="


class BytePieces:
    """Decodes the tokens of a model whose tokens are bytes. ``context``: the tokens before the text, which may end within a
    character.
    """

    def __init__(self, context: Sequence[int] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in context:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        return self._decoder.decode(bytes([token % 256]))

    def finish(self) -> str:
        """End the text, or a message of it; return the text of incomplete bytes."""
        return self._decoder.decode(b"", final=True)


class TokenPieces:
    """``BytePieces`` for a model with a tokenizer: joined, the pieces are what ``decode`` of all tokens adds to that of
    ``context``.

    A token's text can depend on the tokens before it (a space, a character of several tokens) and after it. So the last
    tokens are decoded again with each new one, and text that can no longer change is returned. ``stray``: a token for a byte
    that is not a character, if runs of bytes are decoded as a whole. ``cleans``: whether the tokenizer cleans up spaces.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        stray: int | None = None,
        cleans: bool = False,
    ) -> None:
        self._decode = decode
        self._stray = [] if stray is None else [stray]
        self._cleans = cleans
        #: The last tokens, and the part of their text that has been returned.
        tail = context[-8 * _LONGEST_HELD :]
        self._window = list(tail if decode(tail) else context)
        self._given = decode(self._window)
        self._held = 0  # tokens since some of the text is held back
        self._longest = 0  # length at which the window is shortened
        self._shorten()

    def push(self, token: int) -> str:
        self._window.append(token)
        self._held += 1
        text = self._decode(self._window)
        overdue = self._held >= _LONGEST_HELD + 4 * text.endswith(_REPLACED)
        piece = self._give(text if overdue else self._certain(text))
        if self._given == text:
            self._held = 0
            self._shorten()
        return piece

    def finish(self) -> str:
        return self._give(self._decode(self._window))

    def _certain(self, text: str) -> str:
        if self._stray:
            text = text[: _common(text, self._decode(self._window + self._stray))]
        text = text.rstrip(_REPLACED)
        return _CLEANED_LATER.sub("", text) if self._cleans else text

    def _give(self, text: str) -> str:
        same = _common(self._given, text)
        if same < len(text):
            self._given = text
        return text[same:]

    def _shorten(self) -> None:
        """Drop the first tokens of a long window. The others must have text (decoders omit a leading space) that does not
        begin within a character or with something that is cleaned up.
        """
        if len(self._window) < self._longest:
            return
        for count in range(_LONGEST_HELD, 2 * _LONGEST_HELD):
            text = self._decode(self._window[-count:])
            within = text[:1] in (" n'vr" if self._cleans else "") or text[:1] in ("", _REPLACED)
            if not within and self._given.endswith(text):
                self._window, self._given = self._window[-count:], text
                break
        self._longest = 2 * max(_LONGEST_HELD, len(self._window))


class _Part(Enum):
    """What a piece of text is part of."""

    ANSWER = "answer"
    REASONING = "reasoning"
    HIDDEN = "hidden"  # special tokens, which only stop strings match


class StreamedText:
    """Decodes one answer, which ends before the first stop string of ``stop``. Raises ConfigError for an empty stop string.

    ``specials``: tokens that decoding omits, and their names in stop strings and in the harmony format. ``prompt``: the
    tokens before the answer, whose last message the answer may continue.
    """

    def __init__(
        self,
        pieces: BytePieces | TokenPieces,
        stop: Sequence[str] = (),
        *,
        specials: Mapping[int, str] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        if not all(stop):
            raise ConfigError("stop: expected strings of at least one character")
        self._pieces = pieces
        self._stop: tuple[str, ...] = ()
        self._specials = specials or {}
        self._channels = set(self._specials.values()) >= _HARMONY
        #: Role and channel in the header of a message that has begun.
        self._role: str | None = None
        self._channel: str | None = None
        self._part = _Part.ANSWER
        self._given = dict.fromkeys(_Part, "")  # certain text that has not been returned yet
        self._begun: set[_Part] = set()
        #: Text that is held back (a stop string may begin in it), and the part of each character.
        self._held = ""
        self._parts: list[_Part] = []
        #: Whether a stop string was found; the text before it has been returned.
        self.stopped = False
        if self._channels:
            starts = [at for at, token in enumerate(prompt) if self._specials.get(token) == "<|start|>"]
            for token in prompt[starts[-1] :] if starts else ():
                self.push(token)
            self._given, self._begun = dict.fromkeys(_Part, ""), set()
        self._stop = tuple(stop)

    def push(self, token: int) -> str:
        """Add a token; return the text of the answer that is certain now (empty after a stop string)."""
        if self.stopped:
            return ""
        special = self._specials.get(token)
        named = special is not None and any(special in stop for stop in self._stop)
        if not named and not (self._channels and special in _MARKS):
            self._write(self._pieces.push(token))
        elif special is not None:
            self._write(self._pieces.finish())
            if named:
                self._hold(special, _Part.HIDDEN)
            else:
                self._give(len(self._held))
            if self._channels:
                self._mark(special)
        return self._take(_Part.ANSWER)

    def finish(self) -> str:
        """End the text; return the rest of the answer."""
        self._write(self._pieces.finish())
        self._give(len(self._held))
        return self._take(_Part.ANSWER)

    def reasoning(self) -> str:
        """The reasoning that has become certain since the last call."""
        return self._take(_Part.REASONING)

    def _mark(self, mark: str) -> None:
        """Process a special token of the harmony format."""
        if mark == "<|message|>":
            final = self._channel is None or self._channel.split()[:1] == ["final"]
            self._part = _Part.ANSWER if final else _Part.REASONING
            self._role = self._channel = None
            if self._part in self._begun:
                self._given[self._part] += "\n"
        elif mark == "<|channel|>":
            self._channel = ""
        elif mark == "<|constrain|>" and self._channel is not None:
            self._channel += " "
        elif mark in _MARKS:
            self._role, self._channel = "", None

    def _write(self, text: str) -> None:
        """Process text of a header or a message. After a role, text that cannot be a header is a message without one."""
        if self._channel is not None:
            self._channel += text
        elif self._role is not None:
            self._role += text
            if not (self._role.startswith(_RECIPIENT) or _RECIPIENT.startswith(self._role)):
                text, self._role = self._role.removeprefix(_ROLE), None
                self._part = _Part.ANSWER
        if self._channel is None and self._role is None:
            self._hold(text, self._part)
        elif self._held:  # a stop string that began with a special token may continue in the header
            self._hold(text, _Part.HIDDEN)

    def _hold(self, text: str, part: _Part) -> None:
        """Add ``text``, and release what is certain."""
        if self.stopped:
            return
        self._held += text
        self._parts += [part] * len(text)
        # Take the stop string that ends first, however the text is split into pieces; then the one that begins first.
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self._give(min(found)[1])
            self._held, self.stopped = "", True
        else:
            self._give(len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0))

    def _give(self, count: int) -> None:
        for letter, part in zip(self._held[:count], self._parts, strict=False):
            self._given[part] += letter
            self._begun.add(part)
        self._held, self._parts = self._held[count:], self._parts[count:]

    def _take(self, part: _Part) -> str:
        text, self._given[part] = self._given[part], ""
        return text


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` at the end of ``text``."""
    return next(
        (count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0
    )


@dataclass(frozen=True)
class Language:
    """Encodes and decodes text for a model. ``tokenizer`` None: every byte is a token. ``vocabulary``: number of token ids.

    ``end_tokens`` and the strings ``stop`` end a text and are not part of it; requests override the sampling ``defaults``.
    ``lines``: what of the model's generation_config.json cannot be read, or is not applied.
    """

    tokenizer: DocumentTokenizer | None = None
    _: KW_ONLY
    vocabulary: int
    end_tokens: frozenset[int] = frozenset()
    defaults: SamplingOptions = field(default_factory=SamplingOptions)
    stop: Sequence[str] = ()
    lines: Sequence[str] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises DataError if it has none, or ``text`` has half of a surrogate pair."""
        if not is_unicode(text):
            raise DataError("the prompt contains half of a surrogate pair, which is not a character")
        tokens = list(text.encode()) if self.tokenizer is None else self.tokenizer.encode(text)
        if not tokens:
            raise DataError("the prompt has no tokens")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation, each message with ``role`` and ``content``, up to the assistant's turn. Raises
        DataError if the model has no chat template, or the template refuses the messages.
        """
        if self.tokenizer is None:
            raise DataError("this model has no chat template; it can only continue text")
        return self.tokenizer.chat_prompt(messages)

    def text(
        self, stop: Sequence[str] = (), *, prompt: Sequence[int] = (), context: Sequence[int] = ()
    ) -> StreamedText:
        """A decoder of the answer to ``prompt``, which ends before the first stop string. The text continues that of
        ``context``: the prompt for a completion, nothing for a chat.
        """
        stop, tokenizer = (*self.stop, *stop), self.tokenizer
        if tokenizer is None:
            return StreamedText(BytePieces(context), stop, prompt=prompt)
        pieces = TokenPieces(tokenizer.decode, context, stray=tokenizer.stray, cleans=tokenizer.cleans)
        return StreamedText(pieces, stop, specials=tokenizer.specials, prompt=prompt)


def open_language(spec: ModelSpec) -> Language:
    """The ``Language`` of the model of ``spec``. Raises ConfigError naming a damaged file, CapabilityError."""
    tokenizer = None if spec.tokenizer is None else DocumentTokenizer(spec.tokenizer)
    if not isinstance(spec, HfSpec):
        return Language(tokenizer, vocabulary=spec.vocab_size)
    defaults, stop, lines = generation_defaults(spec)
    return Language(
        tokenizer,
        vocabulary=spec.vocab_size,
        end_tokens=defaults.ends,
        defaults=defaults,
        stop=stop,
        lines=lines,
    )
