"""What a store is, read from its index alone and without keeping others from reading it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import StoreFormatError
from tierstore.store.adamw import AdamWConfig, StepHistory
from tierstore.store.committing import HISTORY_KEY
from tierstore.store.config import StoreAccess
from tierstore.store.disk.home import Home, read_identity
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.format import Placement, RecordSchema
from tierstore.store.index.database import Index
from tierstore.store.opening import read_meta


@dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """The last commit of a store: the ``schemas`` of its records, its named ``state``, how many ``records`` each schema
    has, by its name, and how many of them have ``missed`` optimizer steps, which reading them replays.
    """

    schemas: tuple[RecordSchema, ...]
    state: Mapping[str, bytes]
    records: Mapping[str, int]
    missed: Mapping[str, int]

    def schema(self, name: str) -> RecordSchema | None:
        """The schema called ``name``; None where there is none."""
        return next((schema for schema in self.schemas if schema.name == name), None)


def read_summary(directory: Path) -> StoreSummary:
    """The summary of the store in ``directory``. Other processes may read it at the same time.

    Raises StoreMissingError, StoreInUseError (one writes it), StoreFormatError.
    """
    home = Home(directory, read_identity(directory), published=True)
    access = StoreAccess.READ
    with (
        DirectoryLease(directory, access=access),
        contextlib.closing(Index(directory / "index", access=access)) as index,
    ):
        schemas, inactive, _ = read_meta(home, index)
        commit = index.read_commit()
    history = StepHistory(AdamWConfig(inactive=inactive))
    if HISTORY_KEY not in commit.state:
        raise StoreFormatError(f"{directory}: the history of optimizer steps is missing")
    history.unpack(commit.state[HISTORY_KEY])
    rows = commit.records.rows
    behind = rows["step"] < (history.applied if history.replays else 0)
    counts, missed = (Counter(part["schema"].tolist()) for part in (rows, rows[behind]))
    stepped = [schema.placement is Placement.CACHED and not schema.frozen for schema in schemas]
    return StoreSummary(
        schemas=tuple(schemas),
        state=commit.state,
        records={schema.name: counts[number] for number, schema in enumerate(schemas)},
        missed={schema.name: missed[number] for number, schema in enumerate(schemas) if stepped[number]},
    )
