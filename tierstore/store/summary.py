"""What a store is, read from its index alone and without keeping others from reading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierstore.store.format import RecordSchema
from tierstore.store.opening import missed_records, read_meta, reading


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
