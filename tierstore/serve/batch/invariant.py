"""Each sequence with the bits that it gets alone, whoever else is served (``batch.invariant``).

Products of another number of rows round otherwise, so that a sequence in a padded batch depends on its neighbours.
Here each sequence is a forward pass of its own, of one row, with a cache of its own; the passes meet at the experts, where
one lease serves all and each sequence's rows are computed by themselves. What is read from disk is shared, and what is
computed is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.serve.batch.grouped import GroupedRunner, SequenceGroup
from tierstore.serve.batch.interface import Joined


class InvariantRunner(GroupedRunner):
    """Sequences that are continued together and do not see it in their bits."""

    def describe(self) -> str:
        return "invariant: each sequence is a pass of its own, and its bits are those that it gets alone"

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> Joined:
        """Token by token, as they were computed before: a prefill of all of them would round otherwise."""
        (joined,) = self.join([prompt])
        number, logits_V = joined.number, joined.logits_V
        for token in tokens:
            logits_V = self.step({number: token})[number]
        return Joined(number, logits_V)

    def _parts(self, rows: Sequence[int]) -> list[list[int]]:
        return [[row] for row in rows]

    def _arranged(self, groups: list[SequenceGroup]) -> list[SequenceGroup]:
        return groups
