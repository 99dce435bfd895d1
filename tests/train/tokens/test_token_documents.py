"""Documents: text, lines of JSON, rows of Parquet; and errors that name file and line."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from token_cases import write_lines

from tierstore.errors import ConfigError, DataError
from tierstore.train.files import DataConfig
from tierstore.train.tokens import documents as module
from tierstore.train.tokens.documents import Chat, TextPiece, documents


def _read(path: Path, **options: Any) -> list[Any]:
    read: list[int] = []
    found = list(documents(path, DataConfig(**options), read.append))
    assert sum(read) == path.stat().st_size
    return found


def _texts(found: list[Any]) -> list[str]:
    """Whole documents, put together of their pieces."""
    texts: list[str] = []
    for piece in found:
        if piece.begins:
            texts.append("")
        texts[-1] += piece.text
    return texts


def _file(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.md", "\ufeffone\r\ntwo é\n")
    assert _read(path) == [TextPiece("one\r\ntwo é\n")]


def test_a_separator_splits_a_text_file(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.txt", "one<|x|>two\n<|x|><|x|>three")
    assert _read(path, separator="<|x|>") == [TextPiece(text) for text in ("one", "two\n", "", "three")]


@settings(max_examples=share(80))
@given(
    text=st.text(alphabet="ab \n#é", max_size=120),
    separator=st.sampled_from(["", "#", "##", "a#"]),
    piece=st.integers(2, 9),
    read=st.integers(1, 7),
)
def test_pieces_are_the_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str, piece: int, read: int
) -> None:
    """However long pieces and reads are, the documents are those of a plain split."""
    path = _file(tmp_path_factory.mktemp("text") / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        patch.setattr(module, "_READ", read)
        found = _read(path, separator=separator)
    assert _texts(found) == (text.split(separator) if separator else [text])
    assert all(len(item.text) <= 2 * piece for item in found)
    assert [item.begins for item in found[1:]] == [item.ends for item in found[:-1]]
    assert found[0].begins
    assert found[-1].ends


def test_lines_of_text_and_chats(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": "one"}, "", {"id": 3, "messages": messages, "tools": [{"name": "f"}]}, {"text": ""}],
    )
    assert _read(path) == [TextPiece("one"), Chat(f"{path}:3", messages, [{"name": "f"}]), TextPiece("")]
    path = write_lines(tmp_path / "b.txt", [{"turns": messages}, {"turns": "x"}])
    assert _read(path, format=module.DataFormat.JSONL, column="turns") == [
        Chat(f"{path}:1", messages),
        TextPiece("x"),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"text": "x"', ("JSON: Expecting",)),
        ("[" * 100_000, ("JSON",)),
        (b"\xff{}", ("JSON in UTF-8",)),
        ("[1]", ("object", "a list")),
        ('{"txt": "x", "id": 1}', ("'messages'", "'text'", "'txt', 'id'")),
        ("{}", ("field", "none")),
        ('{"text": 3}', ("'text':", "a number")),
        ('{"text": null}', ("'text':", "null")),
        ('{"messages": [{"content": "x"}]}', ("messages", "'role'", "an object")),
        ('{"messages": ["x"]}', ("messages", "'role'", "found text")),
        ('{"messages": [], "tools": "x"}', ("'tools':", "a list in JSON")),
        ('{"messages": [], "tools": 3}', ("'tools':", "a list", "a number")),
        ('{"messages": [], "tools": "' + "[" * 100_000 + '"}', ("'tools':", "a list in JSON")),
        ('{"text": "\\ud83d"}', ("'text':", "surrogate")),
        ('{"messages": [{"role": "user", "content": "a\\ude00"}]}', ("'messages':", "surrogate")),
        (
            '{"messages": [{"role": "user", "content": "a", "x": [{"\\ud83d": 1}]}]}',
            ("'messages':", "surrogate"),
        ),
        ('{"messages": [], "tools": "[\\"\\\\ud83d\\"]"}', ("'messages':", "surrogate")),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str | bytes, named: tuple[str, ...]) -> None:
    content = line if isinstance(line, bytes) else line.encode()
    path = _file(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + content + b'\n{"text": "fine"}\n')
    with refuses(DataError, *named) as caught:
        list(documents(path, DataConfig(), lambda nbytes: None))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


_ANSWER = '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", %s}]}'


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ('"content": 3', "content: expected text or text parts, found a number"),
        ('"content": true', "content: expected text or text parts, found true or false"),
        ('"content": {"type": "text", "text": "a"}', "content: expected text or text parts, found an object"),
        ('"content": null', "content: expected text, found none, and the message has no tool_calls"),
        ('"tool_calls": []', "content: expected text, found none, and the message has no tool_calls"),
        ('"content": 3, "tool_calls": [{}]', "content: expected text or text parts, found a number"),
        ('"content": ["a"]', "content[0]: expected a part of type 'text' with its 'text', found text"),
        ('"content": [{"type": "text"}]', "content[0]: expected a part of type 'text' with its 'text', found an object"),
        ('"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]', "content[1]: expected .* 'image_url'"),
        *((f'"content": "a", "weight": {value}', f"weight: expected 0 or 1, found {value}")
          for value in ("0.5", "2", "-1", "true", "null", '"0"')),
        *((f'"content": "a", "{name}": {value}', f"{name}: expected true or false, found {value}")
          for name in ("train", "training") for value in ("0", "1", "null", '"no"')),
        ('"content": "a", "train": []', "train: expected true or false, found a list"),
        ('"content": "a", "training_detail": null', "training_detail: parts of an answer cannot be masked"),
        ('"content": "a", "weight": 0, "train": true', ": weight and train contradict each other"),
        ('"content": "a", "train": false, "training": true', ": train and training contradict each other"),
    ],
)  # fmt: skip
def test_a_broken_message_is_named(tmp_path: Path, field: str, said: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [_ANSWER % '"content": "fine"', _ANSWER % field])
    with pytest.raises(DataError) as caught:
        _read(path)
    where, _, rest = str(caught.value).partition("messages[1]")
    assert where == f"{path}:2: "
    assert re.match(re.escape(said).replace(r"\.\*", ".*"), rest.removeprefix("."))


@pytest.mark.parametrize(
    ("fields", "masked"),
    [
        ("", False),
        (', "weight": 1', False),
        (', "weight": 0', True),
        (', "weight": 0.0', True),
        (', "train": true, "training": true, "weight": 1.0', False),
        (', "train": false, "weight": 0', True),
        (', "training": false', True),
    ],
)
def test_what_masks_an_answer(tmp_path: Path, fields: str, masked: bool) -> None:
    """The masks are no part of what the template sees; everything else is."""
    path = write_lines(tmp_path / "a.jsonl", [_ANSWER % f'"content": "a", "name": "x"{fields}'])
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "name": "x"}]
    assert _read(path) == [Chat(f"{path}:1", messages, masked=frozenset({1} if masked else ()))]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '[{"type": "text", "text": "gen"}, {"type": "text", "text": "eral", "cache_control": {}}]',
            "general",
        ),
        ("[]", ""),
        ('""', ""),
    ],
)
def test_text_parts_are_joined(tmp_path: Path, content: str, text: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [_ANSWER % f'"content": {content}'])
    (chat,) = _read(path)
    assert chat.messages[1] == {"role": "assistant", "content": text}


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with refuses(DataError, f"{path}:1:", "'body'", "'text'"):
        _read(path, column="body")


@pytest.mark.parametrize("at", [0, 5, 1 << 20, (1 << 20) + 3])
def test_bytes_that_are_not_text_are_found(tmp_path: Path, at: int) -> None:
    path = _file(tmp_path / "a.bin", (b"x\n" * at)[:at] + b"\xffx\nx")
    with refuses(DataError, f"{path}:", "UTF-8", f"at {at}", f"line {1 + at // 2}"):
        _read(path)
    path = _file(tmp_path / "b.bin", b"x" * at + "é".encode()[:1])
    with refuses(DataError, f"{path}:", f"at {at}"):
        _read(path)


def test_rows_of_text_by_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(2500)]
    pq.write_table(pa.table({"text": texts, "id": list(range(2500))}), path, row_group_size=700)
    assert _texts(_read(path)) == texts


def test_rows_of_chats_have_no_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]}],
        [{"role": "user", "content": "b", "tool_calls": None, "weight": 0}],
    ]
    pq.write_table(
        pa.table({"messages": chats, "tools": ['[{"name": "f"}]', None], "text": ["x", "y"]}), path
    )
    assert _read(path) == [
        Chat(
            f"{path}: row 1",
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"f": 1}]}],
            [{"name": "f"}],
        ),
        Chat(f"{path}: row 2", [{"role": "user", "content": "b"}], masked=frozenset({0})),
    ]


def test_rows_of_text_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    image = [{"type": "image_url", "text": None, "image_url": "x"}]
    turns = [[{"role": "user", "content": parts}], [{"role": "user", "content": image}]]
    pq.write_table(pa.table({"messages": turns[:1]}), path)
    assert _read(path) == [Chat(f"{path}: row 1", [{"role": "user", "content": "ab"}])]
    pq.write_table(pa.table({"messages": turns}), path)
    with refuses(DataError, f"{path}: row 2: messages[0].content[0]:", "'image_url'"):
        _read(path)


def test_a_row_that_is_not_unicode_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    ends = pa.array([0, 4, 6], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"fine\xff\xfe")])
    pq.write_table(pa.table({"text": texts}), path)
    with refuses(DataError, f"{path}: row 2:", "UTF-8"):
        _read(path)


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.parquet", b"PAR1 not really PAR1")
    with refuses(DataError, f"{path}:", "Parquet"):
        _read(path)
    pq.write_table(pa.table({"body": ["x"]}), path)
    with refuses(DataError, f"{path}:", "'messages'", "'text'", "body"):
        _read(path)
    pq.write_table(pa.table({"text": [None, "x"]}), path)
    with refuses(DataError, f"{path}: row 1: 'text':", "null"):
        _read(path)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" * 50 for i in range(100)]}), path, row_group_size=50)
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with refuses(DataError, f"{path}: row group 0:"):
        _read(path)


def test_json_must_be_said(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.json", '{"text": "x"}\n')
    with refuses(ConfigError, f"{path}:", ".json"):
        _read(path)
    assert _read(path, format=module.DataFormat.JSONL) == [TextPiece("x")]
    assert _read(path, format=module.DataFormat.TEXT) == [TextPiece('{"text": "x"}\n')]
