"""Which part of a chat is the assistant's: by the template's marks, by its beginnings, or refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from token_cases import MARKED, PLAIN, REASONING, conversation, save_tokenizer

from tierstore.errors import ConfigError, DataError
from tierstore.train.tokens.documents import Chat
from tierstore.train.tokens.tokenizing import DocumentTokenizer, answer_spans


def _chat(*turns: str, masked: Sequence[int] = ()) -> Chat:
    return Chat("chats.jsonl:7", conversation(*turns)["messages"], masked=frozenset(masked))


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


#: Reasoning and answer are marked by themselves; reasoning stays with the last answer only.
_MARKED_TWICE = MARKED.replace(
    "{% generation %}",
    "{% if loop.last %}{% generation %}<think>{{ m.thinking }}</think>{% endgeneration %} {% endif %}{% generation %}",
)


@pytest.mark.parametrize("template", [PLAIN, MARKED, REASONING], ids=["plain", "marked", "reasoning"])
@pytest.mark.parametrize(
    ("masked", "said"),
    [
        ((1,), "two tiers<|end|>one expert<|end|>"),
        ((3,), "one expert<|end|>one expert<|end|>"),
        ((1, 5), "two tiers<|end|>"),
        ((0, 1, 3, 5), ""),
        ((0, 2), "one expert<|end|>two tiers<|end|>one expert<|end|>"),
    ],
)
def test_masked_answers_by_hand(tmp_path: Path, template: str, masked: Sequence[int], said: str) -> None:
    """Answers with the same text among them; masks of questions change nothing."""
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    turns = ("u", "one expert", "v", "two tiers", "w", "one expert")
    whole, counted = _counted(tokenizer, _chat(*turns, masked=masked))
    assert whole == _counted(tokenizer, _chat(*turns))[0]
    assert counted.replace("<think></think>", "") == said


@pytest.mark.parametrize(
    ("masked", "said"),
    [
        ((1,), "<think>so</think> two<|end|>"),
        ((3,), "one<|end|>"),
        ((1, 3), ""),
        ((), "one<|end|><think>so</think> two<|end|>"),
    ],
)
def test_masked_reasoning_that_is_marked_by_itself(tmp_path: Path, masked: Sequence[int], said: str) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, _MARKED_TWICE))
    chat = _chat("u", "one", "v", "two", masked=masked)
    for number, thinking in ((1, "hm"), (3, "so")):
        chat.messages[number] = {**chat.messages[number], "thinking": thinking}
    assert _counted(tokenizer, chat)[1] == said


def test_a_masked_answer_need_not_be_found(tmp_path: Path) -> None:
    """A chat that begins with a greeting, which only a template with marks could tell from the rest."""
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path))
    messages = [{"role": "assistant", "content": "hello"}, *conversation("u", "a")["messages"]]
    assert _counted(tokenizer, Chat("x", messages, masked=frozenset({0})))[1] == "a<|end|>"


def test_marks_of_no_message_are_refused_where_answers_are_masked(tmp_path: Path) -> None:
    template = MARKED + "{% generation %}that is all{% endgeneration %}"
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    assert _counted(tokenizer, _chat("u", "a"))[1] == "a<|end|>that is all"
    with refuses(DataError, "chats.jsonl:7:", "template"):
        tokenizer.chats([_chat("u", "a", masked=[1])])


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
        ("{{ '\\ud83d' }}" + PLAIN, ("u", "a"), "the chat template writes half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(
    tmp_path: Path, template: str, turns: Sequence[str], said: str
) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, template))
    with refuses(DataError, said) as caught:
        tokenizer.chats([_chat(*turns)])
    assert str(caught.value).startswith("chats.jsonl:7: ")
    assert "\n" not in str(caught.value)


def test_a_chat_that_begins_with_an_answer_is_refused() -> None:
    with refuses(DataError, "first message"):
        answer_spans([{"role": "assistant", "content": "a"}], "a", lambda messages, prompt: "a")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(save_tokenizer(tmp_path, None))
    with refuses(ConfigError, "chat template"):
        tokenizer.chats([_chat("u", "a")])


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = DocumentTokenizer(
        save_tokenizer(tmp_path, "{% if tools %}{{ tools[0].name }}{% endif %}" + PLAIN)
    )
    chat = _chat("u", "a")
    chat.tools.append({"name": "clock"})
    assert _counted(tokenizer, chat)[0].startswith("clock<|start|>user")
