"""Which part of a chat is the assistant's: by the template's marks, by its beginnings, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from token_cases import MARKED, PLAIN, REASONING, conversation, save_tokenizer

from tierstore.errors import ConfigError, DataError
from tierstore.train.tokens.chats import answer_spans
from tierstore.train.tokens.documents import Chat
from tierstore.train.tokens.tokenizing import DocumentTokenizer


def _chat(*turns: str) -> Chat:
    return Chat("chats.jsonl:7", conversation(*turns)["messages"])


def _counted(tokenizer: DocumentTokenizer, chat: Chat) -> tuple[str, str]:
    """The whole text of a chat's tokens, and that of the counted ones, special tokens shown."""
    ((tokens, counted),) = tokenizer.chats([chat])
    raw = tokenizer._tokenizer
    return raw.decode(tokens.tolist()), raw.decode(tokens[counted == 1].tolist())


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_answers_by_hand(tmp_path: Path, template: str) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    whole, counted = _counted(tokenizer, _chat("two?", "one expert", "é😀?", "tiers 😀"))
    assert whole == (
        "<|start|>user\ntwo?<|end|>\n<|start|>assistant\none expert<|end|>\n"
        "<|start|>user\né😀?<|end|>\n<|start|>assistant\ntiers 😀<|end|>\n"
    )
    assert counted == "one expert<|end|>tiers 😀<|end|>"


def test_marks_are_those_that_transformers_finds(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, MARKED))
    chat = _chat("two?", "one expert", "three?", "two tiers in the store")
    expected = tokenizer._tokenizer.apply_chat_template(
        chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ((tokens, counted),) = tokenizer.chats([chat])
    assert tokens.tolist() == expected["input_ids"]
    assert counted.tolist() == expected["assistant_masks"]


def test_answers_in_a_row_and_a_system_message(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "v"},
    ]
    assert _counted(tokenizer, Chat("x", messages))[1] == "a<|end|>b<|end|>"
    assert _counted(tokenizer, Chat("x", messages[:2]))[1] == ""


def test_reasoning_that_is_dropped_later(tmp_path: Path) -> None:
    """The last answer's reasoning counts; of earlier ones, what the template left of them."""
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, REASONING))
    whole, counted = _counted(tokenizer, _chat("u", "one", "v", "two", "w", "one"))
    assert whole.count("<think>") == 1
    assert counted == "one<|end|>two<|end|><think></think>one<|end|>"


def test_reasoning_in_the_text_that_is_dropped_later(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    _, counted = _counted(tokenizer, _chat("u", "<think>hm</think>one", "v", "<think>so</think>two"))
    assert counted == "one<|end|><think>so</think>two<|end|>"


def test_an_end_that_is_another_once_more_follows(tmp_path: Path) -> None:
    """As gpt-oss has it: a channel for the reasoning, which is dropped, and another token at the end of the last."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}"
        "{% if m.role == 'assistant' and loop.last %}|thinks|{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        "|says|{{ m.content }}{{ '<|pad|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    chat = _chat("u", "says", "v", "two")
    for number in (1, 3):
        chat.messages[number] = {**chat.messages[number], "thinking": f"so {number}"}
    _, counted = _counted(tokenizer, chat)
    assert counted == "|says|says<|end|>|thinks|so 3<|end|><|start|>assistant|says|two<|pad|>"


@pytest.mark.parametrize(
    ("template", "turns", "said"),
    [
        # how many messages there are stands before all of them
        ("{{ messages | length }}" + PLAIN, ("u", "a", "v", "b"), "message 1: the text before it"),
        # an answer is upper case as soon as one follows
        (PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content | upper)"),
         ("u", "a", "v", "b"),
         "message 1: the text up to and including it"),
        # the prompt for an answer begins what no answer has
        (PLAIN.replace("assistant\n{% endif", "assistant\n<think>{% endif"), ("u", "a"), "message 1: the text before"),
        ("{{ raise_exception('roles must alternate') }}", ("u", "a"), "the chat template fails: roles must alternate"),
        ("{{ messages[5].content }}", ("u", "a"), "the chat template fails: "),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(
    tmp_path: Path, template: str, turns: Sequence[str], said: str
) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    with pytest.raises(DataError, match=said) as caught:
        tokenizer.chats([_chat(*turns)])
    assert str(caught.value).startswith("chats.jsonl:7: ")
    assert "\n" not in str(caught.value)


def test_a_chat_that_begins_with_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="the first message is an answer"):
        answer_spans([{"role": "assistant", "content": "a"}], "a", lambda messages, prompt: "a")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, None))
    with pytest.raises(ConfigError, match="chats need a chat template, and this tokenizer has none"):
        tokenizer.chats([_chat("u", "a")])


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(
        save_tokenizer(tmp_path, "{% if tools %}{{ tools[0].name }}{% endif %}" + PLAIN)
    )
    chat = _chat("u", "a")
    chat.tools.append({"name": "clock"})
    assert _counted(tokenizer, chat)[0].startswith("clock<|start|>user")
