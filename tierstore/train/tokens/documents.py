"""The documents of files: text, lines of JSON, and rows of Parquet, each read as a stream.

A document is a text or a chat. A text longer than ``PIECE`` characters comes in pieces, cut after a line's end if there
is one in the second half, so that memory use does not grow with the files.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tierstore.capabilities import package_path, require_package
from tierstore.errors import ConfigError, DataError
from tierstore.train.files import FORMATS, DataConfig, DataFormat
from tierstore.units import is_unicode

PIECE = 1 << 20
_READ = 1 << 20
_ARROW = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    NotImplementedError,
    OSError,
)  # pyarrow's exceptions
_CHAT, _TEXT = "messages", "text"
_MASKS = ("weight", "train", "training")  # OpenAI's name, and axolotl's
_PARTS_MASKED = ("training_detail", "train_detail")

#: Called with the bytes read of a file.
Read = Callable[[int], None]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A document's text, or a part of it; ``begins`` and ``ends`` tell whether it is the document's first and last piece."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """A document of messages, and the tools they may call. ``where`` names the file and the line or row; ``masked`` has
    the numbers of the messages excluded from the loss.
    """

    where: str
    messages: list[Message]
    tools: list[object] = field(default_factory=list)
    masked: frozenset[int] = frozenset()


Document = TextPiece | Chat


def file_format(path: Path, config: DataConfig) -> DataFormat:
    """The format of ``path``: TEXT, JSONL or PARQUET. Raises ConfigError if its name is ambiguous."""
    if config.format is not DataFormat.AUTO:
        return config.format
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ConfigError(
            f'{path}: .json may be one value or one a line: rename lines to .jsonl, or set format = "jsonl" or "text"'
        )
    return FORMATS.get(suffix, DataFormat.TEXT)


def documents(path: Path, config: DataConfig, read: Read) -> Iterator[Document]:
    """The documents of ``path`` in order. Empty texts are among them. Raises DataError naming file and line or row."""
    try:
        match file_format(path, config):
            case DataFormat.JSONL:
                yield from _lines(path, config.column, read)
            case DataFormat.PARQUET:
                yield from _rows(path, config.column, read)
            case _:
                yield from _text(path, config.separator, read)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


# Text -------------------------------------------------------------------------------------------------------


def _text(path: Path, separator: str, read: Read) -> Iterator[TextPiece]:
    rest, begins = "", True
    for chunk in _decoded(path, read):
        rest += chunk
        if separator:
            *whole, rest = rest.split(separator)
            for text in whole:
                yield from pieces(text, begins=begins)
                begins = True
        # A possible beginning of a separator stays for the next chunk.
        while len(rest) > 2 * PIECE + len(separator):
            cut = _cut_after(rest)
            yield TextPiece(rest[:cut], begins, False)
            rest, begins = rest[cut:], False
    yield from pieces(rest, begins=begins)


def pieces(text: str, *, begins: bool = True) -> Iterator[TextPiece]:
    """A text, or the rest of one, in pieces."""
    at = 0
    while len(text) - at > PIECE:
        cut = _cut_after(text, at)
        yield TextPiece(text[at:cut], begins, False)
        at, begins = cut, False
    yield TextPiece(text[at:], begins)


def _cut_after(text: str, at: int = 0) -> int:
    """The end of the piece from ``at``: after its last line's end, or its last space."""
    for mark in ("\n", " "):
        found = text.rfind(mark, at + PIECE // 2, at + PIECE)
        if found >= 0:
            return found + 1
    return at + PIECE


def _decoded(path: Path, read: Read) -> Iterator[str]:
    decoder, at, line = codecs.getincrementaldecoder("utf-8")(), 0, 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(_READ)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{path}: expected text in UTF-8, found another byte at {at - pending + error.start}, in line {line}"
                ) from error
            if at == 0:
                text = text.removeprefix("\ufeff")
            at += len(chunk)
            line += chunk.count(b"\n")
            read(len(chunk))
            yield text
            if at:
                _forget(file, at)
            if not chunk:
                return


def first_line(error: Exception) -> str:
    """The message of a library's error, in one line."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _forget(file: BinaryIO, at: int) -> None:
    """Drops the bytes up to ``at`` (0: all) from the page cache."""
    os.posix_fadvise(file.fileno(), 0, at, os.POSIX_FADV_DONTNEED)


# JSONL ------------------------------------------------------------------------------------------------------


def _lines(path: Path, column: str, read: Read) -> Iterator[Document]:
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read(len(line))
            at += len(line)
            if at // _READ != (at - len(line)) // _READ:
                _forget(file, at)
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                value = json.loads(text)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: expected a line of JSON in UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: expected a line of JSON: {error}") from error
            if not isinstance(value, dict):
                raise DataError(f"{where}: expected a JSON object, found {_named(value)}")
            yield from _document(value, column, where)


# Parquet ----------------------------------------------------------------------------------------------------


def _rows(path: Path, column: str, read: Read) -> Iterator[Document]:
    parquet = require_package("pyarrow.parquet", "reading Parquet")
    try:
        with package_path(path) as name:
            file = parquet.ParquetFile(name, memory_map=False)
    except _ARROW as error:
        raise DataError(f"{path}: cannot be read as Parquet: {first_line(error)}") from error
    with file:
        names = list(file.schema_arrow.names)
        chosen = column or next((name for name in (_CHAT, _TEXT) if name in names), "")
        if chosen not in names:
            raise DataError(
                f"{path}: expected a column {_expected(column)}, found {', '.join(names) or 'none'}"
            )
        wanted = [chosen, "tools"] if chosen != _TEXT and "tools" in names else [chosen]
        number = 0
        for group in range(file.num_row_groups):
            try:
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted):
                    for row in zip(*batch.columns, strict=True):
                        number += 1
                        yield from _row(dict(zip(batch.schema.names, row, strict=True)), chosen, path, number)
            except DataError:
                raise
            except _ARROW as error:
                raise DataError(f"{path}: row group {group}: {first_line(error)}") from error
            read(
                path.stat().st_size * (group + 1) // file.num_row_groups
                - path.stat().st_size * group // file.num_row_groups
            )
    with path.open("rb") as raw:
        _forget(raw, 0)


def _row(row: Mapping[str, Any], column: str, path: Path, number: int) -> Iterator[Document]:
    where = f"{path}: row {number}"
    try:
        present = {name: _present(value.as_py()) for name, value in row.items()}
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text in UTF-8: {error.reason}") from error
    yield from _document(present, column, where)


def _present(value: object) -> object:
    """``value`` without the nulls of a struct column for keys that a message lacks."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


# A record ---------------------------------------------------------------------------------------------------


def _document(record: Mapping[str, object], column: str, where: str) -> Iterator[Document]:
    chosen = column or next((name for name in (_CHAT, _TEXT) if name in record), "")
    if chosen not in record:
        found = ", ".join(repr(name) for name in list(record)[:8])
        raise DataError(f"{where}: expected a field {_expected(column)}, found {found or 'none'}")
    value = record[chosen]
    tools = _tools(record, where) if isinstance(value, list) else []
    if not is_unicode([value, tools]):
        raise DataError(f"{where}: {chosen!r}: contains half of a surrogate pair, which is not a character")
    if isinstance(value, str):
        yield from pieces(value)
    elif isinstance(value, list):
        messages = [_message(item, f"{where}: {chosen}[{number}]") for number, item in enumerate(value)]
        masked = frozenset(number for number, (_, trained) in enumerate(messages) if not trained)
        yield Chat(where, [message for message, _ in messages], tools, masked)
    else:
        raise DataError(f"{where}: {chosen!r}: expected text or a list of messages, found {_named(value)}")


def _message(value: object, where: str) -> tuple[Message, bool]:
    """A message in the form for templates, with its content as text, and whether the loss includes it."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{where}: expected messages, objects with a 'role', found {_named(value)}")
    message = {name: item for name, item in value.items() if name not in _MASKS}
    content = value.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_part(one, f"{where}.content[{at}]") for at, one in enumerate(content))
    elif content is None and not value.get("tool_calls"):
        raise DataError(f"{where}.content: expected text, found none, and the message has no tool_calls")
    elif not isinstance(content, str | None):
        raise DataError(f"{where}.content: expected text or text parts, found {_named(content)}")
    return message, _trained(value, where)


def _part(value: object, where: str) -> str:
    """The text of a part of a message's content."""
    kind, text = (value.get("type"), value.get("text")) if isinstance(value, dict) else (None, None)
    if kind != "text" or not isinstance(text, str):
        found = f"one of type {kind!r}" if isinstance(kind, str) and kind != "text" else _named(value)
        raise DataError(f"{where}: expected a part of type 'text' with its 'text', found {found}")
    return text


def _trained(message: Message, where: str) -> bool:
    """Whether the loss includes a message: by its own fields, by default yes."""
    for name in _PARTS_MASKED:
        if name in message:
            raise DataError(
                f"{where}.{name}: parts of an answer cannot be masked: {', '.join(_MASKS)} mask a whole one"
            )
    said = {name: message[name] for name in _MASKS if name in message}
    for name, value in said.items():
        if value not in (0, 1) or isinstance(value, bool) is (name == "weight"):
            expected = "0 or 1" if name == "weight" else "true or false"
            found = _named(value) if isinstance(value, list | dict) else json.dumps(value)
            raise DataError(f"{where}.{name}: expected {expected}, found {found}")
    if len(set(map(bool, said.values()))) > 1:
        raise DataError(f"{where}: {' and '.join(said)} contradict each other")
    return all(said.values())


def _tools(record: Mapping[str, object], where: str) -> list[object]:
    tools = record.get("tools")
    if isinstance(tools, str) and tools:  # Parquet's way to hold them
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: 'tools': expected a list in JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools': expected a list, found {_named(tools)}")
    return list(tools) if isinstance(tools, list) else []


def _expected(column: str) -> str:
    return repr(column) if column else f"{_CHAT!r} or {_TEXT!r} (or the one that data.column names)"


def _named(value: object) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
