"""An expert's gradients from several micro-batches, which share its lease: added up in its gradient slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tierstore.parallel import Channel, RankGroup
from tierstore.stats import Cause, StallLedger, Tier

_ALIGNMENT = 16  # fp32 values: a part starts on a multiple of 64 bytes


class GradientParts:
    """Adds parts up in fp32 and in the order of micro-batches, as gradients that wait in the host cache are.

    Each part is summed over ``replicas`` before it is added: the sums then have the bits of one micro-batch after
    another. Beside the slot there is memory for one part; with replicas, for all but the first.
    """

    def __init__(self, replicas: RankGroup, *, ledger: StallLedger) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._memory: Tensor | None = None

    def add_up(self, micros: Sequence[int], total: Tensor, *, layer: int) -> Iterator[tuple[int, Tensor]]:
        """For each of ``micros``, its number and where its part is written; then ``total`` is the sum."""
        alone = self._replicas.size == 1
        spare = self._spare(1 if alone else len(micros) - 1, total) if len(micros) > 1 else []
        if alone:
            for place, micro in enumerate(micros):
                part = spare[0] if place else total
                yield micro, part
                if place:
                    total.add_(part)
            return
        parts = [total, *spare]
        yield from zip(micros, parts, strict=True)
        work = self._replicas.all_reduce(*parts, channel=Channel.STREAM)
        with self._ledger.stall(layer=layer, tier=Tier.RANKS, cause=Cause.REDUCE):
            work.wait()
        for part in parts[1:]:
            total.add_(part)

    def _spare(self, count: int, like: Tensor) -> list[Tensor]:
        """``count`` tensors as ``like``, of undefined content."""
        numel = like.numel()
        stride = -(-numel // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self._memory.numel() < count * stride:
            self._memory = None  # or both would be there at once
            self._memory = torch.empty(count * stride, dtype=like.dtype, device=like.device)
        return [self._memory[place * stride : place * stride + numel] for place in range(count)]
