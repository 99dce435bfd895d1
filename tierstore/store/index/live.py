"""Which slot each group of each record lies in: copy on write, sharing between commits, and reuse.

A slot is *shared* while the last commit or a snapshot refers to it; shared slots are never written. The first
write-back of a group after a commit therefore allocates a new slot, later ones overwrite that slot in place. The
slot that it leaves behind is freed when the transaction that no longer refers to it is durable and no snapshot
does either.

A group of a record has its own slot, so a write-back moves the dirty group and nothing else.

A store may have a hundred thousand records, so what is known of them lies in columns, by row, and a ``LiveRecord`` is a
handle: an index and a row. Rows are those of the durable table. What a commit does is in proportion to what changed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._native import Buffer, CrcTable, KeyTable, Priority
from tierstore.errors import StoreFormatError
from tierstore.store.disk.extents import Extent, Slot
from tierstore.store.disk.store_extents import SchemaExtents, StoreExtents
from tierstore.store.format import Group, GroupLayout, Placement, RecordSchema
from tierstore.store.index.table import Changed, CommittedRecords, GroupLocation, RecordEntry, Rows, locations

_Number = TypeVar("_Number", bound=np.generic)
_NO_SLOT = 0xFFFFFFFF
_NO_NUMBER = 0xFFFFFFFF
#: Records whose checksums lie in one table.
_SLAB = 1 << 10


class Slots:
    """The slots of a record by group, None until the group was first written."""

    __slots__ = ("_index", "_row")

    def __init__(self, index: LiveIndex, row: int) -> None:
        self._index = index
        self._row = row

    def __getitem__(self, group: int) -> Slot | None:
        return self._index.columns.slot(self._row, group)

    def __setitem__(self, group: int, slot: Slot) -> None:
        columns = self._index.columns
        columns.slots[group][self._row] = slot.number
        columns.directories[group][self._row] = slot.extent.directory


class LiveRecord:
    """One record between commits, and the host cache's ``Backing`` of it: it reads and writes its own slots.

    ``changed`` says that the next commit has a new index value for the record: set it with whatever else changes, such as
    ``step``. Handles of one record are equal.
    """

    __slots__ = ("_index", "row")

    def __init__(self, index: LiveIndex, row: int) -> None:
        self._index = index
        self.row = row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveRecord) and (self.row, self._index) == (other.row, other._index)

    def __hash__(self) -> int:
        return hash((self.row, id(self._index)))

    @property
    def key(self) -> str:
        return self._index.keys.key(self.row)

    @property
    def layer(self) -> int:
        return self._index.columns.layers[self.row]

    @property
    def extents(self) -> SchemaExtents:
        return self._index.columns.extents[self._index.columns.schemas[self.row]]

    @property
    def schema(self) -> RecordSchema:
        return self.extents.schema

    @property
    def slots(self) -> Slots:
        return Slots(self._index, self.row)

    @property
    def step(self) -> int:
        """Optimizer steps that the content has had applied."""
        return self._index.columns.steps[self.row]

    @step.setter
    def step(self, step: int) -> None:
        self._index.columns.steps[self.row] = step

    @property
    def changed(self) -> bool:
        return self.row in self._index.changed

    @changed.setter
    def changed(self, changed: bool) -> None:
        (self._index.changed.add if changed else self._index.changed.discard)(self.row)

    def set_crc(self, section: int, crc: int) -> None:
        """The checksum of a section that is not written."""
        table, first = self._index.columns.crcs(self.row)
        table.array()[first + section] = crc

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        """Queues a checked read of ``group``; returns its ticket."""
        slot = self.slots[group]
        if slot is None:
            raise AssertionError(f"record {self.key}: read of {Group(group).label}, which was never written")
        crcs, first = self._index.columns.crcs(self.row)
        return slot.extent.read(slot.number, sections, crcs, after, priority, crcs_from=first)

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        """Queues a write of ``group``, to a new slot where the old one is shared; returns its ticket."""
        slot = self.slots[group]
        if slot is None or slot.extent.shared(slot.number):
            if slot is not None:
                if self.schema.frozen:
                    raise AssertionError(f"record {self.key} is frozen, and was about to be written again")
                # A read of the slot left behind compares with the checksums that this write is about to replace.
                after = [*after, *slot.extent.reads_in_flight(slot.number)]
            slot = self.extents[group].allocate()
            self.slots[group] = slot
        if group != Group.GRADIENTS:
            self.changed = True
        crcs, first = self._index.columns.crcs(self.row)
        return slot.extent.write(slot.number, sections, crcs, after, crcs_from=first)


class _Columns:
    """What is known of the records, by row."""

    def __init__(self, extents: StoreExtents) -> None:
        self.extents = list(extents)
        self.schemas = array("H")
        self.layers = array("H")
        self.steps = array("q")
        self.slots = [array("I") for _ in Group]
        self.directories = [array("H") for _ in Group]
        #: The records' numbers in the host cache.
        self.numbers = array("I")
        self._width = max((extent.schema.sections for extent in self.extents), default=0)
        self._slabs: list[CrcTable] = []

    def append(self, schema: int, layer: int) -> None:
        self.extend(np.array([schema], np.uint16), np.array([layer], np.uint16), np.array([0], np.int64))

    def extend(
        self,
        schemas: npt.NDArray[np.uint16],
        layers: npt.NDArray[np.uint16],
        steps: npt.NDArray[np.int64],
    ) -> None:
        count = len(schemas)
        self.schemas.frombytes(schemas.tobytes())
        self.layers.frombytes(layers.tobytes())
        self.steps.frombytes(steps.tobytes())
        for column in (*self.slots, self.numbers):
            column.frombytes(b"\xff" * (count * column.itemsize))
        for directories in self.directories:
            directories.frombytes(bytes(count * directories.itemsize))
        while len(self._slabs) * _SLAB < len(self.schemas):
            self._slabs.append(CrcTable(_SLAB * self._width))

    def pop(self) -> None:
        columns = (self.schemas, self.layers, self.steps, self.numbers, *self.slots, *self.directories)
        for column in columns:
            column.pop()

    def slot(self, row: int, group: int) -> Slot | None:
        number = self.slots[group][row]
        if number == _NO_SLOT:
            return None
        extents = self.extents[self.schemas[row]][group].extents
        return Slot(extents[self.directories[group][row]], number)

    def crcs(self, row: int) -> tuple[CrcTable, int]:
        """The table with the record's checksums, and where they begin."""
        return self._slabs[row // _SLAB], row % _SLAB * self._width

    def get_crcs(self, numbers: npt.NDArray[np.int64], first: int, count: int) -> npt.NDArray[np.uint32]:
        """Checksums [records, ``count``] of rows ``numbers``, which ascend, from section ``first`` on."""
        found = np.zeros((len(numbers), count), np.uint32)
        for slab in np.unique(numbers // _SLAB).tolist():
            begin, end = np.searchsorted(numbers, (slab * _SLAB, (slab + 1) * _SLAB)).tolist()
            table = self._slabs[slab].array().reshape(_SLAB, self._width)
            found[begin:end] = table[numbers[begin:end] - slab * _SLAB, first : first + count]
        return found

    def set_crcs(self, numbers: npt.NDArray[np.int64], first: int, crcs: npt.NDArray[np.uint32]) -> None:
        """Checksums [records, sections] of rows ``numbers``, which ascend, from section ``first`` on."""
        for slab in range(int(numbers[0]) // _SLAB, int(numbers[-1]) // _SLAB + 1):
            begin, end = np.searchsorted(numbers, (slab * _SLAB, (slab + 1) * _SLAB)).tolist()
            table = self._slabs[slab].array().reshape(_SLAB, self._width)
            table[numbers[begin:end] - slab * _SLAB, first : first + crcs.shape[1]] = crcs[begin:end]


class _LiveRecords(Mapping[str, LiveRecord]):
    """The records by key; a handle is made when it is asked for."""

    def __init__(self, index: LiveIndex) -> None:
        self._make: Callable[[int], LiveRecord] = index.record_at
        self._keys = index.keys

    def __getitem__(self, key: str) -> LiveRecord:
        row = self._keys.find(key)
        if row < 0:
            raise KeyError(key)
        return self._make(row)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.ordered())

    def __len__(self) -> int:
        return len(self._keys)


class LiveIndex:
    """The records of an open store by key, and what the durable tables of its index refer to."""

    def __init__(self, extents: StoreExtents) -> None:
        self.keys = KeyTable()
        #: Of the last commit.
        self.generation = 0
        #: The last commit's entries; its rows are those of the records.
        self.table = CommittedRecords(self.keys)
        #: Rows of the records whose entry the next commit has.
        self.changed: set[int] = set()
        self.columns = _Columns(extents)
        self._extents = extents
        self._counts: Counter[str] = Counter()
        self._unwritten: set[int] = set()  # DIRECT, and not found written yet
        self._rows = array("I")  # by number in the host cache

    # Records ------------------------------------------------------------------------------------------------

    @property
    def records(self) -> Mapping[str, LiveRecord]:
        """All records, by key."""
        return _LiveRecords(self)

    def record_at(self, row: int) -> LiveRecord:
        return LiveRecord(self, row)

    def add_record(self, key: str, schema: int, layer: int) -> LiveRecord:
        """A new record of schema number ``schema``. Raises ValueError for a key that is there."""
        row = self.keys.add(key)
        self.columns.append(schema, layer)
        shape = self._extents[schema].schema
        self._counts[shape.name] += 1
        if shape.placement is Placement.DIRECT:
            self._unwritten.add(row)
        return LiveRecord(self, row)

    def remove_last(self, record: LiveRecord) -> None:
        """Removes the record that was added last, of which no commit knows."""
        if record.row != len(self.keys) - 1 or record.row < len(self.table):
            raise AssertionError(f"record {record.key} is not the last one")
        self._counts[record.schema.name] -= 1
        self.changed.discard(record.row)
        self._unwritten.discard(record.row)
        self.columns.pop()
        self.keys.pop()

    def load(self, table: CommittedRecords) -> None:
        """Takes up the records of the last commit, which has been checked; there are none before."""
        self.table, self.keys, rows, columns = table, table.keys_by_number, table.rows, self.columns
        columns.extend(rows["schema"], rows["layer"], rows["step"])
        for number, extents in enumerate(self._extents):
            of = np.flatnonzero(rows["schema"] == number)
            self._counts[extents.schema.name] += len(of)
            if not len(of):
                continue
            at, found = 0, rows[of]
            for place, group in enumerate(extents.schema.groups):
                layout = extents.schema.layout(group)
                np.frombuffer(columns.slots[group], np.uint32)[of] = found["slot"][:, place]
                np.frombuffer(columns.directories[group], np.uint16)[of] = found["directory"][:, place]
                crcs = found["crcs"][:, at : at + len(layout.sections)]
                columns.set_crcs(of, layout.first_section, crcs)
                at += len(layout.sections)

    def hold(self, rows: npt.NDArray[np.int64], first: int) -> None:
        """The host cache holds the records of ``rows``, under the numbers from ``first`` on."""
        numbers = np.frombuffer(self.columns.numbers, np.uint32)
        numbers[rows] = np.arange(first, first + len(rows), dtype=np.uint32)
        del numbers
        missing = first + len(rows) - len(self._rows)
        self._rows.frombytes(b"\xff" * (max(missing, 0) * self._rows.itemsize))
        np.frombuffer(self._rows, np.uint32)[first : first + len(rows)] = rows

    def number(self, row: int) -> int | None:
        """The record's number in the host cache; None where its owner holds it."""
        number = self.columns.numbers[row]
        return None if number == _NO_NUMBER else number

    def backing(self, number: int) -> LiveRecord:
        """The record that the host cache knows by ``number``."""
        return LiveRecord(self, self._rows[number])

    def counts(self) -> Counter[str]:
        """How many records there are of each schema, by its name."""
        return +self._counts

    def steps_of(self, schemas: Sequence[int]) -> npt.NDArray[np.int64]:
        """The steps of all records of the ``schemas``, by number."""
        steps = np.array(self.columns.steps, np.int64)
        if len(schemas) == len(self.columns.extents):
            return steps
        wanted = np.isin(np.array(self.columns.schemas, np.uint16), np.array(schemas, np.uint16))
        return steps[wanted]

    @property
    def unwritten_direct(self) -> list[str]:
        """Keys of records that their owner has yet to write: a commit could not say where they are."""
        columns = self.columns
        for row in list(self._unwritten):
            groups = columns.extents[columns.schemas[row]].schema.groups
            if all(columns.slots[group][row] != _NO_SLOT for group in groups):
                self._unwritten.remove(row)
        return [self.keys.key(row) for row in sorted(self._unwritten)]

    def explain(self, path: str, offset: int, section: int | None = None) -> str:
        """The key and section that byte ``offset`` of extent ``path`` belongs to, for error messages."""
        extent = next((extent for extent in self._extents.files if str(extent.path) == path), None)
        if extent is None:
            return "unknown section"
        number, within = divmod(offset, extent.slot_bytes)
        at = _section_at(extent.layout, within) if section is None else section
        name = extent.layout.sections[at].name
        group = extent.layout.group
        for row in np.flatnonzero(np.array(self.columns.slots[group]) == number).tolist():
            if self.columns.slot(row, group) == Slot(extent, number):
                return f"record {self.keys.key(row)!r}, section {name}"
        return f"section {name} of slot {number}"

    # Commits ------------------------------------------------------------------------------------------------

    def changed_entries(self) -> Changed:
        """Index values of the records that changed. Their writes must have finished: checksums are known only then."""
        numbers = np.fromiter(sorted(self.changed), np.int64, len(self.changed))
        schemas = _taken(self.columns.schemas, np.uint16, numbers)
        layouts = [[e.schema.layout(group) for group in e.schema.groups] for e in self._extents]
        shapes = [tuple(len(layout.sections) for layout in of) for of in layouts]
        changed = Changed(self.keys, numbers, shapes)
        changed.rows["schema"] = changed.rows["shape"] = schemas
        changed.rows["layer"] = _taken(self.columns.layers, np.uint16, numbers)
        changed.rows["step"] = _taken(self.columns.steps, np.int64, numbers)
        for schema in np.unique(schemas).tolist():
            at = 0
            of = np.flatnonzero(schemas == schema)
            for place, layout in enumerate(layouts[schema]):
                self._locate(changed, of, place, self._extents[schema][layout.group].extents)
                crcs = self.columns.get_crcs(numbers[of], layout.first_section, len(layout.sections))
                changed.rows["crcs"][of, at : at + crcs.shape[1]] = crcs
                at += crcs.shape[1]
        return changed

    def _locate(
        self, changed: Changed, of: npt.NDArray[np.int64], place: int, extents: Sequence[Extent]
    ) -> None:
        """Sets where the groups at ``place`` of the records at ``of``, which are of one schema, lie in ``extents``."""
        group, numbers = extents[0].layout.group, changed.numbers[of]
        slots = _taken(self.columns.slots[group], np.uint32, numbers)
        directories = _taken(self.columns.directories[group], np.uint16, numbers)
        unwritten = numbers[slots == _NO_SLOT]
        if len(unwritten):
            raise AssertionError(
                f"record {self.keys.key(int(unwritten[0]))}: {group.label} committed before it was written"
            )
        # One that is not shared was written since the last commit; one that is, lies where that has it.
        generations = np.full(len(of), self.generation + 1, np.uint64)
        for extent in extents:
            here = np.flatnonzero(directories == extent.directory)
            shared = here[extent.all_shared(slots[here])]
            generations[shared] = self.table.rows["generation"][numbers[shared], place]
        changed.rows["slot"][of, place] = slots
        changed.rows["directory"][of, place] = directories
        changed.rows["generation"][of, place] = generations

    def committed(self, generation: int, changed: Changed) -> None:
        """The table with ``changed``, which were ``changed_entries``, is durable, as commit ``generation``: it no longer
        refers to the slots that their records had before, and those that no other refers to are free.
        """
        before = self.table.rows[changed.numbers[changed.numbers < len(self.table)]]
        self._retain(changed.rows)
        self._release(before)
        self.generation = generation
        self.table.merge(changed)
        self.changed.clear()

    # Durable tables -----------------------------------------------------------------------------------------

    def check_table(self, table: Mapping[str, RecordEntry], where: str) -> None:
        """Raises StoreFormatError unless every location of ``table`` is whole, within its file, and used
        once.
        """
        if isinstance(table, CommittedRecords) and self._is_whole(table):
            return
        used: set[Slot] = set()
        for key, entry in table.items():
            what = f"{where}: record {key!r}"
            schemas = self._extents.schemas
            if entry.schema >= len(schemas) or len(entry.groups) != len(schemas[entry.schema].groups):
                raise StoreFormatError(
                    f"{what}: schema {entry.schema} with {len(entry.groups)} groups is unknown"
                )
            for group, location in zip(schemas[entry.schema].groups, entry.groups, strict=True):
                extents = self._extents[entry.schema][group]
                known = location.directory < len(extents.extents)
                if not known or len(location.crcs) != len(extents.layout.sections):
                    raise StoreFormatError(f"{what}: {group.label}: not as its schema says")
                extent = extents.extents[location.directory]
                if location.slot >= extent.slots:
                    raise StoreFormatError(
                        f"{extent.path}: truncated: it has {extent.slots} slots of {extent.slot_bytes} bytes, "
                        f"and {what} is in slot {location.slot}"
                    )
                slot = Slot(extent, location.slot)
                if slot in used:
                    raise StoreFormatError(
                        f"{what}: {group.label}: slot {location.slot} holds another record too"
                    )
                used.add(slot)

    def _is_whole(self, table: CommittedRecords) -> bool:
        """What ``check_table`` checks, of all rows at once. False: it may not be, and ``check_table`` finds out where."""
        rows = table.rows
        if (rows["schema"] >= len(self._extents.schemas)).any():
            return False
        for number, extents in enumerate(self._extents):
            of = rows[rows["schema"] == number]
            layouts = [extents.schema.layout(group) for group in extents.schema.groups]
            wanted = tuple(len(layout.sections) for layout in layouts)
            if any(table.shapes[shape] != wanted for shape in np.unique(of["shape"]).tolist()):
                return False
            for place, group in enumerate(extents.schema.groups):
                files = extents[group].extents
                if (of["directory"][:, place] >= len(files)).any():
                    return False
                for extent in files:
                    slots = of["slot"][of["directory"][:, place] == extent.directory, place]
                    if (slots >= extent.slots).any() or len(np.unique(slots)) < len(slots):
                        return False
        return True

    def slots_of(self, entry: RecordEntry) -> Iterator[tuple[GroupLocation, Slot]]:
        """Each location of a durable entry, and the slot that it names."""
        extents = self._extents[entry.schema]
        for group, location in zip(extents.schema.groups, entry.groups, strict=True):
            extent = extents[group].extents[location.directory]
            yield location, Slot(extent, location.slot)

    def _by_extent(self, rows: Rows) -> Iterator[tuple[Extent, npt.NDArray[np.uint32]]]:
        """The slots of ``rows`` by their extent."""
        groups = [schema.groups for schema in self._extents.schemas]
        for schema, group, directory, slots in locations(rows, groups):
            yield self._extents[schema][group].extents[directory], slots

    def _retain(self, rows: Rows) -> None:
        for extent, slots in self._by_extent(rows):
            extent.retain_all(slots)

    def _release(self, rows: Rows) -> None:
        for extent, slots in self._by_extent(rows):
            extent.release_all(slots)

    def retain_table(self, table: CommittedRecords) -> None:
        """A durable table ``table`` refers to its slots from now on."""
        self._retain(table.rows)

    def release_table(self, table: CommittedRecords) -> None:
        """The durable table ``table`` is no more; slots that no other refers to are free again."""
        self._release(table.rows)


def _taken(column: array[int], dtype: type[_Number], numbers: npt.NDArray[np.int64]) -> npt.NDArray[_Number]:
    """``column`` at ``numbers``."""
    return np.frombuffer(column, dtype)[numbers] if len(numbers) else np.empty(0, dtype)


def _section_at(layout: GroupLayout, within: int) -> int:
    """The number of the section that byte ``within`` of a slot belongs to."""
    ends = accumulate(section.padded_nbytes for section in layout.sections)
    return next(number for number, end in enumerate(ends) if within < end)
