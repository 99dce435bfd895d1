"""Reads every record of the last commit and the snapshots, and checks each section against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore import _native
from tierstore._native import CrcTable, Engine
from tierstore.store.disk.drives import DriveReport
from tierstore.store.format import COMMITTED_GROUPS, Group, RecordEntry, divided
from tierstore.store.index.live import SlotMap
from tierstore.store.opening import scratch_buffers

__all__ = ["VerifyReport", "verify_tables"]


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


Location = tuple[int, Group, int, int]
Progress = Callable[[int, int], None]


def verify_tables(
    slots: SlotMap,
    engine: Engine,
    tables: Sequence[tuple[str, Mapping[str, RecordEntry]]],
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks every slot that ``tables`` (name, table; the last commit's first) refer to; shared ones are read
    once.
    """
    report = VerifyReport(snapshots=len(tables) - 1, records=len(tables[0][1]))
    work: dict[Location, tuple[str, tuple[int, ...]]] = {}
    for commit, table in tables:
        for key, entry in table.items():
            for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                where = (entry.schema, group, location.place, location.generation)
                work.setdefault(where, (f"{commit}: record {key!r}", location.crcs))
    for done, (where, (what, crcs)) in enumerate(work.items()):
        _check(slots, engine, where, what, crcs, report)
        if progress is not None:
            progress(done + 1, len(work))
    report.drives = slots.drive_reports()
    return report


def _check(
    slots: SlotMap, engine: Engine, where: Location, what: str, crcs: tuple[int, ...], report: VerifyReport
) -> None:
    """Reads one slot; on a mismatch every bad section is named, not the first."""
    schema, group, place, _ = where
    layout = slots.schemas[schema].layout(group)
    path, slot = slots.extent_path(schema, group, place), divided(place)[1]
    with scratch_buffers(layout) as sections:
        table = CrcTable(len(sections))
        table.array()[:] = crcs
        try:
            engine.wait(slots.read_location(schema, group, place, sections, table))
        except OSError as error:
            report.failures.append(f"{what}, {path}, slot {slot}: {error}")
            return
        except _native.ChecksumMismatch:
            for section, buffer, expected in zip(layout.sections, sections, crcs, strict=True):
                found = _native.crc32c(buffer.array(), 0)
                if found != expected:
                    report.failures.append(
                        f"{what}, section {section.name}, {path}, slot {slot}: "
                        f"checksum {found:08x}, expected {expected:08x}"
                    )
    report.sections += len(layout.sections)
    report.bytes_read += layout.slot_bytes
