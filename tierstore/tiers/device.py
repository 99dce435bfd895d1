"""The device tier: slots for weights, and for the gradients being made.

Weights are copied into a slot before an expert runs (``tierstore.prefetch.device_cache`` says what stays there). Its
gradient is made in a slot and leaves it, for a host buffer, as soon as it is complete. The CPU stands in for a GPU with
slots of its own and real copies, so that there is one code path; its slots count against the host budget. Where it only
computes, no weights are copied: it computes with the memory of the host cache (``WeightLoads.IN_PLACE``), and gradients
stay where they are made. ``LimitedTier`` emulates a device behind a slower link.

Everything is ordered by tickets of the engine. One caller at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from tierstore._native import Activity, Arena, Buffer, Engine, HugePages, Link, QuantProducts
from tierstore.accelerator import has_own_memory
from tierstore.capabilities import Capability, Finding, Resolution, resolve
from tierstore.links import LinkConfig, limited, open_link
from tierstore.quant.weights import QuantizedWeights, Weights
from tierstore.tiers.slots import DeviceSlots


class WeightLoads(Enum):
    """What loading weights means where the device's memory is the host's."""

    COPIED = "copied"
    #: There is none: content in one piece is computed with where it is (``DeviceTier.in_place``). The rest is copied.
    IN_PLACE = "in place"


class DeviceTier(Protocol):
    """Slots are numbers. A weight slot is loaded, used and released, possibly before the device has finished the work
    queued with it. A gradient slot is allocated, written and copied to a host buffer; it is free again when it has been
    copied, and the buffer when the tickets given to ``free_gradient`` have finished. There are as many buffers as gradient
    slots; a copy waits for the one that is to be free first.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def slots(self) -> DeviceSlots[torch.dtype]: ...
    @property
    def loads(self) -> WeightLoads: ...

    def in_place(self, source: Buffer) -> Weights | None:
        """The weights in ``source``, to compute with where they are, as long as it stays as it is. None: they are to be
        loaded into a slot.
        """
        ...

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        """Queues the copy of ``source`` into weight slot ``slot``; returns its ticket."""
        ...

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        """The tickets that the host waits for before it uses ``slot``, whose last load is ``ticket``: the load, or what it
        follows where the device itself waits for the load.
        """
        ...

    def weights(self, slot: int) -> Weights:
        """Weight slot ``slot``, flat, in the compute type, or quantised (``slots.quantized``): for what the device is told
        from now on, once the tickets ``awaited`` have finished.
        """
        ...

    def release_weights(self, slot: int) -> None:
        """The slot may be loaded again once the device has done all work queued so far."""
        ...

    def allocate_gradient(self) -> tuple[int, list[int]]:
        """A gradient slot, and the tickets that must finish before it is written."""
        ...

    def gradients(self, slot: int) -> torch.Tensor: ...

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        """The gradient of ``slot`` in host memory, complete once the device has done all work queued so far, and the
        tickets after which it is there.
        """
        ...

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        """The gradient of ``slot``, copied to the host, is of no use once the tickets ``after`` have finished."""
        ...

    def close(self) -> None: ...


class LeavingGradients:
    """The host ``buffers`` that gradients are copied to, in turns: which is used next, and what must have read it before."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._free: deque[tuple[Buffer, list[int]]] = deque((buffer, []) for buffer in buffers)
        #: By slot: the buffer that its gradient goes to, and the ticket of the copy.
        self._used: dict[int, tuple[Buffer, list[int]]] = {}

    def begin(self, slot: int) -> tuple[Buffer, list[int]]:
        """The buffer for the gradient of ``slot``, and the tickets that its copy follows."""
        buffer, guards = self._free.popleft()
        self._used[slot] = buffer, []
        return buffer, guards

    def left(self, slot: int, ticket: int) -> list[int]:
        """``ticket`` copies the gradient of ``slot``; returned as what its readers follow."""
        self._used[slot][1].append(ticket)
        return [ticket]

    def end(self, slot: int, after: Sequence[int]) -> list[int]:
        """The buffer is free after ``after``; returns after which tickets the slot is."""
        buffer, copied = self._used.pop(slot)
        self._free.append((buffer, list(after)))
        return copied


def _nothing() -> list[int]:
    return []


class HostDeviceTier:
    """The CPU as a device: slots in an arena of its own, and host buffers where weights are copied to slots.

    ``computed`` returns tickets that finish once the device has done all work queued so far: none where the caller
    computes.
    """

    def __init__(
        self,
        engine: Engine,
        slots: DeviceSlots[torch.dtype],
        huge_pages: HugePages,
        loads: WeightLoads = WeightLoads.COPIED,
        computed: Callable[[], list[int]] = _nothing,
    ) -> None:
        self._engine = engine
        self._computed = computed
        self.loads = loads
        self.slots = slots
        buffers = slots.gradients if loads is WeightLoads.COPIED else 0
        self._arena = Arena(slots.nbytes + buffers * slots.gradient_bytes, huge_pages)
        self.device = torch.device("cpu")
        weight_end = slots.weights * slots.weight_bytes
        self._weights = [
            self._buffer(i * slots.weight_bytes, slots.weight_bytes, slots.weight_content_bytes)
            for i in range(slots.weights)
        ]
        self._gradients = [
            self._buffer(weight_end + i * slots.gradient_bytes, slots.gradient_bytes, slots.numel * 4)
            for i in range(slots.gradients)
        ]
        self._leaving = LeavingGradients(
            [
                self._buffer(slots.nbytes + i * slots.gradient_bytes, slots.gradient_bytes, slots.numel * 4)
                for i in range(buffers)
            ]
        )
        #: By weight slot: what must have finished before it is loaded again.
        self._idle: list[list[int]] = [[] for _ in self._weights]
        #: Computes with quantised weights, on as many threads as torch.
        self._products = None if slots.quantized is None else QuantProducts(torch.get_num_threads())
        self._slot_weights = [self._weights_in(buffer) for buffer in self._weights]
        #: Made once for each source.
        self._in_place: WeakKeyDictionary[Buffer, Weights] = WeakKeyDictionary()
        self._gradient_tensors = [tensor_of(buffer, torch.float32) for buffer in self._gradients]
        self._free: deque[tuple[int, list[int]]] = deque((slot, []) for slot in range(slots.gradients))

    def _buffer(self, offset: int, capacity: int, nbytes: int) -> Buffer:
        return Buffer(self._arena, [(offset, capacity)], nbytes)

    def _weights_in(self, buffer: Buffer) -> Weights:
        """The weights in ``buffer``, which is contiguous, without a copy."""
        if self.slots.quantized is None:
            return tensor_of(buffer, self.slots.compute)
        return QuantizedWeights(self.slots.quantized, tensor_of(buffer, torch.uint8), self._products)

    def in_place(self, source: Buffer) -> Weights | None:
        found = self._in_place.get(source)
        if found is None and self.loads is WeightLoads.IN_PLACE and source.contiguous:
            found = self._in_place[source] = self._weights_in(source)
        return found

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        return self._engine.copy(self._weights[slot], source, after=[*after, *self._idle[slot]])

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        return [ticket]

    def weights(self, slot: int) -> Weights:
        return self._slot_weights[slot]

    def release_weights(self, slot: int) -> None:
        self._idle[slot] = self._computed()

    def allocate_gradient(self) -> tuple[int, list[int]]:
        return self._free.popleft()

    def gradients(self, slot: int) -> torch.Tensor:
        return self._gradient_tensors[slot]

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        if self.loads is WeightLoads.IN_PLACE:  # the optimizer reads the slot itself
            return self._gradients[slot], []
        buffer, guards = self._leaving.begin(slot)
        ticket = self._engine.copy(buffer, self._gradients[slot], after=[*guards, *self._computed()])
        return buffer, self._leaving.left(slot, ticket)

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        copied = after if self.loads is WeightLoads.IN_PLACE else self._leaving.end(slot, after)
        self._free.append((slot, list(copied)))

    def close(self) -> None:
        self._slot_weights.clear()
        self._in_place.clear()
        self._gradient_tensors.clear()
        if self._products is not None:
            self._products.close()


def tensor_of(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over a contiguous buffer, without a copy. The tensor keeps the memory alive."""
    return torch.from_numpy(buffer.array()).view(dtype)


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
        #: By gradient slot: the turn of its last copy.
        self._turns: dict[int, int] = {}

    @property
    def device(self) -> torch.device:
        return self._tier.device

    @property
    def slots(self) -> DeviceSlots[torch.dtype]:
        return self._tier.slots

    @property
    def loads(self) -> WeightLoads:
        return self._tier.loads

    def in_place(self, source: Buffer) -> Weights | None:
        return self._tier.in_place(source)

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        ticket = self._tier.load(slot, source, after)
        before = [*after, *self._idle[slot]]
        return limited(self._engine, self._link, ticket, source.nbytes, activity=Activity.COPY, after=before)

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        return [ticket]  # the load's turn on the link, too

    def weights(self, slot: int) -> Weights:
        return self._tier.weights(slot)

    def release_weights(self, slot: int) -> None:
        self._tier.release_weights(slot)
        self._idle[slot] = self._computed()

    def allocate_gradient(self) -> tuple[int, list[int]]:
        slot, guards = self._tier.allocate_gradient()
        turn = self._turns.pop(slot, None)
        return slot, guards if turn is None else [*guards, turn]

    def gradients(self, slot: int) -> torch.Tensor:
        return self._tier.gradients(slot)

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        copied, after = self._tier.copy_to_host(slot)
        turn = self._engine.hold(self._link, copied.nbytes, Activity.COPY, after=self._computed())
        self._turns[slot] = turn
        return copied, [*after, turn]

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        self._tier.free_gradient(slot, after)

    def close(self) -> None:
        self._tier.close()


def open_device_tier(
    engine: Engine,
    slots: DeviceSlots[torch.dtype],
    device: torch.device,
    huge_pages: HugePages,
    loads: WeightLoads = WeightLoads.COPIED,
    pinning: Capability = Capability.AUTO,
) -> DeviceTier:
    """The tier for ``device``; ``loads`` is for the CPU, ``pinning`` (of the host buffers of gradients) for others.
    Raises OSError or torch's OutOfMemoryError when the slots do not fit, CapabilityError for ON where it is refused.
    """
    if has_own_memory(device):
        from tierstore.tiers.accelerated import AcceleratedTier

        return AcceleratedTier(engine, slots, device, huge_pages, pinning)
    return HostDeviceTier(engine, slots, huge_pages, loads)


def weights_in_place(setting: Capability, device: torch.device, link: LinkConfig) -> Resolution:
    """Whether experts are computed with where they lie in the host cache. Raises CapabilityError for ON where they
    cannot be.
    """

    def probe() -> Finding:
        if has_own_memory(device):
            return Finding(False, f"{device} has memory of its own")
        if link.on:
            return Finding(False, "copies are to take the time of a limited link")
        return Finding(True, "the CPU computes")

    return resolve("weights_in_place", setting, probe)


def describe_weights(resolution: Resolution) -> str:
    """What ``weights_in_place`` found, as one line."""
    how = "computed with in the host cache" if resolution else "copied to slots of the device"
    return f"expert weights: {how} ({resolution.reason})"
