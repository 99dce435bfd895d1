"""Tokenises a run's files once: later runs find the tokens by the files' contents, and tokenise again if these change.

``STORE/tokens/KEY`` is named by a hash over the content of every file in order, the tokenizer's files and the options
that define documents. Paths are not part of it: moved files are found again. A file is hashed again if its size or time
of change differs from ``inputs.json``. A tokenisation that is killed leaves a directory named ``.partial``, which the
next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import DataError, StoreInUseError
from tierstore.stats import OnProgress
from tierstore.store.disk.home import write_durably
from tierstore.store.disk.lease import try_lock
from tierstore.train.files import DataConfig, DataFormat
from tierstore.train.tokens.documents import PIECE, Chat, Document, TextPiece, documents, file_format
from tierstore.train.tokens.token_files import (
    INDEX,
    VERSION,
    TokenWriter,
    read_blocks,
)
from tierstore.train.tokens.tokenizing import DocumentTokenizer, tokenizer_digest

_DIRECTORY = "tokens"
_NOTES = "inputs.json"
_SETTLED_NS = 2_000_000_000  # a file changed less than this long before hashing may change again unnoticed
_BATCH, _BATCH_CHARACTERS = 256, 1 << 18  # given to the tokenizer at once, or one longer piece
#: What the tokenizer needs for each token (measured: 155 bytes in long words, 197 in Python code, 299 in single letters).
_TOKEN_BYTES = 300
_POLL_S = 0.1
_MAY_BE_CHATS = (DataFormat.JSONL, DataFormat.PARQUET)


@dataclass(frozen=True, slots=True)
class Input:
    """One file: its format, and the SHA-256 of its content."""

    path: Path
    format: DataFormat
    nbytes: int
    modified_ns: int
    sha256: str


def find_inputs(files: Sequence[Path], config: DataConfig, store: Path) -> list[Input]:
    """The content hash of each file, computed if not known. Raises DataError naming a file that cannot be read."""
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
    """Everything that the tokens depend on. Raises ConfigError without a tokenizer."""
    return {
        "version": VERSION,
        # Without it, a run would find the tokens of an earlier version, which trained on masked answers.
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
    progress: OnProgress,
) -> Path:
    """The directory of the tokens of ``files``, created if missing.

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
    check_vocabulary(loaded.vocabulary, vocabulary, tokenizer)
    with _locked(target.parent):
        partial = target.with_name(f"{target.name}.partial")
        # Left by an interrupted tokenisation. A directory without its index was not completed by a rename.
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        try:
            _write(partial, target, inputs, config, loaded, made, progress)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _note(store, inputs)
    return target


def tokenising_bytes(store: Path, files: Sequence[Path]) -> int:
    """What ``tokenise`` takes while it runs, in bytes, if each byte of the largest piece of ``files`` is a token. 0 if
    ``store`` has tokens: whether they are of ``files`` is known only when those have been read.
    """
    if any((store / _DIRECTORY).glob(f"*/{INDEX}")):
        return 0
    return _TOKEN_BYTES * min(PIECE, max((path.stat().st_size for path in files if path.exists()), default=0))


def find_tokens(store: Path, files: Sequence[Path], config: DataConfig, *, tokenizer: Path) -> Path:
    """Waits for the directory that another rank's ``tokenise`` makes. The death watch notices if that rank dies."""
    target = token_directory(store, made_of(find_inputs(files, config, store), config, tokenizer))
    while not (target / INDEX).exists():
        time.sleep(_POLL_S)
    return target


def check_vocabulary(size: int, most: int, tokenizer: Path) -> None:
    """Raises DataError for a tokenizer with more tokens than the model."""
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
    progress: OnProgress,
) -> None:
    done, total = 0, sum(item.nbytes for item in inputs)

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    with TokenWriter(partial, vocabulary=tokenizer.vocabulary, pad=tokenizer.pad) as writer:
        for item in inputs:
            writer.formats[item.format.value] += 1
            for batch in _batches(documents(item.path, config, read)):
                _add(writer, batch, tokenizer)
                progress(done, total)
            status = item.path.stat()
            if (status.st_size, status.st_mtime_ns) != (item.nbytes, item.modified_ns):
                raise DataError(f"{item.path}: changed while it was being tokenised")
        if not writer.tokens:
            why = "".join(f" ({count} {reason})" for reason, count in writer.skipped.items())
            raise DataError(f"{inputs[0].path}: expected documents, found none{why}")
        writer.finish(target, made_of)


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Batches of documents for the tokenizer: of one kind, in order."""
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


def _add(writer: TokenWriter, batch: Sequence[Document], tokenizer: DocumentTokenizer) -> None:
    chats = [item for item in batch if isinstance(item, Chat)]
    for chat, (tokens, counted) in zip(chats, tokenizer.chats(chats) if chats else (), strict=True):
        if counted.any():
            writer.add(tokens, counted)
            writer.end_document()
        else:
            writer.skipped["chats of masked answers" if chat.masked else "chats without an answer"] += 1
    texts = [item for item in batch if isinstance(item, TextPiece)]
    for tokens, piece in zip(
        tokenizer.texts([item.text for item in texts]) if texts else (), texts, strict=True
    ):
        if piece.begins and piece.ends and not piece.text.strip():
            writer.skipped["empty texts"] += 1
            continue
        if piece.begins:
            writer.add_ids(tokenizer.prefix)
        writer.add(tokens)
        if piece.ends:
            writer.add_ids(tokenizer.suffix)
            writer.end_document()


# Known hashes of inputs, and the lock of a tokenisation -----------------------------------------------------


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
    """Creates ``directory`` and locks it against other processes; the lock ends with its process."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / "lock"
    try:
        with lock.open("wb") as file:
            if not try_lock(file.fileno(), fcntl.LOCK_EX, lock):
                raise StoreInUseError(f"{directory}: another process is tokenising here")
            yield
    except BaseException:
        if created:  # it was created here: remove it
            with contextlib.suppress(OSError):
                lock.unlink()
                for path in created:
                    path.rmdir()
        raise
