"""Which sequences of a batch ask for which experts, as cache policies are told (``Need.FIRST_ASKER``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tierstore.cache.access import ASKERS
from tierstore.moe.computing import ExpertPass


class AskerBits:
    """A bit for each sequence of a batch, of the ``ASKERS`` that there are.

    A sequence that joins gets the one that fewest have, of those the one that was given back longest ago: a policy that has
    learned what a sequence uses then seldom takes another one for it. The same joins and leaves give the same bits.
    """

    def __init__(self) -> None:
        self._bit_of: dict[int, int] = {}
        #: All of them, those first that were given back longest ago.
        self._bits = [1 << number for number in range(ASKERS)]

    def update(self, sequences: Collection[int]) -> None:
        """The batch has these sequences, in the order in which they joined."""
        for gone in [sequence for sequence in self._bit_of if sequence not in sequences]:
            bit = self._bit_of.pop(gone)
            self._bits.remove(bit)
            self._bits.append(bit)
        for sequence in sequences:
            if sequence not in self._bit_of:
                held = Counter(self._bit_of.values())
                self._bit_of[sequence] = min(self._bits, key=held.__getitem__)

    def of(self, sequences: Iterable[int]) -> list[int]:
        """The bits of these sequences."""
        return [self._bit_of[sequence] for sequence in sequences]


def askers_of(calls: Sequence[ExpertPass], bits: Sequence[Sequence[int]]) -> dict[int, int]:
    """The sequences that ask for each expert, a bit each: ``bits[i][t]`` is that of token t of ``calls[i]``, 0 for nobody's.
    Experts that nobody asks for are left out.
    """
    found: dict[int, int] = {}
    for call, own in zip(calls, bits, strict=True):
        plan = call.plan
        if len(own) == 1:
            for expert in plan.experts:
                found[expert] = found.get(expert, 0) | own[0]
            continue
        tokens = plan.token_N.tolist()
        for expert in plan.experts:
            for token in tokens[plan.span(expert)]:
                if own[token]:
                    found[expert] = found.get(expert, 0) | own[token]
    return found
