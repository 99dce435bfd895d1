"""The locations of a commit's records in columns: some 60 bytes a record, instead of a thousand for objects.

``docs/FORMAT.md`` describes a packed entry in prose: a head, then for each group its location and the checksums of its
sections. Everything is little-endian. The schema determines the number of groups and sections of an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._native import KeyTable
from tierstore.errors import StoreFormatError
from tierstore.store.format import Group, RecordSchema

#: LMDB's longest key.
MAX_NAME_BYTES = 511
_HEAD = np.dtype([("schema", "<u2"), ("layer", "<u2"), ("groups", "<u2"), ("zero", "<u2"), ("step", "<i8")])
_LEAST_ROWS = 16
Rows = npt.NDArray[np.void]


def check_name(kind: str, name: str) -> None:
    """Raises ValueError for a name that the index cannot hold: empty, or longer than LMDB's keys may be."""
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(
            f"{kind} {name[:40]!r}: expected 1 to {MAX_NAME_BYTES} bytes, got {len(name.encode())}"
        )


@dataclass(frozen=True)
class GroupLocation:
    """The location of one group of one record: stripe directory, slot, the generation that wrote it, its CRCs."""

    directory: int
    slot: int
    generation: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class RecordEntry:
    """One row of a table, unpacked. ``step`` counts the optimizer steps applied to the content."""

    schema: int
    layer: int
    step: int
    groups: tuple[GroupLocation, ...]


class CommittedRecords(Mapping[str, RecordEntry]):
    """The entries of one commit. Row i belongs to key number i of ``keys_by_number``, which tables may share; a table has
    rows for the first ``len(table)`` keys.

    ``rows`` has a field for each number of an entry: ``step``, ``schema``, ``layer``, and by group ``slot``, ``directory``
    and ``generation``; ``crcs`` are those of all groups in turn. Fields that a schema lacks (a second group, say) are 0.
    """

    def __init__(self, schemas: Sequence[RecordSchema] = (), keys: KeyTable | None = None) -> None:
        self.schemas = schemas
        self.keys_by_number = KeyTable() if keys is None else keys
        #: By schema: the number of sections of each group.
        self._shapes = [
            tuple(len(schema.layout(group).sections) for group in schema.groups) for schema in schemas
        ]
        self._rows: Rows = np.zeros(0, _row_dtype(self._shapes))
        self._count = 0

    @classmethod
    def of(
        cls, schemas: Sequence[RecordSchema], items: Sequence[tuple[bytes, bytes]], *, where: str
    ) -> CommittedRecords:
        """The table of keys and packed entries. Raises StoreFormatError, naming ``where`` and the key, for an entry that
        is truncated, or does not fit its schema.
        """
        table = cls(schemas)
        table.keys_by_number.add_all([key for key, _ in items])
        values = [value for _, value in items]
        table._provide(len(values))
        table._count = len(values)
        numbers = np.fromiter(
            (int.from_bytes(value[:2], "little") for value in values), np.int64, len(values)
        )
        lengths = np.fromiter(map(len, values), np.int64, len(values))

        def refuse(wrong: npt.NDArray[np.int64], what: str) -> None:
            if len(wrong):
                key = table.keys_by_number.key(int(wrong[0]))
                raise StoreFormatError(f"{where}: record {key!r}: {what}")

        refuse(np.flatnonzero(lengths < _HEAD.itemsize), "truncated index entry")
        for schema in np.unique(numbers).tolist():
            of = np.flatnonzero(numbers == schema)
            if schema >= len(schemas):
                refuse(of, f"schema {schema} is unknown")
            shape, dtype = table._shapes[schema], _packed_dtype(table._shapes[schema])
            wrong = of[lengths[of] != dtype.itemsize]
            found = int(lengths[wrong[0]]) if len(wrong) else 0
            refuse(wrong, f"truncated index entry of {found} bytes, expected {dtype.itemsize}")
            chosen = values if len(of) == len(values) else [values[i] for i in of.tolist()]
            packed = np.frombuffer(b"".join(chosen), dtype)
            whole = packed["head"]["groups"] == len(shape)
            for group, sections in enumerate(shape):
                whole &= packed[f"group{group}"]["sections"] == sections
            refuse(of[~whole], "does not match its schema")
            for name in ("schema", "layer", "step"):
                table._rows[name][of] = packed["head"][name]
            at = 0
            for group, sections in enumerate(shape):
                for name in ("directory", "slot", "generation"):
                    table._rows[name][of, group] = packed[f"group{group}"][name]
                table._rows["crcs"][of, at : at + sections] = packed[f"group{group}"]["crcs"]
                at += sections
        return table

    def _provide(self, rows: int) -> None:
        if len(self._rows) < rows:
            longer = np.zeros(max(rows, 3 * len(self._rows) // 2, _LEAST_ROWS), self._rows.dtype)
            longer[: len(self._rows)] = self._rows
            self._rows = longer

    @property
    def rows(self) -> Rows:
        """One row a record."""
        return self._rows[: self._count]

    def merge(self, changed: Changed) -> None:
        """Sets the entries of ``changed``; appends new ones."""
        numbers = changed.numbers
        if not len(numbers):
            return
        new = numbers[np.searchsorted(numbers, self._count) :]
        if len(new) and (int(new[0]), int(new[-1])) != (self._count, self._count + len(new) - 1):
            raise AssertionError(
                f"key {self.keys_by_number.key(int(new[0]))!r} comes before a key without an entry"
            )
        self._provide(int(numbers[-1]) + 1)
        self._count += len(new)
        self._rows[numbers] = changed.rows

    def copy(self) -> CommittedRecords:
        """A copy of the entries, which does not follow later changes."""
        copied = CommittedRecords(self.schemas, self.keys_by_number)
        copied._rows, copied._count = self.rows.copy(), self._count
        return copied

    def entry(self, number: int) -> RecordEntry:
        """The entry of key ``number``."""
        row = self._rows[number]
        crcs, at, groups = row["crcs"].tolist(), 0, []
        for group, sections in enumerate(self._shapes[row["schema"]]):
            directory, slot = int(row["directory"][group]), int(row["slot"][group])
            found = tuple(crcs[at : at + sections])
            groups.append(GroupLocation(directory, slot, int(row["generation"][group]), found))
            at += sections
        return RecordEntry(int(row["schema"]), int(row["layer"]), int(row["step"]), tuple(groups))

    def packed(self) -> Iterator[tuple[str, bytes]]:
        """Keys, in order, and packed entries."""
        values = self.pack(self.rows)
        for number in self.keys_by_number.sorted().tolist():
            if number < self._count:
                yield self.keys_by_number.key(number), values[number]

    def pack(self, rows: Rows) -> list[bytes]:
        """The packed entry of each of ``rows``."""
        values = np.empty(len(rows), object)
        for schema in np.unique(rows["schema"]).tolist():
            numbers, shape = np.flatnonzero(rows["schema"] == schema), self._shapes[schema]
            of, packed = rows[numbers], np.zeros(len(numbers), _packed_dtype(shape))
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
        return list(values)

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


class Changed:
    """New entries of some records of ``table``: row i is that of key number ``numbers[i]`` (ascending), zeros at first."""

    def __init__(self, table: CommittedRecords, numbers: npt.NDArray[np.int64]) -> None:
        self._table = table
        self.numbers = numbers
        self.rows: Rows = np.zeros(len(numbers), table.rows.dtype)

    def packed(self) -> list[tuple[str, bytes]]:
        """Keys and packed entries."""
        keys = map(self._table.keys_by_number.key, self.numbers.tolist())
        return list(zip(keys, self._table.pack(self.rows), strict=True))


def locations(
    rows: Rows, schemas: Sequence[RecordSchema]
) -> Iterator[tuple[int, Group, int, npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
    """For each schema number, group and directory: the numbers of the ``rows`` with the group there, and its slots."""
    for number, schema in enumerate(schemas):
        of = np.flatnonzero(rows["schema"] == number)
        for place, group in enumerate(schema.groups if len(of) else ()):
            directories = rows["directory"][of, place]
            for directory in np.unique(directories).tolist():
                here = of[directories == directory]
                yield number, group, directory, here, rows["slot"][here, place]


def _packed_dtype(shape: Sequence[int]) -> np.dtype[np.void]:
    """The dtype of a packed entry, whose groups have the numbers of sections in ``shape``."""
    fields = [("directory", "<u2"), ("sections", "<u2"), ("slot", "<u4"), ("generation", "<u8")]
    groups = [
        (f"group{number}", np.dtype([*fields, ("crcs", "<u4", (sections,))]))
        for number, sections in enumerate(shape)
    ]
    return np.dtype([("head", _HEAD), *groups])


def _row_dtype(shapes: Sequence[Sequence[int]]) -> np.dtype[np.void]:
    groups, crcs = max(map(len, shapes), default=0), max(map(sum, shapes), default=0)
    return np.dtype(
        [
            ("step", "<i8"),
            ("generation", "<u8", (groups,)),
            ("slot", "<u4", (groups,)),
            ("crcs", "<u4", (crcs,)),
            ("directory", "<u2", (groups,)),
            ("schema", "<u2"),
            ("layer", "<u2"),
        ]
    )
