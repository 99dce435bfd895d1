"""Reads every record of the last commit and the snapshots, and checks each section against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore import _native
from tierstore._native import CrcTable, Engine, Priority
from tierstore.store.disk.drives import DriveReport
from tierstore.store.disk.extents import Slot
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.index.entries import RecordEntry
from tierstore.store.index.live import LiveIndex
from tierstore.store.opening import scratch_buffers


@dataclass
class VerifyReport:
    """What verification found. ``failures`` names key, section and file of each, with the commit it belongs
    to.
    """

    records: int = 0
    sections: int = 0
    snapshots: int = 0
    bytes_read: int = 0
    failures: list[str] = field(default_factory=list)
    drives: list[DriveReport] = field(default_factory=list)


Progress = Callable[[int, int], None]


def verify_tables(
    live: LiveIndex,
    extents: StoreExtents,
    engine: Engine,
    tables: Sequence[tuple[str, Mapping[str, RecordEntry]]],
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks every slot that ``tables`` (name, table; the last commit's first) refer to; shared ones are read
    once.
    """
    report = VerifyReport(snapshots=len(tables) - 1, records=len(tables[0][1]))
    work: dict[tuple[Slot, int], tuple[str, tuple[int, ...]]] = {}
    for commit, table in tables:
        for key, entry in table.items():
            for location, slot in live.slots_of(entry):
                what = f"{commit}: record {key!r}"
                work.setdefault((slot, location.generation), (what, location.crcs))
    for done, ((slot, _), (what, crcs)) in enumerate(work.items()):
        _check(engine, slot, what, crcs, report)
        if progress is not None:
            progress(done + 1, len(work))
    report.drives = extents.drive_reports()
    return report


def _check(engine: Engine, slot: Slot, what: str, crcs: tuple[int, ...], report: VerifyReport) -> None:
    """Reads one slot; on a mismatch every bad section is named, not the first."""
    extent, layout = slot.extent, slot.extent.layout
    with scratch_buffers(layout) as sections:
        table = CrcTable(layout.first_section + len(sections))
        table.array()[layout.first_section :] = crcs
        try:
            engine.wait(extent.read(slot.number, sections, table, (), Priority.DEMAND))
        except OSError as error:
            report.failures.append(f"{what}, {extent.path}, slot {slot.number}: {error}")
            return
        except _native.ChecksumMismatch:
            for section, buffer, expected in zip(layout.sections, sections, crcs, strict=True):
                found = _native.crc32c(buffer.array(), 0)
                if found != expected:
                    report.failures.append(
                        f"{what}, section {section.name}, {extent.path}, slot {slot.number}: "
                        f"checksum {found:08x}, expected {expected:08x}"
                    )
    report.sections += len(layout.sections)
    report.bytes_read += layout.slot_bytes
