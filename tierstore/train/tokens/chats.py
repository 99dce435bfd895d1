"""Chats through a model's own template: the text, and which characters of it are the assistant's answers.

A template that marks them (``{% generation %}``) says so itself. For another, the text of the messages before an answer,
with the template's prompt for one, must begin the whole text; so must the text up to and including the answer. Templates
that render an answer otherwise once more follows (they drop its reasoning) break the second: then the answer ends where
its content and the marks after it stand in the whole text. Where neither holds, the chat is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tierstore.errors import ConfigError, DataError
from tierstore.train.tokens.documents import Chat, Message

Span = tuple[int, int]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
        self._marked = _MARKED.search(self._template) is not None

    def render(self, chat: Chat) -> tuple[str, list[Span]]:
        """The whole text, and the characters of its answers, in order. Raises DataError naming the chat."""
        try:
            if self._marked:
                return self._render_marked(chat)

            def part(messages: Sequence[Message], prompt: bool) -> str:
                return self._render(messages, chat.tools, prompt)

            whole = part(chat.messages, False)
            return whole, answer_spans(chat.messages, whole, part, end=self._tokenizer.eos_token or "")
        except DataError as error:
            raise DataError(f"{chat.where}: {error}") from error
        except Exception as error:  # a template raises what it likes, of its own and of Python's
            raise DataError(f"{chat.where}: the chat template fails: {error}") from error

    def _render(self, messages: Sequence[Message], tools: Sequence[object], prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )
        assert isinstance(text, str)
        return text

    def _render_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        rendered, spans = render(
            conversations=[_without_nulls(chat.messages)],
            tools=chat.tools or None,
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return rendered[0], [(int(start), int(stop)) for start, stop in spans[0]]


def answer_spans(
    messages: Sequence[Message], whole: str, render: Callable[[Sequence[Message], bool], str], *, end: str
) -> list[Span]:
    """The answers in ``whole``, the text of ``messages``, found by rendering its beginnings.

    ``render(messages, prompt)``: their text, with the prompt for an answer or without. ``end``: the token that ends an
    answer; blanks behind it are not the answer's. Raises DataError where beginnings do not begin the whole.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise DataError(
                f"the first message is an answer, so that its beginning cannot be found: {_ADVICE}"
            )
        before = render(messages[:index], True)
        after = render(messages[: index + 1], False)
        at = spans[-1][1] if spans else 0
        if len(before) < at or not whole.startswith(before):
            raise DataError(
                f"message {index}: the text before it, with the prompt for an answer, does not begin the whole text: "
                f"{_ADVICE}"
            )
        stop = len(after)
        if not (whole.startswith(after) and after.startswith(before)):
            stop = _stop_of_rewritten(str(message.get("content") or "").strip(), before, after, whole)
            if stop < 0:
                raise DataError(
                    f"message {index}: the text up to and including it does not begin the whole text: {_ADVICE}"
                )
        spans.append((len(before), _without_blanks(whole, len(before), stop, end)))
    return spans


def _stop_of_rewritten(content: str, before: str, after: str, whole: str) -> int:
    """Where an answer ends that ``whole`` has otherwise than ``after`` has it; -1 where that cannot be told."""
    if not content or not after.startswith(before):
        return -1
    found = after.rfind(content, len(before))
    closing = after[found + len(content) :]
    if found < 0 or not closing.strip():
        return -1
    return len(before) + len(content + closing) if whole.startswith(content + closing, len(before)) else -1


def _without_blanks(whole: str, start: int, stop: int, end: str) -> int:
    kept = start + len(whole[start:stop].rstrip())
    return kept if end and whole.endswith(end, start, kept) else stop


def _without_nulls(messages: Sequence[Message]) -> list[dict[str, object]]:
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
