"""A trace in memory and as bytes: its records, its events in columns, their chunks, and the header.

docs/TRACES.md lays out the file (versions 2 to 6). ``tierstore.trace.files`` reads and writes it;
``replay`` drives a residency core through it.
"""

from __future__ import annotations

import builtins
import enum
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierstore._native import StepClock
from tierstore.errors import DataError

# One run as it is stored: the number of records, and the fields of each.
_RUN = np.dtype(
    [("count", "<u4"), ("layer", "<u4"), ("frames", "<u4", (3,)), ("bytes", "<u8", (3,)), ("stored", "<u4")]
)
_MOST_RECORDS = 1 << 27
#: A note that starts so names a trace of a device's slots.
SLOTS_NOTE = "device slots: "
_WHAT = ["layer", "frames", "bytes", "stored"]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One record: its layer, and the frames and bytes of its groups (weights, moments, gradients)."""

    layer: int
    frames: tuple[int, int, int]
    bytes: tuple[int, int, int]
    stored: int  # mask of groups with a backing copy at the start


class RecordTable(Sequence[TraceRecord]):
    """The records, numbered from 0, as runs of equal records. Immutable; equal tables compare equal.

    ``layers`` (uint32 [records]), ``frames`` (uint32 [records, 3]), ``bytes`` (uint64 [records, 3]) and
    ``stored`` (uint16 [records]) are its columns, made on first use.
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

        Raises DataError for values that the format's integers cannot hold.
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
        """The table of ``records``; returned unchanged if it is one already."""
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
        """Each run: its number of records, and the record."""
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
        """The inverse of ``encode``. Raises ValueError for malformed data."""
        if len(data) < 4:
            raise ValueError(f"{len(data)} bytes")
        (count,) = struct.unpack_from("<I", data)
        size = count * _RUN.itemsize
        plain = _inflated(data[4:], size)
        if len(plain) != size:
            raise ValueError(f"{count} runs in {len(plain)} bytes")
        runs = np.frombuffer(plain, _RUN).copy()
        if (runs["count"] == 0).any():
            raise ValueError("a run of no records")
        # A few bytes can claim billions of records, whose columns would be allocated.
        records = int(runs["count"].sum(dtype=np.uint64))
        if records > _MOST_RECORDS:
            raise ValueError(f"{records} records, more than {_MOST_RECORDS}")
        return RecordTable._of_runs(runs)


def _record(run: np.void) -> TraceRecord:
    frames, sizes = run["frames"].tolist(), run["bytes"].tolist()
    return TraceRecord(int(run["layer"]), tuple(frames), tuple(sizes), int(run["stored"]))


def _merged(runs: NDArray[np.void]) -> NDArray[np.void]:
    """Joins equal neighbours into one run."""
    if len(runs) < 2:
        return runs
    what = runs.view(np.uint8).reshape(len(runs), _RUN.itemsize)[:, _RUN["count"].itemsize :]
    starts = np.concatenate(([True], (what[1:] != what[:-1]).any(axis=1)))
    merged = runs[starts]
    merged["count"] = np.add.reduceat(runs["count"], np.flatnonzero(starts))
    return merged


MAGIC = b"tsrtrace"
#: Version 3 adds records added after the first event, 4 adds notes, 5 adds accesses that count as steps, 6
#: adds KEEP and RELEASE of a device's slots, 7 adds passes that take a part of the cache at a time.
VERSIONS = (2, 3, 4, 5, 6, 7)
PREAMBLE = struct.Struct("<8sIIQ")  # magic, version, 0, byte of the description (0: not completed)
CHUNK = struct.Struct("<4sIIIIBBH")  # tag, events, units, bytes, crc32, coding, constant columns, 0
DESCRIPTION = struct.Struct(
    "<4sIIIQQ32s"
)  # tag, bytes of JSON and of the table, crc32, events, units, sha256
MAX_CHUNK = 1 << 24  # events, and units
_EVENT_COLUMNS = (
    ("kinds", "u1"),
    ("phases", "u1"),
    ("layers", "<u2"),
    ("at", "<u4"),
    ("counts", "<u4"),
    ("steps", "<u4"),
)
_UNIT_COLUMNS = (("records", "<u4"), ("flags", "<u2"))
_ALL_COLUMNS = _EVENT_COLUMNS + _UNIT_COLUMNS
#: The fields of ``EventColumns`` with a value for each event.
_BY_EVENT = ("kinds", "phases", "layers", "at", "steps")


class TraceKind(enum.IntEnum):
    """The inputs of a residency core."""

    ACCESS = 0
    PREFETCH = 1
    CANCEL = 2
    CLEAN = 3
    CLEAN_ALL = 4
    DROP = 5
    SET_STORED = 6
    PIN = 7
    UNPIN = 8
    END_UNIT = 9
    END_STEP = 10
    ADD = 11
    KEEP = 12
    RELEASE = 13


class Coding(enum.IntEnum):
    """The coding of a chunk's columns."""

    PLAIN = 0
    ZLIB = 1


@dataclass(frozen=True)
class TraceHeader:
    """The core that was recorded. ``layer_quotas`` (frames) goes with ``scope="layer"``; ``group_order`` is
    ``"resident-first"``, ``"key"`` or ``"given"``.

    An imported or generated trace has a core in which everything fits. ``origin`` describes the source of the trace.
    ``records`` is converted to a RecordTable; its last ``late_records`` were added after the first event, each by an
    ADD. ``notes`` describe decisions made outside the core, and when. ``clock`` is the policy's notion of a step: the
    name of a ``StepClock``, in lower case. ``parts``: a pass that changes records takes at most the capacity over
    ``parts`` at a time.
    """

    capacity_frames: int
    lookahead_frames: int = 0
    scope: str = "global"
    layer_quotas: tuple[int, ...] = ()
    policy: str = "lfu-decay"
    policy_options: Mapping[str, float | str] = field(default_factory=dict)
    group_order: str = "resident-first"
    records: Sequence[TraceRecord] = ()
    origin: str = ""
    late_records: int = 0
    notes: tuple[str, ...] = ()
    clock: str = "steps"
    parts: int = 1

    def __post_init__(self) -> None:
        if self.clock.upper() not in StepClock.__members__:
            raise ValueError(f"clock {self.clock!r}: expected steps, accesses or late_accesses")
        if self.group_order not in ("resident-first", "key", "given"):
            raise ValueError(f"group_order {self.group_order!r}: expected resident-first, key or given")
        object.__setattr__(self, "records", RecordTable.of(self.records))
        if not 0 <= self.late_records <= len(self.records):
            raise ValueError(f"late_records {self.late_records} of {len(self.records)} records")

    @property
    def version(self) -> int:
        """The file's version: the oldest that can hold this header."""
        if self.parts != 1:
            return VERSIONS[5]
        if self.of_slots:
            return VERSIONS[4]
        return VERSIONS[3 if self.clock != "steps" else 2 if self.notes else self.late_records > 0]

    @property
    def slot_traces(self) -> tuple[str, ...]:
        """Names of the traces of device slots that the same run recorded, beside this one."""
        return tuple(note.removeprefix(SLOTS_NOTE) for note in self.notes if note.startswith(SLOTS_NOTE))

    @property
    def of_slots(self) -> bool:
        """Whether the core decided for the slots of a device."""
        return self.group_order == "given"

    @property
    def table(self) -> RecordTable:
        """The records, by columns and by runs."""
        return RecordTable.of(self.records)

    def to_json(self) -> str:
        """The header as JSON, without its records."""
        plain = {name: value for name, value in vars(self).items() if name != "records"}
        plain["policy_options"] = dict(self.policy_options)
        for name, usual in (("late_records", 0), ("notes", ()), ("clock", "steps"), ("parts", 1)):
            if plain[name] == usual:
                del plain[name]
        return json.dumps(plain, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str, records: RecordTable) -> TraceHeader:
        """Raises KeyError, TypeError or ValueError if ``text`` is no header."""
        plain = json.loads(text)
        quotas = tuple(int(quota) for quota in plain.pop("layer_quotas"))
        notes = tuple(str(note) for note in plain.pop("notes", ()))
        plain.setdefault("group_order", "key")  # the order of all traces before the key existed
        return TraceHeader(**plain, layer_quotas=quotas, notes=notes, records=records)


@dataclass(frozen=True)
class EventColumns:
    """Events as columns. Event i has units ``offsets[i]:offsets[i + 1]`` of ``records`` and ``flags``."""

    kinds: NDArray[np.uint8]
    phases: NDArray[np.uint8]
    layers: NDArray[np.uint32]
    at: NDArray[np.uint32]
    steps: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    records: NDArray[np.uint32]
    flags: NDArray[np.uint16]

    @staticmethod
    def build(
        counts: ArrayLike,
        records: ArrayLike,
        *,
        kinds: ArrayLike = TraceKind.ACCESS,
        phases: ArrayLike = 0,
        layers: ArrayLike = 0,
        at: ArrayLike = 0,
        steps: ArrayLike = 0,
        flags: ArrayLike = 1,
    ) -> EventColumns:
        """Events with ``counts`` [events] units each. The other arguments are columns, or one value for all rows.

        Raises ValueError if the columns do not fit together.
        """
        sizes, units = np.asarray(counts, np.uint64), np.asarray(records, np.uint32)
        offsets = np.zeros(len(sizes) + 1, np.uint64)
        np.cumsum(sizes, out=offsets[1:])
        if int(offsets[-1]) != len(units):
            raise ValueError(f"events of {int(offsets[-1])} units in all, but {len(units)} records")
        events = len(sizes)
        return EventColumns(
            kinds=_column(kinds, np.uint8, events),
            phases=_column(phases, np.uint8, events),
            layers=_column(layers, np.uint32, events),
            at=_column(at, np.uint32, events),
            steps=_column(steps, np.uint32, events),
            offsets=offsets,
            records=np.ascontiguousarray(units),
            flags=_column(flags, np.uint16, len(units)),
        )

    @staticmethod
    def joined(parts: Sequence[EventColumns]) -> EventColumns:
        """The events of all parts, one part after another."""
        empty = EventColumns.build([], [])
        counts = np.concatenate([np.diff(part.offsets) for part in (empty, *parts)])
        columns = {
            name: np.concatenate([getattr(part, name) for part in (empty, *parts)])
            for name in ("records", *_BY_EVENT, "flags")
        }
        return EventColumns.build(counts, columns.pop("records"), **columns)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Units of each event."""
        return np.diff(self.offsets)

    def part(self, first: int, last: int) -> EventColumns:
        """Events ``first`` to ``last`` (excluded), as views; only the offsets are copied."""
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        events = {name: getattr(self, name)[first:last] for name in _BY_EVENT}
        return EventColumns(
            **events,
            offsets=self.offsets[first : last + 1] - np.uint64(begin),
            records=self.records[begin:end],
            flags=self.flags[begin:end],
        )

    def parts(self, limit: int) -> Iterator[EventColumns]:
        """Consecutive parts of at most ``limit`` events and units (an event with more is alone)."""
        first = 0
        while first < len(self):
            fitting = (
                int(np.searchsorted(self.offsets, self.offsets[first] + np.uint64(limit), side="right")) - 1
            )
            last = min(max(fitting, first + 1), first + limit, len(self))
            yield self.part(first, last)
            first = last


def _column(values: ArrayLike, kind: type[Any], length: int) -> NDArray[Any]:
    column = np.asarray(values, kind)
    if column.ndim == 0:
        return np.full(length, column, kind)
    if column.shape != (length,):
        raise ValueError(f"a column of {length} values, got an array of shape {column.shape}")
    return np.ascontiguousarray(column)


@dataclass(frozen=True)
class Trace(EventColumns):
    """A whole trace (or one chunk of it) with its header."""

    header: TraceHeader


class EventDigest:
    """The SHA-256 that identifies a trace: of its records and events, however they were cut into chunks.

    It is the hash of nine hashes: of the table's runs, and of each column of the file in order. The settings
    of the recorded core do not affect it.
    """

    def __init__(self) -> None:
        self._columns = {name: hashlib.sha256() for name, _ in _ALL_COLUMNS}
        self.events = 0
        self.units = 0

    def update(self, columns: EventColumns) -> None:
        """More events."""
        self.events += len(columns)
        self.units += len(columns.records)
        for name, kind in _ALL_COLUMNS:
            self._columns[name].update(np.ascontiguousarray(getattr(columns, name), kind).data)

    def digest(self, records: RecordTable) -> bytes:
        """32 bytes."""
        whole = hashlib.sha256(hashlib.sha256(records.plain()).digest())
        for column in self._columns.values():
            whole.update(column.digest())
        return whole.digest()


def encode_chunk(columns: EventColumns, coding: Coding) -> bytes:
    """A chunk as it is stored, with its head."""
    parts, constant = [], 0
    for bit, (name, kind) in enumerate(_ALL_COLUMNS):
        values = getattr(columns, name).astype(kind)
        if len(values) and (values == values[0]).all():
            constant |= 1 << bit
            values = values[:1]
        parts.append(values.tobytes())
    payload = b"".join(parts)
    if coding is Coding.ZLIB:
        payload = zlib.compress(payload, 1)
    head = CHUNK.pack(
        b"CHNK", len(columns), len(columns.records), len(payload), zlib.crc32(payload), coding, constant, 0
    )
    return head + payload


def decode_chunk(payload: bytes, *, events: int, units: int, coding: int, constant: int) -> EventColumns:
    """The inverse of ``encode_chunk``, for the bytes after the head. Raises ValueError for malformed data."""
    lengths = [
        (name, np.dtype(kind), 1 if constant >> bit & 1 else rows, rows)
        for bit, (name, kind, rows) in enumerate(
            [(*column, events) for column in _EVENT_COLUMNS] + [(*column, units) for column in _UNIT_COLUMNS]
        )
    ]
    size = sum(kind.itemsize * stored for _, kind, stored, _ in lengths)
    if coding == Coding.ZLIB:
        payload = _inflated(payload, size)
    elif coding != Coding.PLAIN:
        raise ValueError(f"coding {coding}")
    if len(payload) != size:
        raise ValueError(
            f"{len(payload)} bytes of columns where {events} events and {units} units need {size}"
        )
    values: dict[str, NDArray[np.generic]] = {}
    at = 0
    for name, kind, stored, rows in lengths:
        column = np.frombuffer(payload, kind, stored, at)
        values[name] = np.repeat(column, rows) if stored != rows else column
        at += kind.itemsize * stored
    if events and int(values["kinds"].max()) > max(TraceKind):
        raise ValueError(f"kind {int(values['kinds'].max())} of events, the last is {max(TraceKind)}")
    return EventColumns.build(values.pop("counts"), values.pop("records"), **values)


def _inflated(payload: bytes, size: int) -> bytes:
    inflate = zlib.decompressobj()
    try:
        # One byte beyond the limit, so that a decompression bomb is noticed before it grows.
        plain = inflate.decompress(payload, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflate.eof or inflate.unused_data:
        raise ValueError("compressed data of another length")
    return plain
