"""A model's tokenizer, from the files in its directory, as documents need it: batches of texts and chats to tokens."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.capabilities import package_path, require_package
from tierstore.errors import ConfigError, DataError
from tierstore.train.tokens.chats import ChatTemplate, Span
from tierstore.train.tokens.documents import Chat, Message, first_line
from tierstore.units import is_unicode

Tokens = npt.NDArray[np.uint32]
Counted = npt.NDArray[np.uint8]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What of a tokenizer a run needs once its files are tokenised: ``size`` is its largest token and one more."""

    size: int
    pad: int


def tokenizer_digest(directory: Path) -> dict[str, str]:
    """SHA-256 of each file that decides what the tokenizer in ``directory`` does. Raises ConfigError for none."""
    names = [name for name in _FILES if (directory / name).is_file()]
    names += sorted(
        str(path.relative_to(directory)) for path in directory.glob("additional_chat_templates/*.jinja")
    )
    if not names:
        raise ConfigError(f"{directory}: expected a tokenizer (tokenizer.json), found none")
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


class DocumentTokenizer:
    """The tokenizer in ``directory``. Nothing is looked up elsewhere, and no code of the directory's is run.

    A text has the tokens that the tokenizer itself puts before and behind one (``prefix``, ``suffix``), and ends with its
    end-of-sequence token if it has one. A chat has what its template writes and no more.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError naming ``directory``, CapabilityError without transformers."""
        self.directory = directory
        self._tokenizer = tokenizer = _load(directory)
        #: The part in Rust, and none where the tokenizer is Python's.
        self._fast = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        if self._fast is not None:
            # A tokenizer is saved with what it was last used with, and would cut documents short.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.prefix, self.suffix = self._around()
        self._template: ChatTemplate | None = None
        end = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        known = tokenizer.get_vocab()
        #: The tokens that ``decode`` leaves out, and their names; the token of a byte that is no character, where bytes are
        #: tokens; and whether ``decode`` removes blanks before punctuation.
        self.specials = {
            token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        self.stray: int | None = known.get("<0xFF>")
        self.cleans = bool(tokenizer.clean_up_tokenization_spaces)
        self.vocabulary = Vocabulary(
            size=max([len(tokenizer) - 1, *known.values()]) + 1,
            pad=next((token for token in (pad, end) if token is not None), 0),
        )

    def texts(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each text, without those before and behind it."""
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(item.ids, dtype=np.uint32) for item in encoded]
        ids = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.array(item, dtype=np.uint32) for item in ids]

    def chats(self, chats: Sequence[Chat]) -> list[tuple[Tokens, Counted]]:
        """Tokens of each chat, and 1 for those of its answers. Raises DataError naming a chat, ConfigError."""
        rendered = self.rendered(chats)
        assert self._fast is not None
        encoded = self._fast.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [
            (np.array(item.ids, dtype=np.uint32), _inside(item.offsets, spans))
            for item, (_, spans) in zip(encoded, rendered, strict=True)
        ]

    def rendered(self, chats: Sequence[Chat]) -> list[tuple[str, list[Span]]]:
        """The text of each chat, and the characters of its answers. Raises DataError naming a chat, ConfigError."""
        if self._template is None:
            if self._fast is None:
                raise ConfigError(
                    f"{self.directory}: chats need a tokenizer of the tokenizers library (tokenizer.json), which says where "
                    "in the text a token lies"
                )
            self._template = ChatTemplate(self._tokenizer, where=str(self.directory))
        return [self._template.render(chat) for chat in chats]

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt: with what the tokenizer puts before a text, without what ends one."""
        return [*self.prefix, *map(int, self.texts([text])[0])]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks, as the template has it. Raises DataError where there is
        no template, or it refuses the messages, or writes what is no text.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes, of its own and of Python's
            raise DataError(f"the chat template fails: {first_line(error)}") from error
        if not is_unicode(text):
            raise DataError("the chat template writes half of a surrogate pair, which is no character")
        return [int(token) for token in self.texts([text])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special ones left out; what is past the vocabulary has none."""
        known = [token for token in tokens if token < self.vocabulary.size]
        return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def _around(self) -> tuple[list[int], list[int]]:
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        places = range(len(whole) - len(bare) + 1) if bare else ()
        at = next((at for at in places if whole[at : at + len(bare)] == bare), 0)
        prefix, suffix = (whole[:at], whole[at + len(bare) :]) if bare else ([], [])
        end = self._tokenizer.eos_token_id
        if end is not None and suffix[-1:] != [end]:
            suffix = [*suffix, end]
        return prefix, suffix


def _load(directory: Path) -> Any:
    transformers = require_package("transformers", "a model's tokenizer")
    try:
        with warnings.catch_warnings(), package_path(directory) as path:
            warnings.simplefilter("ignore")  # about its own ways to be loaded
            return transformers.AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a damaged file raises anything: KeyError, Exception of the part in Rust
        raise ConfigError(f"{directory}: the tokenizer cannot be loaded: {first_line(error)}") from error


def _inside(offsets: Sequence[Span], spans: Sequence[Span]) -> Counted:
    """1 for each token that has a character of a span."""
    counted = np.zeros(len(offsets), dtype=np.uint8)
    if not offsets:
        return counted
    at = np.array(offsets, dtype=np.int64)
    for start, stop in spans:
        counted[(at[:, 0] < stop) & (at[:, 1] > start) & (at[:, 1] > at[:, 0])] = 1
    return counted
