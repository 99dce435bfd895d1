"""Cold reads of whole records, as a store does them, beside the libraries that one might use instead.

Each library has the same records on disk in its own format, written and synced; each reads all of them once into its own
memory, in the same shuffled order, and is timed. docs/BENCH.md defines *cold*. A library that is not installed is left out
and named.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore.bench.io_load import Sample, cpu_s
from tierstore.bench.io_turns import OURS, ProgramComparison, take_turns
from tierstore.bench.probes import Latencies, drop_pages, page_cache_bytes
from tierstore.errors import TierstoreError
from tierstore.machine import cores
from tierstore.units import format_bytes

#: The least ratios of the engine's speed to the library's.
PEER_TARGETS = {"aiofiles": 2.0, "lmdb": 2.0, "safetensors": 2.0, "deepspeed": 1.0}
_COLD_SHARE = 0.01  # of the records may be in memory and still count as cold
_DEEPSPEED_THREADS = 4  # share one read; they must divide a record
_AT_ONCE = 3  # records in memory at a time

_Bytes = NDArray[np.uint8]
_Take = Callable[[int, _Bytes], None]


class PeerMismatch(TierstoreError):
    """A library read other bytes than were written."""


@dataclass(frozen=True)
class PeerRecords:
    """``count`` records of ``nbytes`` each, by number; the content of each is distinct noise."""

    count: int
    nbytes: int

    @property
    def total_bytes(self) -> int:
        return self.count * self.nbytes

    def content(self, number: int) -> _Bytes:
        return np.frombuffer(np.random.default_rng(number).bytes(self.nbytes), np.uint8)


class Peer(ABC):
    """One library. ``prepare`` writes the records; ``read`` passes each one's bytes to ``take``, in the order given."""

    @abstractmethod
    def prepare(self, directory: Path, records: PeerRecords) -> list[Path]: ...

    @abstractmethod
    def read(self, order: Sequence[int], take: _Take) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Close what is open between reads: for most libraries nothing."""


class _Flat(Peer):
    """All records in one file, one after another."""

    path: Path
    records: PeerRecords

    def prepare(self, directory: Path, records: PeerRecords) -> list[Path]:
        self.path, self.records = directory / "flat", records
        if not self.path.exists():
            with self.path.open("wb") as file:
                for number in range(records.count):
                    file.write(records.content(number).data)
        self._opened()
        return [self.path]

    def _opened(self) -> None:
        """Called when the file exists."""


class Ours(_Flat):
    """The engine, with the best block size and depth found; checksums are compared."""

    def __init__(self, chunk_bytes: int, queue_depth: int) -> None:
        self._chunk_bytes, self._queue_depth = chunk_bytes, queue_depth

    def _opened(self) -> None:
        size = self.records.nbytes
        self._arena = _native.Arena(_AT_ONCE * size, _native.HugePages.AUTO)
        self._buffers = [_native.Buffer(self._arena, [(i * size, size)], size) for i in range(_AT_ONCE)]
        self._table = _native.CrcTable(self.records.count)
        sums = self._table.array()
        for number in range(self.records.count):
            sums[number] = _native.crc32c(self.records.content(number))
        self._file = _native.File(self.path)
        self._engine = _native.Engine(
            chunk_bytes=self._chunk_bytes, queue_depth=self._queue_depth, compute_threads=min(cores(), 4)
        )

    def read(self, order: Sequence[int], take: _Take) -> None:
        size, tickets = self.records.nbytes, list[int]()
        for turn, number in enumerate(order):
            if turn >= _AT_ONCE:
                self._finish(order, turn - _AT_ONCE, tickets, take)
            buffer = self._buffers[turn % _AT_ONCE]
            tickets.append(self._engine.read(self._file, number * size, [buffer], self._table, number))
        for turn in range(max(len(order) - _AT_ONCE, 0), len(order)):
            self._finish(order, turn, tickets, take)

    def _finish(self, order: Sequence[int], turn: int, tickets: list[int], take: _Take) -> None:
        self._engine.wait(tickets[turn])
        take(order[turn], self._buffers[turn % _AT_ONCE].array())

    def close(self) -> None:
        self._engine.close()
        self._file.close()


class _Aiofiles(_Flat):
    """``readinto`` of as many files at once as there are buffers."""

    def read(self, order: Sequence[int], take: _Take) -> None:
        asyncio.run(self._all(order, take))

    async def _all(self, order: Sequence[int], take: _Take) -> None:
        lanes = [order[lane::_AT_ONCE] for lane in range(_AT_ONCE)]
        await asyncio.gather(*(self._lane(lane, take) for lane in lanes))

    async def _lane(self, order: Sequence[int], take: _Take) -> None:
        aiofiles: Any = importlib.import_module("aiofiles")
        buffer = np.empty(self.records.nbytes, np.uint8)
        async with aiofiles.open(self.path, "rb", buffering=0) as file:
            for number in order:
                await file.seek(number * self.records.nbytes)
                got = 0
                while got < buffer.nbytes:
                    more = await file.readinto(buffer.data[got:])
                    if not more:
                        raise EOFError(f"{self.path} is too short")
                    got += more
                take(number, buffer)


class _Memmap(_Flat):
    """``numpy.memmap``, copied out of the mapping."""

    def read(self, order: Sequence[int], take: _Take) -> None:
        shape = (self.records.count, self.records.nbytes)
        mapped = np.memmap(self.path, np.uint8, "r", shape=shape)
        buffer = np.empty(self.records.nbytes, np.uint8)
        for number in order:
            np.copyto(buffer, mapped[number])
            take(number, buffer)


class _Lmdb(Peer):
    """One value per record, copied out of the map."""

    def prepare(self, directory: Path, records: PeerRecords) -> list[Path]:
        import lmdb

        self._nbytes, self._path = records.nbytes, directory / "lmdb"
        size = records.count * (records.nbytes + (1 << 20)) + (16 << 20)
        with lmdb.open(os.fsencode(self._path), map_size=size) as environment:
            for number in range(records.count):
                with environment.begin(write=True) as transaction:
                    transaction.put(self._key(number), records.content(number).data)
            environment.sync(True)
        return [self._path / "data.mdb"]

    @staticmethod
    def _key(number: int) -> bytes:
        return number.to_bytes(8, "big")

    def read(self, order: Sequence[int], take: _Take) -> None:
        import lmdb

        buffer = np.empty(self._nbytes, np.uint8)
        # Opened anew, since the kernel does not drop mapped pages.
        with (
            lmdb.open(os.fsencode(self._path), readonly=True, lock=False) as environment,
            environment.begin(buffers=True) as transaction,
        ):
            for number in order:
                value = transaction.get(self._key(number))
                if value is None:
                    raise PeerMismatch(f"lmdb: record {number} is not there")
                np.copyto(buffer, np.frombuffer(value, np.uint8))
                take(number, buffer)


class _Safetensors(Peer):
    """One tensor per record, in one file, loaded one by one."""

    def prepare(self, directory: Path, records: PeerRecords) -> list[Path]:
        from safetensors.numpy import save_file

        self._path = directory / "records.safetensors"
        save_file({str(number): records.content(number) for number in range(records.count)}, str(self._path))
        return [self._path]

    def read(self, order: Sequence[int], take: _Take) -> None:
        from safetensors import safe_open

        with safe_open(str(self._path), framework="numpy") as file:
            for number in order:
                take(number, file.get_tensor(str(number)))


class _DeepSpeed(Peer):
    """DeepSpeed's asynchronous I/O handle: one file per record, as many reads at once as there are buffers."""

    def __init__(self, chunk_bytes: int, queue_depth: int) -> None:
        self._chunk_bytes, self._queue_depth = chunk_bytes, queue_depth

    def prepare(self, directory: Path, records: PeerRecords) -> list[Path]:
        import torch

        builders: Any = importlib.import_module("deepspeed.ops.op_builder")
        folder = directory / "deepspeed"
        folder.mkdir()
        self._paths = [folder / str(number) for number in range(records.count)]
        for number, path in enumerate(self._paths):
            path.write_bytes(records.content(number).data)
        library: Any = builders.AsyncIOBuilder().load()
        threads = _DEEPSPEED_THREADS if records.nbytes % (_DEEPSPEED_THREADS * 4096) == 0 else 1
        self._handle: Any = library.aio_handle(self._chunk_bytes, self._queue_depth, False, True, threads)
        self._tensors = [
            self._handle.new_cpu_locked_tensor(records.nbytes, torch.empty(0, dtype=torch.uint8))
            for _ in range(_AT_ONCE)
        ]
        return self._paths

    def read(self, order: Sequence[int], take: _Take) -> None:
        for start in range(0, len(order), _AT_ONCE):
            group = order[start : start + _AT_ONCE]
            for number, tensor in zip(group, self._tensors, strict=False):
                if self._handle.async_pread(tensor, str(self._paths[number]), 0) != 0:
                    raise PeerMismatch(f"deepspeed: record {number} was refused")
            if self._handle.wait() != len(group):
                raise PeerMismatch("deepspeed: fewer reads completed than were requested")
            for number, tensor in zip(group, self._tensors, strict=False):
                take(number, tensor.numpy())

    def close(self) -> None:
        for tensor in self._tensors:
            self._handle.free_cpu_locked_tensor(tensor)


#: By the name of the module that must be installed.
PEERS: dict[str, Callable[[int, int], Peer]] = {
    "aiofiles": lambda chunk, depth: _Aiofiles(),
    "lmdb": lambda chunk, depth: _Lmdb(),
    "safetensors": lambda chunk, depth: _Safetensors(),
    "numpy": lambda chunk, depth: _Memmap(),
    "deepspeed": _DeepSpeed,
}
_TITLES = {"numpy": "numpy.memmap"}


def missing_peers() -> list[str]:
    """The libraries of ``PEERS`` that are not installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


class _PeerProgram:
    """A library with ``records`` written to ``directory`` and checked. Raises PeerMismatch, and what the library raises."""

    def __init__(self, name: str, peer: Peer, directory: Path, records: PeerRecords) -> None:
        self.program = _TITLES.get(name, name)
        self._peer, self._records = peer, records
        self._order: list[int] = np.random.default_rng(0).permutation(records.count).tolist()
        self._paths = peer.prepare(directory, records)
        self._drop_pages()
        self._check()

    def _drop_pages(self) -> None:
        for path in self._paths:
            drop_pages(path)

    def measure(self) -> Sample:
        self._drop_pages()
        cpu, begun = cpu_s(), time.perf_counter()
        self._peer.read(self._order, lambda number, content: None)
        elapsed = time.perf_counter() - begun
        return Sample(
            nbytes=self._records.total_bytes,
            elapsed_s=elapsed,
            cpu_s=cpu_s() - cpu,
            operations=self._records.count,
            latencies=Latencies(),
        )

    def warm(self) -> str | None:
        """A note on how much stays in the page cache after dropping its pages; None if next to nothing."""
        self._drop_pages()
        left = page_cache_bytes(self._paths)
        if not left or left < _COLD_SHARE * self._records.total_bytes:
            return None
        return f"{self.program}: {format_bytes(left)} of its records stay in the page cache when they are dropped"

    def _check(self) -> None:
        """Raise PeerMismatch unless every record arrives once, as it was written."""
        seen: list[int] = []

        def take(number: int, content: _Bytes) -> None:
            if not np.array_equal(content, self._records.content(number)):
                raise PeerMismatch(f"{self.program}: record {number} is not what was written")
            seen.append(number)

        self._peer.read(self._order, take)
        if sorted(seen) != sorted(self._order):
            raise PeerMismatch(f"{self.program}: read records {sorted(seen)} of {sorted(self._order)}")


def compare_peers(
    directory: Path,
    records: PeerRecords,
    *,
    chunk_bytes: int,
    queue_depth: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> tuple[ProgramComparison, list[str]]:
    """Measure reads in turns, with files in ``directory``; also returns notes on libraries left out or reading warm.

    A library that reads wrong bytes is left out; for the engine, PeerMismatch is raised. Raises OSError.
    """
    absent = missing_peers()
    missing = [f"{name}: not installed" for name in absent]
    notes: list[str] = []
    with ExitStack() as stack:
        programs: list[_PeerProgram] = []
        for name, make in {OURS: Ours, **PEERS}.items():
            if name in absent:
                continue
            peer = make(chunk_bytes, queue_depth)
            try:
                program = _PeerProgram(name, peer, directory, records)
            except (ImportError, RuntimeError, AttributeError, PeerMismatch) as error:
                if name == OURS:
                    raise
                missing.append(f"{name}: {str(error) or type(error).__name__}")  # installed, but unusable
                continue
            stack.enter_context(closing(peer))
            programs.append(program)
            if note := program.warm():
                notes.append(note)
        series = take_turns({one.program: one.measure for one in programs}, rounds, tick)
    targets = {name: PEER_TARGETS[name] for name in PEER_TARGETS if name not in absent}
    title = "cold reads of records"
    return ProgramComparison(title=title, series=series, targets=targets), [*missing, *notes]
