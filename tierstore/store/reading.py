"""Reading the index of a closed store: schemas, states, directories, a summary. Nothing is written.

Every function raises StoreMissingError, StoreInUseError (a process has the store open to write), StoreFormatError or
OSError. Other processes may read the store at the same time.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tierstore.errors import StoreFormatError
from tierstore.store.adamw import HISTORY_KEY, AdamWConfig, Inactive, StepHistory
from tierstore.store.config import StoreAccess
from tierstore.store.disk.drives import BandwidthEstimator, DriveReport
from tierstore.store.disk.home import Home, rank_directories, read_identity
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.format import (
    FORMAT_VERSION,
    NARROW_MOMENTS_VERSION,
    QUANTIZED_WEIGHTS_VERSION,
    Group,
    RecordSchema,
)
from tierstore.store.index.database import PREVIOUS, Commit, Index
from tierstore.store.index.table import locations
from tierstore.store.optimizer import replays


class OpenAt(Enum):
    """The commit to open."""

    LAST = "last"
    PREVIOUS = "previous"


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[tuple[Home, Index]]:
    """The index of the store in ``directory``, under a shared lease."""
    home, access = Home(directory, read_identity(directory), published=True), StoreAccess.READ
    with (
        DirectoryLease(directory, access=access),
        contextlib.closing(Index(directory / "index", access=access)) as index,
    ):
        yield home, index


def read_schemas(directory: Path) -> list[RecordSchema]:
    """The record schemas of the store in ``directory``."""
    with reading(directory) as (home, index):
        return read_meta(home, index)[0]


def read_states(directory: Path, name: str) -> dict[OpenAt, bytes]:
    """State ``name`` at each commit at which the store in ``directory`` can be opened."""
    with reading(directory) as (home, index):
        read_meta(home, index)
        states = {OpenAt.LAST: index.read_state(name)}
        if PREVIOUS in index.snapshots():
            states[OpenAt.PREVIOUS] = index.read_state(name, PREVIOUS)
    return {at: state for at, state in states.items() if state is not None}


def read_drives(store: Path) -> list[DriveReport]:
    """The directories of the store in ``store`` as of its last commit; a missing stripe directory is not an error."""
    with reading(store) as (home, index):
        schemas, _, known = read_meta(home, index)
        used = used_slots(index, schemas)
    paths = [store.absolute(), *(Path(str(entry["path"])) for entry in known[1:])]
    bandwidths = [float(str(entry["bandwidth"])) for entry in known] or [0.0]
    held = [0 for _ in paths]
    for (schema, group, directory), slots in used.items():
        held[directory] += len(slots) * schemas[schema].layout(group).slot_bytes
    return [
        DriveReport(
            path=path,
            share=share,
            used_bytes=nbytes,
            reserved_bytes=sum(file.stat().st_blocks * 512 for file in (path / "extents").glob("*")),
            bandwidth=bandwidth,
        )
        for path, share, nbytes, bandwidth in zip(
            paths, BandwidthEstimator(bandwidths).shares, held, bandwidths, strict=True
        )
    ]


def used_slots(index: Index, schemas: Sequence[RecordSchema]) -> dict[tuple[int, Group, int], set[int]]:
    """By schema number, group and directory: the slots that the last commit or a snapshot refers to."""
    used: dict[tuple[int, Group, int], set[int]] = defaultdict(set)
    for table in (index.read_commit(name).records for name in (None, *index.snapshots())):
        for schema, group, directory, _, slots in locations(table.rows, schemas):
            used[schema, group, directory].update(slots.tolist())
    return used


def read_meta(home: Home, index: Index) -> tuple[list[RecordSchema], Inactive, list[dict[str, object]]]:
    """Schemas, the ``inactive`` setting, and the directories, if there are several."""
    meta = index.read_meta()
    versions = (FORMAT_VERSION, NARROW_MOMENTS_VERSION, QUANTIZED_WEIGHTS_VERSION)
    if meta.get("uuid") != home.uuid or meta.get("format") not in versions:
        raise StoreFormatError(f"{home.directory}: the index belongs to another store or format version")
    try:
        inactive = Inactive(meta.get("inactive"))
    except ValueError as error:
        raise StoreFormatError(f"{home.directory}: {error}") from error
    known = meta.get("stripe", [])
    keys = {"path", "own", "bandwidth"}
    if not isinstance(known, list) or not all(
        isinstance(item, dict) and item.keys() >= keys for item in known
    ):
        raise StoreFormatError(f"{home.directory}: the index has no valid list of the store's directories")
    return index.read_schemas(), inactive, known


def missed_records(schemas: Sequence[RecordSchema], commit: Commit, inactive: Inactive) -> Mapping[int, int]:
    """The number of records with missed steps, by schema number, without zeros. Raises StoreFormatError for a damaged
    history.
    """
    history = StepHistory(AdamWConfig(inactive=inactive))
    history.unpack(commit.state.get(HISTORY_KEY, b""))
    rows = commit.records.rows
    behind = rows["schema"][rows["step"] < (history.applied if history.replays else 0)]
    counts = Counter(behind.tolist())
    return {number: count for number, count in sorted(counts.items()) if replays(schemas[number])}


@dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """The last commit of a store. By schema name: the number of ``records``, and of those with ``missed`` optimizer
    steps, which reads replay.
    """

    schemas: tuple[RecordSchema, ...]
    state: Mapping[str, bytes]
    records: Mapping[str, int]
    missed: Mapping[str, int]

    def schema(self, name: str) -> RecordSchema | None:
        """The schema ``name``, or None."""
        return next((schema for schema in self.schemas if schema.name == name), None)


def read_summary(directory: Path) -> StoreSummary:
    """The summary of the store in ``directory``."""
    with reading(directory) as (home, index):
        schemas, inactive, _ = read_meta(home, index)
        commit = index.read_commit()
    counts = Counter(commit.records.rows["schema"].tolist())
    missed = missed_records(schemas, commit, inactive)
    return StoreSummary(
        schemas=tuple(schemas),
        state=commit.state,
        records={schema.name: counts[number] for number, schema in enumerate(schemas)},
        missed={schemas[number].name: count for number, count in missed.items()},
    )


def drives_of(store: Path) -> list[DriveReport]:
    """The directories of a store, or of the stores of all its ranks, as of their last commits; see ``read_drives``."""
    return [drive for directory in rank_directories(store) or [store] for drive in read_drives(directory)]
