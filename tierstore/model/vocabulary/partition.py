"""Which of the tables over the vocabulary are divided over ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.parallel.layout import TableRows

#: Where the built-in model has its tables: the name of a dense unit, and the parameter's number in it.
EMBEDDING_PLACE = ("embedding", 0)
HEAD_PLACE = ("head", 1)


@dataclass(frozen=True, slots=True)
class VocabularyPartition:
    """The tables of which each rank has some rows; None where the whole table is gathered. A tied head is the embedding:
    both are the same rows then.
    """

    embedding: TableRows | None = None
    head: TableRows | None = None

    def tables(self, *, tied: bool) -> dict[tuple[str, int], TableRows]:
        """The divided parameters of the built-in model, by their places."""
        found = {EMBEDDING_PLACE: self.embedding, HEAD_PLACE: None if tied else self.head}
        return {place: table for place, table in found.items() if table is not None}
