"""All extents of an open store: their files, and the space reserved for its records."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tierstore._native import DirectIo, Engine, FileAccess, FileCreate, Link
from tierstore.capabilities import Capability
from tierstore.errors import StoreError, StoreFormatError
from tierstore.store.config import StoreAccess
from tierstore.store.disk.drives import Drive, DriveReport, Drives, WeightedRoundRobin, apportion
from tierstore.store.disk.extents import NO_SPACE, Discard, Extent, Slot
from tierstore.store.disk.write_budget import WriteBudget
from tierstore.store.format import Group, GroupLayout, RecordSchema, Section


def copies(retain: int) -> int:
    """Copies of every trained record to reserve space for: the live one, the last commit's, and ``retain`` snapshots'.

    Training that touches every record needs them all: slots of the last commit or a snapshot are never overwritten.
    """
    return 2 + retain


def schema_copies(schema: RecordSchema, copies: int) -> int:
    """The copies that records of ``schema`` need: ``copies``, or one if they are frozen (written once)."""
    return min(copies, 1) if schema.frozen else copies


def extent_bytes(schema: RecordSchema, records: int, retain: int) -> int:
    """Bytes of the extents of ``records`` records, padding and copies included."""
    slot = sum(schema.layout(group).slot_bytes for group in schema.groups)
    return slot * records * schema_copies(schema, copies(retain))


def scratch_bytes(schema: RecordSchema, records: int) -> int:
    """Bytes of the spill file for the gradients of ``records`` records."""
    return schema.layout(Group.GRADIENTS).slot_bytes * records


class StripedExtent:
    """The extents of one group of one schema, one on each of ``drives``, in order. Allocates slots and reserves space;
    ``discard`` decides whether free slots may become holes.
    """

    def __init__(self, drives: Drives, extents: Sequence[Extent], discard: Discard) -> None:
        self.extents = list(extents)
        self.layout: GroupLayout = self.extents[0].layout
        self._drives = drives
        self._discard = discard
        self._turns = WeightedRoundRobin(len(self.extents))
        self._wanted = 0

    @property
    def slots(self) -> int:
        return sum(extent.slots for extent in self.extents)

    def reserve(self, slots: int) -> None:
        """Makes the extents at least ``slots`` slots long together, each by its share if possible. Raises OSError
        (ENOSPC) if all drives together lack the space; earlier reservations stay.
        """
        if len(self.extents) == 1:
            self._grow(0, max(slots, self.extents[0].reserved_slots))
        else:
            for extent in self.extents:
                extent.reserve(extent.reserved_slots)  # existing files may have holes
            missing = slots - sum(extent.reserved_slots for extent in self.extents)
            if missing > 0:
                self._share_out(slots, missing)
        self._wanted = max(self._wanted, slots)
        self.rebalance()

    def discard(self, needed: int) -> None:
        """Queues hole punches if more than ``needed`` slots have blocks."""
        self._wanted = min(self._wanted, needed)
        if len(self.extents) == 1:
            self.extents[0].discard(needed, self._discard)
            return
        keep = self._targets(needed)
        # Other drives make up for a full one: together they keep all needed slots.
        reserved = [extent.reserved_slots for extent in self.extents]
        lacking = sum(max(wish - had, 0) for wish, had in zip(keep, reserved, strict=True))
        for number in self._by_share():
            more = min(max(reserved[number] - keep[number], 0), lacking)
            keep[number] += more
            lacking -= more
        for extent, slots in zip(self.extents, keep, strict=True):
            extent.discard(slots, self._discard)

    def _targets(self, slots: int) -> list[int]:
        """Each drive's target of ``slots``: its slots in use, and its share of all free ones, so that the next writes
        follow the shares, wherever the last commits are stored.
        """
        used = [extent.reserved_slots - extent.free_slots for extent in self.extents]
        free = apportion(max(slots - sum(used), 0), self._drives.shares)
        return [taken + own for taken, own in zip(used, free, strict=True)]

    def _share_out(self, slots: int, missing: int) -> None:
        targets = self._targets(slots)
        short = [
            max(target - extent.reserved_slots, 0)
            for target, extent in zip(targets, self.extents, strict=True)
        ]
        left = sum(self._grow_partly(number, more) for number, more in enumerate(apportion(missing, short)))
        for number in self._by_share():
            left = self._grow_partly(number, left) if left else 0
        if left:
            self._raise_full(left)

    def rebalance(self) -> None:
        """Reserves space by the current shares, as far as the drives have it."""
        if len(self.extents) > 1:
            for number, target in enumerate(self._targets(self._wanted)):
                with contextlib.suppress(_FullError):
                    self._grow(number, target)

    def _by_share(self) -> list[int]:
        return sorted(range(len(self.extents)), key=lambda number: (-self._drives.shares[number], number))

    def _grow(self, number: int, slots: int) -> None:
        """Grows an extent. Raises OSError (ENOSPC) if the drive is full, or its limit is reached."""
        drive, extent = self._drives[number], self.extents[number]
        more = (slots - extent.reserved_slots) * self.layout.slot_bytes
        if more > 0 and drive.limit and drive.reserved_bytes + more > drive.limit:
            left = max(drive.limit - drive.reserved_bytes, 0)
            message = f"No space left within stripe.limits: {more} more bytes are needed and {left} are left"
            raise _FullError(errno.ENOSPC, message, str(extent.path))
        try:
            extent.reserve(slots)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise _FullError(*error.args[:2], error.filename) from error
            raise

    def _grow_partly(self, number: int, slots: int) -> int:
        """Adds ``slots`` slots, or as many as fit; returns the number that did not fit."""
        missing, more = slots, slots
        while more:
            try:
                self._grow(number, self.extents[number].reserved_slots + more)
            except _FullError:
                # A file system's own needs, and quotas, leave less than it reports.
                fits = self._fitting(number)
                more = fits if fits < more else more // 2
            else:
                missing -= more
                more = min(more, missing)
        return missing

    def _fitting(self, number: int) -> int:
        """The most slots that fit on the drive, as its file system reports."""
        drive, slot_bytes = self._drives[number], self.layout.slot_bytes
        free = _free_bytes(drive)
        if drive.limit:
            free = min(free, max(drive.limit - drive.reserved_bytes, 0))
        return free // slot_bytes

    def _raise_full(self, slots: int) -> None:
        free = ", ".join(f"{_free_bytes(drive)} in {drive.path}" for drive in self._drives)
        message = (
            f"No space left on device: {slots * self.layout.slot_bytes} more bytes are needed on any drive; free: "
            f"{free}"
        )
        raise _FullError(errno.ENOSPC, message, str(self.extents[0].path))

    def allocate(self) -> Slot:
        """A free slot of the next drive in turn that has one; if none has, a drive grows. Raises OSError (ENOSPC) if
        every drive is full.
        """
        if len(self.extents) == 1:
            self._provide(0)
            return self.extents[0].allocate()
        numbers = range(len(self.extents))
        free = [number for number in numbers if self.extents[number].free_slots]
        full: _FullError | None = None
        for among in (free, [number for number in numbers if number not in free]):
            while among:
                number = self._turns.next(self._drives.shares, among)
                try:
                    self._provide(number)
                    return self.extents[number].allocate()
                except _FullError as error:
                    full = full or error
                    among.remove(number)
        raise full or AssertionError("an extent on no drive")

    def _provide(self, number: int) -> None:
        """Ensures a free slot, and blocks for all slots. Raises _FullError."""
        extent = self.extents[number]
        if extent.free_slots:
            self._grow(number, extent.reserved_slots)
            return
        try:
            self._grow(number, extent.reserved_slots + max(1, extent.slots // 8))
        except _FullError:
            self._grow(number, extent.reserved_slots + 1)


class _FullError(OSError):
    """ENOSPC on one drive, for which another may compensate."""


def _free_bytes(drive: Drive) -> int:
    space = os.statvfs(drive.path)
    return space.f_bavail * space.f_frsize


class StoreExtents:
    """The extents of the schemas of a store, by schema number and group. ``link`` limits the speed of all drives together.
    ``added``: names of schemas that no commit knows yet. ``StoreAccess.READ`` creates, removes and writes no file or
    directory.
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
        self._engine = engine
        self._drives = drives
        self._direct = direct
        #: By schema, the largest number of records for which space was reserved.
        self.promised: Counter[str] = Counter()
        self._access = FileAccess.READ
        if access is StoreAccess.WRITE:
            self._access = FileAccess.READ_WRITE
            _prepare(drives)
        discard = discard if access is StoreAccess.WRITE else Capability.OFF
        self.discarding = Discard(discard, [drive.path / "scratch" for drive in drives])
        self._extents: dict[tuple[int, int], StripedExtent] = {}
        try:
            for number, schema in enumerate(self.schemas):
                create = FileCreate.YES if schema.name in added else FileCreate.NO
                for group in schema.groups:
                    name, layout = f"{schema.name}.{group.label}", schema.layout(group)
                    self._extents[number, group] = self._open(name, layout, create)
        except BaseException:
            self.close()
            raise

    def of(self, schema: int, group: int) -> StripedExtent:
        """The extent of ``group`` of schema number ``schema``; that of gradients is created at its first use. Raises
        StoreError for the moments or gradients of frozen records.
        """
        if (schema, group) not in self._extents:
            shape, group = self.schemas[schema], Group(group)
            if shape.frozen:
                raise StoreError(f"records of schema {shape.name!r} are frozen: they have no {group.label}")
            name = f"{shape.name}.{group.label}"
            self._extents[schema, group] = self._open(name, shape.layout(group), FileCreate.YES)
        return self._extents[schema, group]

    @property
    def files(self) -> list[Extent]:
        """Every extent, scratch included."""
        return [extent for drive in self._drives for extent in drive.extents]

    @property
    def _committed(self) -> list[Extent]:
        return [extent for extent in self.files if extent.layout.group is not Group.GRADIENTS]

    def _open(self, name: str, layout: GroupLayout, create: FileCreate) -> StripedExtent:
        files = [self._open_file(drive, name, layout, create) for drive in self._drives]
        return StripedExtent(self._drives, files, self.discarding)

    def _open_file(self, drive: Drive, name: str, layout: GroupLayout, create: FileCreate) -> Extent:
        scratch = layout.group is Group.GRADIENTS
        path = drive.path / ("scratch" if scratch else "extents") / name
        if scratch:  # cleaners of temporary directories remove empty ones
            path.parent.mkdir(exist_ok=True)
        if create is FileCreate.YES:  # may be left by a process that was killed before its commit
            path.unlink(missing_ok=True)
        try:
            extent = Extent(
                self._engine,
                path,
                layout,
                directory=drive.number,
                direct=self._direct,
                create=create if create is FileCreate.YES else drive.create,
                access=self._access,
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
            # No resume needs gradients: without a name their space is freed however the process ends.
            path.unlink()
        elif drive.lease is not None:
            drive.lease.watch(f"extents/{name}", extent.file.fileno())
        return extent

    # Space --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """After opening: every slot that no durable table refers to is free."""
        for extent in self._committed:
            extent.recover()

    def reserve(self, copies: int, counts: Mapping[str, int]) -> None:
        """Reserves space for ``copies`` of ``counts[schema name]`` records (one of frozen ones), or of the largest
        earlier count. Raises OSError (ENOSPC) before anything moves; a refused count is forgotten.
        """
        promised = self.promised | Counter(counts)
        for extent, slots in self._needed(copies, promised):
            extent.reserve(slots)
        self.promised = promised

    def discard(self, copies: int, counts: Mapping[str, int]) -> None:
        """Frees, in the background, the blocks of free slots beyond ``copies`` of every record. Reserved slots, which
        commits use in turn, keep theirs.
        """
        for extent, slots in self._needed(copies, self.promised | Counter(counts)):
            extent.discard(slots)

    def _needed(self, copies: int, counts: Counter[str]) -> Iterator[tuple[StripedExtent, int]]:
        for number, schema in enumerate(self.schemas):
            for group in schema.groups:
                yield self.of(number, group), counts[schema.name] * schema_copies(schema, copies)

    def open_scratch(self, name: str, nbytes: int, slots: int) -> StripedExtent:
        """Reserves space for ``slots`` pieces of ``nbytes`` outside of commits, in files without a name: their space is
        freed however the process ends. Raises OSError (ENOSPC) with nothing left.
        """
        layout = GroupLayout(Group.GRADIENTS, (Section(name, "|u1", nbytes),), 0)
        extent = self._open(name, layout, FileCreate.YES)
        try:
            extent.reserve(slots)
        except BaseException:
            self.close_scratch(extent)
            raise
        return extent

    def close_scratch(self, extent: StripedExtent) -> None:
        """Frees the space of ``open_scratch``. Queued transfers keep the files until they have ended."""
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
        """Takes the numbers of the directories whose extents are new or have grown since the last commit."""
        grown = [extent for extent in self._committed if extent.unsynced_directory]
        for extent in grown:
            extent.unsynced_directory = False
        return list(dict.fromkeys(extent.directory for extent in grown))

    def committed(self) -> None:
        """Called after a commit: earlier transfers have finished, and the drives' shares may have changed."""
        for extent in self.files:
            extent.forget_finished()
        for striped in self._extents.values():
            striped.rebalance()

    # Reports ------------------------------------------------------------------------------------------------

    def drive_reports(self) -> list[DriveReport]:
        """The bytes on each drive, and its bandwidth."""
        used = Counter[int]()
        for extent in self._committed:
            used[extent.directory] += (extent.reserved_slots - extent.free_slots) * extent.slot_bytes
        return self._drives.reports([used[drive.number] for drive in self._drives])

    @property
    def direct_reason(self) -> str:
        """Why extents do not bypass the page cache; empty if they do."""
        return next((extent.file.direct_reason for extent in self.files if not extent.file.direct), "")

    @property
    def map_sync_reason(self) -> str:
        """Why mapped extents need a sync; empty if their stores are durable by themselves."""
        return next(filter(None, (extent.file.map_sync_reason() for extent in self.files)), "")

    def close(self) -> None:
        for extent in self.files:
            extent.close()


def _prepare(drives: Drives) -> None:
    """Makes the directories of extents to be written, and removes the leftovers of a killed process in them."""
    for drive in drives:
        if drive.create is FileCreate.YES:
            (drive.path / "extents").mkdir()
        scratch = drive.path / "scratch"
        scratch.mkdir(exist_ok=True)
        for stale in scratch.iterdir():
            stale.unlink()
