"""Checkpoints on disk: the tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the values of all tensors, one after
another without gaps. Headers are read here, not by the package ``safetensors``, so that single tensors and rows of them
are read past the page cache, into memory allocated before. Nothing in a header is trusted before it is checked: files come
from the internet.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tierstore.errors import DataError, TierstoreError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: The same limit as in the package safetensors.
MAX_HEADER_BYTES = 100_000_000
#: Direct reads begin and end at multiples of this, in the file and in memory.
ALIGNMENT = 4096

#: Bytes of one value, by safetensors' name of the type.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MOST_DIMENSIONS = 32
_SAMPLES, _SAMPLE_BYTES = 64, 4096
#: Bytes that are read at once of a tensor that is copied or compared, and written at once.
WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint, row-major. ``dtype``: safetensors' name of its type."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor on disk: its bytes begin at ``offset`` of ``file``."""

    file: Path
    offset: int


# Headers ----------------------------------------------------------------------------------------------------


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises DataError if ``start``, the first bytes of ``path``, begins a git-lfs pointer."""
    if start.startswith(b"version "):
        raise DataError(f"{path}: a git-lfs pointer, not the file itself; git lfs pull fetches the file")


def read_object(path: Path, wrong: type[TierstoreError]) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ``wrong`` if the file holds none, DataError for a git-lfs pointer, OSError."""
    content = path.read_bytes()
    refuse_pointer(path, content)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise wrong(f"{path}: expected a JSON object")
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of the file ``path`` by name, in file order; its header is checked against the file.

    Raises DataError naming file, tensor and what was expected; OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise DataError(
                f"{path}: {size} bytes, expected a safetensors file of at least 8; is it truncated?"
            )
        refuse_pointer(path, start)
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise DataError(f"{path}: a header of {length} bytes, expected at most {MAX_HEADER_BYTES}")
        if 8 + length > size:
            raise DataError(f"{path}: truncated: a header of {length} bytes in a file of {size}")
        raw = file.read(length)
    if len(raw) != length:
        raise DataError(f"{path}: truncated while it was read")
    table = _parse(path, raw)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DataError(f"{path}: __metadata__: expected an object whose values are strings")
    infos = [_info(path, name, value, 8 + length) for name, value in table.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    at = 8 + length
    for info in infos:
        if info.offset != at:
            what = "overlaps the tensor before it" if info.offset < at else "leaves a gap before it"
            raise DataError(
                f"{path}: tensor {info.name!r} {what}: it begins at byte {info.offset}, expected {at}"
            )
        at += info.nbytes
    if at != size:
        what = "truncated" if at > size else "longer than its header says"
        raise DataError(f"{path}: {what}: {size} bytes, expected {at}")
    return {info.name: info for info in infos}


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise DataError(f"{path}: the header names {twice!r} twice")
        return table

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    if not raw.startswith(b"{"):
        raise DataError(f"{path}: not a safetensors file: its header is no JSON object")
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise DataError(f"{path}: not a safetensors file: its header is no JSON object")
    return table


def _info(path: Path, name: str, value: object, data: int) -> TensorInfo:
    what = f"{path}: tensor {name[:200]!r}"
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{what}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DataError(f"{what}: unknown dtype {str(dtype)[:40]!r}; known: {', '.join(ITEM_BYTES)}")
    if not _naturals(shape) or len(shape) > _MOST_DIMENSIONS:
        raise DataError(f"{what}: shape: expected at most {_MOST_DIMENSIONS} whole numbers of at least 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DataError(f"{what}: data_offsets: expected [begin, end], got {str(offsets)[:80]}")
    info = TensorInfo(name, dtype, tuple(shape), path, data + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise DataError(
            f"{what}: data_offsets span {offsets[1] - offsets[0]} bytes, and {dtype} {str(info.shape)[:80]} has "
            f"{info.nbytes}"
        )
    return info


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 63 for item in value
    )


# A whole checkpoint -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model directory by name, and the files that they lie in, in the order of their names."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads the headers of all files. Raises DataError, one line naming file and tensor; OSError."""
        if not directory.is_dir():
            raise DataError(f"{directory}: expected a model directory")
        if (directory / SINGLE_NAME).exists():
            return cls(directory, read_header(directory / SINGLE_NAME), (directory / SINGLE_NAME,))
        if (directory / INDEX_NAME).exists():
            return cls._sharded(directory)
        raise DataError(_no_checkpoint(directory))

    @classmethod
    def _sharded(cls, directory: Path) -> Checkpoint:
        index = directory / INDEX_NAME
        weight_map = _weight_map(index)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise DataError(f"{directory / missing[0]}: missing; {index} names it{_more(missing)}")
        tensors: dict[str, TensorInfo] = {}
        for name in names:
            for tensor, info in read_header(directory / name).items():
                if weight_map.get(tensor) == name:
                    tensors[tensor] = info
                elif tensor in weight_map:
                    raise DataError(
                        f"{directory / name}: tensor {tensor!r} is in this file, and {INDEX_NAME} says it is in "
                        f"{weight_map[tensor]}"
                    )
                else:
                    raise DataError(f"{directory / name}: tensor {tensor!r} is not in {INDEX_NAME}")
        lost = [tensor for tensor in weight_map if tensor not in tensors]
        if lost:
            raise DataError(
                f"{directory / weight_map[lost[0]]}: tensor {lost[0]!r} is missing; {INDEX_NAME} says it is there"
                f"{_more(lost)}"
            )
        return cls(directory, tensors, tuple(directory / name for name in names))

    @property
    def unlisted(self) -> list[str]:
        """Safetensors files in the directory that are no part of the checkpoint: the index may lack them."""
        own = {file.name for file in self.files}
        return sorted(path.name for path in self.directory.glob("*.safetensors") if path.name not in own)

    def fingerprint(self) -> str:
        """SHA-256 over the configuration, all headers and samples of the values: identifies the checkpoint without reading
        all of it. The path of the checkpoint has no influence.
        """
        digest = hashlib.sha256()
        config = self.directory / "config.json"
        digest.update(config.read_bytes() if config.exists() else b"")
        for path in self.files:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
                digest.update(os.fsencode(path.name) + f" {size}\n".encode())
                header = 8 + int.from_bytes(file.read(8), "little")
                file.seek(0)
                digest.update(file.read(header))
                step = max((size - header) // _SAMPLES, _SAMPLE_BYTES)
                for offset in range(header, size, step):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE_BYTES))
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, DataError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index}: weight_map: expected an object, tensor name to file name")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(
                f"{index}: weight_map.{tensor}: expected the name of a .safetensors file in the same directory, got "
                f"{str(file)[:80]!r}"
            )
    return weight_map


def _more(items: list[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _no_checkpoint(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    pickled = next((name for name in names if name.endswith(_PICKLES)), None)
    if pickled is not None:
        return (
            f"{directory / pickled}: pickled weights can run code when they are loaded, so they are refused; convert them "
            f"if you trust them: AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(OUT) "
            "writes safetensors"
        )
    loose = next((name for name in names if name.endswith(".safetensors")), None)
    if loose is not None:
        return f"{directory}: {INDEX_NAME} is missing; it lists the tensors of {loose} and of the other files"
    return f"{directory}: expected {SINGLE_NAME} or {INDEX_NAME}, found neither"


# Reading ----------------------------------------------------------------------------------------------------


class TensorReader:
    """Reads bytes of tensors past the page cache: with O_DIRECT or, if the file system does not support it, by dropping the
    pages after each read. Any number of threads may read, each into a buffer of its own, which grows to the largest read. A
    context manager.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._files: dict[Path, tuple[int, bool]] = {}  # descriptors, and whether they have O_DIRECT
        self._lock = threading.Lock()  # of them
        #: Why files are read through the page cache; empty when they are not.
        self.direct_reason = ""

    def read(self, info: TensorInfo, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Bytes ``[begin, end)`` of a tensor, a view that the thread's next read overwrites.

        Raises DataError when the file has been cut short meanwhile; OSError.
        """
        if not 0 <= begin <= end <= info.nbytes:
            raise ValueError(f"tensor {info.name!r}: bytes {begin} to {end} of {info.nbytes}")
        if begin == end:
            return np.empty(0, np.uint8)
        first, last = info.offset + begin, info.offset + end
        low = first // ALIGNMENT * ALIGNMENT
        high = -(-last // ALIGNMENT) * ALIGNMENT
        memory = self._buffer(high - low)
        fd, direct = self._open(info.file)
        got = self._fill(info.file, fd, direct, memory[: high - low], low, last - low)
        if got < last - low:
            raise DataError(f"{info.file}: truncated while it was read: tensor {info.name!r} ends beyond it")
        if not direct:
            os.posix_fadvise(fd, low, high - low, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(memory, np.uint8, end - begin, first - low)

    def chunks(self, info: TensorInfo) -> Iterator[npt.NDArray[np.uint8]]:
        """All bytes of a tensor in order, in pieces that the next one overwrites. Raises as ``read``."""
        for begin in range(0, info.nbytes, WINDOW_BYTES):
            yield self.read(info, begin, min(begin + WINDOW_BYTES, info.nbytes))

    def _buffer(self, nbytes: int) -> memoryview:
        """The thread's buffer, page-aligned, of at least ``nbytes``."""
        held: mmap.mmap | None = getattr(self._threads, "buffer", None)
        if held is None or len(held) < nbytes:
            held = self._threads.buffer = mmap.mmap(-1, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        return memoryview(held)

    def _fill(self, path: Path, fd: int, direct: bool, memory: memoryview, offset: int, wanted: int) -> int:
        got = 0
        while got < wanted:
            try:
                count = os.preadv(fd, [memory[got:]], offset + got)
            except OSError as error:
                if not (direct and error.errno == errno.EINVAL):
                    raise OSError(error.errno, error.strerror, str(path)) from error
                # The device needs larger blocks than ALIGNMENT: this and later reads use the page cache.
                self.direct_reason, direct = f"{path}: O_DIRECT: {error.strerror}", False
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                with self._lock:
                    self._files[path] = (fd, False)
                continue
            got += count
            if count == 0 or (direct and count % ALIGNMENT):
                break  # the end of the file; bytes beyond it were not requested
        return got

    def _open(self, path: Path) -> tuple[int, bool]:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct_reason = f"{path}: O_DIRECT: {error.strerror}"
                    self._files[path] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), False)
            return self._files[path]

    def close(self) -> None:
        """Closes the files; no thread may be reading."""
        with self._lock:
            for fd, _ in self._files.values():
                os.close(fd)
            self._files.clear()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
