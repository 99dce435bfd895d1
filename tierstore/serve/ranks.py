"""Serving on several ranks: experts divided over them as in training, and the sequences of a batch.

Rank 0 decides: its ``BatchRunner`` sends each of its calls to the runners of the other ranks, which make the same call
(``BatchRunner.follow``) and so know the same batch. Each sequence belongs to one rank, which computes its passes and keeps
its keys and values; the logits go to rank 0, which chooses the tokens. Dense parameters are whole on every rank, and
``JointPasses`` exchanges the rows of experts. Every pass is a collective: what fails on one rank ends all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.parallel import RankGroup

#: The name of a method of ``BatchRunner``, and its arguments.
Call = tuple[Any, ...]


class ServedRanks:
    """How the sequences of a batch are divided over the ranks of ``world``: the ranks' counts differ by as little as
    departures allow, and no rank has more than its share of a full batch, rounded up.

    All ranks make the same calls in the same order; ``send``, ``receive`` and ``gather`` are collectives.
    """

    def __init__(self, world: RankGroup) -> None:
        self._world = world
        self._owner: dict[int, int] = {}

    def send(self, call: Call | None) -> None:
        """On rank 0: what ``receive`` returns on the others. On the others it does nothing. Raises PeerError."""
        if self._world.rank == 0:
            self._world.all_gather_object(call)

    def receive(self) -> Call | None:
        """The next call of rank 0; None is the end. Raises PeerError."""
        call: Call | None = self._world.all_gather_object(None)[0]
        return call

    def update(self, sequences: Collection[int]) -> None:
        """Set the sequences of the batch: a new one goes to the rank with the fewest."""
        self._owner = {number: rank for number, rank in self._owner.items() if number in sequences}
        for number in sequences:
            if number not in self._owner:
                held = Counter(self._owner.values())
                self._owner[number] = min(range(self._world.size), key=held.__getitem__)

    def owns(self, number: int) -> bool:
        """Whether this rank computes the sequence."""
        return self._owner[number] == self._world.rank

    def gather(
        self, logits: Mapping[int, Tensor], sequences: Sequence[int], vocabulary: int, device: torch.device
    ) -> dict[int, Tensor]:
        """On rank 0 the fp32 logits (V,) of ``sequences``, of which each rank gives those of its own; nothing on the others.
        Raises PeerError.
        """
        if self._world.size == 1:
            return dict(logits)
        size, first = self._world.size, self._world.rank == 0
        by_rank = [[number for number in sequences if self._owner[number] == rank] for rank in range(size)]
        own = by_rank[self._world.rank]
        own_RV = torch.empty(len(own), vocabulary, device=device)
        for row_V, number in zip(own_RV, own, strict=True):
            row_V.copy_(logits[number])
        came = [len(numbers) if first else 0 for numbers in by_rank]
        all_RV = own_RV.new_empty(sum(came), vocabulary)
        self._world.all_to_all(all_RV, own_RV, came, [len(own), *[0] * (size - 1)]).wait()
        owned = [number for numbers in by_rank for number in numbers] if first else []
        return dict(zip(owned, all_RV, strict=True))
