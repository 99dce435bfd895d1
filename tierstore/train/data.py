"""Text as bytes: files, bytes and their order, all a function of the configuration.

Shapes: B sequences of S positions a micro-batch; L bytes in the training split.

**Split.** The files are one long string, in the order of ``paths`` (a directory is walked in the order of its
sorted relative paths). It is cut into blocks of at most 64 KiB; evenly spread blocks,
``validation_fraction`` of them, are the validation split, and the rest the training split. Both are held in memory, so
``max_bytes`` limits the bytes read; the rest is left out, and ``describe()`` says so.

**Order.** The training split holds ``N = (L - S) // S`` windows. An epoch visits each of them once, in the order of a
permutation keyed by (seed, epoch). A phase in [0, S), keyed likewise, shifts the windows so that the cuts differ from
epoch to epoch. The permutation is a Feistel network over a counter (Luby and Rackoff 1988): sequence i is computed
without the ones before it, so a resume needs only the step.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import ConfigError, DataError
from tierstore.model.interface import Batch
from tierstore.moe.seeds import derive_seed
from tierstore.train.files import DataConfig, byte_files
from tierstore.units import format_bytes

_BLOCK = 65_536
_READ = 1 << 20
_ROUNDS = 4

Bytes = npt.NDArray[np.uint8]


class TrainingData(Protocol):
    """Data for training and validation: batches that are a function of the configuration and the step."""

    #: Checksum of everything read, in order.
    crc32: int

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Micro-batch ``micro`` of step ``step``, of all ranks."""
        ...

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """At most ``count`` batches that training never sees: the same ones every time."""
        ...

    def describe(self) -> str:
        """One line for the head of a run."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        ...


class TextData:
    """The two splits and their batches. ``crc32`` covers every byte read, in order."""

    def __init__(self, config: DataConfig, *, seq_len: int) -> None:
        """Reads all files once. Raises DataError naming the file that cannot be read or is empty."""
        if seq_len < 1:
            raise ConfigError(f"seq_len: expected at least 1, got {seq_len}")
        self.config = config
        self.seq_len = seq_len
        files = byte_files(config)
        sizes = [_size(path) for path in files]
        self.bytes_found = sum(sizes)
        self.bytes_read = total = min(self.bytes_found, config.max_bytes)
        name = os.fspath(files[0]) if len(files) == 1 else f"{len(files)} files from {files[0]} on"
        if total == 0:
            raise DataError(f"{name}: expected text, found 0 bytes")
        fraction = config.validation_fraction
        block = min(_BLOCK, max(1, int(total * min(fraction, 1 - fraction))))
        bounds = _validation_blocks(total, block, fraction)
        held = sum(stop - start for start, stop in bounds)
        need = seq_len + 1
        if min(total - held - seq_len + 1, held) < need:
            raise DataError(
                f"{name}: {format_bytes(total)} give {total - held} bytes to train on and {held} to validate;"
                f" expected at least {need + seq_len} and {need} (seq_len {seq_len})"
            )
        self.train: Bytes = np.empty(total - held, dtype=np.uint8)
        self.validation: Bytes = np.empty(held, dtype=np.uint8)
        self.crc32, self.files = self._fill(files, sizes, bounds)
        self.windows = (self.train.size - seq_len) // seq_len

    def _fill(self, files: list[Path], sizes: list[int], bounds: list[tuple[int, int]]) -> tuple[int, int]:
        """Copy the files' bytes to their splits; returns the checksum and how many files were used."""
        edges = [edge for bound in bounds for edge in bound] + [self.bytes_read]
        at, edge, filled, crc, used = 0, 0, [0, 0], 0, 0
        for path, size in zip(files, sizes, strict=True):
            if at >= self.bytes_read:
                break
            used += 1
            for chunk in _chunks(path, min(size, self.bytes_read - at)):
                crc = zlib.crc32(chunk, crc)
                rest = np.frombuffer(chunk, dtype=np.uint8)
                while rest.size:
                    while edges[edge] <= at:
                        edge += 1
                    part = rest[: edges[edge] - at]
                    side = edge % 2  # odd: between the start and the stop of a validation block
                    split = self.validation if side else self.train
                    split[filled[side] : filled[side] + part.size] = part
                    filled[side] += part.size
                    at += part.size
                    rest = rest[part.size :]
        return crc, used

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Tokens and targets, int64 (B, S) each, of one micro-batch: a function of (seed, step, micro)."""
        config = self.config
        if not 0 <= micro < config.micro_batches:
            raise ValueError(f"micro-batch {micro} of {config.micro_batches}")
        first = (step * config.micro_batches + micro) * config.batch_size
        return self.take(range(first, first + config.batch_size))

    @property
    def examples(self) -> int:
        """Windows in an epoch."""
        return self.windows

    def take(self, numbers: Sequence[int]) -> Batch:
        """The windows at positions ``numbers`` in the order of all epochs, one a row."""
        return _cut(self.train, [self._start(index) for index in numbers], self.seq_len)

    def targets(self, numbers: Sequence[int]) -> int:
        """The number of counted targets of the windows at ``numbers``: all of them."""
        return len(numbers) * self.seq_len

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.windows)
        window = permute(place, self.windows, derive_seed(self.config.seed, "data", epoch))
        phase = derive_seed(self.config.seed, "phase", epoch) % self.seq_len
        return phase + window * self.seq_len

    def validation_batches(self, count: int) -> Iterator[Batch]:
        """``count`` batches, spread evenly over the validation split: the same ones every time.

        Fewer if the split has fewer than ``count * B`` windows: each window at most once, and at least one
        batch.
        """
        config = self.config
        windows = (self.validation.size - 1) // self.seq_len
        wanted = min(windows, count * config.batch_size)
        starts = [(i * windows // wanted) * self.seq_len for i in range(wanted)]
        for i in range(0, wanted, config.batch_size):
            yield _cut(self.validation, starts[i : i + config.batch_size], self.seq_len)

    def encode(self, text: str) -> list[int]:
        """Its bytes in UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """A token above 255 stands for its lowest byte."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")

    def describe(self) -> str:
        """One line for the head of a run."""
        text = (
            f"{format_bytes(self.bytes_read)} in {self.files} files"
            f" ({format_bytes(self.train.size)} train, {format_bytes(self.validation.size)} validation)"
        )
        if self.bytes_found > self.bytes_read:
            text += f"; {format_bytes(self.bytes_found - self.bytes_read)} past max_bytes left out"
        return text


def permute(index: int, count: int, key: int) -> int:
    """The image of ``index`` under a keyed permutation of ``range(count)``.

    A balanced Feistel network on the next even number of bits, walked until it falls inside the range: the
    domain is less than four times ``count``, so fewer than four rounds of walking are expected.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, key, turn) & mask)
        index = left << half | right
        if index < count:
            return index


def _mix(value: int, key: int, turn: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014) over the value, the key and the round."""
    z = (value * 0x9E3779B97F4A7C15 + key + turn * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def _cut(split: Bytes, starts: list[int], seq_len: int) -> Batch:
    rows = np.empty((len(starts), seq_len + 1), dtype=np.int64)
    for row, start in zip(rows, starts, strict=True):
        row[:] = split[start : start + seq_len + 1]
    both = torch.from_numpy(rows)
    return Batch(both[:, :-1].contiguous(), both[:, 1:].contiguous())


def _validation_blocks(total: int, block: int, fraction: float) -> list[tuple[int, int]]:
    """Byte ranges of the validation blocks: block i is one if ``i * fraction`` crosses a whole number there."""
    blocks = -(-total // block)
    return [
        (i * block, min((i + 1) * block, total))
        for i in range(blocks)
        if int((i + 1) * fraction + 1e-9) > int(i * fraction + 1e-9)
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """Exactly ``size`` bytes of ``path``."""
    try:
        with path.open("rb") as file:
            left = size
            while left:
                chunk = file.read(min(left, _READ))
                if not chunk:
                    raise DataError(
                        f"{path}: expected {size} bytes, found {size - left}: it changed meanwhile"
                    )
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
