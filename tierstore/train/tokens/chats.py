"""Chats through a model's own template: the text, and which characters of it are the assistant's answers.

A template that marks them (``{% generation %}``) says so itself. For another, the text of the messages before an answer,
with the template's prompt for one, must begin the whole text; so must the text up to and including the answer. Templates
that render an answer otherwise once more follows break the second: they drop its reasoning, or end it with another token.
Then the answer is what the whole text has of it: its end, or its content with a special token behind it. Where none of this
holds, the chat is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tierstore.errors import ConfigError, DataError
from tierstore.train.tokens.documents import Chat, Message, first_line
from tierstore.units import is_unicode

Span = tuple[int, int]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNMASKED = "and answers of this chat are masked"
_ADVICE = "a template with {% generation %} around the answers says which tokens they are"


class ChatTemplate:
    """The template of one tokenizer of transformers."""

    def __init__(self, tokenizer: Any, *, where: str) -> None:
        """Raises ConfigError naming ``where`` when the tokenizer has no template."""
        self._tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(f"{where}: chats need a chat template, and this tokenizer has none") from error
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = [token for token in special if token.strip()]
        self._marked = _MARKED.search(self._template) is not None

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """The whole text, and the characters of its answers that are not masked, in order. Raises DataError naming the
        chat.
        """
        try:
            whole, spans = self._marked_answers(chat) if self._marked else self._answers(chat)
            if not is_unicode(whole):
                raise DataError("the chat template writes half of a surrogate pair, which is no character")
            return whole, spans
        except DataError as error:
            raise DataError(f"{chat.where}: {error}") from error
        except Exception as error:  # a template raises what it likes, of its own and of Python's
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
        """What the template marks. Where answers are masked, a mark belongs to the message that changes the text in it."""
        whole, spans = self._render_marked(chat.messages, chat.tools)
        owners: dict[int, int] = {}
        for number, message in enumerate(chat.messages) if chat.masked else ():
            changed = [*chat.messages[:number], _changed(message), *chat.messages[number + 1 :]]
            text, others = self._render_marked(changed, chat.tools)
            pairs = zip(spans, others, strict=len(spans) == len(others))
            found = [at for at, (one, other) in enumerate(pairs) if whole[slice(*one)] != text[slice(*other)]]
            if len(spans) != len(others) or owners.keys() & found:
                raise DataError(
                    f"message {number}: which marks of the template are its own cannot be told, {_UNMASKED}"
                )
            owners |= dict.fromkeys(found, number)
        if chat.masked and len(owners) < len(spans):
            raise DataError(f"the template marks what no message is in, {_UNMASKED}")
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

    ``render(messages, prompt)``: their text, with the prompt for an answer or without. ``ends``: special tokens; one
    ends an answer, and blanks behind it are not the answer's. ``masked``: messages that are not looked for. Raises
    DataError where beginnings do not begin the whole.
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
    """How much of ``whole`` from ``start`` is the longest end of ``answer`` with a special token in it; 0 for none."""
    at = answer.find(whole[start : start + 1])
    while at >= 0 and any(end in answer[at:] for end in ends):
        if whole.startswith(answer[at:], start):
            return len(answer) - at
        at = answer.find(whole[start], at + 1)
    return 0


def _rewritten(answer: str, content: str, whole: str, start: int, ends: Sequence[str]) -> int:
    """How much of ``whole`` from ``start`` is ``content``, with what stands before it in ``answer`` or an end of that, and
    the special token behind it; 0 where it is not so.
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
    """A message with other texts, of the same shape."""
    if isinstance(value, Mapping):
        return {key: item if key in ("role", "type") else _changed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item) for item in value]
    return f"{value}x" if isinstance(value, str) and value else value
