"""Where all records of one commit lie, in one array: some 60 bytes a record, where objects would take a thousand.

A ``CommittedRecords`` is a mapping of keys to ``RecordEntry``; it makes an entry when asked for one. Code that looks at all
records reads ``rows`` instead, an array with a field for each number of an entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._native import KeyTable
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


_HEAD = np.dtype([("schema", "<u2"), ("layer", "<u2"), ("groups", "<u2"), ("zero", "<u2"), ("step", "<i8")])
_LEAST_ROWS = 16
Rows = npt.NDArray[np.void]


def _group_dtype(sections: int) -> np.dtype[np.void]:
    fields = [("directory", "<u2"), ("sections", "<u2"), ("slot", "<u4"), ("generation", "<u8")]
    return np.dtype([*fields, ("crcs", "<u4", (sections,))])


def packed_dtype(sections: Sequence[int]) -> np.dtype[np.void]:
    """A record entry as it is packed, with a group of each number of ``sections``."""
    groups = [(f"group{number}", _group_dtype(count)) for number, count in enumerate(sections)]
    return np.dtype([("head", _HEAD), *groups])


def _shape(value: bytes) -> tuple[int, ...]:
    """The number of sections of each group of a packed entry that is whole."""
    entry = RecordEntry.unpack(value, where="")
    return tuple(len(location.crcs) for location in entry.groups)


class CommittedRecords(Mapping[str, RecordEntry]):
    """The record entries of one commit. Row i belongs to key number i of ``keys``. Tables may share their keys; each has
    rows for the first ``len(table)`` of them.

    A field that a record lacks (a second group, say) is 0 in its row. ``shapes`` lists how many sections the groups of a
    record may have, and the field ``shape`` says which of these a record has.
    """

    def __init__(self, keys: KeyTable | None = None) -> None:
        self.keys_by_number = KeyTable() if keys is None else keys
        self.shapes: list[tuple[int, ...]] = []
        self._rows: Rows = np.zeros(0, _row_dtype(2, 0))
        self._count = 0

    @classmethod
    def of(cls, items: Sequence[tuple[bytes, bytes]], *, where: str) -> CommittedRecords:
        """From keys and packed entries. Raises StoreFormatError, naming ``where`` and the key, for an entry that is not
        whole.
        """
        table = cls()
        table.keys_by_number.add_all([key for key, _ in items])
        values = [value for _, value in items]
        table._count = len(values)
        left = np.arange(len(values))
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        while len(left):
            first = int(left[0])
            named = f"{where}: record {table.keys_by_number.key(first)!r}"
            RecordEntry.unpack(values[first], where=named)
            shape = _shape(values[first])
            dtype = packed_dtype(shape)
            alike = left[lengths[left] == dtype.itemsize]
            chosen = values if len(alike) == len(values) else [values[i] for i in alike.tolist()]
            packed = np.frombuffer(b"".join(chosen), dtype)
            same = packed["head"]["groups"] == len(shape)
            for number, sections in enumerate(shape):
                same &= packed[f"group{number}"]["sections"] == sections
            table._take(alike[same], packed[same], shape)
            left = np.setdiff1d(left, alike[same], assume_unique=True)
        return table

    def _take(self, numbers: npt.NDArray[np.int64], packed: Rows, shape: tuple[int, ...]) -> None:
        self._widen(len(shape), sum(shape))
        self._provide(self._count)
        rows = np.zeros(len(numbers), self._rows.dtype)
        rows["shape"] = self._shape_number(shape)
        for name in ("schema", "layer", "step"):
            rows[name] = packed["head"][name]
        at = 0
        for number, sections in enumerate(shape):
            group = packed[f"group{number}"]
            for name in ("directory", "slot", "generation"):
                rows[name][:, number] = group[name]
            rows["crcs"][:, at : at + sections] = group["crcs"]
            at += sections
        self._rows[numbers] = rows

    def _shape_number(self, shape: tuple[int, ...]) -> int:
        if shape not in self.shapes:
            self.shapes.append(shape)
        return self.shapes.index(shape)

    def _widen(self, groups: int, crcs: int) -> None:
        had = self._rows.dtype["slot"].shape[0], self._rows.dtype["crcs"].shape[0]
        if groups <= had[0] and crcs <= had[1]:
            return
        wider = np.zeros(len(self._rows), _row_dtype(max(groups, had[0]), max(crcs, had[1])))
        for name in self._rows.dtype.names or ():
            field = self._rows[name]
            if field.ndim == 1:
                wider[name] = field
            else:
                wider[name][:, : field.shape[1]] = field
        self._rows = wider

    def _provide(self, rows: int) -> None:
        if len(self._rows) < rows:
            longer = np.zeros(max(rows, 3 * len(self._rows) // 2, _LEAST_ROWS), self._rows.dtype)
            longer[: len(self._rows)] = self._rows
            self._rows = longer

    @property
    def rows(self) -> Rows:
        """One row a record: ``step``, ``schema``, ``layer``, ``shape``, and for each group ``slot``, ``directory``,
        ``generation``; ``crcs`` of all groups in turn.
        """
        return self._rows[: self._count]

    def put(self, number: int, entry: RecordEntry) -> None:
        """Sets the entry of key ``number``. A new one is the next."""
        if number > self._count:
            raise AssertionError(
                f"key {self.keys_by_number.key(number)!r} comes before one that has no entry"
            )
        shape = tuple(len(location.crcs) for location in entry.groups)
        self._widen(len(shape), sum(shape))
        self._provide(number + 1)
        self._count = max(self._count, number + 1)
        row = self._rows[number]
        row["shape"] = self._shape_number(shape)
        row["schema"], row["layer"], row["step"] = entry.schema, entry.layer, entry.step
        at = 0
        for group, location in enumerate(entry.groups):
            row["directory"][group], row["slot"][group] = location.directory, location.slot
            row["generation"][group] = location.generation
            row["crcs"][at : at + len(location.crcs)] = location.crcs
            at += len(location.crcs)

    def merge(self, changed: Changed) -> None:
        """Sets the entries of ``changed``; new ones follow those that are here."""
        numbers, rows = changed.numbers, changed.rows
        if not len(numbers):
            return
        new = numbers[np.searchsorted(numbers, self._count) :]
        if len(new) and (int(new[0]), int(new[-1])) != (self._count, self._count + len(new) - 1):
            raise AssertionError(
                f"key {self.keys_by_number.key(int(new[0]))!r} comes before one that has no entry"
            )
        self._widen(rows.dtype["slot"].shape[0], rows.dtype["crcs"].shape[0])
        self._provide(int(numbers[-1]) + 1)
        self._count += len(new)
        shapes = np.array([self._shape_number(shape) for shape in changed.shapes], np.uint16)
        for name in self._rows.dtype.names or ():
            values = shapes[rows["shape"]] if name == "shape" else rows[name]
            if values.ndim == 1:
                self._rows[name][numbers] = values
            else:
                self._rows[name][numbers, : values.shape[1]] = values

    def update(self, entries: Mapping[str, RecordEntry]) -> None:
        """Sets the entry of each key, which ``keys_by_number`` has."""
        numbers = {self.keys_by_number.find(key): entry for key, entry in entries.items()}
        for number in sorted(numbers):
            self.put(number, numbers[number])

    def copy(self) -> CommittedRecords:
        """The same entries, which go on being what they are now."""
        copied = CommittedRecords(self.keys_by_number)
        copied.shapes, copied._rows, copied._count = list(self.shapes), self.rows.copy(), self._count
        return copied

    def entry(self, number: int) -> RecordEntry:
        """The entry of key ``number``."""
        row = self._rows[number]
        schema, layer, step = int(row["schema"]), int(row["layer"]), int(row["step"])
        crcs, at, groups = row["crcs"].tolist(), 0, []
        for group, sections in enumerate(self.shapes[row["shape"]]):
            directory, slot = int(row["directory"][group]), int(row["slot"][group])
            found = tuple(crcs[at : at + sections])
            groups.append(GroupLocation(directory, slot, int(row["generation"][group]), found))
            at += sections
        return RecordEntry(schema, layer, step, tuple(groups))

    def packed(self) -> Iterator[tuple[str, bytes]]:
        """Keys, in order, and packed entries."""
        values = _pack_rows(self.rows, self.shapes)
        for number in self.keys_by_number.sorted().tolist():
            if number < self._count:
                yield self.keys_by_number.key(number), values[number]

    def __getitem__(self, key: str) -> RecordEntry:
        number = self.keys_by_number.find(key)
        if not 0 <= number < self._count:
            raise KeyError(key)
        return self.entry(number)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and 0 <= self.keys_by_number.find(key) < self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_by_number.ordered(self._count))

    def __len__(self) -> int:
        return self._count


class Changed(Mapping[str, RecordEntry]):
    """New entries of some records: of key number ``numbers[i]`` (they ascend) row i, as in ``CommittedRecords.rows``."""

    def __init__(
        self,
        keys: KeyTable,
        numbers: npt.NDArray[np.int64],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self._keys = keys
        self.numbers = numbers
        self.shapes = list(shapes)
        self.rows: Rows = np.zeros(
            len(numbers), _row_dtype(max(map(len, shapes), default=0), max(map(sum, shapes), default=0))
        )

    def packed(self) -> list[tuple[str, bytes]]:
        """Keys and packed entries."""
        keys = map(self._keys.key, self.numbers.tolist())
        return list(zip(keys, _pack_rows(self.rows, self.shapes).tolist(), strict=True))

    def __getitem__(self, key: str) -> RecordEntry:
        number = self._keys.find(key)
        place = int(np.searchsorted(self.numbers, number))
        if number < 0 or place == len(self.numbers) or self.numbers[place] != number:
            raise KeyError(key)
        return RecordEntry.unpack(_pack_rows(self.rows[place : place + 1], self.shapes)[0], where=key)

    def __iter__(self) -> Iterator[str]:
        return map(self._keys.key, self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)


def locations(
    rows: Rows, groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int, npt.NDArray[np.uint32]]]:
    """Schema, group, directory, and the slots there of the records of ``rows``, where schema s has the groups
    ``groups[s]``.
    """
    for schema, of_schema in enumerate(groups):
        of = rows[rows["schema"] == schema]
        for place, group in enumerate(of_schema if len(of) else ()):
            directories = of["directory"][:, place]
            for directory in np.unique(directories).tolist():
                yield schema, group, directory, of["slot"][directories == directory, place]


def _pack_rows(rows: Rows, shapes: Sequence[tuple[int, ...]]) -> npt.NDArray[np.object_]:
    """The packed entry of each row."""
    values = np.empty(len(rows), object)
    for shape_number, shape in enumerate(shapes):
        numbers = np.flatnonzero(rows["shape"] == shape_number)
        of, packed = rows[numbers], np.zeros(len(numbers), packed_dtype(shape))
        packed["head"]["groups"] = len(shape)
        for name in ("schema", "layer", "step"):
            packed["head"][name] = of[name]
        at = 0
        for number, sections in enumerate(shape):
            group = packed[f"group{number}"]
            group["sections"] = sections
            for name in ("directory", "slot", "generation"):
                group[name] = of[name][:, number]
            group["crcs"] = of["crcs"][:, at : at + sections]
            at += sections
        content, size = packed.tobytes(), packed.itemsize
        for place, number in enumerate(numbers.tolist()):
            values[number] = content[place * size : (place + 1) * size]
    return values


def _row_dtype(groups: int, crcs: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("step", "<i8"),
            ("generation", "<u8", (groups,)),
            ("slot", "<u4", (groups,)),
            ("crcs", "<u4", (crcs,)),
            ("directory", "<u2", (groups,)),
            ("schema", "<u2"),
            ("layer", "<u2"),
            ("shape", "<u2"),
        ]
    )
