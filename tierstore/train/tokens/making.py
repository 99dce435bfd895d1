"""Tokenises a run's files once: the tokens are found again by the files' contents, and made anew when these change.

``STORE/tokens/KEY`` is named by a hash over the content of every file in order, the tokenizer's files and the options that
decide what a document is. Paths are not part of it: files that were moved are found again. Content is hashed anew when a
file's size or time of change is another than ``inputs.json`` notes. A tokenisation that is killed leaves a directory named
``.partial``, which the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import DataError, StoreInUseError
from tierstore.store.disk.lease import try_lock
from tierstore.train.files import DataConfig, DataFormat
from tierstore.train.tokens.documents import Chat, Document, TextPiece, documents, file_format
from tierstore.train.tokens.token_files import (
    INDEX,
    VERSION,
    Made,
    TokenIndex,
    TokenWriter,
    read_blocks,
    remove_tree,
    write_durably,
)
from tierstore.train.tokens.tokenizing import DocumentTokenizer, tokenizer_digest

#: Called with bytes that have been read and bytes in all.
Progress = Callable[[int, int], None]

_DIRECTORY = "tokens"
_NOTES = "inputs.json"
_SETTLED_NS = 2_000_000_000  # a file changed later than this before it was hashed may change again unnoticed
_BATCH, _BATCH_CHARACTERS = (
    256,
    1 << 18,
)  # that the tokenizer takes at once: it needs some hundred bytes for each token
_POLL_S = 0.1
_MAY_BE_CHATS = (DataFormat.JSONL, DataFormat.PARQUET)


@dataclass(frozen=True, slots=True)
class Input:
    """One file: what it is read as, and the SHA-256 of its content."""

    path: Path
    format: DataFormat
    nbytes: int
    modified_ns: int
    sha256: str


def find_inputs(files: Sequence[Path], config: DataConfig, store: Path) -> list[Input]:
    """Each file's content, hashed where it is not known. Raises DataError naming a file that cannot be read."""
    notes = _notes(store)
    inputs = []
    for path in files:
        try:
            status = path.stat()
            noted = notes.get(str(path.absolute()))
            if noted and noted[:2] == [status.st_size, status.st_mtime_ns]:
                sha256 = str(noted[2])
            else:
                digest = hashlib.sha256()
                for block in read_blocks(path):
                    digest.update(block)
                sha256 = digest.hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        inputs.append(Input(path, file_format(path, config), status.st_size, status.st_mtime_ns, sha256))
    return inputs


def made_of(inputs: Sequence[Input], config: DataConfig, tokenizer: Path) -> dict[str, object]:
    """Everything that decides the tokens. Raises ConfigError when there is no tokenizer."""
    return {
        "version": VERSION,
        # Without it tokens are found that an earlier version made, which trained on masked answers.
        **({"masks": True} if any(item.format in _MAY_BE_CHATS for item in inputs) else {}),
        "inputs": [[item.format.value, item.nbytes, item.sha256] for item in inputs],
        "tokenizer": tokenizer_digest(tokenizer),
        "column": config.column,
        "separator": config.separator,
    }


def token_directory(store: Path, made: dict[str, object]) -> Path:
    key = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
    return store / _DIRECTORY / key


def tokenise(
    store: Path,
    files: Sequence[Path],
    config: DataConfig,
    *,
    tokenizer: Path,
    vocabulary: int,
    progress: Progress,
) -> Path:
    """The directory of the tokens of ``files``, made if it is not there.

    Raises DataError naming a file and its line or row, ConfigError for a tokenizer that cannot be loaded or whose vocabulary
    is larger than the model's, CapabilityError, StoreInUseError, OSError; then no new directory is there.
    """
    inputs = find_inputs(files, config, store)
    made = made_of(inputs, config, tokenizer)
    target = token_directory(store, made)
    if (target / INDEX).exists():
        _note(store, inputs)
        return target
    loaded = DocumentTokenizer(tokenizer)
    check_vocabulary(loaded.vocabulary.size, vocabulary, tokenizer)
    with _locked(target.parent):
        partial = target.with_name(f"{target.name}.partial")
        remove_tree(partial)
        if target.exists():
            remove_tree(target)  # without its index: not of a rename
        try:
            _write(partial, target, inputs, config, loaded, made, progress)
        except BaseException:
            remove_tree(partial)
            raise
        _note(store, inputs)
    return target


def find_tokens(store: Path, files: Sequence[Path], config: DataConfig, *, tokenizer: Path) -> Path:
    """The directory that another rank's ``tokenise`` makes, waited for. That rank's end is noticed by the death watch."""
    target = token_directory(store, made_of(find_inputs(files, config, store), config, tokenizer))
    while not (target / INDEX).exists():
        time.sleep(_POLL_S)
    return target


def check_vocabulary(size: int, most: int, tokenizer: Path) -> None:
    """Raises DataError for a tokenizer with tokens that the model does not have."""
    if size > most:
        raise DataError(
            f"{tokenizer}: the tokenizer has {size} tokens, and the model {most}: it is not this model's tokenizer"
        )


def _write(
    partial: Path,
    target: Path,
    inputs: Sequence[Input],
    config: DataConfig,
    tokenizer: DocumentTokenizer,
    made_of: dict[str, object],
    progress: Progress,
) -> TokenIndex:
    made, done, total = Made(), 0, sum(item.nbytes for item in inputs)

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    with TokenWriter(partial, vocabulary=tokenizer.vocabulary.size, pad=tokenizer.vocabulary.pad) as writer:
        for item in inputs:
            made.formats[item.format.value] = made.formats.get(item.format.value, 0) + 1
            for batch in _batches(documents(item.path, config, read)):
                _add(writer, batch, tokenizer, made)
                progress(done, total)
            _check_unchanged(item)
        if not writer.tokens:
            raise DataError(f"{inputs[0].path}: expected documents, found none{_why(made)}")
        return writer.finish(target, made_of, made)


def _check_unchanged(item: Input) -> None:
    status = item.path.stat()
    if (status.st_size, status.st_mtime_ns) != (item.nbytes, item.modified_ns):
        raise DataError(f"{item.path}: it changed while it was tokenised")


def _why(made: Made) -> str:
    return "".join(f" ({count} {why})" for why, count in made.skipped.items())


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents that the tokenizer takes at once: of one kind, in their order."""
    batch: list[Document] = []
    nchars = 0
    for item in found:
        size = len(item.text) if isinstance(item, TextPiece) else _BATCH_CHARACTERS // _BATCH
        other = bool(batch) and type(item) is not type(batch[0])
        if other or len(batch) == _BATCH or (batch and nchars + size > _BATCH_CHARACTERS):
            yield batch
            batch, nchars = [], 0
        batch.append(item)
        nchars += size
    if batch:
        yield batch


def _add(writer: TokenWriter, batch: Sequence[Document], tokenizer: DocumentTokenizer, made: Made) -> None:
    chats = [item for item in batch if isinstance(item, Chat)]
    for chat, (tokens, counted) in zip(chats, tokenizer.chats(chats) if chats else (), strict=True):
        if counted.any():
            writer.add(tokens, counted)
            writer.end_document()
        else:
            made.skip("chats of masked answers" if chat.masked else "chats without an answer")
    texts = [item for item in batch if isinstance(item, TextPiece)]
    for tokens, piece in zip(
        tokenizer.texts([item.text for item in texts]) if texts else (), texts, strict=True
    ):
        if piece.begins and piece.ends and not piece.text.strip():
            made.skip("empty texts")
            continue
        if piece.begins:
            writer.add_ids(tokenizer.prefix)
        writer.add(tokens)
        if piece.ends:
            writer.add_ids(tokenizer.suffix)
            writer.end_document()


# What is known of the inputs, and who makes tokens ----------------------------------------------------------


def _notes(store: Path) -> dict[str, list[object]]:
    try:
        notes = json.loads((store / _DIRECTORY / _NOTES).read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _note(store: Path, inputs: Sequence[Input]) -> None:
    now, notes = time.time_ns(), _notes(store)
    known = {
        str(item.path.absolute()): [item.nbytes, item.modified_ns, item.sha256]
        for item in inputs
        if item.modified_ns + _SETTLED_NS < now
    }
    if notes != notes | known:
        write_durably(store / _DIRECTORY / _NOTES, json.dumps(notes | known, indent=1).encode())


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Locks ``directory``, which is made, against other processes; the lock ends with its process."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / "lock"
    try:
        with lock.open("wb") as file:
            if not try_lock(file.fileno(), fcntl.LOCK_EX, lock):
                raise StoreInUseError(f"{directory}: another process is tokenising here")
            yield
    except BaseException:
        if created:  # nothing was here: nothing stays
            with contextlib.suppress(OSError):
                lock.unlink()
                for path in created:
                    path.rmdir()
        raise
