"""Reads every record of the last commit and the snapshots, and checks each section against its checksum."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore import _native
from tierstore._native import Buffer, CrcTable, Engine, Priority
from tierstore.stats import OnProgress
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.extents import Slot, scratch_buffers
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.format import GroupLayout
from tierstore.store.index.table import CommittedRecords


@dataclass
class VerifyReport:
    """The result of a verification. ``failures`` names key, section, file and commit of each mismatch."""

    records: int = 0
    sections: int = 0
    snapshots: int = 0
    bytes_read: int = 0
    failures: list[str] = field(default_factory=list)
    drives: list[DriveReport] = field(default_factory=list)


#: Reads in flight at once.
_IN_FLIGHT = 64
_IN_FLIGHT_BYTES = 64 << 20


def verify_tables(
    extents: StoreExtents,
    engine: Engine,
    tables: Sequence[tuple[str, CommittedRecords]],
    progress: OnProgress | None = None,
) -> VerifyReport:
    """Checks every slot of ``tables`` (name, table; the last commit's first); shared slots are read once."""
    report = VerifyReport(snapshots=len(tables) - 1, records=len(tables[0][1]))
    work: dict[tuple[Slot, int], tuple[str, tuple[int, ...]]] = {}
    for commit, table in tables:
        for key, entry in table.items():
            what = f"{commit}: record {key!r}"
            for group, location in zip(extents.schemas[entry.schema].groups, entry.groups, strict=True):
                slot = Slot(extents.of(entry.schema, group).extents[location.directory], location.slot)
                work.setdefault((slot, location.generation), (what, location.crcs))
    reads = _Reads(engine, report)
    for done, ((slot, _), (what, crcs)) in enumerate(work.items()):
        reads.queue(slot, what, crcs)
        if progress is not None:
            progress(done + 1, len(work))
    reads.finish()
    report.drives = extents.drive_reports()
    return report


@dataclass(frozen=True, slots=True)
class _Read:
    """A slot being read into separate memory, and its ``table`` of checksums."""

    ticket: int
    slot: Slot
    what: str
    crcs: tuple[int, ...]
    sections: list[Buffer]
    table: CrcTable


class _Reads:
    """Reads of slots, limited in flight by ``_IN_FLIGHT_BYTES`` and ``_IN_FLIGHT``, checked in order."""

    def __init__(self, engine: Engine, report: VerifyReport) -> None:
        self._engine = engine
        self._report = report
        self._queued: deque[_Read] = deque()
        self._queued_bytes = 0
        self._spare: dict[GroupLayout, list[tuple[list[Buffer], CrcTable]]] = defaultdict(list)

    def queue(self, slot: Slot, what: str, crcs: tuple[int, ...]) -> None:
        """Queues a check of ``slot`` against ``crcs``, done when ``finish`` returns."""
        layout = slot.extent.layout
        while self._queued and (
            len(self._queued) >= _IN_FLIGHT or self._queued_bytes + layout.slot_bytes > _IN_FLIGHT_BYTES
        ):
            self._check(self._queued.popleft())
        spare = self._spare[layout]
        if spare:
            sections, table = spare.pop()
        else:
            sections = scratch_buffers(layout)
            table = CrcTable(layout.first_section + len(sections))
        table.array()[layout.first_section :] = crcs
        try:
            ticket = slot.extent.read(slot.number, sections, table, (), Priority.DEMAND)
        except OSError as error:
            self._report.failures.append(f"{what}, {slot.extent.path}, slot {slot.number}: {error}")
            return
        self._queued.append(_Read(ticket, slot, what, crcs, sections, table))
        self._queued_bytes += layout.slot_bytes

    def finish(self) -> None:
        while self._queued:
            self._check(self._queued.popleft())

    def _check(self, read: _Read) -> None:
        """Waits for one slot; on a mismatch, names every bad section."""
        extent, layout, report = read.slot.extent, read.slot.extent.layout, self._report
        self._queued_bytes -= layout.slot_bytes
        self._spare[layout].append((read.sections, read.table))
        try:
            self._engine.wait(read.ticket)
        except OSError as error:
            report.failures.append(f"{read.what}, {extent.path}, slot {read.slot.number}: {error}")
            return
        except _native.ChecksumMismatch:
            for section, buffer, expected in zip(layout.sections, read.sections, read.crcs, strict=True):
                found = _native.crc32c(buffer.array(), 0)
                if found != expected:
                    report.failures.append(
                        f"{read.what}, section {section.name}, {extent.path}, slot {read.slot.number}: "
                        f"checksum {found:08x}, expected {expected:08x}"
                    )
        report.sections += len(layout.sections)
        report.bytes_read += layout.slot_bytes
