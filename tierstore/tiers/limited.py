"""A device tier whose copies are slower than the machine's: emulation, outside the tiers themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tierstore._native import Activity, Buffer, Engine, Link
from tierstore.links import LinkConfig, limited, open_link
from tierstore.quant.weights import Weights
from tierstore.tiers.device import DeviceTier
from tierstore.tiers.slots import DeviceSlots


def _nothing() -> list[int]:
    return []


def limited_tier(
    tier: DeviceTier, engine: Engine, config: LinkConfig, computed: Callable[[], list[int]] = _nothing
) -> DeviceTier:
    """``tier`` with its copies limited as ``config`` says: ``tier`` itself where that says no limit."""
    link = open_link(config)
    return tier if link is None else LimitedTier(tier, engine, link, computed)


class LimitedTier:
    """Copies of ``tier``, in both directions, also take their turns on ``link``.

    A copy is done when both the real copy and its turn are. The turn begins when the copy may begin: after the
    tickets that it follows, and after those of ``computed``, which finish once the device has done all work queued so
    far (none where the caller computes).
    """

    def __init__(
        self, tier: DeviceTier, engine: Engine, link: Link, computed: Callable[[], list[int]] = _nothing
    ) -> None:
        self._tier = tier
        self._engine = engine
        self._link = link
        self._computed = computed
        self._idle: list[list[int]] = [[] for _ in range(tier.slots.weights)]

    @property
    def device(self) -> torch.device:
        return self._tier.device

    @property
    def slots(self) -> DeviceSlots[torch.dtype]:
        return self._tier.slots

    def in_place(self, source: Buffer) -> Weights | None:
        return self._tier.in_place(source)

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        ticket = self._tier.load(slot, source, after)
        before = [*after, *self._idle[slot]]
        return limited(self._engine, self._link, ticket, source.nbytes, activity=Activity.COPY, after=before)

    def weights(self, slot: int) -> Weights:
        return self._tier.weights(slot)

    def release_weights(self, slot: int) -> None:
        self._tier.release_weights(slot)
        self._idle[slot] = self._computed()

    def allocate_gradient(self) -> tuple[int, list[int]]:
        return self._tier.allocate_gradient()

    def gradients(self, slot: int) -> torch.Tensor:
        return self._tier.gradients(slot)

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        copied, after = self._tier.copy_to_host(slot)
        turn = self._engine.hold(self._link, copied.nbytes, Activity.COPY, after=self._computed())
        return copied, [*after, turn]

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        self._tier.free_gradient(slot, after)

    def close(self) -> None:
        self._tier.close()
