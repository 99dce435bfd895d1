"""The slot of each group of each record: copy on write, sharing between commits, and reuse.

A slot is *shared* while the last commit or a snapshot refers to it; shared slots are never written. The first
write-back of a group after a commit therefore allocates a new slot, later ones overwrite that slot in place. The old slot
is freed when the transaction that drops it is durable, unless a snapshot refers to it.

A group of a record has its own slot, so a write-back moves the dirty group and nothing else.

A store may have a hundred thousand records, so their state is kept in columns, by row, and a ``LiveRecord`` is a handle:
an index and a row. Rows are those of the durable table. The work of a commit is proportional to the number of changes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._native import Buffer, CrcTable, KeyTable, Priority
from tierstore.cache.access import GROUP_STRIDE
from tierstore.errors import StoreFormatError
from tierstore.store.disk.extents import Extent, Slot
from tierstore.store.disk.store_extents import StoreExtents, StripedExtent
from tierstore.store.format import Group, GroupLayout, Placement, RecordSchema
from tierstore.store.index.table import Changed, CommittedRecords, Rows, locations

_Number = TypeVar("_Number", bound=np.generic)
_NO_SLOT = 0xFFFFFFFF
_NO_NUMBER = 0xFFFFFFFF
#: Records whose checksums share one table.
_SLAB = 1 << 10


class LiveRecord:
    """One record between commits, and the host cache's ``Backing`` of it: it reads and writes its own slots.

    ``changed`` marks the record for a new index value in the next commit: set it together with other changes, such as
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
        return self._index.layers[self.row]

    @property
    def schema(self) -> RecordSchema:
        return self._index.extents.schemas[self._index.schemas[self.row]]

    @property
    def cached(self) -> bool:
        """Whether the host cache holds the record, instead of its owner."""
        return self._index.numbers[self.row] != _NO_NUMBER

    @property
    def number(self) -> int:
        """The record's number in the host cache."""
        return self._index.numbers[self.row]

    def entry(self, group: Group) -> int:
        """The number of ``group`` in the host cache."""
        return self._index.numbers[self.row] * GROUP_STRIDE + group

    @property
    def step(self) -> int:
        """Optimizer steps applied to the content."""
        return self._index.steps[self.row]

    @step.setter
    def step(self, step: int) -> None:
        self._index.steps[self.row] = step

    @property
    def changed(self) -> bool:
        return self.row in self._index.changed

    @changed.setter
    def changed(self, changed: bool) -> None:
        (self._index.changed.add if changed else self._index.changed.discard)(self.row)

    def slot(self, group: int) -> Slot | None:
        """The slot of ``group``; None until the group was first written."""
        return self._index.slot(self.row, group)

    def allocate(self, group: int) -> Slot:
        """Moves ``group`` to a free slot. Raises OSError (ENOSPC)."""
        slot = self._index.extent(self.row, group).allocate()
        self._index.slots[group][self.row] = slot.number
        self._index.directories[group][self.row] = slot.extent.directory
        return slot

    def set_crc(self, section: int, crc: int) -> None:
        """Sets the checksum of a section that is not written."""
        table, first = self._index.crcs(self.row)
        table.array()[first + section] = crc

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        """Queues a checked read of ``group``; returns its ticket."""
        slot = self.slot(group)
        if slot is None:
            raise AssertionError(f"record {self.key}: read of {Group(group).label}, which was never written")
        crcs, first = self._index.crcs(self.row)
        return slot.extent.read(slot.number, sections, crcs, after, priority, crcs_from=first)

    def map_weights(self) -> tuple[Buffer, int]:
        """The written weights of a frozen record in a mapping of their file, and the ticket of the comparison with their
        checksum. Raises OSError.
        """
        slot = self._index.slot(self.row, Group.WEIGHTS)
        if slot is None:
            raise AssertionError(f"record {self.key}: a mapping of weights that were never written")
        return slot.extent.map(slot.number, *self._index.crcs(self.row))

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        """Queues a write of ``group``, to a new slot if the old one is shared; returns its ticket."""
        slot = self.slot(group)
        if slot is None or slot.extent.shared(slot.number):
            if slot is not None:
                if self.schema.frozen:
                    raise AssertionError(f"record {self.key} is frozen: it is written only once")
                # A read of the old slot uses the checksums that this write replaces.
                after = [*after, *slot.extent.reads_in_flight(slot.number)]
            slot = self.allocate(group)
        if group != Group.GRADIENTS:
            self.changed = True
        crcs, first = self._index.crcs(self.row)
        return slot.extent.write(slot.number, sections, crcs, after, crcs_from=first)


class LiveIndex:
    """The records of an open store in columns, by row, and the slots that durable tables refer to."""

    def __init__(self, extents: StoreExtents) -> None:
        self.extents = extents
        self.keys = KeyTable()
        #: Of the last commit.
        self.generation = 0
        #: The last commit's entries, by the rows of the records.
        self.table = CommittedRecords(extents.schemas, self.keys)
        #: Rows of the records whose entries the next commit writes.
        self.changed: set[int] = set()
        self.schemas = array("H")
        self.layers = array("H")
        self.steps = array("q")
        self.slots = [array("I") for _ in Group]
        self.directories = [array("H") for _ in Group]
        #: The records' numbers in the host cache.
        self.numbers = array("I")
        self._width = max((schema.sections for schema in extents.schemas), default=0)
        self._slabs: list[CrcTable] = []
        self._counts: Counter[str] = Counter()
        self._unwritten: set[int] = set()  # DIRECT, and not seen written yet
        self._rows = array("I")  # by number in the host cache

    # Columns ------------------------------------------------------------------------------------------------

    def _extend(
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

    def extent(self, row: int, group: int) -> StripedExtent:
        """The extent of ``group`` of the records of the same schema."""
        return self.extents.of(self.schemas[row], group)

    def slot(self, row: int, group: int) -> Slot | None:
        number = self.slots[group][row]
        if number == _NO_SLOT:
            return None
        return Slot(self.extent(row, group).extents[self.directories[group][row]], number)

    def crcs(self, row: int) -> tuple[CrcTable, int]:
        """The table with the record's checksums, and their offset in it."""
        return self._slabs[row // _SLAB], row % _SLAB * self._width

    def _crc_slabs(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[slice, npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
        """For each slab: the part of ``rows`` (ascending) in it, their positions in it, and its checksums."""
        for slab in np.unique(rows // _SLAB).tolist():
            begin, end = np.searchsorted(rows, (slab * _SLAB, (slab + 1) * _SLAB)).tolist()
            of = slice(begin, end)
            yield of, rows[of] - slab * _SLAB, self._slabs[slab].array().reshape(_SLAB, self._width)

    # Records ------------------------------------------------------------------------------------------------

    def record(self, key: str) -> LiveRecord:
        """Raises KeyError."""
        row = self.keys.find(key)
        if row < 0:
            raise KeyError(key)
        return LiveRecord(self, row)

    def add_record(self, key: str, schema: int, layer: int) -> LiveRecord:
        """Adds a record of schema number ``schema``. Raises ValueError for an existing key."""
        row = self.keys.add(key)
        self._extend(np.array([schema], np.uint16), np.array([layer], np.uint16), np.array([0], np.int64))
        shape = self.extents.schemas[schema]
        self._counts[shape.name] += 1
        if shape.placement is Placement.DIRECT:
            self._unwritten.add(row)
        return LiveRecord(self, row)

    def remove_last(self, record: LiveRecord) -> None:
        """Removes the record that was added last, which no commit has."""
        if record.row != len(self.keys) - 1 or record.row < len(self.table):
            raise AssertionError(f"record {record.key} is not the last one")
        self._counts[record.schema.name] -= 1
        self.changed.discard(record.row)
        self._unwritten.discard(record.row)
        columns = (self.schemas, self.layers, self.steps, self.numbers, *self.slots, *self.directories)
        for column in columns:
            column.pop()
        self.keys.pop()

    def load(self, table: CommittedRecords) -> None:
        """Loads the records of the last commit, which has been checked, into an empty index."""
        self.table, self.keys, rows = table, table.keys_by_number, table.rows
        self._extend(rows["schema"], rows["layer"], rows["step"])
        for number, schema in enumerate(self.extents.schemas):
            of = np.flatnonzero(rows["schema"] == number)
            self._counts[schema.name] += len(of)
            at, found = 0, rows[of]
            for place, group in enumerate(schema.groups if len(of) else ()):
                layout = schema.layout(group)
                np.frombuffer(self.slots[group], np.uint32)[of] = found["slot"][:, place]
                np.frombuffer(self.directories[group], np.uint16)[of] = found["directory"][:, place]
                for some, places, slab in self._crc_slabs(of):
                    crcs = found["crcs"][some, at : at + len(layout.sections)]
                    slab[places, layout.first_section : layout.first_section + len(layout.sections)] = crcs
                at += len(layout.sections)

    def hold(self, rows: npt.NDArray[np.int64], first: int) -> None:
        """Assigns the records of ``rows`` to the host cache, under the numbers from ``first`` on."""
        numbers = np.frombuffer(self.numbers, np.uint32)
        numbers[rows] = np.arange(first, first + len(rows), dtype=np.uint32)
        del numbers
        missing = first + len(rows) - len(self._rows)
        self._rows.frombytes(b"\xff" * (max(missing, 0) * self._rows.itemsize))
        np.frombuffer(self._rows, np.uint32)[first : first + len(rows)] = rows

    def backing(self, number: int) -> LiveRecord:
        """The record with ``number`` in the host cache."""
        return LiveRecord(self, self._rows[number])

    def counts(self) -> Counter[str]:
        """The number of records of each schema, by its name."""
        return +self._counts

    def steps_of(self, schemas: Sequence[int]) -> npt.NDArray[np.int64]:
        """The steps of all records of the ``schemas``, by number."""
        steps = np.array(self.steps, np.int64)
        if len(schemas) == len(self.extents.schemas):
            return steps
        return steps[np.isin(np.array(self.schemas, np.uint16), np.array(schemas, np.uint16))]

    @property
    def unwritten_direct(self) -> list[str]:
        """Keys of records that their owner has not written yet: a commit would have no location for them."""
        for row in list(self._unwritten):
            groups = self.extents.schemas[self.schemas[row]].groups
            if all(self.slots[group][row] != _NO_SLOT for group in groups):
                self._unwritten.remove(row)
        return [self.keys.key(row) for row in sorted(self._unwritten)]

    def explain(self, path: str, offset: int, section: int | None = None) -> str:
        """The key and section at byte ``offset`` of extent ``path``, for error messages."""
        extent = next((extent for extent in self.extents.files if str(extent.path) == path), None)
        if extent is None:
            return "unknown section"
        number, within = divmod(offset, extent.slot_bytes)
        at = _section_at(extent.layout, within) if section is None else section
        name = extent.layout.sections[at].name
        group = extent.layout.group
        for row in np.flatnonzero(np.array(self.slots[group]) == number).tolist():
            if self.slot(row, group) == Slot(extent, number):
                return f"record {self.keys.key(row)!r}, section {name}"
        return f"section {name} of slot {number}"

    # Commits ------------------------------------------------------------------------------------------------

    def changed_entries(self) -> Changed:
        """Index values of the changed records. Their writes must have finished: checksums are known only then."""
        numbers = np.fromiter(sorted(self.changed), np.int64, len(self.changed))
        schemas = _taken(self.schemas, np.uint16, numbers)
        changed = Changed(self.table, numbers)
        changed.rows["schema"] = schemas
        changed.rows["layer"] = _taken(self.layers, np.uint16, numbers)
        changed.rows["step"] = _taken(self.steps, np.int64, numbers)
        for number in np.unique(schemas).tolist():
            at, of, schema = 0, np.flatnonzero(schemas == number), self.extents.schemas[number]
            for place, group in enumerate(schema.groups):
                layout = schema.layout(group)
                end = at + len(layout.sections)
                self._locate(changed, of, place, self.extents.of(number, group).extents)
                for some, places, slab in self._crc_slabs(numbers[of]):
                    first = layout.first_section
                    changed.rows["crcs"][of[some], at:end] = slab[places, first : first + end - at]
                at = end
        return changed

    def _locate(
        self, changed: Changed, of: npt.NDArray[np.int64], place: int, extents: Sequence[Extent]
    ) -> None:
        """Sets the locations in ``extents`` of the groups at ``place`` of the records at ``of``, which share a schema."""
        group, numbers = extents[0].layout.group, changed.numbers[of]
        slots = _taken(self.slots[group], np.uint32, numbers)
        directories = _taken(self.directories[group], np.uint16, numbers)
        unwritten = numbers[slots == _NO_SLOT]
        if len(unwritten):
            raise AssertionError(
                f"record {self.keys.key(int(unwritten[0]))}: {group.label} committed before it was written"
            )
        # An unshared slot was written since the last commit; a shared one has the location of that commit.
        generations = np.full(len(of), self.generation + 1, np.uint64)
        for extent in extents:
            here = np.flatnonzero(directories == extent.directory)
            shared = here[extent.all_shared(slots[here])]
            generations[shared] = self.table.rows["generation"][numbers[shared], place]
        changed.rows["slot"][of, place] = slots
        changed.rows["directory"][of, place] = directories
        changed.rows["generation"][of, place] = generations

    def committed(self, generation: int, changed: Changed) -> None:
        """Called when the table with ``changed`` (``changed_entries``) is durable as commit ``generation``: frees old
        slots of those records that no other table refers to.
        """
        before = self.table.rows[changed.numbers[changed.numbers < len(self.table)]]
        self.retain(changed.rows)
        self.release(before)
        self.generation = generation
        self.table.merge(changed)
        self.changed.clear()

    # Durable tables -----------------------------------------------------------------------------------------

    def check_table(self, table: CommittedRecords, where: str) -> None:
        """Raises StoreFormatError unless each slot of ``table`` lies within its file and is used once."""
        for number, group, directory, rows, slots in locations(table.rows, self.extents.schemas):

            def named(place: int, rows: npt.NDArray[np.int64] = rows) -> str:
                return f"{where}: record {table.keys_by_number.key(int(rows[place]))!r}"

            extents = self.extents.of(number, group).extents
            if directory >= len(extents):
                raise StoreFormatError(f"{named(0)}: {group.label}: directory {directory} is unknown")
            extent = extents[directory]
            beyond = np.flatnonzero(slots >= extent.slots)
            if len(beyond):
                raise StoreFormatError(
                    f"{extent.path}: truncated: it has {extent.slots} slots of {extent.slot_bytes} bytes, "
                    f"and {named(int(beyond[0]))} is in slot {slots[beyond[0]]}"
                )
            first = np.unique(slots, return_index=True)[1]
            if len(first) < len(slots):
                twice = int(np.setdiff1d(np.arange(len(slots)), first)[0])
                raise StoreFormatError(
                    f"{named(twice)}: {group.label}: slot {slots[twice]} holds another record too"
                )

    def _by_extent(self, rows: Rows) -> Iterator[tuple[Extent, npt.NDArray[np.uint32]]]:
        """The slots of ``rows`` by their extent."""
        for schema, group, directory, _, slots in locations(rows, self.extents.schemas):
            yield self.extents.of(schema, group).extents[directory], slots

    def retain(self, rows: Rows) -> None:
        """Adds a durable table's references to the slots of ``rows``."""
        for extent, slots in self._by_extent(rows):
            extent.retain_all(slots)

    def release(self, rows: Rows) -> None:
        """Drops a durable table's references to the slots of ``rows``; frees those without other references."""
        for extent, slots in self._by_extent(rows):
            extent.release_all(slots)


def _taken(column: array[int], dtype: type[_Number], numbers: npt.NDArray[np.int64]) -> npt.NDArray[_Number]:
    """``column`` at ``numbers``."""
    return np.frombuffer(column, dtype)[numbers] if len(numbers) else np.empty(0, dtype)


def _section_at(layout: GroupLayout, within: int) -> int:
    """The number of the section at byte ``within`` of a slot."""
    ends = accumulate(section.padded_nbytes for section in layout.sections)
    return next(number for number, end in enumerate(ends) if within < end)
