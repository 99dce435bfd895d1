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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _native
from tierstore.bench.io_load import Sample, cpu_s
from tierstore.bench.io_turns import OURS, ProgramComparison, take_turns
from tierstore.bench.probes import drop_pages, page_cache_bytes
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


#: Reads the records in the order given, and passes each one's bytes to the function.
Read = Callable[[Sequence[int], _Take], None]
#: One library: a context in which it has written the records to the directory, and is open. Yields their files, and how it
#: reads them. The numbers are a block size and a depth.
Peer = Callable[[Path, PeerRecords, int, int], AbstractContextManager[tuple[list[Path], Read]]]


def _flat(directory: Path, records: PeerRecords) -> Path:
    """The file of all records, one after another."""
    path = directory / "flat"
    if not path.exists():
        with path.open("wb") as file:
            for number in range(records.count):
                file.write(records.content(number).data)
    return path


@contextmanager
def ours(
    directory: Path, records: PeerRecords, chunk_bytes: int, queue_depth: int
) -> Iterator[tuple[list[Path], Read]]:
    """The engine, with the best block size and depth found; checksums are compared."""
    path, size = _flat(directory, records), records.nbytes
    arena = _native.Arena(_AT_ONCE * size, _native.HugePages.AUTO)
    buffers = [_native.Buffer(arena, [(i * size, size)], size) for i in range(_AT_ONCE)]
    table = _native.CrcTable(records.count)
    sums = table.array()
    for number in range(records.count):
        sums[number] = _native.crc32c(records.content(number))
    with (
        _native.File(path) as file,
        _native.Engine(
            chunk_bytes=chunk_bytes, queue_depth=queue_depth, compute_threads=min(cores(), 4)
        ) as engine,
    ):

        def read(order: Sequence[int], take: _Take) -> None:
            tickets: list[int] = []

            def finish(turn: int) -> None:
                engine.wait(tickets[turn])
                take(order[turn], buffers[turn % _AT_ONCE].array())

            for turn, number in enumerate(order):
                if turn >= _AT_ONCE:
                    finish(turn - _AT_ONCE)
                buffer = buffers[turn % _AT_ONCE]
                tickets.append(engine.read(file, number * size, [buffer], table, number))
            for turn in range(max(len(order) - _AT_ONCE, 0), len(order)):
                finish(turn)

        yield [path], read


@contextmanager
def _aiofiles(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """``readinto`` of as many files at once as there are buffers."""
    aiofiles: Any = importlib.import_module("aiofiles")
    path = _flat(directory, records)

    async def lane(order: Sequence[int], take: _Take) -> None:
        buffer = np.empty(records.nbytes, np.uint8)
        async with aiofiles.open(path, "rb", buffering=0) as file:
            for number in order:
                await file.seek(number * records.nbytes)
                got = 0
                while got < buffer.nbytes:
                    more = await file.readinto(buffer.data[got:])
                    if not more:
                        raise EOFError(f"{path} is too short")
                    got += more
                take(number, buffer)

    async def lanes(order: Sequence[int], take: _Take) -> None:
        await asyncio.gather(*(lane(order[first::_AT_ONCE], take) for first in range(_AT_ONCE)))

    yield [path], lambda order, take: asyncio.run(lanes(order, take))


@contextmanager
def _memmap(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """``numpy.memmap``, copied out of the mapping."""
    path = _flat(directory, records)

    def read(order: Sequence[int], take: _Take) -> None:
        mapped = np.memmap(path, np.uint8, "r", shape=(records.count, records.nbytes))
        buffer = np.empty(records.nbytes, np.uint8)
        for number in order:
            np.copyto(buffer, mapped[number])
            take(number, buffer)

    yield [path], read


@contextmanager
def _lmdb(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """One value per record, copied out of the map."""
    import lmdb

    path = directory / "lmdb"
    keys = [number.to_bytes(8, "big") for number in range(records.count)]
    size = records.count * (records.nbytes + (1 << 20)) + (16 << 20)
    with lmdb.open(os.fsencode(path), map_size=size) as environment:
        for number, key in enumerate(keys):
            with environment.begin(write=True) as transaction:
                transaction.put(key, records.content(number).data)
        environment.sync(True)

    def read(order: Sequence[int], take: _Take) -> None:
        buffer = np.empty(records.nbytes, np.uint8)
        # Opened anew, since the kernel does not drop mapped pages.
        with (
            lmdb.open(os.fsencode(path), readonly=True, lock=False) as environment,
            environment.begin(buffers=True) as transaction,
        ):
            for number in order:
                value = transaction.get(keys[number])
                if value is None:
                    raise PeerMismatch(f"lmdb: record {number} is not there")
                np.copyto(buffer, np.frombuffer(value, np.uint8))
                take(number, buffer)

    yield [path / "data.mdb"], read


@contextmanager
def _safetensors(directory: Path, records: PeerRecords, *_: int) -> Iterator[tuple[list[Path], Read]]:
    """One tensor per record, in one file, loaded one by one."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = directory / "records.safetensors"
    save_file({str(number): records.content(number) for number in range(records.count)}, str(path))

    def read(order: Sequence[int], take: _Take) -> None:
        with safe_open(str(path), framework="numpy") as file:
            for number in order:
                take(number, file.get_tensor(str(number)))

    yield [path], read


@contextmanager
def _deepspeed(
    directory: Path, records: PeerRecords, chunk_bytes: int, queue_depth: int
) -> Iterator[tuple[list[Path], Read]]:
    """DeepSpeed's asynchronous I/O handle: one file per record, as many reads at once as there are buffers."""
    import torch

    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    folder = directory / "deepspeed"
    folder.mkdir()
    paths = [folder / str(number) for number in range(records.count)]
    for number, path in enumerate(paths):
        path.write_bytes(records.content(number).data)
    library: Any = builders.AsyncIOBuilder().load()
    threads = _DEEPSPEED_THREADS if records.nbytes % (_DEEPSPEED_THREADS * 4096) == 0 else 1
    handle: Any = library.aio_handle(chunk_bytes, queue_depth, False, True, threads)
    empty = torch.empty(0, dtype=torch.uint8)
    tensors = [handle.new_cpu_locked_tensor(records.nbytes, empty) for _ in range(_AT_ONCE)]

    def read(order: Sequence[int], take: _Take) -> None:
        for start in range(0, len(order), _AT_ONCE):
            group = order[start : start + _AT_ONCE]
            for number, tensor in zip(group, tensors, strict=False):
                if handle.async_pread(tensor, str(paths[number]), 0) != 0:
                    raise PeerMismatch(f"deepspeed: record {number} was refused")
            if handle.wait() != len(group):
                raise PeerMismatch("deepspeed: fewer reads completed than were requested")
            for number, tensor in zip(group, tensors, strict=False):
                take(number, tensor.numpy())

    try:
        yield paths, read
    finally:
        for tensor in tensors:
            handle.free_cpu_locked_tensor(tensor)


#: By the name of the module that must be installed.
PEERS: dict[str, Peer] = {
    "aiofiles": _aiofiles,
    "lmdb": _lmdb,
    "safetensors": _safetensors,
    "numpy": _memmap,
    "deepspeed": _deepspeed,
}
_TITLES = {"numpy": "numpy.memmap"}


def missing_peers() -> list[str]:
    """The libraries of ``PEERS`` that are not installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


def _drop(paths: Sequence[Path]) -> None:
    for path in paths:
        drop_pages(path)


def _cold_read(paths: Sequence[Path], read: Read, order: Sequence[int], records: PeerRecords) -> Sample:
    _drop(paths)
    cpu, begun = cpu_s(), time.perf_counter()
    read(order, lambda number, content: None)
    elapsed = time.perf_counter() - begun
    return Sample(
        nbytes=records.total_bytes,
        elapsed_s=elapsed,
        cpu_s=cpu_s() - cpu,
        operations=records.count,
    )


def _check(program: str, read: Read, order: Sequence[int], records: PeerRecords) -> None:
    """Raise PeerMismatch unless every record arrives once, as it was written."""
    seen: list[int] = []

    def take(number: int, content: _Bytes) -> None:
        if not np.array_equal(content, records.content(number)):
            raise PeerMismatch(f"{program}: record {number} is not what was written")
        seen.append(number)

    read(order, take)
    if sorted(seen) != sorted(order):
        raise PeerMismatch(f"{program}: read records {sorted(seen)} of {sorted(order)}")


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
    order: list[int] = np.random.default_rng(0).permutation(records.count).tolist()
    with ExitStack() as stack:
        programs: dict[str, Callable[[], Sample]] = {}
        for name, peer in {OURS: ours, **PEERS}.items():
            if name in absent:
                continue
            program = _TITLES.get(name, name)
            try:
                paths, read = stack.enter_context(peer(directory, records, chunk_bytes, queue_depth))
                _drop(paths)
                _check(program, read, order, records)
            except (ImportError, RuntimeError, AttributeError, PeerMismatch) as error:
                if name == OURS:
                    raise
                missing.append(f"{name}: {str(error) or type(error).__name__}")  # installed, but unusable
                continue
            programs[program] = partial(_cold_read, paths, read, order, records)
            _drop(paths)
            left = page_cache_bytes(paths) or 0
            if left >= max(_COLD_SHARE * records.total_bytes, 1):
                notes.append(
                    f"{program}: {format_bytes(left)} of its records stay in the page cache when they are dropped"
                )
        series = take_turns(programs, rounds, tick)
    targets = {name: PEER_TARGETS[name] for name in PEER_TARGETS if name not in absent}
    title = "cold reads of records"
    return ProgramComparison(title=title, series=series, targets=targets), [*missing, *notes]
