"""Which sequences of a batch ask for which experts, as cache policies are told (``Need.FIRST_ASKER``)."""

from __future__ import annotations

from bisect import bisect_right
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
    """The sequences that ask for each expert, a bit each; experts that nobody asks for are left out.

    ``bits[i]``: of the sequences of ``calls[i]``, whose tokens lie there one sequence after another, as many of each. A
    sequence asks with its last token, from which it goes on.
    """
    found: dict[int, int] = {}
    for call, own in zip(calls, bits, strict=True):
        plan = call.plan
        each = len(plan.place_TK) // len(own)
        for bit, places in zip(own, plan.place_TK[each - 1 :: each].tolist(), strict=True):
            for place in places:
                if place < plan.rows:  # not dropped
                    expert = bisect_right(plan.offsets, place) - 1
                    found[expert] = found.get(expert, 0) | bit
    return found
