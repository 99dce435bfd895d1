"""All extents of an open store: their files, and the space that they reserve for its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tierstore._native import DirectIo, Engine, FileAccess, FileCreate, Link
from tierstore.capabilities import Capability
from tierstore.errors import StoreError, StoreFormatError
from tierstore.store.config import StoreAccess
from tierstore.store.disk.discard import Discard
from tierstore.store.disk.drives import Drive, DriveReport, Drives
from tierstore.store.disk.extents import Extent
from tierstore.store.disk.space import schema_copies
from tierstore.store.disk.striping import StripedExtent
from tierstore.store.disk.write_budget import WriteBudget
from tierstore.store.format import Group, GroupLayout, RecordSchema, Section


class SchemaExtents:
    """The extents of the records of one schema, by group. ``number`` is the schema's in the store."""

    def __init__(self, number: int, schema: RecordSchema, make: Callable[[Group], StripedExtent]) -> None:
        self.number = number
        self.schema = schema
        self._make = make
        self._groups = {group: make(group) for group in schema.groups}

    def __getitem__(self, group: int) -> StripedExtent:
        """The extent of ``group``. That of gradients is made when it is first used. Raises StoreError for frozen records,
        which have weights alone.
        """
        if group not in self._groups:
            if self.schema.frozen:
                raise StoreError(
                    f"records of schema {self.schema.name!r} are frozen: they have no {Group(group).label}"
                )
            self._groups[Group(group)] = self._make(Group(group))
        return self._groups[Group(group)]

    def rebalance(self) -> None:
        """Reserves the drives' shares as they are now."""
        for extent in self._groups.values():
            extent.rebalance()


@dataclass(frozen=True)
class _Opener:
    """What the files of extents are opened with. It does not know ``StoreExtents``: a closed store is freed without
    the garbage collector, and its arena with it.
    """

    engine: Engine
    drives: Drives
    direct: DirectIo
    link: Link | None
    budget: WriteBudget | None
    discard: Discard
    added: Collection[str]
    access: FileAccess

    def striped(self, schema: RecordSchema, group: Group) -> StripedExtent:
        layout, name = schema.layout(group), f"{schema.name}.{group.label}"
        new = schema.name in self.added
        return self._striped(name, layout, FileCreate.YES if new else FileCreate.NO)

    def scratch(self, name: str, layout: GroupLayout) -> StripedExtent:
        return self._striped(name, layout, FileCreate.YES)

    def _striped(self, name: str, layout: GroupLayout, create: FileCreate) -> StripedExtent:
        files = [self._open(drive, name, layout, create) for drive in self.drives]
        return StripedExtent(self.drives, files, self.discard)

    def _open(self, drive: Drive, name: str, layout: GroupLayout, create: FileCreate) -> Extent:
        scratch = layout.group is Group.GRADIENTS
        path = drive.path / ("scratch" if scratch else "extents") / name
        new = scratch or create is FileCreate.YES
        if scratch:  # cleaners of temporary directories remove empty ones
            path.parent.mkdir(exist_ok=True)
        if new:  # a process that was killed before its commit may have left one
            path.unlink(missing_ok=True)
        try:
            extent = Extent(
                self.engine,
                path,
                layout,
                directory=drive.number,
                direct=self.direct,
                create=FileCreate.YES if new else drive.create,
                access=self.access,
                links=[link for link in (drive.link, self.link) if link is not None],
                budget=self.budget,
                meter=drive.meter,
            )
        except FileNotFoundError as error:
            if scratch:
                raise
            raise StoreFormatError(f"{error.filename}: the extent file is missing") from error
        drive.extents.append(extent)
        if scratch:
            # Nothing resumes from gradients: without a name their space is free however the process ends.
            path.unlink()
        elif drive.lease is not None:
            drive.lease.watch(f"extents/{name}", extent.file.fileno())
        return extent


def _prepare(drives: Drives) -> None:
    """Makes the directories of extents that are to be written, and removes what a killed process left in them."""
    for drive in drives:
        if drive.create is FileCreate.YES:
            (drive.path / "extents").mkdir()
        scratch = drive.path / "scratch"
        scratch.mkdir(exist_ok=True)
        for stale in scratch.iterdir():
            stale.unlink()


class StoreExtents:
    """The extents of the schemas of a store, by number. ``link`` limits the speed of all drives together. ``added``: names
    of schemas that no commit knows yet. With ``StoreAccess.READ`` no file or directory is made, removed or written.
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
        added: Collection[str] = (),
        access: StoreAccess = StoreAccess.WRITE,
    ) -> None:
        self.schemas = list(schemas)
        self.budget = budget
        self.link = link
        self._drives = drives
        #: The most records of each schema that space was reserved for.
        self.promised: Counter[str] = Counter()
        if access is StoreAccess.WRITE:
            _prepare(drives)
        discard = discard if access is StoreAccess.WRITE else Capability.OFF
        self.discarding = Discard(discard, [drive.path / "scratch" for drive in drives])
        file_access = FileAccess.READ_WRITE if access is StoreAccess.WRITE else FileAccess.READ
        self._opener = _Opener(engine, drives, direct, link, budget, self.discarding, added, file_access)
        self._by_schema: list[SchemaExtents] = []
        try:
            for number, schema in enumerate(self.schemas):
                self._by_schema.append(SchemaExtents(number, schema, partial(self._opener.striped, schema)))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> SchemaExtents:
        return self._by_schema[number]

    def __iter__(self) -> Iterator[SchemaExtents]:
        return iter(self._by_schema)

    @property
    def files(self) -> list[Extent]:
        """Every extent, scratch included."""
        return [extent for drive in self._drives for extent in drive.extents]

    @property
    def _committed(self) -> list[Extent]:
        return [extent for extent in self.files if extent.layout.group is not Group.GRADIENTS]

    # Space --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """After opening: every slot that no durable table refers to is free."""
        for extent in self._committed:
            extent.recover()

    def reserve(self, copies: int, counts: Mapping[str, int]) -> None:
        """Reserves space for ``copies`` of ``counts[schema name]`` records (one of frozen ones), or of as many as ever
        before.

        Raises OSError (ENOSPC) before anything moves; a count that was refused is not asked for again.
        """
        promised = self.promised | Counter(counts)
        for extent, slots in self._needed(copies, promised):
            extent.reserve(slots)
        self.promised = promised

    def discard(self, copies: int, counts: Mapping[str, int]) -> None:
        """Returns, in the background, the blocks of free slots that ``copies`` of every record do not need.

        What is reserved stays reserved: the slots that turn around at every commit are never among them.
        """
        for extent, slots in self._needed(copies, self.promised | Counter(counts)):
            extent.discard(slots)

    def _needed(self, copies: int, counts: Counter[str]) -> Iterator[tuple[StripedExtent, int]]:
        for extents in self:
            schema = extents.schema
            for group in schema.groups:
                yield extents[group], counts[schema.name] * schema_copies(schema, copies)

    def open_scratch(self, name: str, nbytes: int, slots: int) -> StripedExtent:
        """Space for ``slots`` pieces of ``nbytes`` that no commit holds, reserved; its files have no name, so their space
        is free however the process ends. Raises OSError (ENOSPC) with nothing left.
        """
        layout = GroupLayout(Group.GRADIENTS, (Section(name, "|u1", nbytes),), 0)
        extent = self._opener.scratch(name, layout)
        try:
            extent.reserve(slots)
        except BaseException:
            self.close_scratch(extent)
            raise
        return extent

    def close_scratch(self, extent: StripedExtent) -> None:
        """Frees the space of ``open_scratch``. Transfers that are queued keep the files until they have ended."""
        for drive, file in zip(self._drives, extent.extents, strict=True):
            drive.extents.remove(file)
            file.close()

    @property
    def allocated_bytes(self) -> int:
        return sum(extent.slots * extent.slot_bytes for extent in self.files)

    def end_discards(self) -> None:
        """Waits for the holes that are being made."""
        for extent in self.files:
            extent.end_punches()

    # Commits ------------------------------------------------------------------------------------------------

    def syncs(self, after: Iterable[int]) -> list[int]:
        """Queues the fdatasync of every committed extent that changed; returns their tickets."""
        waits = list(after)
        tickets = [extent.sync(waits) for extent in self._committed]
        return [ticket for ticket in tickets if ticket is not None]

    def take_unsynced_directories(self) -> list[int]:
        """Numbers of the directories with extents that are new or have grown since the last commit."""
        grown = [extent for extent in self._committed if extent.unsynced_directory]
        for extent in grown:
            extent.unsynced_directory = False
        return list(dict.fromkeys(extent.directory for extent in grown))

    def committed(self) -> None:
        """After a commit: transfers before it have finished, and the drives' shares may have changed."""
        for extent in self.files:
            extent.forget_finished()
        for extents in self:
            extents.rebalance()

    # What they are ------------------------------------------------------------------------------------------

    def drive_reports(self) -> list[DriveReport]:
        """What lies on each drive, and what each gave."""
        used = Counter[int]()
        for extent in self._committed:
            used[extent.directory] += (extent.reserved_slots - extent.free_slots) * extent.slot_bytes
        return self._drives.reports([used[drive.number] for drive in self._drives])

    @property
    def direct_reason(self) -> str:
        """Why extents are not read and written past the page cache; empty when they are."""
        return next((extent.file.direct_reason for extent in self.files if not extent.file.direct), "")

    @property
    def map_sync_reason(self) -> str:
        """Why mapped extents need a sync; empty where their stores are durable by themselves."""
        return next(filter(None, (extent.file.map_sync_reason() for extent in self.files)), "")

    def close(self) -> None:
        for extent in self.files:
            extent.close()
