"""Low-rank pairs that train beside frozen experts: two expert sources over one store, combined into one.

An access of the host cache covers one kind of record, and only one access is open at a time. So a pass over a layer first
copies all pairs that it needs to memory beside the cache, then walks the experts. In a backward pass the pairs' gradients
are written to such memory, too; a second walk, over the pairs, then takes them as their gradients. Everything happens in
program order, in one host cache, and is recorded in one trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tierstore.moe.lora import PairShape
from tierstore.moe.low_rank import PairLease
from tierstore.moe.source import ExpertLease, users_of
from tierstore.prefetch.experts import ExpertTiers, FrozenExperts, TieredExperts
from tierstore.prefetch.gradients import FlatTensors
from tierstore.prefetch.predictor import Counts
from tierstore.prefetch.program import Finals


class LoraExperts(ExpertTiers):
    """Frozen experts ``base`` and their trained ``pairs``, which have the same ids. ``program`` is that of ``base``; that of
    ``pairs`` makes the same guesses.
    """

    def __init__(
        self,
        base: FrozenExperts,
        pairs: TieredExperts | FrozenExperts,
        shape: PairShape,
        *,
        device: torch.device,
    ) -> None:
        """``pairs`` that are not trained, such as a server's, have no gradients: then only forward passes are allowed."""
        self.program = base.program
        self.gradients = pairs.gradients
        self._base = base
        self._pairs = pairs
        self._shape = shape
        self._weights = FlatTensors(shape.numel, device)
        self._gradients = FlatTensors(shape.numel, device)

    @property
    def late_prefetch_bytes(self) -> int:
        return self._base.late_prefetch_bytes + self._pairs.late_prefetch_bytes

    def begin_micro(self, *, index: int, count: int | None) -> None:
        for each in (self._pairs, self._base):
            each.begin_micro(index=index, count=count)

    def resume_micro(self, *, index: int, finals: Finals) -> None:
        for each in (self._pairs, self._base):
            each.resume_micro(index=index, finals=finals)

    def end_passes(self) -> None:
        self._pairs.end_passes()

    def begin_evaluation(self) -> None:
        for each in (self._pairs, self._base):
            each.begin_evaluation()

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        """Set which sequences request each expert and its pair in the next forward pass: a bit mask per expert."""
        for each in (self._pairs, self._base):
            if isinstance(each, FrozenExperts):
                each.set_requesters(requesters)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        for each in (self._pairs, self._base):
            each.offer(source, layer, chosen_E)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` with their pairs."""
        weights = self._read_pairs(layer, experts)
        for lease in self._base.forward(layer, experts):
            yield replace(lease, pair=PairLease(self._shape, weights[lease.expert]))

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases with gradients of the pairs, which count as complete once all experts have been walked."""
        weights = self._read_pairs(layer, experts)
        gradients = dict(zip(experts, self._gradients.of(len(experts)), strict=True))
        for lease in self._base.backward(layer, experts):
            expert = lease.expert
            yield replace(lease, pair=PairLease(self._shape, weights[expert], gradients[expert]))
        for lease in self._pairs.backward(layer, experts):
            assert lease.gradients is not None
            lease.gradients.copy_(gradients[lease.expert])

    def backward_each(self, layer: int, asked: Sequence[Sequence[int]]) -> Iterator[tuple[int, ExpertLease]]:
        """As in ``JointSource``. Each micro-batch has separate gradients of the pairs until the end of the pass."""
        users = users_of(asked)
        weights = self._read_pairs(layer, list(users))
        keys = [(expert, micro) for expert, micros in users.items() for micro in micros]
        gradients = dict(zip(keys, self._gradients.of(len(keys)), strict=True))
        for micro, lease in self._base.backward_each(layer, asked):
            expert = lease.expert
            pair = PairLease(self._shape, weights[expert], gradients[expert, micro])
            yield micro, replace(lease, pair=pair)
        for micro, lease in self._pairs.backward_each(layer, asked):
            assert lease.gradients is not None
            lease.gradients.copy_(gradients[lease.expert, micro])

    def _read_pairs(self, layer: int, experts: Sequence[int]) -> dict[int, Tensor]:
        weights = dict(zip(experts, self._weights.of(len(experts)), strict=True))
        for lease in self._pairs.forward(layer, experts):
            weights[lease.expert].copy_(lease.flat)
        return weights
