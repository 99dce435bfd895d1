"""A model's tokenizer, loaded from its directory: converts batches of texts and chats to tokens."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.capabilities import package_path, require_package
from tierstore.errors import ConfigError, DataError
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


def tokenizer_digest(directory: Path) -> dict[str, str]:
    """SHA-256 of each file that determines the tokenizer in ``directory``. Raises ConfigError without a tokenizer."""
    names = [name for name in _FILES if (directory / name).is_file()]
    names += sorted(
        str(path.relative_to(directory)) for path in directory.glob("additional_chat_templates/*.jinja")
    )
    if not names:
        raise ConfigError(f"{directory}: expected a tokenizer (tokenizer.json), found none")
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


class DocumentTokenizer:
    """The tokenizer in ``directory``. Reads no other place, and runs no code from the directory.

    A text gets the tokens that the tokenizer itself adds before and after it (``prefix``, ``suffix``), and ends with its
    end-of-sequence token if it has one. A chat gets exactly what its template writes.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError naming ``directory``, CapabilityError without transformers."""
        self.directory = directory
        self._tokenizer = tokenizer = _load(directory)
        #: The Rust tokenizer; None if the tokenizer is written in Python.
        self._fast = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        if self._fast is not None:
            # A saved tokenizer keeps its last truncation setting, which would cut documents short.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.prefix, self.suffix = self._around()
        self._template: ChatTemplate | None = None
        end = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        known = tokenizer.get_vocab()
        #: The tokens that ``decode`` leaves out, and their names; the token of each byte that is not a character, if
        #: bytes are tokens; and whether ``decode`` removes blanks before punctuation.
        self.specials = {
            token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        self.stray: int | None = known.get("<0xFF>")
        self.cleans = bool(tokenizer.clean_up_tokenization_spaces)
        #: The largest token plus one; and the padding token.
        self.vocabulary = max([len(tokenizer) - 1, *known.values()]) + 1
        self.pad: int = next((token for token in (pad, end) if token is not None), 0)

    def texts(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokens of each text, without prefix and suffix."""
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(item.ids, dtype=np.uint32) for item in encoded]
        ids = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.array(item, dtype=np.uint32) for item in ids]

    def chats(self, chats: Sequence[Chat]) -> list[tuple[Tokens, Counted]]:
        """Tokens of each chat, and a mask of 1 for tokens of its answers. Raises DataError naming a chat, ConfigError."""
        rendered = self.rendered(chats)
        assert self._fast is not None
        encoded = self._fast.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        return [
            (np.array(item.ids, dtype=np.uint32), _inside(item.offsets, spans))
            for item, (_, spans) in zip(encoded, rendered, strict=True)
        ]

    def rendered(self, chats: Sequence[Chat]) -> list[tuple[str, list[Span]]]:
        """The text of each chat, and the character ranges of its answers. Raises DataError naming a chat, ConfigError."""
        if self._template is None:
            if self._fast is None:
                raise ConfigError(
                    f"{self.directory}: chats need a tokenizer of the tokenizers library (tokenizer.json), which says where "
                    "in the text a token lies"
                )
            self._template = ChatTemplate(self._tokenizer, where=str(self.directory))
        return [self._template.render(chat) for chat in chats]

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with the prefix, without the suffix."""
        return [*self.prefix, *map(int, self.texts([text])[0])]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation with the template's prompt for an answer. Raises DataError if there is no template, or
        it refuses the messages, or its output is not valid text.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise exceptions of any type
            raise DataError(f"the chat template fails: {first_line(error)}") from error
        if not is_unicode(text):
            raise DataError("the chat template writes half of a surrogate pair, which is not a character")
        return [int(token) for token in self.texts([text])[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without special tokens and those beyond the vocabulary."""
        known = [token for token in tokens if token < self.vocabulary]
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
    """1 for each token with a character in a span."""
    counted = np.zeros(len(offsets), dtype=np.uint8)
    if not offsets:
        return counted
    at = np.array(offsets, dtype=np.int64)
    for start, stop in spans:
        counted[(at[:, 0] < stop) & (at[:, 1] > start) & (at[:, 1] > at[:, 0])] = 1
    return counted


# Chats through a model's own template -----------------------------------------------------------------------
#
# Which characters of the text are the assistant's answers? Some templates mark them (``{% generation %}``). For the
# others, the text of the messages before an answer, with the template's prompt for an answer, must begin the whole text;
# so must the text up to and including the answer. Templates that render an earlier answer differently break the second
# condition: they drop its reasoning, or end it with another token. Then the answer is the part of it in the whole text:
# its end, or its content with the special token after it. If none of this holds, the chat is refused.


Span = tuple[int, int]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNMASKED = "and answers of this chat are masked"
_ADVICE = "a template with {% generation %} around the answers says which tokens they are"


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, *, where: str) -> None:
        """Raises ConfigError naming ``where`` if the tokenizer has no template."""
        self._tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(f"{where}: chats need a chat template, and this tokenizer has none") from error
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = [token for token in special if token.strip()]
        self._marked = _MARKED.search(self._template) is not None

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """The whole text, and the character ranges of its unmasked answers, in order. Raises DataError naming the chat."""
        try:
            whole, spans = self._marked_answers(chat) if self._marked else self._answers(chat)
            if not is_unicode(whole):
                raise DataError("the chat template writes half of a surrogate pair, which is not a character")
            return whole, spans
        except DataError as error:
            raise DataError(f"{chat.where}: {error}") from error
        except Exception as error:  # templates raise exceptions of any type
            raise DataError(f"{chat.where}: the chat template fails: {first_line(error)}") from error

    def _answers(self, chat: Chat) -> tuple[str, list[Span]]:
        def part(messages: Sequence[Message], prompt: bool) -> str:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(chat.tools) or None, tokenize=False, add_generation_prompt=prompt
            )
            assert isinstance(text, str)
            return text

        whole = part(chat.messages, False)
        return whole, answer_spans(chat.messages, whole, part, ends=self._ends, masked=chat.masked)

    def _marked_answers(self, chat: Chat) -> tuple[str, list[Span]]:
        """The ranges that the template marks. If answers are masked, a mark belongs to the message that changes its text."""
        whole, spans = self._render_marked(chat.messages, chat.tools)
        owners: dict[int, int] = {}
        for number, message in enumerate(chat.messages) if chat.masked else ():
            changed = [*chat.messages[:number], _changed(message), *chat.messages[number + 1 :]]
            text, others = self._render_marked(changed, chat.tools)
            pairs = zip(spans, others, strict=len(spans) == len(others))
            found = [at for at, (one, other) in enumerate(pairs) if whole[slice(*one)] != text[slice(*other)]]
            if len(spans) != len(others) or owners.keys() & found:
                raise DataError(
                    f"message {number}: the template's marks cannot be attributed to it, {_UNMASKED}"
                )
            owners |= dict.fromkeys(found, number)
        if chat.masked and len(owners) < len(spans):
            raise DataError(f"the template marks text of no message, {_UNMASKED}")
        return whole, [span for at, span in enumerate(spans) if owners.get(at) not in chat.masked]

    def _render_marked(self, messages: Sequence[Message], tools: Sequence[object]) -> tuple[str, list[Span]]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        rendered, spans = render(
            conversations=[_without_nulls(messages)],
            tools=tools or None,
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return rendered[0], [(int(start), int(stop)) for start, stop in spans[0]]


def answer_spans(
    messages: Sequence[Message],
    whole: str,
    render: Callable[[Sequence[Message], bool], str],
    *,
    ends: Sequence[str] = (),
    masked: Collection[int] = (),
) -> list[Span]:
    """The answers in ``whole``, the text of ``messages``, found by rendering its beginnings.

    ``render(messages, prompt)``: their text, with or without the prompt for an answer. ``ends``: special tokens; one ends
    an answer, which excludes the blanks after it. ``masked``: messages to leave out. Raises DataError if a beginning is
    not a prefix of the whole.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index in masked:
            continue
        if index == 0:
            raise DataError(
                f"the first message is an answer, so that its beginning cannot be found: {_ADVICE}"
            )
        before = render(messages[:index], True)
        after = whole if index + 1 == len(messages) else render(messages[: index + 1], False)
        start = len(before)
        if start < (spans[-1][1] if spans else 0) or not whole.startswith(before):
            raise DataError(
                f"message {index}: the text before it, with the prompt for an answer, does not begin the whole text: "
                f"{_ADVICE}"
            )
        stop = len(after)
        if not (whole.startswith(after) and after.startswith(before)):
            answer = after[start:] if after.startswith(before) else ""
            content = str(message.get("content") or "").strip()
            stop = start + (
                _shortened(answer, whole, start, ends) or _rewritten(answer, content, whole, start, ends)
            )
            if stop == start:
                raise DataError(
                    f"message {index}: the text up to and including it does not begin the whole text: {_ADVICE}"
                )
        spans.append((start, _without_blanks(whole, start, stop, ends)))
    return spans


def _shortened(answer: str, whole: str, start: int, ends: Sequence[str]) -> int:
    """The length at ``start`` in ``whole`` of the longest suffix of ``answer`` with a special token in it; 0 for none."""
    at = answer.find(whole[start : start + 1])
    while at >= 0 and any(end in answer[at:] for end in ends):
        if whole.startswith(answer[at:], start):
            return len(answer) - at
        at = answer.find(whole[start], at + 1)
    return 0


def _rewritten(answer: str, content: str, whole: str, start: int, ends: Sequence[str]) -> int:
    """The length at ``start`` in ``whole`` of ``content``, preceded by its prefix in ``answer`` or a suffix of that, and
    followed by the special token; 0 for none.
    """
    if not content or content not in answer:
        return 0
    lead = answer[: answer.rfind(content)]
    at = whole.find(content, start, start + len(lead) + len(content))
    while at >= 0:
        stop = at + len(content)
        if lead.endswith(whole[start:at]):
            found = [len(end) for end in ends if whole.startswith(end, stop)]
            if found:
                return stop + max(found) - start
        at = whole.find(content, at + 1, start + len(lead) + len(content))
    return 0


def _without_blanks(whole: str, start: int, stop: int, ends: Sequence[str]) -> int:
    kept = start + len(whole[start:stop].rstrip())
    return kept if whole.endswith(tuple(ends), start, kept) else stop


def _without_nulls(messages: Sequence[Message]) -> list[dict[str, object]]:
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _changed(value: Any) -> Any:
    """A copy of a message with different texts and the same structure."""
    if isinstance(value, Mapping):
        return {key: item if key in ("role", "type") else _changed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item) for item in value]
    return f"{value}x" if isinstance(value, str) and value else value
