"""What computes the layers of a synthetic stack: the processor itself, or an emulated device beside it.

The emulated device takes time only. As with a GPU's stream, it works off in order what is launched, and the
program that launches it goes on meanwhile. Weights and gradients in its slots stay as they are until it has finished, and
collectives start on their link when it has come to where they were issued, as those of NCCL do on theirs. (Each rank's
device for itself: they do not wait for one another's, which compute the same and keep step.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import torch

from tierstore._native import Activity, Buffer, Engine, HugePages, Link
from tierstore.links import wait_until
from tierstore.tiers import DeviceSlots, HostDeviceTier


class Computation(StrEnum):
    """What a layer's computation is."""

    MATMUL = "matmul"  # on the processor that also drives the queues
    DEVICE = "device"  # a given time on a device that the processor does not wait for, as on a GPU


class Computer(Protocol):
    """Computes for given times, one after another."""

    def launch(self, seconds: float) -> None: ...

    def finished(self) -> list[int]:
        """Tickets after which all that was launched is done."""
        ...

    def synchronize(self) -> None:
        """Returns when all that was launched is done."""
        ...

    def clock_ns(self) -> int:
        """Now, or when what was launched will be done: time in which it computes does not pass."""
        ...


class Processor:
    """Computes products on the calling thread."""

    def __init__(self) -> None:
        self._x = torch.ones(64, 512)
        self._w = torch.eye(512)
        self._out = torch.empty(64, 512)
        self._s = self._measure()

    def _measure(self) -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(10):
                torch.mm(self._x, self._w, out=self._out)
            times.append(time.perf_counter() - started)
        return min(times) / 10

    def launch(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / self._s))):
            torch.mm(self._x, self._w, out=self._out)

    def finished(self) -> list[int]:
        return []

    def synchronize(self) -> None:
        """All is done already."""

    def clock_ns(self) -> int:
        return time.monotonic_ns()


class EmulatedDevice:
    """A device that is busy for the times that it is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free_at_ns = 0
        self._last: list[int] = []

    def launch(self, seconds: float) -> None:
        now = time.monotonic_ns()
        self._free_at_ns = max(now, self._free_at_ns) + round(seconds * 1e9)
        # A link of its own: all that it is used for is one time from now.
        left = Link(math.inf, (self._free_at_ns - now) / 1e9)
        self._last = [self._engine.hold(left, 0, Activity.OTHER)]

    def finished(self) -> list[int]:
        return self._last

    def synchronize(self) -> None:
        wait_until(self._free_at_ns)

    def clock_ns(self) -> int:
        return max(time.monotonic_ns(), self._free_at_ns)


class EmulatedTier(HostDeviceTier):
    """Slots of what ``computer`` computes with: a copy into or out of one waits for that."""

    def __init__(self, engine: Engine, slots: DeviceSlots[torch.dtype], computer: Computer) -> None:
        super().__init__(engine, slots, HugePages.OFF)
        self._computer = computer
        self._idle: list[list[int]] = [[] for _ in range(slots.weights)]

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        return super().load(slot, source, [*after, *self._idle[slot]])

    def release_weights(self, slot: int) -> None:
        self._idle[slot] = self._computer.finished()

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        copied, after = super().copy_to_host(slot)
        return copied, [*after, *self._computer.finished()]
