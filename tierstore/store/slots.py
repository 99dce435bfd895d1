"""Which slot each group of each record lives in: copy on write, sharing between commits, and reuse.

A slot is *shared* while the last commit or a snapshot refers to it; shared slots are never written. The first
write-back of a group after a commit therefore takes a new slot, later ones overwrite that slot in place. The
slot it leaves behind is freed when the transaction that no longer refers to it is durable and no snapshot
does either.

A group of a record has its own slot, so a write-back moves the dirty group and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from tierstore._native import Buffer, CrcTable, DirectIo, Engine, FileCreate, Link, Priority
from tierstore.capabilities import Capability
from tierstore.errors import StoreFormatError
from tierstore.store.discard import Discard
from tierstore.store.drives import Drive, DriveReport, Drives
from tierstore.store.extents import Extent
from tierstore.store.format import (
    COMMITTED_GROUPS,
    Group,
    GroupLayout,
    GroupLocation,
    Placement,
    RecordEntry,
    RecordSchema,
    divided,
    place,
)
from tierstore.store.striping import StripedExtent
from tierstore.store.write_budget import WriteBudget

__all__ = ["LiveRecord", "SlotMap"]


@dataclass(slots=True)
class LiveRecord:
    """One record between commits. ``slots[g]``, a place, is None until the group was first written."""

    key: str
    schema: int
    layer: int
    crcs: CrcTable
    step: int = 0
    slots: list[int | None] = field(default_factory=lambda: [None for _ in COMMITTED_GROUPS])
    generations: list[int] = field(default_factory=lambda: [0 for _ in COMMITTED_GROUPS])
    scratch_slot: int | None = None


class SlotMap:
    """The live index, and the host cache's ``Backing``: a record's number is its position in ``records``.

    Slots are named by their places: directory and slot in one number. ``link`` limits the speed of all drives together.
    """

    def __init__(
        self,
        engine: Engine,
        drives: Drives,
        schemas: Sequence[RecordSchema],
        *,
        direct: DirectIo,
        link: Link | None = None,
        budget: WriteBudget | None = None,
        discard: Capability = Capability.OFF,
    ) -> None:
        self._engine = engine
        self._link = link
        self.budget = budget
        #: Records of each schema that space was asked for, where that is more than there are.
        self._promised: Counter[str] = Counter()
        self._drives = drives
        self._direct = direct
        self.schemas = list(schemas)
        self.records: list[LiveRecord] = []
        self._extents: dict[tuple[int, Group], StripedExtent] = {}
        self._references: dict[tuple[int, Group], Counter[int]] = {}
        self._dirty_entries: set[int] = set()
        self.generation = 0
        for drive in drives:
            if drive.create is FileCreate.YES:
                (drive.path / "extents").mkdir()
            scratch = drive.path / "scratch"
            scratch.mkdir(exist_ok=True)
            for stale in scratch.iterdir():
                stale.unlink()
        self._discard = Discard(discard, [drive.path / "scratch" for drive in drives])
        try:
            for index in range(len(self.schemas)):
                self._open_extents(index)
        except BaseException:
            self.close()
            raise

    # Schemas and records ------------------------------------------------------------------------------------

    def _open_extents(self, index: int) -> None:
        for group in COMMITTED_GROUPS:
            extents: list[Extent] = []
            for drive in self._drives:
                try:
                    extents.append(self._open_extent(drive, index, group, drive.create))
                except FileNotFoundError as error:
                    raise StoreFormatError(f"{error.filename}: the extent file is missing") from error
            self._extents[index, group] = StripedExtent(self._drives, extents, self._discard)
            self._references[index, group] = Counter()

    def _open_extent(self, drive: Drive, schema: int, group: Group, create: FileCreate) -> Extent:
        shape = self.schemas[schema]
        extent = Extent(
            self._engine,
            drive.path
            / ("scratch" if group is Group.GRADIENTS else "extents")
            / f"{shape.name}.{group.label}",
            shape.layout(group),
            direct=self._direct,
            create=create,
            links=[link for link in (drive.link, self._link) if link is not None],
            budget=self.budget,
            meter=drive.meter,
        )
        drive.extents.append(extent)
        return extent

    def check_table(self, table: Mapping[str, RecordEntry], where: str) -> None:
        """Raises StoreFormatError unless every location of ``table`` is whole, within its file, and used
        once.
        """
        used: set[tuple[int, Group, int]] = set()
        for key, entry in table.items():
            what = f"{where}: record {key!r}"
            if entry.schema >= len(self.schemas) or len(entry.groups) != len(COMMITTED_GROUPS):
                raise StoreFormatError(
                    f"{what}: schema {entry.schema} with {len(entry.groups)} groups is unknown"
                )
            for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                extent = self._extents[entry.schema, group]
                known = location.directory < len(extent.extents)
                if not known or len(location.crcs) != len(extent.layout.sections):
                    raise StoreFormatError(f"{what}: {group.label}: not as its schema says")
                if not extent.holds(location.place):
                    raise StoreFormatError(
                        f"{extent.path(location.place)}: truncated: it has "
                        f"{extent.extents[location.directory].slots} slots of "
                        f"{extent.layout.slot_bytes} bytes, and {what} is in slot {location.slot}"
                    )
                if (entry.schema, group, location.place) in used:
                    raise StoreFormatError(
                        f"{what}: {group.label}: slot {location.slot} holds another record too"
                    )
                used.add((entry.schema, group, location.place))

    def add_record(self, key: str, schema: int, layer: int, entry: RecordEntry | None = None) -> LiveRecord:
        """A new record, or with ``entry`` one that the opened commit has."""
        crcs = CrcTable(self._crc_count(schema))
        record = LiveRecord(key, schema, layer, crcs)
        if entry is not None:
            record.step = entry.step
            table = crcs.array()
            for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                record.slots[group] = location.place
                record.generations[group] = location.generation
                first = self._first_crc(schema, group)
                table[first : first + len(location.crcs)] = location.crcs
        self.records.append(record)
        return record

    def _crc_count(self, schema: int) -> int:
        return sum(len(self.schemas[schema].layout(group).sections) for group in Group)

    def _first_crc(self, schema: int, group: int) -> int:
        return sum(len(self.schemas[schema].layout(Group(g)).sections) for g in range(group))

    # Backing ------------------------------------------------------------------------------------------------

    def read(
        self, record: int, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority
    ) -> int:
        live = self.records[record]
        extent = (
            self._scratch(live.schema)
            if group == Group.GRADIENTS
            else self._extents[live.schema, Group(group)]
        )
        slot = live.scratch_slot if group == Group.GRADIENTS else live.slots[group]
        if slot is None:
            raise AssertionError(f"record {live.key}: read of {Group(group).label}, which was never written")
        return extent.read(slot, sections, live.crcs, self._first_crc(live.schema, group), after, priority)

    def write(self, record: int, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        live = self.records[record]
        first_crc = self._first_crc(live.schema, group)
        if group == Group.GRADIENTS:
            scratch = self._scratch(live.schema)
            if live.scratch_slot is None:
                live.scratch_slot = scratch.take()
            return scratch.write(live.scratch_slot, sections, live.crcs, first_crc, after)
        extent = self._extents[live.schema, Group(group)]
        slot = live.slots[group]
        references = self._references[live.schema, Group(group)]
        if slot is None or slot in references:
            # A read of the slot left behind compares with the checksums that this write is about to replace.
            after = [*after, *(extent.reads_in_flight(slot) if slot is not None else ())]
            slot = extent.take()
            live.slots[group] = slot
            live.generations[group] = self.generation + 1
        self._dirty_entries.add(record)
        return extent.write(slot, sections, live.crcs, first_crc, after)

    def _scratch(self, schema: int) -> StripedExtent:
        key = (schema, Group.GRADIENTS)
        if key not in self._extents:
            extents: list[Extent] = []
            for drive in self._drives:
                extents.append(self._open_extent(drive, schema, Group.GRADIENTS, FileCreate.YES))
                # Nobody resumes from gradients: without a name the space is given back however the process ends.
                extents[-1].path.unlink()
            self._extents[key] = StripedExtent(self._drives, extents, self._discard)
        return self._extents[key]

    # Space --------------------------------------------------------------------------------------------------

    def reserve(self, copies: int, counts: Mapping[str, int]) -> None:
        """Space for ``copies`` of every record, at least ``counts[schema name]`` of them.

        Raises OSError (ENOSPC) before anything moves; what was asked for in vain is not asked for again.
        """
        promised = self._promised | Counter(counts)
        for key, slots in self._needed_slots(copies, promised).items():
            self._extents[key].reserve(slots)
        self._promised = promised

    def _needed_slots(self, copies: int, promised: Counter[str]) -> dict[tuple[int, Group], int]:
        live = Counter(record.schema for record in self.records)
        return {
            (index, group): max(live[index], promised[schema.name]) * copies
            for index, schema in enumerate(self.schemas)
            for group in COMMITTED_GROUPS
        }

    def discard(self, copies: int) -> None:
        """Gives back, in the background, the blocks of free slots that ``copies`` of every record do not need.

        What is reserved stays reserved: the slots that turn around at every commit are never among them.
        """
        for key, slots in self._needed_slots(copies, self._promised).items():
            self._extents[key].discard(slots)

    def reserve_scratch(self, schema: int) -> None:
        """Space to spill the gradients of every record of ``schema``."""
        self._scratch(schema).reserve(sum(record.schema == schema for record in self.records))

    @property
    def allocated_bytes(self) -> int:
        return sum(extent.slots * extent.layout.slot_bytes for extent in self._extents.values())

    # Commits ------------------------------------------------------------------------------------------------

    def touch(self, record: int) -> None:
        """The record's index value changed although none of its groups was written (its step, say)."""
        self._dirty_entries.add(record)

    def entry(self, record: LiveRecord) -> RecordEntry:
        """The record's index value. Its writes must have finished: checksums are known only then."""
        crcs = record.crcs.array()
        locations = []
        for group in COMMITTED_GROUPS:
            slot = record.slots[group]
            if slot is None:
                raise AssertionError(f"record {record.key}: {group.label} committed before it was written")
            first = self._first_crc(record.schema, group)
            count = len(self.schemas[record.schema].layout(group).sections)
            values = tuple(int(crc) for crc in crcs[first : first + count])
            locations.append(GroupLocation(*divided(slot), record.generations[group], values))
        return RecordEntry(record.schema, record.layer, record.step, tuple(locations))

    def changed_entries(self) -> dict[str, RecordEntry]:
        return {self.records[r].key: self.entry(self.records[r]) for r in sorted(self._dirty_entries)}

    def syncs(self, after: Iterable[int]) -> list[int]:
        """Queues the fdatasync of every committed extent that changed; returns their tickets."""
        tickets = []
        waits = list(after)
        for (_, group), extent in self._extents.items():
            if group is not Group.GRADIENTS:
                tickets += extent.syncs(waits)
        return tickets

    def take_unsynced_directories(self) -> list[Path]:
        """Directories with extents that are new or have grown since the last commit."""
        committed = [e for (_, group), e in self._extents.items() if group is not Group.GRADIENTS]
        grown = [extent for striped in committed for extent in striped.extents if extent.unsynced_directory]
        for extent in grown:
            extent.unsynced_directory = False
        return list(dict.fromkeys(extent.path.parent for extent in grown))

    def retain(self, entries: Iterable[RecordEntry]) -> None:
        """A durable table refers to these slots from now on."""
        for entry in entries:
            for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                self._references[entry.schema, group][location.place] += 1

    def let_go(self, entries: Iterable[RecordEntry]) -> None:
        """A durable table no longer refers to these slots; those that nothing refers to are free again."""
        for entry in entries:
            for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                references = self._references[entry.schema, group]
                references[location.place] -= 1
                if not references[location.place]:
                    del references[location.place]
                    self._extents[entry.schema, group].give_back(location.place)

    def committed(self) -> None:
        self._dirty_entries.clear()
        for extent in self._extents.values():
            extent.forget_finished()
            extent.rebalance()

    def adopt_free_slots(self) -> None:
        """After opening: whatever no table refers to is free."""
        for key, references in self._references.items():
            self._extents[key].adopt(set(references))

    def read_location(
        self, schema: int, group: Group, place: int, sections: Sequence[Buffer], crcs: CrcTable
    ) -> int:
        """Queues a checked read of any slot, for verification."""
        return self._extents[schema, group].read(place, sections, crcs, 0, (), Priority.DEMAND)

    @property
    def unwritten_direct(self) -> list[str]:
        """Keys of records that their owner has yet to write: a commit could not say where they are."""
        return [
            record.key
            for record in self.records
            if None in record.slots and self.schemas[record.schema].placement is Placement.DIRECT
        ]

    def extent_path(self, schema: int, group: Group, place: int) -> Path:
        """The file that a slot is in."""
        return self._extents[schema, group].path(place)

    def drive_reports(self) -> list[DriveReport]:
        """What lies on each drive, and what each gave."""
        taken = {key: set(references) for key, references in self._references.items()}
        for record in self.records:
            for group in COMMITTED_GROUPS:
                if (slot := record.slots[group]) is not None:
                    taken[record.schema, group].add(slot)
        used = [0 for _ in self._drives]
        for key, slots in taken.items():
            for slot in slots:
                used[divided(slot)[0]] += self._extents[key].layout.slot_bytes
        return self._drives.reports(used)

    def explain(self, path: str, offset: int, section: int | None = None) -> str:
        """The key and section that byte ``offset`` of extent ``path`` belongs to, for error messages."""
        for (schema, group), striped in self._extents.items():
            paths = [str(extent.path) for extent in striped.extents]
            if path in paths:
                slot, within = divmod(offset, striped.layout.slot_bytes)
                at = _section_at(striped.layout, within) if section is None else section
                name = striped.layout.sections[at].name
                for record in self.records:
                    held = record.scratch_slot if group is Group.GRADIENTS else record.slots[group]
                    if record.schema == schema and held == place(paths.index(path), slot):
                        return f"record {record.key!r}, section {name}"
                return f"section {name} of slot {slot}"
        return "unknown section"

    @property
    def direct_reason(self) -> str:
        """Why extents are not read and written past the page cache; empty when they are."""
        return next((e.file.direct_reason for e in self._files if not e.file.direct), "")

    @property
    def _files(self) -> list[Extent]:
        return [extent for striped in self._extents.values() for extent in striped.extents]

    @property
    def map_sync_reason(self) -> str:
        """Why mapped extents need a sync; empty where their stores are durable by themselves."""
        return next(filter(None, (extent.file.map_sync_reason() for extent in self._files)), "")

    def end_discards(self) -> None:
        """Waits for the holes that are being made."""
        for extent in self._files:
            extent.end_punches()

    def describe_discard(self) -> str:
        return self._discard.describe()

    def close(self) -> None:
        for extent in self._extents.values():
            extent.close()


def _section_at(layout: GroupLayout, within: int) -> int:
    """The number of the section that byte ``within`` of a slot belongs to."""
    ends = accumulate(section.padded_nbytes for section in layout.sections)
    return next(number for number, end in enumerate(ends) if within < end)
