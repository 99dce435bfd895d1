"""Experts on an emulated device: every product with their weights takes the time that such a device would.

The device is the calling thread asleep. What is computed, sent and waited for is what a training run does: only the weights
know that they are slow. They are tensors whose products take time, so that it passes where an accelerator would
compute: after an expert's rows have arrived, before its results leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.links import wait_until
from tierstore.moe.config import ExpertShape
from tierstore.moe.source import ExpertLease

#: Products with its weights that an expert has in a pass: two either way.
_PRODUCTS = 2


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Seconds of one expert's forward pass: ``start_s + rows * row_s``. A backward pass takes twice that."""

    start_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, rows: int) -> float:
        return self.start_s + rows * self.row_s


class SleepingDevice:
    """A device that is busy for the times that it is given, one after another; who launches waits."""

    def __init__(self) -> None:
        self.speed = DeviceSpeed()
        #: What has been launched takes this many times as long as a forward pass.
        self.times = 1

    def product(self, rows: int) -> None:
        """Returns when one of an expert's products over ``rows`` is done."""
        spent = self.times * self.speed.seconds(rows) / _PRODUCTS
        if spent > 0:
            wait_until(time.monotonic_ns() + round(spent * 1e9))


def slow_weights(flat: Tensor, product: Callable[[int], None]) -> Tensor:
    """``flat`` as weights whose products, and those of its views, call ``product`` with their rows."""

    class SlowWeights(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if func is torch.mm:
                product(args[0].shape[0])
            return made

    return flat.as_subclass(SlowWeights)


class SleepingExperts:
    """An expert source: every expert has the same weights, and lies on ``device``."""

    def __init__(self, shape: ExpertShape, device: SleepingDevice) -> None:
        self._device = device
        self._weights = slow_weights(torch.full((shape.numel,), 1e-3), device.product)
        self._gradients = torch.empty(shape.numel)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self._device.times = 1
        for expert in experts:
            yield ExpertLease(expert, self._weights)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        self._device.times = 2
        for expert in experts:
            yield ExpertLease(expert, self._weights, self._gradients)
