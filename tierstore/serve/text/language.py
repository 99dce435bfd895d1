"""The text side of a served model: its tokenizer and chat template, what ends a text, how it is sampled by default."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tierstore.errors import ConfigError, DataError
from tierstore.hf.describing import CONFIG_NAME, read_config
from tierstore.hf.packages import transformers
from tierstore.hf.spec import HfSpec
from tierstore.serve.text.sampling import PROCESSED, SAMPLED, SamplingOptions, TokenSampler
from tierstore.serve.text.streaming import BytePieces, PieceDecoder, StreamedText, TokenPieces
from tierstore.units import is_unicode

if TYPE_CHECKING:
    from tierstore.model.spec import ModelSpec
    from tierstore.train.tokens.tokenizing import DocumentTokenizer

#: The file in which a model says how its texts end and are sampled.
GENERATION_NAME = "generation_config.json"
_TOP_K = 50  # transformers' own, where a model says nothing
#: Keys that are applied, or that change no text here.
_READ = {
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", *PROCESSED, "stop_strings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "renormalize_logits"),
    *("use_cache", "return_dict_in_generate", "transformers_version"),
}
#: With these values, others change none either.
_IDLE = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "length_penalty"), 1),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty", "penalty_alpha"), 0),
    "max_length": 20,
}
_SHOWN = 40  # characters of a value in a message


class Codec(Protocol):
    """Text to tokens, and back. ``specials``: the tokens that have no text, and their names."""

    specials: Mapping[int, str]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation, each message with ``role`` and ``content``, up to where the assistant speaks. Raises
        DataError where the model has no template for it, or the template refuses it.
        """
        ...

    def pieces(self, context: Sequence[int] = ()) -> PieceDecoder:
        """Makes text of the tokens of one answer, which goes on from the text of ``context``."""
        ...


@dataclass(frozen=True)
class Language:
    """The text side of a model: ``codec``; ``end_tokens`` and the strings ``stop`` end a text and are no part of it;
    ``defaults`` sample it where nobody says otherwise. ``vocabulary``: tokens are below it. ``lines``: what of the model's
    generation_config.json cannot be read, or is not applied.
    """

    codec: Codec
    _: KW_ONLY
    vocabulary: int
    end_tokens: frozenset[int]
    defaults: SamplingOptions
    stop: Sequence[str] = ()
    lines: Sequence[str] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Raises DataError for one without any, or that is no text."""
        if not is_unicode(text):
            raise DataError("the prompt holds half of a surrogate pair, which is no character")
        tokens = self.codec.encode(text)
        if not tokens:
            raise DataError("the prompt has no tokens")
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of a conversation, as in ``Codec``."""
        return self.codec.encode_chat(messages)

    def text(
        self, stop: Sequence[str] = (), *, prompt: Sequence[int] = (), context: Sequence[int] = ()
    ) -> StreamedText:
        """Makes the text of what follows ``prompt``, which ends before the first of ``stop``. It goes on from the text of
        ``context``: the prompt where it is continued, nothing where a chat is answered.
        """
        stop = (*self.stop, *stop)
        return StreamedText(self.codec.pieces(context), stop, specials=self.codec.specials, prompt=prompt)


def open_language(spec: ModelSpec) -> Language:
    """The text side of the model of ``spec``. Raises ConfigError naming a file that is damaged, CapabilityError."""
    codec: Codec = ByteCodec() if spec.tokenizer is None else TokenizerCodec(spec.tokenizer)
    if not isinstance(spec, HfSpec):
        return Language(codec, vocabulary=spec.vocab_size, end_tokens=frozenset(), defaults=SamplingOptions())
    values, where, ignored = _generation_values(spec)
    ends = _end_tokens(values, spec.config, where=str(spec.directory))
    return Language(
        codec,
        vocabulary=spec.vocab_size,
        end_tokens=ends,
        defaults=sampling_defaults(values, where=str(where), vocabulary=spec.vocab_size, ends=ends),
        stop=_stop_strings(values, where=str(where)),
        lines=[*ignored, *not_applied(values, where=where.name)],
    )


class ByteCodec:
    """Of a model without a tokenizer: every byte is a token."""

    specials: Mapping[int, str] = MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        raise DataError("this model has no chat template: it continues text")

    def pieces(self, context: Sequence[int] = ()) -> BytePieces:
        return BytePieces(context)


class TokenizerCodec:
    """The tokenizer in ``directory``. Raises ConfigError naming it, CapabilityError without transformers."""

    def __init__(self, directory: Path) -> None:
        from tierstore.train.tokens.tokenizing import DocumentTokenizer

        self._tokenizer: DocumentTokenizer = DocumentTokenizer(directory)
        self.specials: Mapping[int, str] = self._tokenizer.specials

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        return self._tokenizer.chat_prompt(messages)

    def pieces(self, context: Sequence[int] = ()) -> TokenPieces:
        tokenizer = self._tokenizer
        return TokenPieces(tokenizer.decode, context, stray=tokenizer.stray, cleans=tokenizer.cleans)


def sampling_defaults(
    values: Mapping[str, Any], *, where: str, vocabulary: int = 2, ends: frozenset[int] = frozenset()
) -> SamplingOptions:
    """What a generation_config.json says of sampling. As in transformers, a model samples only where it says so, and of 50
    tokens where it does not say of how many.

    Raises ConfigError naming ``where`` and the key.
    """
    samples = bool(values.get("do_sample"))
    processed = {key: values[key] for key in PROCESSED if values.get(key) is not None}
    try:
        for (
            key,
            value,
        ) in processed.items():  # processors check their values when they are made, and first used
            try:
                TokenSampler(SamplingOptions(processed={key: value}, ends=ends), [0])(torch.zeros(vocabulary))
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
        return SamplingOptions(
            temperature=_number(values, "temperature") if samples else 0.0,
            top_k=int(_number(values, "top_k", default=_TOP_K)),
            top_p=_number(values, "top_p"),
            repetition_penalty=_number(values, "repetition_penalty"),
            processed=processed,
            ends=ends,
        )
    except ConfigError as error:
        read = {key: value for key, value in values.items() if samples or key not in SAMPLED}
        if len(read) < len(values):  # of no use where nothing is sampled: transformers does not look at them
            return sampling_defaults(read, where=where, vocabulary=vocabulary, ends=ends)
        raise ConfigError(f"{where}: {error}") from error


def not_applied(values: Mapping[str, Any], *, where: str) -> list[str]:
    """A line that names what a generation_config.json asks for and serving does not do; none where there is nothing."""
    left = [
        f"{key} = {json.dumps(value)[:_SHOWN]}"
        for key, value in values.items()
        if not (key in _READ or key.startswith(("output_", "_")) or value is None or value is False)
        and not (key in _IDLE and value == _IDLE[key])
    ]
    return [f"{where}: not applied: {', '.join(left)}"] if left else []


def _number(values: Mapping[str, Any], key: str, *, default: float = 1.0) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    return float(value)


def _generation_values(spec: HfSpec) -> tuple[dict[str, Any], Path, list[str]]:
    """What the model says of generation, and where: in config.json, as older models have it, where it has no other file, or
    one that cannot be read, of which a line tells.
    """
    file, ignored = (spec.directory or Path()) / GENERATION_NAME, []
    if spec.directory is not None and file.exists():
        try:
            return read_config(file), file, []
        except ConfigError as error:
            ignored = [f"{error}; ignored"]
    keys = transformers().GenerationConfig().to_dict()
    values = {key: value for key, value in spec.config.items() if key in keys}
    return values, file.with_name(CONFIG_NAME), ignored


def _stop_strings(values: Mapping[str, Any], *, where: str) -> Sequence[str]:
    found = values.get("stop_strings")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(text, str) and text for text in listed):
        raise ConfigError(f"{where}: stop_strings: expected a string or several, got {found!r}")
    return listed


def _end_tokens(values: Mapping[str, Any], config: Mapping[str, Any], *, where: str) -> frozenset[int]:
    """``eos_token_id`` of the generation's configuration, else of the model's: a number, several, or none."""
    found = values.get("eos_token_id", config.get("eos_token_id"))
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ConfigError(f"{where}: eos_token_id: expected a token or several, got {found!r}")
    return frozenset(listed)
