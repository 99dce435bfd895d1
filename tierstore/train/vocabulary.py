"""Chooses whether vocabulary tables are gathered, or their rows stay divided over the data ranks. Imports no torch.

The choice depends only on the configuration when a store is created; its conditions keep it for resumed runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierstore.decision import Decision
from tierstore.dense.config import OptimizerState
from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig, TieEmbeddings
from tierstore.model.spec import BuiltInSpec, ModelSpec
from tierstore.model.vocabulary import VocabularyCost, VocabularyPartition
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import TableRows
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes

#: Placements of embedding and head, never AUTO.
Placements = tuple[RowPlacement, RowPlacement]

#: AUTO gathers smaller tables: the cost of their messages is their number, not their bytes.
SMALL_TABLE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class VocabularyTables:
    """Both tables. ``table``: the division of their rows, if divided; ``cost``: the bytes sent either way; None for a
    single data rank, or if nothing can be divided. A tied head is the embedding.
    """

    embedding: Decision[RowPlacement]
    head: Decision[RowPlacement]
    tied: bool
    table: TableRows | None = None
    cost: VocabularyCost | None = None

    @property
    def partition(self) -> VocabularyPartition:
        """The divided tables."""
        divided = (one.value is RowPlacement.PARTITIONED for one in (self.embedding, self.head))
        return VocabularyPartition(*(self.table if one else None for one in divided))

    @property
    def tables(self) -> dict[tuple[str, int], TableRows]:
        """The divided parameters by position."""
        return self.partition.tables(tied=self.tied)

    def conditions(self) -> dict[str, object]:
        """The choice in the form of a store's conditions."""
        return {"embedding": self.embedding.value.value, "head": self.head.value.value}

    def as_json(self) -> dict[str, object]:
        """The choice, with the bytes a rank sends in a step and needs beside its slices, either way."""
        chosen = {
            "embedding": self.embedding.value.value,
            "embedding_reason": self.embedding.reason,
            "head": self.head.value.value,
            "head_reason": self.head.reason,
        }
        if self.cost is None:
            return {**chosen, "sent": None, "memory": None}
        cost = self.cost
        return {
            **chosen,
            "sent": {
                "gathered_table_bytes": cost.gathered_sent,
                "partitioned_embedding_bytes": cost.embedding_sent,
                "partitioned_head_bytes": cost.head_sent,
            },
            "memory": {
                "gathered_table_bytes": cost.gathered_memory,
                "partitioned_table_bytes": cost.divided_memory,
            },
        }

    def describe(self) -> str | None:
        """The line at the head of a run; None if there is no choice."""
        if self.cost is None:
            return None
        return "; ".join(
            one.describe() for one in ((self.embedding,) if self.tied else (self.embedding, self.head))
        )


def choose_vocabulary(
    config: TrainConfig,
    *,
    ranks: int,
    device: DeviceKind = DeviceKind.CPU,
    recorded: Mapping[str, object] | None = None,
) -> VocabularyTables:
    """The choice for a run of ``config`` on ``ranks`` data ranks: the configured one, the one ``recorded`` by its store,
    or AUTO's; for a pipeline stage, the whole model's choice, for the tables that the stage has. Depends only on its
    arguments. Raises ConfigError.
    """
    model, parallel = config.model, config.parallel
    if isinstance(model, ModelSpec) and model.whole is not None:
        whole = replace(config, model=model.whole)
        return _of_stage(choose_vocabulary(whole, ranks=ranks, device=device, recorded=recorded), model)
    tied = isinstance(config.spec, BuiltInSpec) and config.spec.config.tie_embeddings is TieEmbeddings.TIED
    if tied and parallel.head not in (RowPlacement.AUTO, parallel.embedding):
        raise ConfigError(
            f"parallel.head: expected auto or {parallel.embedding.value}: the head is the embedding, got "
            f"{parallel.head.value}"
        )
    if ranks == 1:
        alone = Decision("embedding", RowPlacement.GATHERED, "one data rank")
        return VocabularyTables(embedding=alone, head=replace(alone, name="head"), tied=tied)
    in_general, of_head = _obstacles(config, device)
    of_embedding = in_general or (of_head if tied else None)
    table = TableRows(model.vocab_size, model.d_model, ranks)
    cost = VocabularyCost(
        table=table,
        tokens=-(-config.tokens_per_micro_batch // ranks),
        micro_batches=config.data.micro_batches,
        value_bytes=model.compute_dtype.itemsize,
    )

    def placement(
        name: str, asked: RowPlacement, obstacle: str | None, divided_sent: int
    ) -> tuple[RowPlacement, str]:
        if obstacle is None:
            return _placement(asked, _kept(recorded, name), cost, divided_sent)
        if asked is RowPlacement.PARTITIONED:
            raise ConfigError(f"parallel.{name}: expected gathered or auto: {obstacle}")
        return RowPlacement.GATHERED, obstacle

    sent = cost.embedding_sent + (cost.head_sent if tied else 0)
    of_rows = placement("embedding", parallel.embedding, of_embedding, sent)
    embedding = Decision("embedding (and tied head)" if tied else "embedding", *of_rows)
    head = (
        embedding
        if tied
        else Decision("head", *placement("head", parallel.head, in_general or of_head, cost.head_sent))
    )
    possible = in_general is None
    return VocabularyTables(
        embedding=embedding,
        head=head,
        tied=tied,
        table=table if possible else None,
        cost=cost if possible else None,
    )


def _of_stage(choice: VocabularyTables, stage: ModelSpec) -> VocabularyTables:
    """The part of ``choice`` for ``stage``: the first stage has the embedding, the last one the head."""

    def own(table: Decision[RowPlacement], *, here: bool) -> Decision[RowPlacement]:
        return table if here else replace(table, value=RowPlacement.GATHERED, reason="of another stage")

    return replace(
        choice, embedding=own(choice.embedding, here=stage.begins), head=own(choice.head, here=stage.ends)
    )


def recorded_placements(parallel: Mapping[str, object]) -> Placements:
    """The placements of embedding and head in a store's recorded layout. Raises ValueError."""
    embedding, head = (_kept(parallel, name) or RowPlacement.GATHERED for name in ("embedding", "head"))
    return embedding, head


def places_of(model: ModelConfig, placements: Placements) -> list[tuple[str, int]]:
    """The positions in ``model`` of the parameters whose rows are divided over data ranks."""
    table = TableRows(model.vocab_size, model.d_model, 1)
    divided = [table if each is RowPlacement.PARTITIONED else None for each in placements]
    return list(VocabularyPartition(*divided).tables(tied=model.tie_embeddings is TieEmbeddings.TIED))


def _kept(recorded: Mapping[str, object] | None, name: str) -> RowPlacement | None:
    """The recorded placement; a store without one has whole tables."""
    return None if recorded is None else RowPlacement(str(recorded.get(name, RowPlacement.GATHERED.value)))


def _placement(
    asked: RowPlacement, kept: RowPlacement | None, cost: VocabularyCost, divided_sent: int
) -> tuple[RowPlacement, str]:
    """The placement of a table, and why."""
    if asked is not RowPlacement.AUTO:
        return asked, "as configured"
    if kept is not None:
        return kept, "as the store was made"
    gathered = cost.gathered_sent
    nbytes = 4 * cost.table.rows * cost.table.width
    if nbytes < SMALL_TABLE_BYTES:
        return RowPlacement.GATHERED, f"auto: a table of {format_bytes(nbytes)} is too small to matter"
    sent = f"auto: a step sends {format_bytes(divided_sent)} a rank, and {format_bytes(gathered)} gathered"
    return RowPlacement.PARTITIONED if divided_sent < gathered else RowPlacement.GATHERED, sent


def _obstacles(config: TrainConfig, device: DeviceKind) -> tuple[str | None, str | None]:
    """Why no table can be divided, and why no head can; None if it can."""
    of_head = (
        "the rows of tasks differ from rank to rank, and each task has its own loss" if config.tasks else None
    )
    if not isinstance(config.spec, BuiltInSpec):
        return (
            "an imported model's tables were cut with its other dense parameters, and its code calls them",
            of_head,
        )
    where = config.dense.optimizer_state
    if device is not DeviceKind.CPU and where is not OptimizerState.DEVICE:
        return (
            f"rows are looked up where they are stepped, but dense.optimizer_state is {where.value}",
            of_head,
        )
    return None, of_head
