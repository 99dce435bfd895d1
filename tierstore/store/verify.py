"""Reads every record of the last commit and the snapshots, and checks each section against its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore import _native
from tierstore._native import CrcTable, Engine, Priority
from tierstore.machine import MemoryAccount
from tierstore.stats import OnProgress, no_progress
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.extents import Scratch, Slot, read_ahead
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.index.table import CommittedRecords


@dataclass
class VerifyReport:
    """The result of a verification. ``failures`` names key, section, file and commit of each mismatch. ``account``: the
    memory that ``verify_all`` announced; empty in other reports.
    """

    records: int = 0
    sections: int = 0
    snapshots: int = 0
    bytes_read: int = 0
    failures: list[str] = field(default_factory=list)
    drives: list[DriveReport] = field(default_factory=list)
    account: MemoryAccount = field(default_factory=lambda: MemoryAccount({}))


def verify_tables(
    extents: StoreExtents,
    engine: Engine,
    tables: Sequence[tuple[str, CommittedRecords]],
    progress: OnProgress = no_progress,
) -> VerifyReport:
    """Checks every slot of ``tables`` (name, table; the last commit's first); shared slots are read once. ``progress`` is
    called with the bytes checked and in all.
    """
    report = VerifyReport(snapshots=len(tables) - 1, records=len(tables[0][1]))
    work: dict[tuple[Slot, int], tuple[str, tuple[int, ...]]] = {}
    for commit, table in tables:
        for key, entry in table.items():
            what = f"{commit}: record {key!r}"
            for group, location in zip(extents.schemas[entry.schema].groups, entry.groups, strict=True):
                slot = Slot(extents.of(entry.schema, group).extents[location.directory], location.slot)
                work.setdefault((slot, location.generation), (what, location.crcs))
    done, total = 0, sum(slot.extent.slot_bytes for slot, _ in work)
    progress(0, total)
    for read in read_ahead(work.items(), lambda item: item[0][0].extent.slot_bytes, _Read):
        _check(read, engine, report)
        done += read.slot.extent.slot_bytes
        progress(done, total)
    report.drives = extents.drive_reports()
    return report


class _Read:
    """A slot that is read into scratch memory."""

    def __init__(self, item: tuple[tuple[Slot, int], tuple[str, tuple[int, ...]]], scratch: Scratch) -> None:
        (self.slot, _), (self.what, self.crcs) = item
        layout = self.slot.extent.layout
        self.sections = scratch(layout)
        table = CrcTable(layout.first_section + len(self.sections))
        table.array()[layout.first_section :] = self.crcs
        self.ticket: int | OSError
        try:
            self.ticket = self.slot.extent.read(self.slot.number, self.sections, table, (), Priority.DEMAND)
        except OSError as error:
            self.ticket = error


def _check(read: _Read, engine: Engine, report: VerifyReport) -> None:
    """Waits for one slot; on a mismatch, names every bad section."""
    extent, layout = read.slot.extent, read.slot.extent.layout
    try:
        if isinstance(read.ticket, OSError):
            raise read.ticket
        engine.wait(read.ticket)
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
