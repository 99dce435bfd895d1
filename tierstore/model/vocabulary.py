"""Which of the tables over the vocabulary are divided over ranks, and what a table costs a rank, gathered and divided: bytes
by formula, and which of the two sends fewer. Imports no torch.

A gathered table (ZeRO-3) is gathered once a step and its gradients are reduced once a micro-batch: V D values each, whatever
the number of tokens. A divided one sends tokens' rows instead (SE-MoE section 4.3): T D values twice, and as a head the
hidden states of all T tokens to all other ranks and back. So division pays for a vocabulary that is large against the
tokens of a micro-batch, and loses for that of bytes.
"""

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


#: Ids travel as int32; masters, gradients of gathered tables and the losses' figures in fp32.
_ID = _FP32 = 4
#: How many tokens a rank has, which goes before its ids.
_COUNT = 8
#: Largest logit, sum of exponentials, target's logit; and what goes back to make gradients with.
_FIGURES = 3 + 1
#: One double from each rank, twice: the factor of the loss.
_FACTOR = 16


@dataclass(frozen=True, kw_only=True)
class VocabularyCost:
    """Of ``table`` in steps of ``micro_batches`` of ``tokens`` on each rank, whose values are ``value_bytes`` wide in the
    compute type. Sent bytes are those of one rank in a step; those of divided rows hold for ids that are spread evenly.
    """

    table: TableRows
    tokens: int
    micro_batches: int
    value_bytes: int

    @property
    def gathered_sent(self) -> int:
        """A gather of the table, and a reduction of its gradients for each micro-batch."""
        ranks, table = self.table.ranks, self.table
        return _FP32 * table.each * table.width * (ranks - 1) * (1 + self.micro_batches)

    @property
    def embedding_sent(self) -> int:
        """Ids, rows back, gradients."""
        others = self.table.ranks - 1
        values = 2 * self.tokens * self.table.width * others // self.table.ranks
        ids = (_COUNT + _ID * self.tokens) * others
        return self.micro_batches * (ids + self.value_bytes * values)

    @property
    def head_sent(self) -> int:
        """Targets, hidden states, the sums' parts, the gradients of hidden states."""
        each = _ID + _FP32 * _FIGURES + 2 * self.value_bytes * self.table.width
        return self.micro_batches * (self.table.ranks - 1) * (_COUNT + self.tokens * each + _FACTOR)

    @property
    def gathered_memory(self) -> int:
        """The whole table, as much to send it from on three ranks and more, its gradients twice (own, other ranks') and once
        more where they are made.
        """
        whole = _FP32 * self.table.each * self.table.ranks * self.table.width
        return whole * (2 if self.table.ranks > 2 else 1) + 3 * whole

    @property
    def divided_memory(self) -> int:
        """The gradients of this rank's rows, where they are made."""
        return _FP32 * self.table.each * self.table.width
