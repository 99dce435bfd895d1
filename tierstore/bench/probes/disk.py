"""The disk's speed for transfers of the sizes, and in the mix of reads and writes, that a run needs.

Transfers go through the engine, past the page cache where the file system allows it, between a small arena
and a file that lies where the store lies: preallocated and written once beforehand, as extents are.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from tierstore import _native
from tierstore.bench.io.load import drop_pages
from tierstore.store.config import IoConfig, tune

_PAGE = 4096
_IN_FLIGHT_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that moved between disk and memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def per(self, steps: int) -> Bytes:
        """The mean over ``steps``."""
        return Bytes(self.read // steps, self.written // steps)


class Durable(Enum):
    """Whether a measurement ends when the bytes are written, or when they are durable."""

    NO = "no"
    YES = "yes"


class DiskProbe:
    """A file of ``nbytes`` in ``directory``, made at once and removed by ``close``.

    ``transfer_bytes`` are the sizes of transfers, taken in turn. Raises OSError.
    """

    def __init__(self, directory: Path, nbytes: int, transfer_bytes: Sequence[int], io: IoConfig) -> None:
        self._sizes = [-(-size // _PAGE) * _PAGE for size in transfer_bytes]
        self._slot_bytes = max(self._sizes)
        self._slots = max(nbytes // self._slot_bytes, 2)
        self._random = random.Random(0)
        self._order = itertools.cycle(self._random.sample(range(self._slots), self._slots))
        self._path = directory / "bench-disk.tmp"
        buffers = max(_IN_FLIGHT_BYTES // self._slot_bytes, 2)
        arena = _native.Arena(buffers * self._slot_bytes, _native.HugePages.AUTO)
        # A virtual disk may be faster with zeros.
        noise = np.frombuffer(self._random.randbytes(self._slot_bytes), np.uint8)
        for i in range(buffers):
            arena.view(i * self._slot_bytes, self._slot_bytes)[:] = noise
        self._buffers = [
            {
                size: _native.Buffer(arena, [(i * self._slot_bytes, self._slot_bytes)], size)
                for size in {*self._sizes, self._slot_bytes}
            }
            for i in range(buffers)
        ]
        self._tickets = [0] * buffers
        self._turn = 0
        tuning = tune(io, directory)
        self._engine = _native.Engine(
            backend=_native.IoBackend[io.backend.name],
            io_threads=io.threads,
            queue_depth=tuning.queue_depth,
            chunk_bytes=tuning.chunk_bytes,
        )
        try:
            self._file = _native.File(
                self._path, create=_native.FileCreate.YES, direct=_native.DirectIo[io.direct.name]
            )
            self._file.allocate(0, self._slots * self._slot_bytes)
            for slot in range(self._slots):
                self._submit("write", slot, self._slot_bytes)
            self._drain(Durable.YES)
        except BaseException:
            self.close()
            raise

    def disk_bytes_per_s(self, mix: Bytes) -> float:
        """``bytes_per_s`` of the disk itself: without O_DIRECT the file's pages are dropped before, and what is written
        is synced within the time, or it would be memory's. At most the file's bytes are read once each.
        """
        if self._file.direct:
            return self.bytes_per_s(mix)
        drop_pages(self._path)
        return self.bytes_per_s(mix, durable=Durable.YES)

    def bytes_per_s(self, mix: Bytes, *, durable: Durable = Durable.NO) -> float:
        """Bytes per second over ``mix``, its reads and writes interleaved in proportion, at random slots."""
        moved = Bytes(0, 0)
        sizes = itertools.cycle(self._sizes)
        begun = time.perf_counter()
        while moved.read < mix.read or moved.written < mix.written:
            size = next(sizes)
            # Whichever is further behind goes next.
            if moved.written * mix.read >= moved.read * mix.written and moved.read < mix.read:
                self._submit("read", next(self._order), size)
                moved = Bytes(moved.read + size, moved.written)
            elif moved.written < mix.written:
                self._submit("write", next(self._order), size)
                moved = Bytes(moved.read, moved.written + size)
            else:
                self._submit("read", next(self._order), size)
                moved = Bytes(moved.read + size, moved.written)
        self._drain(durable)
        return moved.total / (time.perf_counter() - begun)

    def _submit(self, kind: str, slot: int, size: int) -> None:
        lane = self._turn % len(self._buffers)
        self._turn += 1
        call = self._engine.read if kind == "read" else self._engine.write
        before = self._tickets[lane]
        self._tickets[lane] = call(
            self._file,
            slot * self._slot_bytes,
            [self._buffers[lane][size]],
            after=[before] if before else [],
        )

    def _drain(self, durable: Durable) -> None:
        tickets = [ticket for ticket in self._tickets if ticket]
        if durable is Durable.YES:
            tickets = [self._engine.sync(self._file, after=tickets)]
        self._engine.wait_all(tickets)
        self._tickets = [0] * len(self._tickets)

    def close(self) -> None:
        """Removes the file. Safe to call twice."""
        self._engine.close()
        self._path.unlink(missing_ok=True)
