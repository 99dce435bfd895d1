"""Documents: text, lines of JSON, rows of Parquet; and errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
        assert isinstance(piece, TextPiece)
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


@settings(deadline=None, max_examples=80)
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
    ("line", "said"),
    [
        ('{"text": "x"', "expected a line of JSON: Expecting"),
        ("[" * 100_000, "expected a line of JSON: "),
        (b"\xff{}", "expected a line of JSON in UTF-8"),
        ("[1]", "expected a JSON object, found a list"),
        ('{"txt": "x", "id": 1}', "expected a field 'messages' or 'text'.*found 'txt', 'id'"),
        ("{}", "expected a field .*found none"),
        ('{"text": 3}', "'text': expected text or a list of messages, found a number"),
        ('{"text": null}', "'text': expected text or a list of messages, found null"),
        ('{"messages": [{"content": "x"}]}', "expected messages, objects with a 'role', found an object"),
        ('{"messages": ["x"]}', "expected messages, objects with a 'role', found text"),
        ('{"messages": [], "tools": "x"}', "'tools': expected a list in JSON"),
        ('{"messages": [], "tools": 3}', "'tools': expected a list, found a number"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    content = line if isinstance(line, bytes) else line.encode()
    path = _file(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + content + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=said) as caught:
        list(documents(path, DataConfig(), lambda nbytes: None))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: expected a field 'body', found 'text'"):
        _read(path, column="body")


@pytest.mark.parametrize("at", [0, 5, 1 << 20, (1 << 20) + 3])
def test_bytes_that_are_not_text_are_found(tmp_path: Path, at: int) -> None:
    path = _file(tmp_path / "a.bin", b"x" * at + b"\xffxx")
    with pytest.raises(DataError, match=rf"a\.bin: expected text in UTF-8, found another byte at {at}"):
        _read(path)
    path = _file(tmp_path / "b.bin", b"x" * at + "é".encode()[:1])
    with pytest.raises(DataError, match=rf"found another byte at {at}"):
        _read(path)


def test_rows_of_text_by_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(2500)]
    pq.write_table(pa.table({"text": texts, "id": list(range(2500))}), path, row_group_size=700)
    assert _texts(_read(path)) == texts


def test_rows_of_chats_have_no_nulls(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "call": {"f": 1}}],
        [{"role": "user", "content": "b", "call": None}],
    ]
    pq.write_table(
        pa.table({"messages": chats, "tools": ['[{"name": "f"}]', None], "text": ["x", "y"]}), path
    )
    assert _read(path) == [
        Chat(
            f"{path}: row 1",
            [{"role": "user", "content": "a"}, {"role": "assistant", "call": {"f": 1}}],
            [{"name": "f"}],
        ),
        Chat(f"{path}: row 2", [{"role": "user", "content": "b"}]),
    ]


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.parquet", b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        _read(path)
    pq.write_table(pa.table({"body": ["x"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: expected a column 'messages' or 'text'.*, found body"):
        _read(path)
    pq.write_table(pa.table({"text": [None, "x"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: row 1: 'text': .*found null"):
        _read(path)


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"row {i}" * 50 for i in range(100)]}), path, row_group_size=50)
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: row group 0: "):
        _read(path)


def test_json_must_be_said(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.json", '{"text": "x"}\n')
    with pytest.raises(ConfigError, match=r"a\.json: \.json may be one value or one a line"):
        _read(path)
    assert _read(path, format=module.DataFormat.JSONL) == [TextPiece("x")]
    assert _read(path, format=module.DataFormat.TEXT) == [TextPiece('{"text": "x"}\n')]
