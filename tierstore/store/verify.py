"""Reads every record of the last commit and of every snapshot, and checks each section against its checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import _native
from tierstore._native import CrcTable
from tierstore.errors import StoreFormatError
from tierstore.store import opening
from tierstore.store.config import StoreConfig
from tierstore.store.format import COMMITTED_GROUPS, Group, RecordSchema
from tierstore.store.parameter_store import ParameterStore

__all__ = ["VerifyReport", "verify_store"]


@dataclass
class VerifyReport:
    """What verification found. ``failures`` names key, section and file of each, with the commit it belongs to."""

    records: int = 0
    sections: int = 0
    snapshots: int = 0
    bytes_read: int = 0
    failures: list[str] = field(default_factory=list)


Location = tuple[int, Group, int, int]


def verify_store(directory: Path, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Verifies the store in ``directory``; ``progress`` is told groups done and groups in all.

    A group shared by several commits is read once. Raises StoreMissingError, StoreInUseError, StoreFormatError.
    """
    schemas = opening.read_schemas(directory)
    budget = opening.minimum_host_budget(schemas)
    with ParameterStore.open(directory, StoreConfig(host_budget=budget)) as store:
        tables = store.committed_tables()
        report = VerifyReport(snapshots=len(tables) - 1, records=len(tables[0][1]))
        work: dict[Location, tuple[str, str, tuple[int, ...]]] = {}
        for commit, table in tables:
            for key, entry in table.items():
                for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
                    where = (entry.schema, group, location.slot, location.generation)
                    work.setdefault(where, (commit, key, location.crcs))
        for done, (where, (commit, key, crcs)) in enumerate(work.items()):
            _check(store, schemas, where, f"{commit}: record {key!r}", crcs, report)
            if progress is not None:
                progress(done + 1, len(work))
    return report


def _check(
    store: ParameterStore,
    schemas: list[RecordSchema],
    where: Location,
    what: str,
    crcs: tuple[int, ...],
    report: VerifyReport,
) -> None:
    """Reads one slot section by section of its checksum table, so that every bad section is named, not the first."""
    schema, group, slot, _ = where
    if schema >= len(schemas):
        raise StoreFormatError(f"{what}: unknown schema number {schema}")
    layout = schemas[schema].layout(group)
    path = store.slots.extent_path(schema, group)
    with opening.scratch_buffers(layout) as sections:
        table = CrcTable(len(sections))
        table.array()[:] = crcs
        try:
            store.engine.wait(store.slots.read_location(schema, group, slot, sections, table))
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
