"""The on-disk format: what a store directory holds, and how index values are packed.

``docs/FORMAT.md`` is the same in prose. Everything is little-endian.

A store directory holds::

    tierstore.json            identity: format version, uuid, which of the store's directories this is
    lease                     flock()ed by the one process that has the store open; holds its pid
    index/data.mdb            LMDB: databases `meta`, `records`, `state`, `snapshots`
    extents/<schema>.<group>  equal slots, slot i at byte i * slot_bytes

A *record* is everything stored about one expert or one dense slice. Its sections are arranged in *groups*
(`weights`, `moments`); the group is the unit of residency, of dirtiness, of I/O and of copy on write, so each
group of a record has a slot of its own. In a slot the sections of the group lie one after another, each
starting at a multiple of ``SECTION_ALIGNMENT`` bytes; the gaps are zero. Checksums are CRC-32C over a
section's ``nbytes`` bytes, without the gap.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np

from tierstore.errors import ConfigError, StoreFormatError

__all__ = [
    "COMMITTED_GROUPS",
    "FORMAT_VERSION",
    "SECTION_ALIGNMENT",
    "Group",
    "GroupLayout",
    "GroupLocation",
    "Placement",
    "RecordEntry",
    "RecordSchema",
    "Section",
    "WeightFormat",
    "check_name",
    "divided",
    "pack_table",
    "place",
    "unpack_table",
]

FORMAT_VERSION = 2
#: LMDB's longest key.
MAX_NAME_BYTES = 511
#: Sections start at multiples of this many bytes, in files and in memory: enough for direct I/O everywhere.
SECTION_ALIGNMENT = 4096
#: Slots are numbered in so many bits, in index entries too.
_SLOT_BITS = 32


class Group(IntEnum):
    """A section group. ``GRADIENTS`` is scratch: it spills to disk but is never part of a commit."""

    WEIGHTS = 0
    MOMENTS = 1
    GRADIENTS = 2

    @property
    def label(self) -> str:
        return self.name.lower()


#: Groups that a commit holds.
COMMITTED_GROUPS = (Group.WEIGHTS, Group.MOMENTS)


class WeightFormat(Enum):
    """How the fp32 master weight is kept.

    ``SPLIT_BF16`` keeps its bf16 rounding (``weight_hi``, all that a forward pass reads) apart from a 16-bit
    remainder (``weight_lo``); merging them is exact.
    """

    FP32 = "fp32"
    SPLIT_BF16 = "split-bf16"


class Placement(Enum):
    """Who holds a record in memory: the host cache, or its owner, who writes it through at commits."""

    CACHED = "cached"
    DIRECT = "direct"


@dataclass(frozen=True)
class Section:
    """A one-dimensional array of ``numel`` elements of numpy dtype ``dtype`` within a group."""

    name: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * np.dtype(self.dtype).itemsize

    @property
    def padded_nbytes(self) -> int:
        return -(-self.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


@dataclass(frozen=True)
class GroupLayout:
    """The sections of one group, in file order."""

    group: Group
    sections: tuple[Section, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, gaps included."""
        return sum(section.padded_nbytes for section in self.sections)

    @property
    def nbytes(self) -> int:
        """Bytes of content, gaps excluded."""
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True)
class RecordSchema:
    """The shape of a class of records: AdamW state of ``numel`` parameters, 12 bytes a parameter on disk.

    ``name`` names the extent files, so it is limited to letters, digits, ``-`` and ``_``.
    """

    name: str
    numel: int
    weight_format: WeightFormat = WeightFormat.FP32
    placement: Placement = Placement.CACHED

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"schema name {self.name!r}: expected letters, digits, '-' and '_'")
        if self.numel < 1:
            raise ConfigError(f"schema {self.name}: numel must be at least 1, got {self.numel}")

    def layout(self, group: Group) -> GroupLayout:
        if group is Group.GRADIENTS:
            return GroupLayout(group, (Section("gradient", "<f4", self.numel),))
        moments: tuple[Section, ...] = (
            Section("exp_avg", "<f4", self.numel),
            Section("exp_avg_sq", "<f4", self.numel),
        )
        if self.weight_format is WeightFormat.FP32:
            weights: tuple[Section, ...] = (Section("weight", "<f4", self.numel),)
        else:
            weights = (Section("weight_hi", "<u2", self.numel),)
            moments = (Section("weight_lo", "<i2", self.numel), *moments)
        return GroupLayout(group, weights if group is Group.WEIGHTS else moments)

    @property
    def record_bytes(self) -> int:
        """Bytes of content of one record, scratch excluded."""
        return sum(self.layout(group).nbytes for group in COMMITTED_GROUPS)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "numel": self.numel,
            "weight_format": self.weight_format.value,
            "placement": self.placement.value,
        }

    @classmethod
    def from_json(cls, value: dict[str, object]) -> RecordSchema:
        """Raises StoreFormatError for what ``as_json`` would not have written."""
        try:
            return cls(
                str(value["name"]),
                int(str(value["numel"])),
                WeightFormat(value["weight_format"]),
                Placement(value["placement"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(f"not a record schema: {value!r} ({error})") from error


def place(directory: int, slot: int) -> int:
    """Directory and slot in one number; in a store of one directory it is the slot's."""
    return directory << _SLOT_BITS | slot


def divided(place: int) -> tuple[int, int]:
    """Directory and slot of a place."""
    return place >> _SLOT_BITS, place & (1 << _SLOT_BITS) - 1


@dataclass(frozen=True)
class GroupLocation:
    """Where one group of one record lies: stripe directory, slot, the generation that wrote it, its CRCs."""

    directory: int
    slot: int
    generation: int
    crcs: tuple[int, ...]

    @property
    def place(self) -> int:
        """Directory and slot in one number."""
        return place(self.directory, self.slot)


@dataclass(frozen=True)
class RecordEntry:
    """One record's index value. ``step`` counts the optimizer steps that its content has had applied."""

    schema: int
    layer: int
    step: int
    groups: tuple[GroupLocation, ...]

    _HEAD = struct.Struct("<HHHHq")
    _GROUP = struct.Struct("<HHIQ")

    def pack(self) -> bytes:
        parts = [self._HEAD.pack(self.schema, self.layer, len(self.groups), 0, self.step)]
        for location in self.groups:
            parts.append(
                self._GROUP.pack(location.directory, len(location.crcs), location.slot, location.generation)
            )
            parts.append(struct.pack(f"<{len(location.crcs)}I", *location.crcs))
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes, *, where: str) -> RecordEntry:
        """Raises StoreFormatError naming ``where`` when ``data`` is not a whole entry."""
        try:
            schema, layer, count, _, step = cls._HEAD.unpack_from(data)
            offset = cls._HEAD.size
            groups = []
            for _ in range(count):
                directory, sections, slot, generation = cls._GROUP.unpack_from(data, offset)
                offset += cls._GROUP.size
                crcs = struct.unpack_from(f"<{sections}I", data, offset)
                offset += 4 * sections
                groups.append(GroupLocation(directory, slot, generation, crcs))
        except struct.error as error:
            raise StoreFormatError(
                f"{where}: truncated index entry of {len(data)} bytes ({error})"
            ) from error
        if offset != len(data):
            raise StoreFormatError(f"{where}: index entry has {len(data)} bytes, expected {offset}")
        return cls(schema, layer, step, tuple(groups))


def check_name(kind: str, name: str) -> None:
    """Raises ValueError for a name that the index cannot hold: empty, or longer than LMDB's keys may be."""
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(
            f"{kind} {name[:40]!r}: expected 1 to {MAX_NAME_BYTES} bytes, got {len(name.encode())}"
        )


_TABLE_HEAD = struct.Struct("<HI")


def pack_table(table: dict[str, bytes]) -> bytes:
    """A mapping of keys to values as one value: per item key length (u16), value length (u32), key, value."""
    parts = []
    for key, value in sorted(table.items()):
        encoded = key.encode()
        parts += [_TABLE_HEAD.pack(len(encoded), len(value)), encoded, value]
    return b"".join(parts)


def unpack_table(data: bytes, *, where: str) -> dict[str, bytes]:
    """The inverse of ``pack_table``. Raises StoreFormatError naming ``where``."""
    table: dict[str, bytes] = {}
    offset = 0
    while offset < len(data):
        if offset + _TABLE_HEAD.size > len(data):
            raise StoreFormatError(f"{where}: table ends inside an item at byte {offset}")
        key_length, value_length = _TABLE_HEAD.unpack_from(data, offset)
        offset += _TABLE_HEAD.size
        end = offset + key_length + value_length
        if end > len(data):
            raise StoreFormatError(f"{where}: table ends inside an item at byte {offset}")
        try:
            key = data[offset : offset + key_length].decode()
        except UnicodeDecodeError as error:
            raise StoreFormatError(f"{where}: a key is not UTF-8 at byte {offset}") from error
        table[key] = data[offset + key_length : end]
        offset = end
    return table
