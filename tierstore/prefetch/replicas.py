"""Expert gradients summed over the replicas of their expert while the next ones are computed.

A gradient stays in its device slot, and its record pinned, until the sum has come back: so half of the slots may
be computed into while the other half travel. Small gradients travel together; how many do has no say in any bit,
and depends on the number of slots alone, so all replicas cut alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierstore.parallel import Channel, Group, Work
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.tiers import DeviceSlots

BATCH_BYTES = 1 << 20  # a message this long costs more in bytes than in latency


@dataclass(slots=True)
class _Batch:
    """Gradients that travel together: what to do once they are summed, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    complete: list[Callable[[], None]] = field(default_factory=list)
    work: Work | None = None


class ReplicaSums:
    """Sums over ``group``, of gradients that lie in the gradient slots of ``slots``.

    All replicas add the same gradients in the same order. With a group of one they are complete at once.
    """

    def __init__(self, group: Group, slots: DeviceSlots[torch.dtype], *, ledger: StallLedger) -> None:
        self._group = group
        together = max(1, BATCH_BYTES // slots.gradient_bytes)
        # Two batches of half the slots: one that is filled, and one that travels.
        self._limit = min(slots.gradients // 2, together)
        self._ledger = ledger
        self._filling = _Batch()
        self._travelling: _Batch | None = None

    def add(self, gradient: Tensor, complete: Callable[[], None], *, layer: int) -> None:
        """Sums ``gradient`` in place; then calls ``complete``, in the order of adding, now or later."""
        if self._group.size == 1:
            complete()
            return
        self._filling.tensors.append(gradient)
        self._filling.complete.append(complete)
        if len(self._filling.tensors) >= self._limit:
            self._send(layer)
        if self._limit == 0:
            self._finish(layer)

    def flush(self, *, layer: int) -> None:
        """Completes all that was added."""
        self._send(layer)
        self._finish(layer)

    def _send(self, layer: int) -> None:
        self._finish(layer)
        if self._filling.tensors:
            self._filling.work = self._group.all_reduce(*self._filling.tensors, channel=Channel.STREAM)
            self._travelling, self._filling = self._filling, _Batch()

    def _finish(self, layer: int) -> None:
        if self._travelling is None:
            return
        work, complete = self._travelling.work, self._travelling.complete
        self._travelling = None
        assert work is not None
        with self._ledger.stall(layer=layer, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        for step in complete:
            step()
