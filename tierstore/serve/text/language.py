"""The text side of a served model: its tokenizer and chat template, what ends a text, how it is sampled by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tierstore.errors import ConfigError, DataError
from tierstore.hf.describing import read_config
from tierstore.hf.spec import HfSpec
from tierstore.serve.text.sampling import SamplingOptions
from tierstore.serve.text.streaming import BytePieces, PieceDecoder, StreamedText, TokenPieces

if TYPE_CHECKING:
    from tierstore.model.spec import ModelSpec
    from tierstore.train.tokens.tokenizing import DocumentTokenizer

#: The file in which a model says how its texts end and are sampled.
GENERATION_NAME = "generation_config.json"


class Codec(Protocol):
    """Text to tokens, and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation, each message with ``role`` and ``content``, up to where the assistant speaks. Raises
        DataError where the model has no template for it, or the template refuses it.
        """
        ...

    def pieces(self) -> PieceDecoder:
        """Makes text of the tokens of one answer."""
        ...


class Language:
    """The text side of a model: ``codec``; ``end_tokens`` end a text and are no part of it; ``defaults`` sample it where
    nobody says otherwise. ``vocabulary``: tokens are below it.
    """

    def __init__(
        self, codec: Codec, *, vocabulary: int, end_tokens: frozenset[int], defaults: SamplingOptions
    ) -> None:
        self.vocabulary = vocabulary
        self.end_tokens = end_tokens
        self.defaults = defaults
        self._codec = codec

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises DataError for one without any."""
        tokens = self._codec.encode(text)
        if not tokens:
            raise DataError("the prompt has no tokens")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation, as in ``Codec``."""
        return self._codec.encode_chat(messages)

    def text(self, stop: Sequence[str] = ()) -> StreamedText:
        """Makes the text of one answer, which ends before the first of ``stop``."""
        return StreamedText(self._codec.pieces(), stop)


def open_language(spec: ModelSpec) -> Language:
    """The text side of the model of ``spec``. Raises ConfigError naming a file that is damaged, CapabilityError."""
    codec: Codec = ByteCodec() if spec.tokenizer is None else TokenizerCodec(spec.tokenizer)
    if not isinstance(spec, HfSpec):
        return Language(codec, vocabulary=spec.vocab_size, end_tokens=frozenset(), defaults=SamplingOptions())
    values = _generation_values(spec.directory)
    ends = _end_tokens(values, spec.config, where=str(spec.directory))
    defaults = sampling_defaults(values, where=str(spec.directory))
    return Language(codec, vocabulary=spec.vocab_size, end_tokens=ends, defaults=defaults)


class ByteCodec:
    """Of a model without a tokenizer: every byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        raise DataError("this model has no chat template: it continues text")

    def pieces(self) -> BytePieces:
        return BytePieces()


class TokenizerCodec:
    """The tokenizer in ``directory``. Raises ConfigError naming it, CapabilityError without transformers."""

    def __init__(self, directory: Path) -> None:
        from tierstore.train.tokens.tokenizing import DocumentTokenizer

        self._tokenizer: DocumentTokenizer = DocumentTokenizer(directory)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return self._tokenizer.chat_prompt(messages)

    def pieces(self) -> TokenPieces:
        return TokenPieces(self._tokenizer.decode)


def sampling_defaults(values: Mapping[str, Any], *, where: str) -> SamplingOptions:
    """What a generation_config.json says of sampling. As in transformers, a model samples only where it says so.

    Raises ConfigError naming ``where`` and the key.
    """
    try:
        penalty = _number(values, "repetition_penalty")
        if not values.get("do_sample"):
            return SamplingOptions(temperature=0.0, repetition_penalty=penalty)
        return SamplingOptions(
            temperature=_number(values, "temperature"),
            top_k=int(_number(values, "top_k", default=0)),
            top_p=_number(values, "top_p"),
            repetition_penalty=penalty,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}/{GENERATION_NAME}: {error}") from error


def _number(values: Mapping[str, Any], key: str, *, default: float = 1.0) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    return float(value)


def _generation_values(directory: Path | None) -> dict[str, Any]:
    if directory is None or not (directory / GENERATION_NAME).exists():
        return {}
    return read_config(directory / GENERATION_NAME)


def _end_tokens(values: Mapping[str, Any], config: Mapping[str, Any], *, where: str) -> frozenset[int]:
    """``eos_token_id`` of the generation's configuration, else of the model's: a number, several, or none."""
    found = values.get("eos_token_id", config.get("eos_token_id"))
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ConfigError(f"{where}: eos_token_id: expected a token or several, got {found!r}")
    return frozenset(listed)
