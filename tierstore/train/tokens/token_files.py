"""The files of tokenised documents: written once as a stream, renamed when complete, then mapped.

A directory holds ``tokens`` (uint16 or uint32, little-endian), ``documents`` (int64: the start of each, and the end of
the last), ``counted`` (uint8, one a token: whether it is a target; absent if all are) and ``index.json``, which records
their inputs and each one's size and CRC-32. Sequential writes and reads drop their data from the page cache.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import DataError
from tierstore.store.disk.home import fsync_directory, write_durably

VERSION = 1
INDEX = "index.json"
TOKENS, DOCUMENTS, COUNTED = "tokens", "documents", "counted"
_BLOCK = 8 << 20

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """The content of ``index.json``. ``skipped``: documents left out, by reason; ``vocabulary``, ``pad``: of the
    tokenizer."""

    made_of: dict[str, object]
    dtype: str
    tokens: int
    documents: int
    masked: bool
    vocabulary: int
    pad: int
    formats: dict[str, int]
    skipped: dict[str, int]
    files: dict[str, dict[str, int]]
    version: int = VERSION

    @property
    def crc32(self) -> int:
        """A checksum over every byte of the other files."""
        return zlib.crc32(json.dumps(self.files, sort_keys=True).encode())


class TokenWriter:
    """Writes the files into the new ``directory``; ``finish`` makes them durable and renames it.

    The caller counts files read in ``formats``, and documents left out in ``skipped``.
    """

    def __init__(self, directory: Path, *, vocabulary: int, pad: int) -> None:
        directory.mkdir()
        self._directory = directory
        self._vocabulary, self._pad = vocabulary, pad
        self._dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
        self._stack = ExitStack()
        self._tokens = self._file(TOKENS)
        self._documents = self._file(DOCUMENTS)
        self._counted: _Stream | None = None
        self.tokens = self.documents = 0
        self.formats = Counter[str]()
        self.skipped = Counter[str]()
        self._begin()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _file(self, name: str) -> _Stream:
        return self._stack.enter_context(closing(_Stream(self._directory / name)))

    def _begin(self) -> None:
        self._documents.write(np.array([self.tokens], dtype="<i8").tobytes())

    def add(self, tokens: npt.NDArray[np.integer[Any]], counted: npt.NDArray[np.uint8] | None = None) -> None:
        """Adds tokens of the current document; ``counted`` (None: all) tells which of them are targets."""
        if counted is not None and self._counted is None:
            self._counted = self._file(COUNTED)
            for at in range(0, self.tokens, _BLOCK):
                self._counted.write(b"\1" * min(_BLOCK, self.tokens - at))
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        if self._counted is not None:
            self._counted.write(b"\1" * tokens.size if counted is None else counted.tobytes())
        self.tokens += tokens.size

    def add_ids(self, tokens: Sequence[int]) -> None:
        """Adds tokens, all of them targets."""
        if tokens:
            self.add(np.array(tokens, dtype=np.uint32))

    def end_document(self) -> None:
        self.documents += 1
        self._begin()

    def finish(self, target: Path, made_of: Mapping[str, object]) -> None:
        """Makes all files durable, and renames the directory to ``target``."""
        streams = [stream for stream in (self._tokens, self._documents, self._counted) if stream is not None]
        for stream in streams:
            stream.flush()
        index = TokenIndex(
            made_of=dict(made_of),
            dtype=self._dtype.str,
            tokens=self.tokens,
            documents=self.documents,
            masked=self._counted is not None,
            vocabulary=self._vocabulary,
            pad=self._pad,
            formats=dict(self.formats),
            skipped=dict(self.skipped),
            files={stream.path.name: {"bytes": stream.nbytes, "crc32": stream.crc32} for stream in streams},
        )
        self._stack.close()
        write_durably(self._directory / INDEX, json.dumps(asdict(index), indent=1).encode())
        fsync_directory(self._directory)
        os.rename(self._directory, target)
        fsync_directory(target.parent)


class TokenFiles:
    """The files in ``directory``, mapped: ``tokens``, ``counted`` (None: all are) and ``documents``."""

    def __init__(self, directory: Path) -> None:
        """Raises DataError naming a file that is missing, damaged or of another size."""
        self.directory = directory
        self.index = read_index(directory)
        for name, said in self.index.files.items():
            path = directory / name
            found = path.stat().st_size if path.exists() else -1
            if found != said["bytes"]:
                raise DataError(f"{path}: expected {said['bytes']} bytes, found {max(found, 0)}; {_AGAIN}")
        self.tokens = _mapped(directory / TOKENS, np.dtype(self.index.dtype))
        self.documents: Offsets = np.fromfile(directory / DOCUMENTS, dtype="<i8").astype(np.int64)
        self.counted = _mapped(directory / COUNTED, np.dtype(np.uint8)) if self.index.masked else None

    def verify(self) -> None:
        """Reads every byte. Raises DataError naming a file whose checksum does not match."""
        for name, said in self.index.files.items():
            crc = 0
            for block in read_blocks(self.directory / name):
                crc = zlib.crc32(block, crc)
            if crc != said["crc32"]:
                raise DataError(f"{self.directory / name}: damaged: its checksum does not match; {_AGAIN}")

    def counted_targets(self, starts: Offsets, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The number of counted targets among the ``lengths`` tokens from each of ``starts``, which ascend."""
        if self.counted is None:
            return lengths.copy()
        sums = np.zeros((2, starts.size), dtype=np.int64)
        edges = np.stack([starts, starts + lengths])
        total = 0
        for at in range(0, self.counted.size, _BLOCK):
            block = np.cumsum(self.counted[at : at + _BLOCK], dtype=np.int64)
            for side in (0, 1):  # sums before an edge: edges ascend on both sides
                first, last = np.searchsorted(edges[side], [at + 1, at + block.size + 1])
                sums[side, first:last] = total + block[edges[side, first:last] - at - 1]
            total += int(block[-1])
        difference: npt.NDArray[np.int64] = sums[1] - sums[0]
        return difference.astype(np.int32)


_AGAIN = "remove its directory, and the next run tokenises again"


def read_index(directory: Path) -> TokenIndex:
    """Reads the index. Raises DataError if it cannot be read, or has another version."""
    path = directory / INDEX
    try:
        values = json.loads(path.read_bytes())
        if values.get("version") != VERSION:
            raise DataError(f"{path}: expected version {VERSION}, found {values.get('version')}; {_AGAIN}")
        return TokenIndex(**values)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {_AGAIN}") from error


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of ``path``, read without keeping them in the page cache."""
    with path.open("rb", buffering=0) as file:
        at = 0
        while block := file.read(_BLOCK):
            yield block
            os.posix_fadvise(file.fileno(), at, len(block), os.POSIX_FADV_DONTNEED)
            at += len(block)


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapping.madvise(mmap.MADV_RANDOM)  # rows are read at random: read-ahead would be wasted
    return np.frombuffer(mapping, dtype=dtype)


class _Stream:
    """A file written sequentially, without keeping it in the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = self.crc32 = 0
        self._file: IO[bytes] = path.open("wb", buffering=1 << 20)
        self._clean = 0

    def close(self) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.crc32 = zlib.crc32(content, self.crc32)
        self.nbytes += len(content)
        if self.nbytes - self._clean >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Makes the written bytes durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._clean = self.nbytes
