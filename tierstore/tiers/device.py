"""The device tier: slots for weights and for gradients under way.

Weights are copied into a slot before an expert runs (``tierstore.prefetch.device_cache`` decides what stays there). Its
gradient is computed in a slot and copied to a host buffer as soon as it is complete. The CPU can stand in for a GPU, with
its own slots and real copies, so that there is one code path; its slots count against the host budget. With
``WeightLoads.IN_PLACE`` it computes with the weights in the host cache instead, without copies, and gradients stay in
their slots. ``LimitedTier`` emulates a device behind a slower link.

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
from tierstore.capabilities import Capability, Finding, resolve
from tierstore.links import LinkConfig, limited, open_link
from tierstore.quant.weights import QuantizedWeights, Weights
from tierstore.tiers.slots import DeviceSlots, SlotGradient
from tierstore.timeline import TimelineSink


class WeightLoads(Enum):
    """How weights are loaded when the device's memory is the host's."""

    COPIED = "copied"
    #: Contiguous weights are used where they are (``DeviceTier.in_place``). Others are copied.
    IN_PLACE = "in place"


class DeviceTier(Protocol):
    """Weight and gradient slots, identified by number. A weight slot is loaded, used and released, possibly before the
    device has finished the work that uses it. A gradient slot is allocated, written and copied to a host buffer. The slot
    is free once it has been copied, the buffer once the tickets given to ``free_gradient`` have finished. A copy waits for
    the buffer of its kind, usual or ``spare``, that becomes free first.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def slots(self) -> DeviceSlots[torch.dtype]: ...
    @property
    def loads(self) -> WeightLoads: ...

    def in_place(self, source: Buffer) -> Weights | None:
        """The weights in ``source``, without a copy, valid until ``source`` changes. None: load them into a slot."""
        ...

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        """Queue the copy of ``source`` into weight slot ``slot``, behind the tickets ``after``; returns its ticket."""
        ...

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        """The tickets that the host must wait for before it uses ``slot``, whose last load is ``ticket``: the load, or, if
        the device itself waits for the load, the tickets that the load follows.
        """
        ...

    def weights(self, slot: int) -> Weights:
        """The weights in slot ``slot``, flat, in the compute type or quantised (``slots.quantized``). Call it once the
        tickets ``awaited`` have finished; work that is queued on the device afterwards may use them.
        """
        ...

    def release_weights(self, slot: int) -> None:
        """Allow loading the slot again once the device has done all work queued so far."""
        ...

    def allocate_gradient(self) -> tuple[int, list[int]]:
        """Allocate a gradient slot; returns it and the tickets that must finish before it is written."""
        ...

    def gradients(self, slot: int) -> torch.Tensor: ...

    def copy_to_host(self, slot: int, *, spare: bool = False) -> tuple[Buffer, list[int]]:
        """Copy the gradient of ``slot``, complete once the device has done all work queued so far, to host memory; returns
        the buffer, one of ``slots.spare`` if ``spare``, and the tickets after which it holds the gradient.
        """
        ...

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        """Free ``slot``, whose copy to the host is queued, and its buffer once the tickets ``after`` have finished."""
        ...

    def close(self) -> None: ...


class LeavingGradients:
    """The host ``buffers`` that gradients are copied to, and the tickets that must finish before reuse. The usual ones and
    the ``spare`` ones, which come last, are each used in rotation.
    """

    def __init__(self, buffers: Sequence[Buffer], spare: int) -> None:
        free = [(buffer, list[int]()) for buffer in buffers]
        usual = len(free) - spare
        self._free = {False: deque(free[:usual]), True: deque(free[usual:])}
        #: By slot: the buffer that its gradient is copied to, whether it is spare, and the ticket of the copy.
        self._used: dict[int, tuple[Buffer, bool, list[int]]] = {}

    def begin(self, slot: int, *, spare: bool) -> tuple[Buffer, list[int]]:
        """Take a buffer for the gradient of ``slot``; returns it and the tickets that the copy must follow."""
        buffer, guards = self._free[spare].popleft()
        self._used[slot] = buffer, spare, []
        return buffer, guards

    def left(self, slot: int, ticket: int) -> list[int]:
        """Record that ``ticket`` copies the gradient of ``slot``; returns the tickets that its readers must follow."""
        self._used[slot][-1].append(ticket)
        return [ticket]

    def end(self, slot: int, after: Sequence[int]) -> list[int]:
        """Free the buffer of ``slot`` once ``after`` have finished; returns the tickets after which the slot is free."""
        buffer, spare, copied = self._used.pop(slot)
        self._free[spare].append((buffer, list(after)))
        return copied


def _nothing() -> list[int]:
    return []


class HostDeviceTier:
    """The CPU as a device: slots in a separate arena, and host buffers for gradients if weights are copied to slots.

    ``computed`` returns tickets that finish once the device has done all work queued so far; it returns none if the
    caller itself computes.
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
        buffers = slots.host_buffers if loads is WeightLoads.COPIED else 0
        self._arena = Arena(slots.nbytes + buffers * slots.gradient_bytes, huge_pages)
        self.device = torch.device("cpu")
        weight_end = slots.weights * slots.weight_bytes
        self._weights = [
            self._buffer(i * slots.weight_bytes, slots.weight_bytes, slots.weight_content_bytes)
            for i in range(slots.weights)
        ]
        self._gradients = [
            self._buffer(
                weight_end + i * slots.gradient_bytes, slots.gradient_bytes, slots.gradient_content_bytes
            )
            for i in range(slots.gradients)
        ]
        self._leaving = LeavingGradients(
            [
                self._buffer(
                    slots.nbytes + i * slots.gradient_bytes,
                    slots.gradient_bytes,
                    slots.gradient_content_bytes,
                )
                for i in range(buffers)
            ],
            slots.spare,
        )
        #: By weight slot: the tickets that must finish before it is loaded again.
        self._idle: list[list[int]] = [[] for _ in self._weights]
        #: Multiplies by quantised weights, on as many threads as torch uses.
        self._products = None if slots.quantized is None else QuantProducts(torch.get_num_threads())
        self._slot_weights = [self._weights_in(buffer) for buffer in self._weights]
        #: The results of ``in_place`` by source.
        self._in_place: WeakKeyDictionary[Buffer, Weights] = WeakKeyDictionary()
        self._gradient_tensors = [tensor_of(buffer, gradient_type(slots)) for buffer in self._gradients]
        self._free: deque[tuple[int, list[int]]] = deque((slot, []) for slot in range(slots.gradients))

    def _buffer(self, offset: int, capacity: int, nbytes: int) -> Buffer:
        return Buffer(self._arena, [(offset, capacity)], nbytes)

    def _weights_in(self, buffer: Buffer) -> Weights:
        """The weights in the contiguous ``buffer``, without a copy."""
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

    def copy_to_host(self, slot: int, *, spare: bool = False) -> tuple[Buffer, list[int]]:
        if self.loads is WeightLoads.IN_PLACE:  # the optimizer reads the slot itself
            return self._gradients[slot], []
        buffer, guards = self._leaving.begin(slot, spare=spare)
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


def gradient_type(slots: DeviceSlots[torch.dtype]) -> torch.dtype:
    """The type of gradients in ``slots``."""
    return torch.float32 if slots.gradient is SlotGradient.SUM else slots.compute


def tensor_of(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over a contiguous buffer, without a copy. The tensor keeps the memory alive."""
    return torch.from_numpy(buffer.array()).view(dtype)


def limited_tier(
    tier: DeviceTier, engine: Engine, config: LinkConfig, computed: Callable[[], list[int]] = _nothing
) -> DeviceTier:
    """``tier`` with its copies slowed down to the link of ``config``; ``tier`` itself if that sets no limit."""
    link = open_link(config)
    return tier if link is None else LimitedTier(tier, engine, link, computed)


class LimitedTier:
    """``tier`` with copies, in both directions, that also take turns on ``link``.

    A copy is done when both the real copy and its turn are done. The turn begins when the copy may begin: after the
    tickets that it follows and those of ``computed``, which finish once the device has done all work queued so far (none
    if the caller itself computes).
    """

    def __init__(
        self, tier: DeviceTier, engine: Engine, link: Link, computed: Callable[[], list[int]] = _nothing
    ) -> None:
        self._tier = tier
        self._engine = engine
        self.link = link
        self._computed = computed
        self._idle: list[list[int]] = [[] for _ in range(tier.slots.weights)]
        #: By gradient slot: the ticket of its last copy's turn on the link.
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
        return limited(self._engine, self.link, ticket, source.nbytes, activity=Activity.COPY, after=before)

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        return [ticket]  # includes the load's turn on the link

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

    def copy_to_host(self, slot: int, *, spare: bool = False) -> tuple[Buffer, list[int]]:
        copied, after = self._tier.copy_to_host(slot, spare=spare)
        turn = self._engine.hold(self.link, copied.nbytes, Activity.COPY, after=self._computed())
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
    timeline: TimelineSink | None = None,
) -> DeviceTier:
    """Open the tier of ``device``. ``loads`` applies to the CPU only, ``pinning`` (of gradients' host buffers) and
    ``timeline`` (of copies; those of the CPU are the engine's) to others.
    Raises OSError or torch's OutOfMemoryError if the slots do not fit, CapabilityError if ``pinning`` is ON and refused.
    """
    if has_own_memory(device):
        from tierstore.tiers.accelerated import AcceleratedTier

        return AcceleratedTier(engine, slots, device, huge_pages, pinning, timeline)
    return HostDeviceTier(engine, slots, huge_pages, loads)


def weights_in_place(setting: Capability, device: torch.device, link: LinkConfig) -> Finding:
    """Whether expert weights are used in place, in the host cache. Raises CapabilityError if ``setting`` is ON and they
    cannot be.
    """

    def probe() -> Finding:
        if has_own_memory(device):
            return Finding(False, f"{device} has memory of its own")
        if link.on:
            return Finding(False, "copies are to take the time of a limited link")
        return Finding(True, "the CPU computes")

    return resolve("weights_in_place", setting, probe)


def describe_weights(in_place: Finding) -> str:
    """One line that describes the result of ``weights_in_place``."""
    how = "computed with in the host cache" if in_place else "copied to slots of the device"
    return f"expert weights: {how} ({in_place.reason})"
