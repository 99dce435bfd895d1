"""The forward passes of a batch, side by side: they meet at the experts, also those of several ranks.

Serving on several ranks divides experts as in training, and the sequences of a batch. Rank 0 decides: its ``BatchRunner``
sends each of its calls to the runners of the other ranks, which make the same call (``BatchRunner.follow``) and so know the
same batch. Each sequence belongs to one rank, which computes its passes and keeps its keys and values; the logits go to
rank 0, which chooses the tokens. Dense parameters are whole on every rank, and ``JointPasses`` exchanges the rows of
experts. Every pass is a collective: what fails on one rank ends all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor

from tierstore.errors import PeerError
from tierstore.moe.computing import ExpertPass
from tierstore.moe.exchange import gather_counts
from tierstore.moe.joint import forward_together
from tierstore.moe.source import ExpertSourceRef
from tierstore.parallel import RankGroup

ExpertCall = tuple[Tensor, Tensor, ExpertPass]
#: Receives the calls of a layer, one from each pass, before its experts are leased.
Called = Callable[[Sequence[ExpertPass]], None]


class LockstepPasses:
    """Runs forward passes side by side over a model whose experts are leased through ``slot``.

    Each pass runs in its own greenlet, like the micro-batches of a step in layer order. It stops where it calls experts;
    when all passes have stopped, the experts that any of them needs are leased once, and the rows of each pass are computed
    separately. So a pass has the same bits as if it were alone.
    """

    def __init__(self, slot: ExpertSourceRef) -> None:
        self._slot = slot

    def run(self, passes: Sequence[Callable[[], Tensor]], called: Called | None = None) -> list[Tensor]:
        """Run ``passes`` of one model, which all call experts of the same layers; return their results.

        If a pass or the source raises, all passes end, and the error is raised.
        """
        if len(passes) == 1 and called is None:
            return [passes[0]()]
        lanes = [greenlet(each) for each in passes]
        self._slot.barrier = self
        try:
            stops: list[ExpertCall | Tensor] = [lane.switch() for lane in lanes]
            while calls := [stop for stop in stops if not isinstance(stop, Tensor)]:
                if len(calls) < len(lanes):
                    raise RuntimeError("some passes of a model ended while others call experts")
                stops.clear()
                if called is not None:
                    called([call for _, _, call in calls])
                results = forward_together(self._slot, calls)
                del calls
                stops.extend(lane.switch(results.pop(0)) for lane in lanes)
            return [stop for stop in stops if isinstance(stop, Tensor)]
        finally:
            self._slot.barrier = None
            for lane in lanes:
                if not lane.dead:
                    lane.throw()  # ends the pass, which closes what it has open

    def compute(self, x_TD: Tensor, weight_TK: Tensor, call: ExpertPass) -> Tensor:
        """The experts' results for the current pass, which stops here until they are computed (``ExpertBarrier``)."""
        # Switches to ``run``, which resumes this pass when all passes have stopped and their experts are computed.
        parent = greenlet.getcurrent().parent
        assert parent is not None
        result: Tensor = parent.switch((x_TD, weight_TK, call))
        return result


class JointPasses(LockstepPasses):
    """``LockstepPasses`` of all ranks of ``world``: each rank brings passes of its own, and in each layer their rows travel
    to the ranks of their experts, pass by pass. A rank runs ``empty``, a pass without tokens, where only others have one.

    ``apart``: an expert computes the rows of each pass separately, with the bits of one process. Otherwise it computes the
    rows of the n-th passes of all ranks together.
    """

    def __init__(
        self, slot: ExpertSourceRef, world: RankGroup, empty: Callable[[], Tensor], *, apart: bool
    ) -> None:
        super().__init__(slot)
        self._world, self._empty, self._apart = world, empty, apart

    def run(self, passes: Sequence[Callable[[], Tensor]], called: Called | None = None) -> list[Tensor]:
        """A collective. No rank can go on after an error on any, so all raise PeerError."""
        try:
            counts = gather_counts(torch.tensor([len(passes)]), self._world).flatten().tolist()
            before = sum(counts[: self._world.rank]) if self._apart else 0
            after = (sum(counts) if self._apart else max(counts)) - before - len(passes)
            found = super().run([*[self._empty] * before, *passes, *[self._empty] * after], called)
        except PeerError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise PeerError("pass", reason, rank=self._world.ranks[self._world.rank]) from error
        return found[before : before + len(passes)]


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
