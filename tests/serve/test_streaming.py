"""Streamed text: whole characters, no part of a stop string, and together what was decoded at once."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import small_tokenizers
from effort import share
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import MARKS, byte_level

from tierstore.serve.language import BytePieces, StreamedText, TokenPieces


def _streamed(text: StreamedText, tokens: Sequence[int]) -> list[str]:
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()]


def _decode(tokens: Sequence[int]) -> str:
    """A tokenizer of bytes, as those of the field decode: what is no character is replaced."""
    return bytes(tokens).decode(errors="replace")


@given(st.binary(max_size=40))
def test_bytes_of_any_kind(data: bytes) -> None:
    assert "".join(_streamed(StreamedText(BytePieces()), data)) == data.decode(errors="replace")


def test_a_prompt_that_ends_within_a_character() -> None:
    assert BytePieces("é".encode()[:1]).push("é".encode()[1]) == "é"


@given(st.text(max_size=30))
def test_characters_are_whole(text: str) -> None:
    data = text.encode(errors="replace")
    for pieces in (BytePieces(), TokenPieces(_decode)):
        given = _streamed(StreamedText(pieces), data)
        assert "".join(given) == data.decode()
        assert not any("\ufffd" in piece for piece in given if "\ufffd" not in text)


def _words(tokens: Sequence[int]) -> str:
    """A tokenizer that puts a blank before each word but the first."""
    return " ".join(("one", "two", "three")[token] for token in tokens)


def test_a_token_s_text_depends_on_those_before() -> None:
    assert _streamed(StreamedText(TokenPieces(_words)), [0, 1, 2, 0]) == ["one", " two", " three", " one", ""]


def test_bytes_that_never_become_a_character_do_not_wait_for_ever() -> None:
    pieces = _streamed(StreamedText(TokenPieces(_decode)), [0xFF] * 40)
    assert "".join(pieces) == "\ufffd" * 40
    assert pieces[14] == ""
    assert any(pieces[:20])


def test_stop_strings_by_hand() -> None:
    """``<e`` may become ``<end>`` and waits; ``<ex`` may not."""
    text = StreamedText(BytePieces(), ["<end>", "STOP"])
    pieces = [text.push(byte) for byte in b"a<ex<end>b"]
    assert pieces == ["a", "", "", "<ex", "", "", "", "", "", ""]
    assert text.stopped
    assert text.finish() == ""


@given(st.text("ab<>", max_size=24), st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3))
def test_stop_strings(written: str, stop: list[str]) -> None:
    """The oracle: the text before the first place where one of them begins."""
    text = StreamedText(BytePieces(), stop)
    pieces = _streamed(text, written.encode())
    # The one that ends first ends the text; then the one of those that begins first.
    ends = [end for end in range(1, len(written) + 1) if any(written[:end].endswith(each) for each in stop)]
    if not ends:
        assert "".join(pieces) == written
        assert not text.stopped
        return
    begun = min(ends[0] - len(each) for each in stop if written[: ends[0]].endswith(each))
    assert "".join(pieces) == written[:begun]
    assert text.stopped


# Tokenizers: what is streamed is what ``decode`` of all tokens gives ----------------------------------------


@functools.cache
def _tokenizer(kind: str) -> Any:
    name, *options = kind.split("/")
    return getattr(small_tokenizers, name)(**dict.fromkeys(options, True))


_KINDS = ["sentencepiece", "metaspace", "byte_level", "word_piece"]
_KINDS += [f"{kind}/clean_up_tokenization_spaces" for kind in _KINDS if kind != "byte_level"]


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def _pieces(tokenizer: Any, context: Sequence[int] = ()) -> TokenPieces:
    return TokenPieces(
        lambda tokens: _decoded(tokenizer, tokens),
        context,
        stray=tokenizer.get_vocab().get("<0xFF>"),
        cleans=tokenizer.clean_up_tokenization_spaces,
    )


def _drawn(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Tokens of all kinds, and characters of several bytes."""
    known = tokenizer.get_vocab()
    words = sorted(token for name, token in known.items() if not name.startswith("<0x"))
    others = [token for token in words if _decoded(tokenizer, [token]).strip()][:1]
    runs = [st.sampled_from(words).map(lambda token: [token])] * 2
    if "<0xFF>" in known:
        runs.append(st.sampled_from([*"é漢🚗\u2028"]).map(lambda letter: _bytes(tokenizer, letter)))
        runs.append(st.integers(0, 255).map(lambda byte: [known[f"<0x{byte:02X}>"]]))
    # Behind 15 bytes without anything else between them, what came is given.
    return st.lists(st.one_of(runs), max_size=60).map(
        lambda drawn: [token for at, run in enumerate(drawn) for token in run + others * (at % 3 == 2)]
    )


def _bytes(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in text.encode()]


@pytest.mark.parametrize("kind", _KINDS)
def test_pieces_are_the_text_of_all_tokens(kind: str) -> None:
    """Also behind a prompt, where its text stays: a blank may go with what comes."""
    tokenizer = _tokenizer(kind)

    @settings(max_examples=share(60))
    @given(_drawn(tokenizer), _drawn(tokenizer))
    def check(prompt: list[int], tokens: list[int]) -> None:
        assert "".join(_streamed(StreamedText(_pieces(tokenizer)), tokens)) == _decoded(tokenizer, tokens)
        before, whole = _decoded(tokenizer, prompt), _decoded(tokenizer, prompt + tokens)
        if whole.startswith(before):
            text = StreamedText(_pieces(tokenizer, prompt))
            assert "".join(_streamed(text, tokens)) == whole[len(before) :]

    check()


def test_a_special_token_between_words() -> None:
    """By hand, and for any length of text before it: the blank of the next word stays."""
    tokenizer = _tokenizer("sentencepiece")
    known = tokenizer.convert_tokens_to_ids
    for count in range(60):
        tokens = known([*["▁and"] * count, "▁London", "<|tool|>", "▁Hello"])
        pieces = _streamed(StreamedText(_pieces(tokenizer)), tokens)
        assert "".join(pieces).endswith("London Hello")
        assert pieces[-2:] == [" Hello", ""]


def test_the_completion_of_a_prompt_begins_with_its_blank() -> None:
    tokenizer = _tokenizer("sentencepiece")
    known = tokenizer.convert_tokens_to_ids
    for prompt in ("The capital of", "The " * 70 + "capital of"):
        text = StreamedText(_pieces(tokenizer, tokenizer(prompt)["input_ids"]))
        assert text.push(known("▁France")) == " France"
    text = StreamedText(_pieces(tokenizer, known(["<s>"])))
    assert text.push(known("▁France")) == "France"
    half = _bytes(tokenizer, "漢")
    text = StreamedText(_pieces(tokenizer, [*known(["▁a"]), *half[:2]]))
    assert "".join(_streamed(text, [*half[2:], *known(["▁b"])])) == "漢 b"


def test_bytes_wait_for_those_that_would_spoil_them() -> None:
    """By hand: Unicode's line separator, and then a byte that is no character: ``decode`` replaces all four."""
    tokenizer = _tokenizer("sentencepiece")
    run = _bytes(tokenizer, "\u2028")
    assert _streamed(StreamedText(_pieces(tokenizer)), [*run, *run])[-1] == "\u2028\u2028"
    spoilt = [*run, tokenizer.get_vocab()["<0xFF>"]]
    assert "".join(_streamed(StreamedText(_pieces(tokenizer)), spoilt)) == "\ufffd" * 4
    assert any(_streamed(StreamedText(_pieces(tokenizer)), run * 6)[:18])  # not for ever


def test_no_blank_that_is_cleaned_up_later_is_given() -> None:
    """All texts of four characters of those that clean-up knows, and all places to cut them."""
    clean = _tokenizer("sentencepiece").clean_up_tokenization
    for text in map("".join, itertools.product(" n't.v", repeat=4)):
        written = StreamedText(TokenPieces(lambda tokens: clean(bytes(tokens).decode()), cleans=True))
        assert "".join(_streamed(written, text.encode())) == clean(text)


# Special tokens as stop strings ------------------------------------------------------------------------------


def _special_text(tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> StreamedText:
    specials = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return StreamedText(_pieces(tokenizer), stop, specials=specials, prompt=prompt)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["<|tool|>"], "Paris and London"),
        (["<|im_end|>", "<|tool|>"], "Paris and London"),
        (["<|im_end|>"], "Paris and London Hello world"),
        (["London<|tool|> He"], "Paris and "),
        (["<|tool|> Hello world<|im_end|>"], "Paris and London"),
        (["<|tool|> Paris", "world"], "Paris and London Hello "),
        (["don Hell"], "Paris and Lon"),  # what is not seen parts nothing
        (["<|tool|", "im_end"], "Paris and London Hello world!"),  # no part of a special token is text
        (["<s>"], "Paris and London Hello world!"),
    ],
)
def test_special_tokens_in_stop_strings(stop: list[str], text: str) -> None:
    tokenizer = _tokenizer("sentencepiece")
    words = ["▁Paris", "▁and", "▁London", "<|tool|>", "▁Hello", "▁world", "<|im_end|>", "!"]
    written = _special_text(tokenizer, stop)
    assert "".join(_streamed(written, tokenizer.convert_tokens_to_ids(words))) == text
    assert written.stopped == (not text.endswith("!"))


@settings(max_examples=share(150))
@given(
    st.lists(st.sampled_from(["a", "b", "<|tool|>", "<|im_end|>"]), max_size=14),
    st.lists(
        st.lists(st.sampled_from(["a", "b", "<|tool|>"]), min_size=1, max_size=3), min_size=1, max_size=3
    ),
)
@example(["a", "<|tool|>", "b"], [["<|tool|>", "b"]])
def test_stop_strings_of_tokens(written: list[str], stops: list[list[str]]) -> None:
    """The oracle: the tokens before the first place where those of a stop string begin, of those the one that ends first.
    A token that no stop string names is not there for them.
    """
    tokenizer = _tokenizer("byte_level")
    named = {name for stop in stops for name in stop} | {"a", "b"}
    seen = [name for name in written if name in named]
    ends = [
        (end, end - len(stop))
        for end in range(len(seen) + 1)
        for stop in stops
        if seen[:end][-len(stop) :] == stop
    ]
    kept = seen[: min(ends)[1]] if ends else seen
    text = _special_text(tokenizer, ["".join(stop) for stop in stops])
    found = "".join(_streamed(text, tokenizer.convert_tokens_to_ids(written)))
    assert found == "".join(name for name in kept if len(name) == 1)
    assert text.stopped == bool(ends)


# Channels of the harmony format --------------------------------------------------------------------------------

_THOUGHT = "<|channel|>analysis<|message|>The user greets<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>Hello!"
_CALL = "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("written", "answer", "reasoning"),
    [
        (_THOUGHT + _FINAL, "Hello!", "The user greets"),
        (_THOUGHT + _FINAL + "<|return|>", "Hello!", "The user greets"),
        (_THOUGHT + _THOUGHT + _FINAL, "Hello!", "The user greets\nThe user greets"),
        (_THOUGHT + _CALL, "", "The user greets\n{}"),
        (_THOUGHT + " to=functions.x<|channel|>commentary<|message|>{}", "", "The user greets\n{}"),
        (_THOUGHT + "<|channel|>final <|constrain|>json<|message|>[1]", "[1]", "The user greets"),
        (_THOUGHT + "<|channel|>final<|constrain|>json<|message|>[1]", "[1]", "The user greets"),
        (_FINAL, "Hello!", ""),
        ("<|message|>Hello!", "Hello!", ""),  # a message without a channel
        ("Hello!", "Hello!", ""),  # no header at all
        ("a", "a", ""),
        ("to be", "to be", ""),
        # Cut within a header, or before any text.
        (_THOUGHT[: -len("stant")], "", "The user greets"),
        (_THOUGHT, "", "The user greets"),
        (_THOUGHT + "<|channel|>fin", "", "The user greets"),
        (_THOUGHT + "<|channel|>final", "", "The user greets"),
        (_THOUGHT + "<|channel|>commentary to=functions.x <|constrain|>js", "", "The user greets"),
        (" to", "", ""),
        (" to=functions.x", "", ""),
        ("<|channel|>", "", ""),
    ],
)
def test_channels(written: str, answer: str, reasoning: str) -> None:
    """By hand; behind the prompt that gpt-oss's template ends with, and behind one that has begun a message."""
    tokenizer = byte_level(MARKS)
    prompt = tokenizer("<|start|>user<|message|>Hi<|end|><|start|>assistant")["input_ids"]
    text = _special_text(tokenizer, prompt=prompt)
    assert "".join(_streamed(text, tokenizer(written)["input_ids"])) == answer
    assert text.reasoning() == reasoning
    assert text.reasoning() == ""
    begun, left = (
        tokenizer("<|start|>assistant<|channel|>analysis<|message|>Hm")["input_ids"],
        tokenizer("m."),
    )
    text = _special_text(tokenizer, prompt=begun)
    assert ("".join(_streamed(text, left["input_ids"])), text.reasoning()) == ("", "m.")


def test_channels_as_they_come() -> None:
    """Each character is given with its own token: reasoning, then the answer."""
    tokenizer = byte_level(MARKS)
    text = _special_text(tokenizer, prompt=tokenizer("<|start|>assistant")["input_ids"])
    given = []
    for token in tokenizer(_THOUGHT + _FINAL)["input_ids"]:
        given += [("answer", text.push(token)), ("reasoning", text.reasoning())]
    given = [(kind, piece) for kind, piece in given if piece]
    assert len(given) > 12
    assert [kind for kind, _ in given] == sorted((kind for kind, _ in given), reverse=True)


@pytest.mark.parametrize(
    ("stop", "answer", "reasoning"),
    [
        ("user", "", "The "),
        ("ll", "He", "The user greets"),
        ("<|end|>", "", "The user greets"),
        ("greets<|end|>", "", "The user "),
        ("<|channel|>final", "", "The user greets"),
        ("<|message|>Hell", "", "The user greets"),
        ("<|start|>assistant<|channel|>final<|message|>H", "", "The user greets"),
        ("greetsHello", "Hello!", "The user greets"),  # two texts
        ("assistant", "Hello!", "The user greets"),  # a header is no text
        ("final", "Hello!", "The user greets"),
    ],
)
def test_stop_strings_in_channels(stop: str, answer: str, reasoning: str) -> None:
    tokenizer = byte_level(MARKS)
    text = _special_text(tokenizer, [stop], tokenizer("<|start|>assistant")["input_ids"])
    assert "".join(_streamed(text, tokenizer(_THOUGHT + _FINAL)["input_ids"])) == answer
    assert text.reasoning() == reasoning
    assert text.stopped == (answer != "Hello!")


def test_marks_of_another_format() -> None:
    """ChatML's begin with ``<|start|>`` in some models: they are no channels."""
    tokenizer = byte_level(("<|start|>", "<|end|>"))
    text = _special_text(tokenizer, prompt=tokenizer("<|start|>assistant")["input_ids"])
    assert "".join(_streamed(text, tokenizer("a<|start|>b<|end|>")["input_ids"])) == "ab"
