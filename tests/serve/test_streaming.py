"""Streamed text: whole characters, no part of a stop string, and together what was decoded at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.serve.text.streaming import BytePieces, StreamedText, TokenPieces


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


def test_an_empty_stop_string() -> None:
    with pytest.raises(ConfigError, match="stop"):
        StreamedText(BytePieces(), [""])
