"""The records of a trace: equal neighbours are one run, so that a million equal keys take a few bytes."""

from __future__ import annotations

import builtins
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierstore.errors import DataError

# One run as it is stored: how many records, and what each of them is.
_RUN = np.dtype(
    [("count", "<u4"), ("layer", "<u4"), ("frames", "<u4", (3,)), ("bytes", "<u8", (3,)), ("stored", "<u4")]
)
_MOST_RECORDS = 1 << 27
_WHAT = ["layer", "frames", "bytes", "stored"]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One record: its layer, and frames and bytes of its groups (weights, moments, gradients)."""

    layer: int
    frames: tuple[int, int, int]
    bytes: tuple[int, int, int]
    stored: int  # mask of groups with a backing copy at the start


class RecordTable(Sequence[TraceRecord]):
    """The records, numbered from 0, as runs of equal ones. Immutable; equal tables compare equal.

    ``layers`` (uint32 [records]), ``frames`` (uint32 [records, 3]), ``bytes`` (uint64 [records, 3]) and
    ``stored`` (uint16 [records]) are its columns, made when they are asked for.
    """

    def __init__(self, records: Iterable[TraceRecord] = ()) -> None:
        rows = [(1, record.layer, record.frames, record.bytes, record.stored) for record in records]
        self._runs = _merged(np.array(rows, _RUN))
        self._ends = np.cumsum(self._runs["count"], dtype=np.int64)

    @classmethod
    def _of_runs(cls, runs: NDArray[np.void]) -> RecordTable:
        table = cls.__new__(cls)
        table._runs = _merged(runs)
        table._ends = np.cumsum(table._runs["count"], dtype=np.int64)
        return table

    @classmethod
    def of_columns(
        cls, layers: ArrayLike, frames: ArrayLike, sizes: ArrayLike, stored: ArrayLike, *, count: int
    ) -> RecordTable:
        """``count`` records; each argument is a column of them, or one value for all (a triple for sizes).

        Raises DataError for what the format's integers cannot hold.
        """
        runs = np.zeros(count, _RUN)
        runs["count"] = 1
        for name, values in zip(_WHAT, (layers, frames, sizes, stored), strict=True):
            largest, most = np.max(values, initial=0), int(np.iinfo(_RUN[name].base).max)
            if largest > most:
                raise DataError(f"{name} of a record: expected at most {most}, got {largest}")
            runs[name] = values
        return cls._of_runs(runs)

    @classmethod
    def of(cls, records: Iterable[TraceRecord]) -> RecordTable:
        """``records`` themselves, if they are a table already."""
        return records if isinstance(records, RecordTable) else cls(records)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> TraceRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TraceRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> TraceRecord | tuple[TraceRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return _record(self._runs[int(np.searchsorted(self._ends, number, side="right"))])

    def __iter__(self) -> Iterator[TraceRecord]:
        for count, record in self.runs():
            for _ in range(count):
                yield record

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordTable):
            return NotImplemented
        return bool(np.array_equal(self._runs, other._runs))

    def __hash__(self) -> int:
        return hash(self._runs.tobytes())

    def __repr__(self) -> str:
        return f"RecordTable({len(self)} records in {len(self._runs)} runs)"

    def runs(self) -> Iterator[tuple[int, TraceRecord]]:
        """Each run: how many records, and what each of them is."""
        for run in self._runs:
            yield int(run["count"]), _record(run)

    @property
    def layers(self) -> NDArray[np.uint32]:
        return self._column("layer").astype(np.uint32)

    @property
    def frames(self) -> NDArray[np.uint32]:
        return self._column("frames").astype(np.uint32)

    @property
    def bytes(self) -> NDArray[np.uint64]:
        return self._column("bytes").astype(np.uint64)

    @property
    def stored(self) -> NDArray[np.uint16]:
        return self._column("stored").astype(np.uint16)

    @property
    def total_frames(self) -> int:
        """Frames of all records."""
        return int(self.frames.sum(dtype=np.uint64))

    def _column(self, name: str) -> NDArray[np.generic]:
        return np.repeat(self._runs[name], self._runs["count"], axis=0)

    def plain(self) -> builtins.bytes:
        """The runs, 48 bytes each, as they are hashed."""
        return self._runs.tobytes()

    def encode(self) -> builtins.bytes:
        """The runs as they are stored: their number, then themselves, compressed.

        Raises DataError for more records than ``decode`` takes.
        """
        if len(self) > _MOST_RECORDS:
            raise DataError(f"{len(self)} records, more than {_MOST_RECORDS}")
        return struct.pack("<I", len(self._runs)) + zlib.compress(self._runs.tobytes(), 1)

    @staticmethod
    def decode(data: builtins.bytes) -> RecordTable:
        """The inverse of ``encode``. Raises ValueError for what is none."""
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes")
        (count,) = struct.unpack_from("<I", data)
        size = count * _RUN.itemsize
        inflate = zlib.decompressobj()
        try:
            plain = inflate.decompress(data[4:], size + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(plain) != size or not inflate.eof:
            raise ValueError(f"{count} runs in {len(plain)} bytes")
        runs = np.frombuffer(plain, _RUN).copy()
        if (runs["count"] == 0).any():
            raise ValueError("a run of no records")
        # A few bytes can say billions, and columns of them would be made.
        records = int(runs["count"].sum(dtype=np.uint64))
        if records > _MOST_RECORDS:
            raise ValueError(f"{records} records, more than {_MOST_RECORDS}")
        return RecordTable._of_runs(runs)


def _record(run: np.void) -> TraceRecord:
    frames, sizes = run["frames"].tolist(), run["bytes"].tolist()
    return TraceRecord(int(run["layer"]), tuple(frames), tuple(sizes), int(run["stored"]))


def _merged(runs: NDArray[np.void]) -> NDArray[np.void]:
    """Neighbours that are alike as one run."""
    if len(runs) < 2:
        return runs
    what = runs.view(np.uint8).reshape(len(runs), _RUN.itemsize)[:, _RUN["count"].itemsize :]
    starts = np.concatenate(([True], (what[1:] != what[:-1]).any(axis=1)))
    merged = runs[starts]
    merged["count"] = np.add.reduceat(runs["count"], np.flatnonzero(starts))
    return merged
