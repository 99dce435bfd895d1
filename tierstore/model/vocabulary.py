"""The division of vocabulary tables over ranks, and the cost of a gathered and a divided table on a rank: bytes by
formula, and which of the two sends fewer. Imports no torch.

A gathered table (ZeRO-3) is gathered once a step and its gradients are reduced once a micro-batch: V D values each, whatever
the number of tokens. A divided one sends tokens' rows instead (SE-MoE section 4.3): T D values twice, and as a head the
hidden states of all T tokens to all other ranks and back. So division pays for a vocabulary that is large compared with
the tokens of a micro-batch, and does not for that of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.parallel.layout import TableRows

#: The positions of the built-in model's tables: the name of a dense group, and the parameter's index in it.
EMBEDDING_PLACE = ("embedding", 0)
HEAD_PLACE = ("head", 1)


@dataclass(frozen=True, slots=True)
class VocabularyPartition:
    """The tables with rows divided over ranks; None if the whole table is gathered. A tied head is the embedding: both
    have the same rows.
    """

    embedding: TableRows | None = None
    head: TableRows | None = None

    def tables(self, *, tied: bool) -> dict[tuple[str, int], TableRows]:
        """The divided parameters of the built-in model, by position."""
        found = {EMBEDDING_PLACE: self.embedding, HEAD_PLACE: None if tied else self.head}
        return {place: table for place, table in found.items() if table is not None}


#: Ids are sent as int32; masters, gradients of gathered tables and values of the loss in fp32.
_ID = _FP32 = 4
#: A rank's number of tokens, sent before its ids.
_COUNT = 8
#: Largest logit, sum of exponentials, target's logit; and the value sent back to compute gradients.
_FIGURES = 3 + 1
#: One double from each rank, twice: the factor of the loss.
_FACTOR = 16


@dataclass(frozen=True, kw_only=True)
class VocabularyCost:
    """The cost of ``table`` in steps of ``micro_batches`` of ``tokens`` on each rank, with values of ``value_bytes`` in
    the compute type. Sent bytes are those of one rank in a step; those of divided rows assume evenly spread ids.
    """

    table: TableRows
    tokens: int
    micro_batches: int
    value_bytes: int

    @property
    def gathered_sent(self) -> int:
        """Bytes sent by a gather of the table, and a reduction of its gradients for each micro-batch."""
        ranks, table = self.table.ranks, self.table
        return _FP32 * table.each * table.width * (ranks - 1) * (1 + self.micro_batches)

    @property
    def embedding_sent(self) -> int:
        """Bytes sent for ids, rows and gradients."""
        others = self.table.ranks - 1
        values = 2 * self.tokens * self.table.width * others // self.table.ranks
        ids = (_COUNT + _ID * self.tokens) * others
        return self.micro_batches * (ids + self.value_bytes * values)

    @property
    def head_sent(self) -> int:
        """Bytes sent for targets, hidden states, partial sums and the gradients of hidden states."""
        each = _ID + _FP32 * _FIGURES + 2 * self.value_bytes * self.table.width
        return self.micro_batches * (self.table.ranks - 1) * (_COUNT + self.tokens * each + _FACTOR)

    @property
    def gathered_memory(self) -> int:
        """Bytes of the whole table, as much to send it from on three or more ranks, its gradients twice (own, other
        ranks') and once more where they are computed.
        """
        whole = _FP32 * self.table.each * self.table.ranks * self.table.width
        return whole * (2 if self.table.ranks > 2 else 1) + 3 * whole

    @property
    def divided_memory(self) -> int:
        """Bytes of the gradients of this rank's rows, where they are computed."""
        return _FP32 * self.table.each * self.table.width
