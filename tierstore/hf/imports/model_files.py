"""What an import leaves beside the records: configuration, tokenizer, and the tensors that the family ignores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, DataError
from tierstore.hf.checkpoints.checkpoint import (
    INDEX_NAME,
    TensorInfo,
    TensorReader,
    copy_tensors,
    refuse_pointer,
)
from tierstore.hf.describing import CONFIG_NAME
from tierstore.hf.manifest import MANIFEST_NAME, CarriedEntry, Quantization, write_durably
from tierstore.store.disk.home import fsync_directory
from tierstore.train.tokens.tokenizing import DocumentTokenizer

_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
_TEMPLATES = "additional_chat_templates"
#: Larger files are no tokenizer's.
_MOST_BYTES = 256 << 20
#: About how large one file of carried tensors becomes.
_CARRIED_BYTES = 4 << 30


def companion_files(directory: Path) -> list[str]:
    """Names of the configuration and tokenizer files of a model directory, in order; code is none of them."""
    names = [
        path.name
        for path in directory.iterdir()
        if path.is_file()
        and (path.suffix in _SUFFIXES or path.name.startswith(_NAMES))
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= _MOST_BYTES
    ]
    names += [f"{_TEMPLATES}/{path.name}" for path in (directory / _TEMPLATES).glob("*.jinja")]
    return sorted(names)


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raises DataError where the tokenizer has a token that the embedding has no row for, or one of its files that are no
    JSON is a git-lfs pointer, which would be taken for a template or a vocabulary.
    """
    for name in companion_files(directory):
        if not name.endswith(".json"):
            with (directory / name).open("rb") as file:
                refuse_pointer(directory / name, file.read(8))
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    content = path.read_bytes()
    refuse_pointer(path, content)
    try:
        value = json.loads(content)
        vocabulary = value.get("model", {}).get("vocab", {})
        numbers = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        numbers += [token["id"] for token in value.get("added_tokens") or ()]
        largest = max((int(number) for number in numbers), default=-1)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a tokenizer: {error}") from error
    if largest >= vocab_size:
        raise DataError(
            f"{path}: token {largest} is beyond the model's vocabulary of {vocab_size} (vocab_size in {CONFIG_NAME})"
        )


def companion_notes(directory: Path) -> Iterator[str]:
    """A line for each companion file that is damaged and yet no reason to refuse the model."""
    path = directory / "generation_config.json"
    if path.exists():
        try:
            whole = isinstance(json.loads(path.read_bytes()), dict)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            yield f"{path}: not a JSON object, and ignored"
    if (directory / "tokenizer.json").exists():
        try:
            DocumentTokenizer(directory)
        except (ConfigError, DataError) as error:
            yield f"{error}; the model is imported, but reads and writes no text"


def copy_companions(source: Path, target: Path, names: Sequence[str], quantization: Quantization) -> None:
    """Copies ``names`` into ``target``, durably. The configuration loses its quantisation: the records have none."""
    for name in names:
        content = (source / name).read_bytes()
        if name == CONFIG_NAME and quantization is not Quantization.NONE:
            config = json.loads(content)
            config.pop("quantization_config", None)
            content = (json.dumps(config, indent=2) + "\n").encode()
        path = target / name
        if path.parent != target:
            path.parent.mkdir(exist_ok=True)
            fsync_directory(path.parent)
        write_durably(path, content)
        fsync_directory(path.parent)


def carried_files(infos: Sequence[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    """Which file each carried tensor goes to, in order."""
    files: list[tuple[str, list[TensorInfo]]] = []
    held = 0
    for info in infos:
        if not files or held + info.nbytes > _CARRIED_BYTES:
            files.append((f"carried-{len(files):05d}.safetensors", []))
            held = 0
        files[-1][1].append(info)
        held += info.nbytes
    return files


def carried_entries(infos: Sequence[TensorInfo]) -> Iterator[CarriedEntry]:
    """What the manifest says of them."""
    for name, held in carried_files(infos):
        for info in held:
            yield CarriedEntry(info.name, name)


def carried_header(infos: Sequence[TensorInfo]) -> bytes:
    """The header of a safetensors file of ``infos``, its length before it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for info in infos:
        table[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [at, at + info.nbytes],
        }
        at += info.nbytes
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def copy_carried(infos: Sequence[TensorInfo], target: Path, reader: TensorReader) -> None:
    """Copies the carried tensors into ``target``, byte for byte, durably. Files that are whole already stay."""
    for name, held in carried_files(infos):
        header = carried_header(held)
        path = target / name
        if path.exists() and path.stat().st_size == len(header) + sum(info.nbytes for info in held):
            continue  # it has its name, so it was whole
        partial = path.with_name(f"{name}.partial")
        with open(partial, "wb") as file:
            file.write(header)
            written = 0
            for info in held:
                copy_tensors([info], reader, lambda raw: file.write(raw.data))
                written += info.nbytes
                if written >= 64 << 20:  # the page cache stays next to empty
                    written = 0
                    _flush(file.fileno(), file.flush)
            _flush(file.fileno(), file.flush)
        partial.rename(path)
        fsync_directory(target)


def _flush(fd: int, flush: Any) -> None:
    flush()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
