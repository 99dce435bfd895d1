"""How the values of the index are packed: where a record lies, and a whole commit as one value.

``docs/FORMAT.md`` is the same in prose. Everything is little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tierstore.errors import StoreFormatError

#: LMDB's longest key.
MAX_NAME_BYTES = 511


@dataclass(frozen=True)
class GroupLocation:
    """Where one group of one record lies: stripe directory, slot, the generation that wrote it, its CRCs."""

    directory: int
    slot: int
    generation: int
    crcs: tuple[int, ...]


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
