"""Traces: what a residency core was told, written down so that a replay decides as the live run did.

The format, version 1 (little-endian throughout)::

    magic      8 bytes   b"tsrtrace"
    version    u32       1
    length     u32       of the header, bytes
    header     JSON      UTF-8: the fields of TraceHeader; records as columns, one item a record
    crc        u32       crc32 (zlib) of the header
    chunks:
      tag      4 bytes   b"CHNK"; the last one is b"END." and has neither events nor units
      events   u32
      units    u32
      crc      u32       crc32 of the three arrays that follow
      events   16 bytes each: kind u8, phase u8, layer u16, at u32, units u32, step u32
      records  u32 each unit, the units of all events one after another
      flags    u16 each unit

The kinds of events are ``TraceKind``. ``at`` says where an event fell in the access before it: 0 outside it
(whose remaining groups are over), ``2g`` while its group g (counted from 1) was open, ``2g + 1`` after g
groups, none open. A unit is a record with flags (bits 0-2 the groups needed, 3-5 dirtied, 6-8 dropped), but:
in DROP an entry; in SET_STORED a record and its mask; in END_UNIT the index of a unit in its access; flags
are 0 where they mean nothing. The groups themselves are not recorded: they follow from the capacity, so a
trace can be replayed with another one.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tierstore._native import CapacityError, Replay, Residency, Scope
from tierstore.errors import BudgetError, ConfigError, DataError

__all__ = [
    "Trace",
    "TraceHeader",
    "TraceKind",
    "TraceRecord",
    "TraceWriter",
    "equal_quotas",
    "load_trace",
    "make_residency",
    "read_chunks",
    "read_header",
    "replay",
]

_MAGIC = b"tsrtrace"
_VERSION = 1
_CHUNK = struct.Struct("<4sIII")
_CHUNK_UNITS = 1 << 16  # a chunk is written when it has this many units or events
_MAX_CHUNK = 1 << 24
_MAX_HEADER = 1 << 30
_EVENT = np.dtype(
    [("kind", "u1"), ("phase", "u1"), ("layer", "<u2"), ("at", "<u4"), ("units", "<u4"), ("step", "<u4")]
)


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


@dataclass(frozen=True)
class TraceRecord:
    """One record: its layer, and frames and bytes of its groups (weights, moments, gradients)."""

    layer: int
    frames: tuple[int, int, int]
    bytes: tuple[int, int, int]
    stored: int  # mask of groups with a backing copy at the start


@dataclass(frozen=True)
class TraceHeader:
    """The core that was recorded. ``layer_quotas`` (frames) goes with ``scope="layer"``."""

    capacity_frames: int
    lookahead_frames: int = 0
    scope: str = "global"
    layer_quotas: tuple[int, ...] = ()
    policy: str = "lfu-decay"
    policy_options: Mapping[str, float | str] = field(default_factory=dict)
    records: tuple[TraceRecord, ...] = ()

    def to_json(self) -> str:
        """The header as JSON, its records as columns."""
        plain = {key: value for key, value in asdict(self).items() if key != "records"}
        plain["policy_options"] = dict(self.policy_options)
        plain["records"] = {
            "layer": [record.layer for record in self.records],
            "frames": [record.frames for record in self.records],
            "bytes": [record.bytes for record in self.records],
            "stored": [record.stored for record in self.records],
        }
        return json.dumps(plain, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> TraceHeader:
        """Raises KeyError, TypeError or ValueError if ``text`` is no header."""
        plain = json.loads(text)
        columns = plain.pop("records")
        rows = zip(columns["layer"], columns["frames"], columns["bytes"], columns["stored"], strict=True)
        records = tuple(
            TraceRecord(int(layer), _triple(frames), _triple(sizes), int(stored))
            for layer, frames, sizes, stored in rows
        )
        quotas = tuple(int(quota) for quota in plain.pop("layer_quotas"))
        return TraceHeader(**plain, layer_quotas=quotas, records=records)


def _triple(values: Sequence[int]) -> tuple[int, int, int]:
    weights, moments, gradients = values
    return int(weights), int(moments), int(gradients)


def equal_quotas(capacity_frames: int, layers: int) -> tuple[int, ...]:
    """``capacity_frames`` split evenly; the first layers get the frames that are left over."""
    share, rest = divmod(capacity_frames, layers)
    return tuple(share + (1 if layer < rest else 0) for layer in range(layers))


def make_residency(header: TraceHeader) -> Residency:
    """A fresh core as the header describes it, with its records. Raises ConfigError."""
    try:
        residency = Residency(
            header.capacity_frames,
            policy=header.policy,
            policy_options=dict(header.policy_options),
            scope=Scope.LAYER if header.scope == "layer" else Scope.GLOBAL,
            lookahead_frames=header.lookahead_frames,
            layer_quotas=list(header.layer_quotas),
        )
        for record in header.records:
            residency.add_record(record.layer, record.frames, record.bytes, record.stored)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return residency


class TraceWriter:
    """Writes a trace as its events happen, a chunk at a time (a context manager).

    A trace that was not closed lacks its end and is refused when it is read.
    """

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - closed by close()
        text = header.to_json().encode()
        self._file.write(_MAGIC + struct.pack("<II", _VERSION, len(text)) + text)
        self._file.write(struct.pack("<I", zlib.crc32(text)))
        self._events: list[tuple[int, int, int, int, int, int]] = []
        self._records: list[NDArray[np.uint32]] = []
        self._flags: list[NDArray[np.uint16]] = []
        self._units = 0

    def event(
        self,
        kind: TraceKind,
        *,
        step: int = 0,
        phase: int = 0,
        layer: int = 0,
        at: int = 0,
        records: NDArray[np.uint32] | None = None,
        flags: NDArray[np.uint16] | None = None,
    ) -> None:
        """Appends one event; ``flags`` missing means zeros. The arrays are copied."""
        units = 0 if records is None else len(records)
        self._events.append((int(kind), phase, layer, at, units, step))
        if records is not None and units:
            self._records.append(records.astype("<u4"))
            self._flags.append(np.zeros(units, "<u2") if flags is None else flags.astype("<u2"))
            self._units += units
        if self._units >= _CHUNK_UNITS or len(self._events) >= _CHUNK_UNITS:
            self._flush()

    def _flush(self) -> None:
        if not self._events:
            return
        payload = b"".join(
            (
                np.array(self._events, _EVENT).tobytes(),
                *(part.tobytes() for part in self._records),
                *(part.tobytes() for part in self._flags),
            )
        )
        self._file.write(_CHUNK.pack(b"CHNK", len(self._events), self._units, zlib.crc32(payload)))
        self._file.write(payload)
        self._events, self._records, self._flags, self._units = [], [], [], 0

    def close(self) -> None:
        """Writes what is buffered and the end of the trace."""
        if self._file.closed:
            return
        try:
            self._flush()
            self._file.write(_CHUNK.pack(b"END.", 0, 0, 0))
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Trace:
    """Events as columns; event i has units ``offsets[i]:offsets[i + 1]`` of ``records`` and ``flags``."""

    header: TraceHeader
    kinds: NDArray[np.uint8]
    phases: NDArray[np.uint8]
    layers: NDArray[np.uint32]
    at: NDArray[np.uint32]
    steps: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    records: NDArray[np.uint32]
    flags: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.kinds)


def _read(file: BinaryIO, count: int, what: str) -> bytes:
    offset = file.tell()
    data = file.read(count)
    if len(data) != count:
        raise DataError(
            f"{file.name}: at byte {offset}: expected {what} ({count} bytes), found {len(data)} bytes"
        )
    return data


def _refuse(file: BinaryIO, offset: int, expected: str, found: object) -> DataError:
    return DataError(f"{file.name}: at byte {offset}: expected {expected}, found {found}")


def read_header(file: BinaryIO) -> TraceHeader:
    """The header of the trace that ``file`` (at its start) holds. Raises DataError."""
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise _refuse(file, 0, f"a trace (it starts with {_MAGIC!r})", repr(magic))
    version, length = struct.unpack("<II", _read(file, 8, "version and length of the header"))
    if version != _VERSION:
        raise _refuse(file, 8, f"version {_VERSION}", version)
    if length > _MAX_HEADER:
        raise _refuse(file, 12, f"a header of at most {_MAX_HEADER} bytes", length)
    text = _read(file, length, "the header")
    (crc,) = struct.unpack("<I", _read(file, 4, "the header's crc32"))
    if crc != zlib.crc32(text):
        raise _refuse(file, 16, "a header with its crc32", "another one")
    try:
        return TraceHeader.from_json(text.decode())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refuse(file, 16, "a header", f"JSON that is none ({error})") from error


def read_chunks(file: BinaryIO, header: TraceHeader) -> Iterator[Trace]:
    """The chunks after the header, each as columns of its own. Raises DataError."""
    while True:
        start = file.tell()
        tag, events, units, crc = _CHUNK.unpack(_read(file, _CHUNK.size, "a chunk or the end of the trace"))
        if tag == b"END.":
            if file.read(1):
                raise _refuse(file, start + _CHUNK.size, "nothing after the end of the trace", "more")
            return
        if tag != b"CHNK":
            raise _refuse(file, start, "the tag CHNK or END.", repr(tag))
        if events > _MAX_CHUNK or units > 2**31:
            raise _refuse(
                file, start + 4, f"at most {_MAX_CHUNK} events in a chunk", f"{events} and {units} units"
            )
        data = _read(file, events * _EVENT.itemsize + units * 6, f"{events} events and {units} units")
        if zlib.crc32(data) != crc:
            raise _refuse(file, start, "a chunk with its crc32", "another one")
        rows = np.frombuffer(data, _EVENT, events)
        offsets = np.zeros(events + 1, np.uint64)
        np.cumsum(rows["units"], out=offsets[1:])
        if int(offsets[-1]) != units:
            raise _refuse(file, start, f"events of {units} units in all", f"{int(offsets[-1])}")
        if events and int(rows["kind"].max()) > max(TraceKind):
            raise _refuse(file, start, f"kinds of events up to {max(TraceKind)}", int(rows["kind"].max()))
        at = events * _EVENT.itemsize
        yield Trace(
            header=header,
            kinds=np.ascontiguousarray(rows["kind"]),
            phases=np.ascontiguousarray(rows["phase"]),
            layers=rows["layer"].astype(np.uint32),
            at=rows["at"].astype(np.uint32),
            steps=rows["step"].astype(np.uint32),
            offsets=offsets,
            records=np.frombuffer(data, "<u4", units, at).astype(np.uint32),
            flags=np.frombuffer(data, "<u2", units, at + 4 * units).astype(np.uint16),
        )


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """The whole trace in memory. Raises DataError naming file, byte and what was expected, or OSError."""
    with Path(path).open("rb") as file:
        header = read_header(file)
        chunks = list(read_chunks(file, header))
    if len(chunks) == 1:
        return chunks[0]
    empty = {
        "kinds": np.uint8,
        "phases": np.uint8,
        "layers": np.uint32,
        "at": np.uint32,
        "steps": np.uint32,
        "records": np.uint32,
        "flags": np.uint16,
    }
    columns = {
        name: np.concatenate([np.zeros(0, kind), *(getattr(chunk, name) for chunk in chunks)]).astype(kind)
        for name, kind in empty.items()
    }
    counts = [np.zeros(1, np.uint64), *(np.diff(chunk.offsets) for chunk in chunks)]
    return Trace(header=header, offsets=np.cumsum(np.concatenate(counts), dtype=np.uint64), **columns)


def replay(
    path: str | os.PathLike[str],
    *,
    policy: str | None = None,
    policy_options: Mapping[str, float | str] | None = None,
    capacity_frames: int | None = None,
    lookahead_frames: int | None = None,
    scope: str | None = None,
    layer_quotas: Sequence[int] | None = None,
) -> dict[str, object]:
    """Replays a trace in the native loop, chunk by chunk, and returns ``Residency.stats()``.

    What is not given is as it was recorded: then the statistics are those of the live run, exactly. Another
    policy starts with its default options; one written in Python must be given, as a file alone shall not decide
    which code runs; with layer scope and another capacity or scope, quotas are equal
    shares unless given. Raises DataError (a malformed trace), ConfigError (a policy or option that cannot
    be), BudgetError (a capacity too small for the trace; names what the refused access needs), OSError.
    """
    with Path(path).open("rb") as file:
        recorded = read_header(file)
        capacity = recorded.capacity_frames if capacity_frames is None else capacity_frames
        chosen_scope = recorded.scope if scope is None else scope
        if chosen_scope not in ("global", "layer"):
            raise ConfigError(f"scope: expected 'global' or 'layer', got {chosen_scope!r}")
        quotas: tuple[int, ...] = ()
        if chosen_scope == "layer":
            if layer_quotas is not None:
                quotas = tuple(layer_quotas)
            elif capacity_frames is None and recorded.scope == "layer":
                quotas = recorded.layer_quotas
            else:
                layers = 1 + max((record.layer for record in recorded.records), default=0)
                quotas = equal_quotas(capacity, layers)
        if policy is None and ":" in recorded.policy:
            raise ConfigError(
                f"{os.fspath(path)}: recorded under {recorded.policy}, a policy written in Python: "
                "name it as the policy of the replay"
            )
        options = recorded.policy_options if policy in (None, recorded.policy) else {}
        header = TraceHeader(
            capacity_frames=capacity,
            lookahead_frames=recorded.lookahead_frames if lookahead_frames is None else lookahead_frames,
            scope=chosen_scope,
            layer_quotas=quotas,
            policy=policy if policy is not None else recorded.policy,
            policy_options=policy_options if policy_options is not None else options,
            records=recorded.records,
        )
        residency = make_residency(header)
        loop = Replay(residency)
        try:
            for chunk in read_chunks(file, header):
                loop.run(
                    chunk.kinds,
                    chunk.phases,
                    chunk.at,
                    chunk.layers,
                    chunk.offsets,
                    chunk.records,
                    chunk.flags,
                )
            loop.finish()
        except CapacityError as error:
            raise BudgetError(
                f"{os.fspath(path)}: a capacity of {capacity} frames is too small for an access: {error}"
            ) from error
        except DataError:
            raise
        except ValueError as error:
            if residency.policy_failed:  # the user's own, from a policy written in Python
                raise
            raise DataError(f"{os.fspath(path)}: {error}") from error
    return residency.stats()
