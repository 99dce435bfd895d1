"""Which slot each group of each record lies in: copy on write, sharing between commits, and reuse.

A slot is *shared* while the last commit or a snapshot refers to it; shared slots are never written. The first
write-back of a group after a commit therefore allocates a new slot, later ones overwrite that slot in place. The
slot that it leaves behind is freed when the transaction that no longer refers to it is durable and no snapshot
does either.

A group of a record has its own slot, so a write-back moves the dirty group and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tierstore._native import Buffer, CrcTable, Priority
from tierstore.errors import StoreFormatError
from tierstore.store.disk.extents import Slot
from tierstore.store.disk.store_extents import SchemaExtents, StoreExtents
from tierstore.store.format import COMMITTED_GROUPS, Group, GroupLayout, Placement, RecordSchema
from tierstore.store.index.entries import GroupLocation, RecordEntry


@dataclass(slots=True, eq=False)
class LiveRecord:
    """One record between commits, and the host cache's ``Backing`` of it: it reads and writes its own slots.

    ``slots[group]`` is None until the group was first written. ``changed`` says that the next commit has a new index
    value for the record: set it with whatever else changes, such as ``step``.
    """

    key: str
    layer: int
    extents: SchemaExtents
    crcs: CrcTable
    step: int = 0
    slots: list[Slot | None] = field(default_factory=lambda: [None for _ in Group])
    generations: list[int] = field(default_factory=lambda: [0 for _ in COMMITTED_GROUPS])
    changed: bool = False

    @property
    def schema(self) -> RecordSchema:
        return self.extents.schema

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        """Queues a checked read of ``group``; returns its ticket."""
        slot = self.slots[group]
        if slot is None:
            raise AssertionError(f"record {self.key}: read of {Group(group).label}, which was never written")
        return slot.extent.read(slot.number, sections, self.crcs, after, priority)

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        """Queues a write of ``group``, to a new slot where the old one is shared; returns its ticket."""
        slot = self.slots[group]
        if slot is None or slot.extent.shared(slot.number):
            if slot is not None:
                if self.schema.frozen:
                    raise AssertionError(f"record {self.key} is frozen, and was about to be written again")
                # A read of the slot left behind compares with the checksums that this write is about to replace.
                after = [*after, *slot.extent.reads_in_flight(slot.number)]
            slot = self.slots[group] = self.extents[group].allocate()
        if group != Group.GRADIENTS:
            self.changed = True
        return slot.extent.write(slot.number, sections, self.crcs, after)


class LiveIndex:
    """The records of an open store by key, and what the durable tables of its index refer to."""

    def __init__(self, extents: StoreExtents) -> None:
        self.records: dict[str, LiveRecord] = {}
        #: Of the last commit.
        self.generation = 0
        self._extents = extents

    # Records ------------------------------------------------------------------------------------------------

    def add_record(self, key: str, schema: int, layer: int, entry: RecordEntry | None = None) -> LiveRecord:
        """A new record of schema number ``schema``, or with ``entry`` one that the opened commit has."""
        extents = self._extents[schema]
        record = LiveRecord(key, layer, extents, CrcTable(extents.schema.sections))
        if entry is not None:
            record.step = entry.step
            table = record.crcs.array()
            for location, slot in self.slots_of(entry):
                layout = slot.extent.layout
                record.slots[layout.group] = slot
                record.generations[layout.group] = location.generation
                table[_crcs(layout)] = location.crcs
        self.records[key] = record
        return record

    def counts(self) -> Counter[str]:
        """How many records there are of each schema, by its name."""
        return Counter(record.schema.name for record in self.records.values())

    @property
    def unwritten_direct(self) -> list[str]:
        """Keys of records that their owner has yet to write: a commit could not say where they are."""
        return [
            record.key
            for record in self.records.values()
            if record.schema.placement is Placement.DIRECT
            and any(record.slots[group] is None for group in record.schema.groups)
        ]

    def explain(self, path: str, offset: int, section: int | None = None) -> str:
        """The key and section that byte ``offset`` of extent ``path`` belongs to, for error messages."""
        extent = next((extent for extent in self._extents.files if str(extent.path) == path), None)
        if extent is None:
            return "unknown section"
        number, within = divmod(offset, extent.slot_bytes)
        at = _section_at(extent.layout, within) if section is None else section
        name = extent.layout.sections[at].name
        for record in self.records.values():
            if record.slots[extent.layout.group] == Slot(extent, number):
                return f"record {record.key!r}, section {name}"
        return f"section {name} of slot {number}"

    # Commits ------------------------------------------------------------------------------------------------

    def changed_entries(self) -> dict[str, RecordEntry]:
        """Index values of the records that changed. Their writes must have finished: checksums are known only then."""
        return {record.key: self._entry(record) for record in self.records.values() if record.changed}

    def _entry(self, record: LiveRecord) -> RecordEntry:
        crcs = record.crcs.array()
        locations = []
        for group in record.schema.groups:
            slot = record.slots[group]
            if slot is None:
                raise AssertionError(f"record {record.key}: {group.label} committed before it was written")
            extent = slot.extent
            if not extent.shared(slot.number):  # it was written since the last commit
                record.generations[group] = self.generation + 1
            values = tuple(crcs[_crcs(extent.layout)].tolist())
            locations.append(GroupLocation(extent.directory, slot.number, record.generations[group], values))
        return RecordEntry(record.extents.number, record.layer, record.step, tuple(locations))

    def committed(self, generation: int) -> None:
        """The table with ``changed_entries`` is durable, as commit ``generation``."""
        self.generation = generation
        for record in self.records.values():
            record.changed = False

    # Durable tables -----------------------------------------------------------------------------------------

    def check_table(self, table: Mapping[str, RecordEntry], where: str) -> None:
        """Raises StoreFormatError unless every location of ``table`` is whole, within its file, and used
        once.
        """
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

    def slots_of(self, entry: RecordEntry) -> Iterator[tuple[GroupLocation, Slot]]:
        """Each location of a durable entry, and the slot that it names."""
        extents = self._extents[entry.schema]
        for group, location in zip(extents.schema.groups, entry.groups, strict=True):
            extent = extents[group].extents[location.directory]
            yield location, Slot(extent, location.slot)

    def retain(self, entries: Iterable[RecordEntry]) -> None:
        """A durable table refers to the slots of ``entries`` from now on."""
        for entry in entries:
            for _, slot in self.slots_of(entry):
                slot.extent.retain(slot.number)

    def release(self, entries: Iterable[RecordEntry]) -> None:
        """A durable table no longer refers to the slots of ``entries``; those that none refers to are free again."""
        for entry in entries:
            for _, slot in self.slots_of(entry):
                slot.extent.release(slot.number)


def _crcs(layout: GroupLayout) -> slice:
    """Where the checksums of a group are among those of its record."""
    return slice(layout.first_section, layout.first_section + len(layout.sections))


def _section_at(layout: GroupLayout, within: int) -> int:
    """The number of the section that byte ``within`` of a slot belongs to."""
    ends = accumulate(section.padded_nbytes for section in layout.sections)
    return next(number for number, end in enumerate(ends) if within < end)
