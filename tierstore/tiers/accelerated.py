"""The device tier on an accelerator: slots in device memory, pinned host buffers, one copy thread a direction.

The engine knows nothing of devices. A copy that a stream carries out is an *external* ticket: a thread
waits for the tickets that it follows, puts the copy on its stream, waits for the stream and
completes the ticket. Both threads spend their time outside the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from tierstore._native import Arena, Buffer, Engine, HugePages
from tierstore.accelerator import pin_arena, unpin_arena
from tierstore.capabilities import Capability, resolve
from tierstore.quant.weights import QuantizedWeights, Weights
from tierstore.tiers.device import tensor_of
from tierstore.tiers.slots import DeviceSlots

_Work = tuple[Sequence[int], Callable[[], None], int]


class _CopyThread:
    """Runs copies in order on a stream of its own; each ticket completes when the bytes have arrived."""

    def __init__(self, engine: Engine, device: torch.device, name: str) -> None:
        self._engine = engine
        self.stream = torch.Stream(device)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, after: Sequence[int], copy: Callable[[], None]) -> int:
        before = [earlier for earlier in after if earlier]
        # It fails with the error of what it follows; waiting for it makes what it follows urgent.
        ticket = self._engine.external(after=before)
        self._work.put((before, copy, ticket))
        return ticket

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            after, copy, ticket = work
            try:
                self._engine.wait_all(after)
                with self.stream:
                    copy()
                self.stream.synchronize()
            except Exception as error:  # raised again for those that wait for the ticket
                self._engine.complete_external(ticket, str(error))
            else:
                self._engine.complete_external(ticket)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class AcceleratedTier:
    """Slots on ``device``. Gradients are copied to host memory, pinned if it can be (``pinned``), a buffer for each slot."""

    def __init__(
        self,
        engine: Engine,
        slots: DeviceSlots[torch.dtype],
        device: torch.device,
        huge_pages: HugePages,
        pinning: Capability = Capability.AUTO,
    ) -> None:
        self.device = device
        self.slots = slots
        self._weights = _slots(slots.weights, slots.weight_bytes, slots.weight_content_bytes, device)
        gradients = _slots(slots.gradients, slots.gradient_bytes, slots.numel * 4, device)
        self._gradients = [slot.view(torch.float32) for slot in gradients]
        # Frozen experts have no gradient slots; an arena has at least a page.
        self._host_arena = Arena(max(slots.gradients * slots.gradient_bytes, 4096), huge_pages)
        self.pinned = resolve("pinned_memory", pinning, lambda: pin_arena(self._host_arena, device))
        self._host = [
            Buffer(self._host_arena, [(i * slots.gradient_bytes, slots.gradient_bytes)], slots.numel * 4)
            for i in range(slots.gradients)
        ]
        # The allocator may have given them memory that work queued on the compute stream still uses.
        self._idle = [self._reached()] * slots.weights
        self._free: deque[tuple[int, list[int]]] = deque((slot, []) for slot in range(slots.gradients))
        self._up = _CopyThread(engine, device, "tierstore-h2d")
        self._down = _CopyThread(engine, device, "tierstore-d2h")

    def in_place(self, source: Buffer) -> Weights | None:
        """None: experts are computed with on the device."""
        return None

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        target, idle = self._weights[slot], self._idle[slot]

        def copy() -> None:
            self._up.stream.wait_event(idle)
            offset = 0
            for piece in source.arrays():
                part = torch.from_numpy(piece)
                target[offset : offset + part.numel()].copy_(part, non_blocking=True)
                offset += part.numel()

        return self._up.submit(after, copy)

    def weights(self, slot: int) -> Weights:
        if self.slots.quantized is not None:
            return QuantizedWeights(self.slots.quantized, self._weights[slot])
        return self._weights[slot].view(self.slots.compute)

    def release_weights(self, slot: int) -> None:
        self._idle[slot] = self._reached()

    def _reached(self) -> torch.Event:
        """An event that occurs when the compute stream has done all work queued so far."""
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def allocate_gradient(self) -> tuple[int, list[int]]:
        return self._free.popleft()

    def gradients(self, slot: int) -> torch.Tensor:
        return self._gradients[slot]

    def copy_to_host(self, slot: int) -> tuple[Buffer, list[int]]:
        made = self._reached()
        source, target = self._gradients[slot], tensor_of(self._host[slot], torch.float32)

        def copy() -> None:
            self._down.stream.wait_event(made)
            target.copy_(source, non_blocking=True)

        return self._host[slot], [self._down.submit((), copy)]

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        self._free.append((slot, list(after)))

    def close(self) -> None:
        self._up.close()
        self._down.close()
        if self.pinned:
            unpin_arena(self._host_arena, self.device)


def _slots(count: int, stride: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Bytes that start every ``stride`` bytes. A product's kernel depends on how its operands are aligned, and
    its bits may not depend on the slot.
    """
    memory = torch.empty(count * stride, dtype=torch.uint8, device=device)
    starts = range(0, count * stride, stride)
    return [memory[start : start + nbytes] for start in starts]
