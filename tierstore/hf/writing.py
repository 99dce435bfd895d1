"""Writing checkpoints: safetensors files as streams, sharded, with their index, in bounded memory.

The package ``safetensors`` writes only tensors that are in memory. Here names, types and shapes are known beforehand
(``Outline``), which is all that a header needs; the values follow in file order, past the page cache. A checkpoint is
built under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore.dense import UnitLayout
from tierstore.hf.checkpoint import (
    ALIGNMENT,
    INDEX_NAME,
    SINGLE_NAME,
    WINDOW_BYTES,
    TensorInfo,
    TensorSpec,
)
from tierstore.hf.manifest import ParameterEntry
from tierstore.machine import require_space
from tierstore.stats import OnProgress, no_progress
from tierstore.store.disk.home import building, building_directory, fsync_directory, write_durably

#: Default limit of a shard's bytes, as in transformers.
MAX_SHARD_BYTES = 5 * 10**9
#: The header entry that transformers requires.
METADATA = {"format": "pt"}

#: Marks a directory as an incomplete export of tierstore.
_MARKER = ".tierstore-export"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    """One file: its tensors in file order."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def header(self) -> bytes:
        """The bytes before the values, padded so that the values begin at a multiple of 8."""
        table: dict[str, object] = {"__metadata__": METADATA}
        at = 0
        for tensor in self.tensors:
            offsets = [at, at + tensor.nbytes]
            table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            at = offsets[1]
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(tensors: Sequence[TensorSpec], max_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """Cuts ``tensors`` into files of at most ``max_bytes`` of values; a larger tensor has a file of its own.

    The order is kept, except that wider types come first within a file, so that every tensor is aligned to its type.
    """
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    ordered = [sorted(part, key=lambda tensor: -tensor.item_bytes) for part in parts]
    if len(ordered) == 1:
        return [Shard(SINGLE_NAME, tuple(ordered[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(ordered):05d}.safetensors", tuple(part))
        for number, part in enumerate(ordered, start=1)
    ]


def index_of(shards: Sequence[Shard]) -> dict[str, object]:
    """The content of ``model.safetensors.index.json``."""
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    return {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }


# The directory ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_directory(target: Path, nbytes: int) -> Iterator[Path]:
    """A temporary directory beside ``target``, which is durable under the name ``target`` when the block ends.

    If the block raises, nothing is left. ``nbytes``: the space needed. Raises FileExistsError if ``target`` exists, or if
    the temporary name is taken by something that no export left; OSError (ENOSPC), each with nothing written;
    StoreInUseError.
    """
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "there is something here already", str(target))
    partial = building_directory(target)
    if partial.exists():
        ours = partial.is_dir() and ((partial / _MARKER).exists() or not any(partial.iterdir()))
        if not ours:
            raise FileExistsError(
                errno.EEXIST, f"this name is needed to build {target.name}, but it exists", str(partial)
            )
        with building(partial):
            _remove(partial)
    require_space([partial], nbytes, "the weights")
    partial.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, partial)
        stack.enter_context(building(partial))
        (partial / _MARKER).touch()
        yield partial
        fsync_directory(partial)
        partial.rename(target)
        fsync_directory(target.absolute().parent)
        # Last: a killed export leaves a directory that the next one recognises by it. In a complete one it does no harm.
        (target / _MARKER).unlink()
        fsync_directory(target)


def _remove(partial: Path) -> None:
    """Removes the remains of an export as far as possible; the marker last, since it identifies the rest."""
    for child in partial.iterdir() if partial.exists() else ():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
        elif child.name != _MARKER:
            with contextlib.suppress(OSError):
                child.unlink()
    shutil.rmtree(partial, ignore_errors=True)


def write_model(
    target: Path,
    shards: Sequence[Shard],
    files: Mapping[str, bytes],
    content: Callable[[TensorSpec], Iterable[Bytes]],
    progress: OnProgress,
) -> None:
    """Writes ``files`` and, as ``write_checkpoint`` does, ``shards`` to the new directory ``target``.

    Raises OSError (a target that exists, a full disk); after a failure nothing exists at ``target``.
    """
    with new_directory(target, needed_bytes(shards, files)) as directory:
        for name, data in files.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            write_durably(path, data)
            fsync_directory(path.parent)
        write_checkpoint(directory, shards, content, progress)


def write_checkpoint(
    directory: Path,
    shards: Sequence[Shard],
    content: Callable[[TensorSpec], Iterable[Bytes]],
    progress: OnProgress = no_progress,
) -> None:
    """Writes ``shards`` and their index. ``content`` gives the bytes of a tensor in pieces, each valid until the next one
    is read; ``progress`` is called after each piece. Raises OSError; ValueError where pieces do not fit.
    """
    done, total = 0, sum(shard.data_bytes for shard in shards)
    progress(0, total)
    for shard in shards:
        with StreamFile(directory / shard.file) as file:
            file.append(np.frombuffer(shard.header, np.uint8))
            for tensor in shard.tensors:
                before = file.nbytes
                for piece in content(tensor):
                    file.append(piece)
                    done += piece.nbytes
                    progress(done, total)
                if file.nbytes - before != tensor.nbytes:
                    raise ValueError(f"{tensor.name}: {file.nbytes - before} bytes, expected {tensor.nbytes}")
            file.finish()
    if len(shards) > 1:
        write_durably(directory / INDEX_NAME, json_bytes(index_of(shards), ensure_ascii=True))


def json_bytes(value: object, *, ensure_ascii: bool = False) -> bytes:
    """``value`` as a JSON file of a model directory."""
    return (json.dumps(value, indent=2, ensure_ascii=ensure_ascii) + "\n").encode()


class StreamFile:
    """A new file, written sequentially past the page cache: with O_DIRECT or, if the file system does not support it, by
    syncing and dropping the pages after each write. One caller; the file's own thread writes. A context manager:
    a file that was not finished is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nbytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems refuse the flag for a file that exists
            self._direct = False
            self._fd = os.open(path, flags, 0o666)
        # Two buffers: one is filled while the other is written.
        self._windows = [mmap.mmap(-1, WINDOW_BYTES) for _ in range(2)]
        self._current, self._filled, self._offset = 0, 0, 0
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")

    def __enter__(self) -> StreamFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._fd)

    def append(self, data: Bytes) -> None:
        """Adds ``data`` (flat, contiguous), which may change afterwards. Raises OSError, also for an earlier write."""
        view = data.data
        at = 0
        while at < len(view):
            count = min(len(view) - at, WINDOW_BYTES - self._filled)
            self._windows[self._current][self._filled : self._filled + count] = view[at : at + count]
            self._filled += count
            at += count
            if self._filled == WINDOW_BYTES:
                self._flush(WINDOW_BYTES)
        self.nbytes += len(view)

    def finish(self) -> None:
        """Writes and fsyncs the rest. Raises OSError."""
        if self._filled:
            padded = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._windows[self._current][self._filled : padded] = bytes(padded - self._filled)
            self._flush(padded)
        self._wait()
        os.ftruncate(self._fd, self.nbytes)
        os.fsync(self._fd)

    def _flush(self, count: int) -> None:
        self._wait()
        self._writing = self._thread.submit(self._write, self._windows[self._current], count, self._offset)
        self._offset += count
        self._current, self._filled = 1 - self._current, 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, window: mmap.mmap, count: int, offset: int) -> None:
        with memoryview(window) as view:
            done = 0
            while done < count:
                done += self._pwrite(view[done:count], offset + done)
        if not self._direct:
            os.fdatasync(self._fd)  # only clean pages can be dropped
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)

    def _pwrite(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._fd, view, offset)
        except OSError as error:
            if not (self._direct and error.errno == errno.EINVAL):
                raise OSError(error.errno, error.strerror, str(self._path)) from error
        # The device needs larger blocks than ALIGNMENT, or an earlier write was short: use the page cache.
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return os.pwrite(self._fd, view, offset)


def needed_bytes(shards: Sequence[Shard], files: Mapping[str, bytes]) -> int:
    """The space that a checkpoint takes, in whole blocks."""
    sizes = [len(shard.header) + shard.data_bytes for shard in shards]
    sizes += [len(content) for content in files.values()]
    index = sum(len(tensor.name) + 64 for shard in shards for tensor in shard.tensors)
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in (*sizes, index))


# Contents of an export --------------------------------------------------------------------------------------


class ExportDtype(StrEnum):
    """The type of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def safetensors(self) -> str:
        """safetensors' name of it."""
        return "BF16" if self is ExportDtype.BF16 else "F32"

    @property
    def torch_name(self) -> str:
        return "bfloat16" if self is ExportDtype.BF16 else "float32"


@dataclass(frozen=True)
class DenseValues:
    """``numel`` values from ``begin`` of parameter ``index`` of dense unit ``unit``, ``name`` in memory, times ``scale``."""

    name: str
    unit: int
    index: int
    begin: int
    numel: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertValues:
    """``numel`` values from ``begin`` of each of ``experts``, one after another."""

    layer: int
    experts: range
    begin: int
    numel: int


#: What a tensor's values come from; a buffer from the commit's small state, a tensor of another file unchanged.
Origin = DenseValues | ExpertValues | ParameterEntry | TensorInfo


@dataclass(frozen=True)
class Outline:
    """The plan of a checkpoint: ``tensors`` in order, by name, with their origins; small ``files`` beside them; ``notes``
    for the user. ``layouts``: the layout of the dense units in the stores.
    """

    dtype: ExportDtype
    tensors: Sequence[tuple[TensorSpec, Origin]]
    layouts: Sequence[UnitLayout]
    files: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
