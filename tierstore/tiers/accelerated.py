"""The device tier on an accelerator: slots in device memory, pinned host buffers, one copy stream per direction.

The engine knows nothing of devices: each copy on a stream is an *external* ticket, completed when the bytes have arrived.
Computation does not wait for the ticket: the compute stream waits for the copy's event, and the host waits only until the
copy is on its stream.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from tierstore._native import Arena, Buffer, Engine, HugePages
from tierstore.accelerator import pinned, reached, synchronize
from tierstore.capabilities import Capability
from tierstore.quant.weights import QuantizedWeights, Weights
from tierstore.tiers.device import LeavingGradients, WeightLoads, gradient_type, tensor_of
from tierstore.tiers.slots import DeviceSlots
from tierstore.timeline import NullTimeline, TimelineSink, Track


class DeviceCopy:
    """A copy to be put on ``stream`` once the tickets ``after`` have finished. The thread that waits for the tickets queues
    it, unless a caller needs it sooner and queues it itself.
    """

    def __init__(
        self, stream: torch.Stream, after: Sequence[int], copy: Callable[[], None], ticket: int
    ) -> None:
        self.after = after
        self.ticket = ticket
        self._stream = stream
        self._copy: Callable[[], None] | None = copy
        self._queued: torch.Event | None = None
        self._lock = threading.Lock()

    def queue(self) -> torch.Event:
        """Put the copy on its stream, unless it is there; returns its event. The tickets ``after`` must have finished."""
        with self._lock:
            if self._queued is None:
                assert self._copy is not None
                with self._stream:
                    self._copy()
                    self._queued = reached(self._stream.device)
                self._copy = None  # also frees what the closure holds
            return self._queued


class CopyStream:
    """Copies on a separate stream. A copy with unfinished tickets is not put on the stream, so that none waits behind it."""

    def __init__(self, engine: Engine, device: torch.device, name: str) -> None:
        self.stream = torch.Stream(device)
        self._engine = engine
        #: Copies that follow unfinished tickets, and copies that are on the stream.
        self._waiting: queue.SimpleQueue[DeviceCopy | None] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[DeviceCopy | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._queue_ready, name=f"{name}-wait", daemon=True),
            threading.Thread(target=self._complete, name=f"{name}-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, after: Sequence[int], copy: Callable[[], None]) -> DeviceCopy:
        """Put ``copy`` on the stream: at once if the tickets ``after`` have finished, otherwise when they have."""
        before = [earlier for earlier in after if earlier]
        # The ticket fails with the error of those it follows; waiting for it makes them urgent.
        submitted = DeviceCopy(self.stream, before, copy, self._engine.external(after=before))
        if all(map(self._engine.done, before)):
            self._queue(submitted)
        else:
            self._waiting.put(submitted)
        return submitted

    def _queue_ready(self) -> None:
        while (copy := self._waiting.get()) is not None:
            self._queue(copy)

    def _queue(self, copy: DeviceCopy) -> None:
        try:
            self._engine.wait_all(copy.after)
            copy.queue()
        except Exception as error:  # raised again to whoever waits for the ticket
            self._engine.complete_external(copy.ticket, str(error))
        else:
            self._running.put(copy)

    def _complete(self) -> None:
        while (copy := self._running.get()) is not None:
            try:
                copy.queue().synchronize()
            except Exception as error:
                self._engine.complete_external(copy.ticket, str(error))
            else:
                self._engine.complete_external(copy.ticket)

    def close(self) -> None:
        """Wait for all copies and stop the threads."""
        for copies, thread in zip((self._waiting, self._running), self._threads, strict=True):
            copies.put(None)
            thread.join()


class AcceleratedTier:
    """Slots on ``device``. Gradients are copied to host buffers, which are pinned if possible."""

    def __init__(
        self,
        engine: Engine,
        slots: DeviceSlots[torch.dtype],
        device: torch.device,
        huge_pages: HugePages,
        pinning: Capability = Capability.AUTO,
        timeline: TimelineSink | None = None,
    ) -> None:
        self.device = device
        self._timeline = timeline or NullTimeline()
        self.slots = slots
        self.loads = WeightLoads.COPIED
        self._weights = _slots(slots.weights, slots.weight_bytes, slots.weight_content_bytes, device)
        gradients = _slots(slots.gradients, slots.gradient_bytes, slots.gradient_content_bytes, device)
        self._gradients = [slot.view(gradient_type(slots)) for slot in gradients]
        # Frozen experts have no gradient slots; an arena has at least a page.
        self._host_arena = Arena(max(slots.host_bytes, 4096), huge_pages)
        self._pinned = contextlib.ExitStack()
        self._pinned.enter_context(pinned(self._host_arena, device, pinning))
        self._leaving = LeavingGradients(
            [
                Buffer(
                    self._host_arena,
                    [(i * slots.gradient_bytes, slots.gradient_bytes)],
                    slots.gradient_content_bytes,
                )
                for i in range(slots.host_buffers)
            ],
            slots.spare,
        )
        # The allocator may have given the slots memory that work queued on the compute stream still uses.
        self._idle = [reached(device)] * slots.weights
        self._free: deque[tuple[int, list[int]]] = deque((slot, []) for slot in range(slots.gradients))
        self._up = CopyStream(engine, device, "tierstore-h2d")
        self._down = CopyStream(engine, device, "tierstore-d2h")
        #: The last copy into each weight slot.
        self._loads: dict[int, DeviceCopy] = {}

    def in_place(self, source: Buffer) -> Weights | None:
        """Always None: the device computes with weights in its own memory."""
        return None

    def load(self, slot: int, source: Buffer, after: Sequence[int]) -> int:
        target, idle = self._weights[slot], self._idle[slot]

        def copy() -> None:
            self._up.stream.wait_event(idle)
            offset = 0
            with self._drawn(self._up, "load weights", source.nbytes):
                for piece in source.arrays():
                    part = torch.from_numpy(piece)
                    target[offset : offset + part.numel()].copy_(part, non_blocking=True)
                    offset += part.numel()

        load = self._loads[slot] = self._up.submit(after, copy)
        return load.ticket

    def awaited(self, slot: int, ticket: int) -> Sequence[int]:
        return self._loads[slot].after

    def weights(self, slot: int) -> Weights:
        torch.accelerator.current_stream(self.device).wait_event(self._loads[slot].queue())
        if self.slots.quantized is not None:
            return QuantizedWeights(self.slots.quantized, self._weights[slot])
        return self._weights[slot].view(self.slots.compute)

    def release_weights(self, slot: int) -> None:
        self._idle[slot] = reached(self.device)

    def allocate_gradient(self) -> tuple[int, list[int]]:
        return self._free.popleft()

    def gradients(self, slot: int) -> torch.Tensor:
        return self._gradients[slot]

    def copy_to_host(self, slot: int, *, spare: bool = False) -> tuple[Buffer, list[int]]:
        made = reached(self.device)
        buffer, guards = self._leaving.begin(slot, spare=spare)
        source, target = self._gradients[slot], tensor_of(buffer, gradient_type(self.slots))

        def copy() -> None:
            self._down.stream.wait_event(made)
            with self._drawn(self._down, "copy gradient to host", buffer.nbytes):
                target.copy_(source, non_blocking=True)

        return buffer, self._leaving.left(slot, self._down.submit(guards, copy).ticket)

    def free_gradient(self, slot: int, after: Sequence[int]) -> None:
        self._free.append((slot, self._leaving.end(slot, after)))

    @contextlib.contextmanager
    def _drawn(self, copies: CopyStream, name: str, nbytes: int) -> Iterator[None]:
        begun = self._timeline.now(copies.stream)
        yield
        self._timeline.add(
            Track.DEVICE_COPIES, name, begun, self._timeline.now(copies.stream), {"nbytes": nbytes}
        )

    def close(self) -> None:
        self._up.close()
        self._down.close()
        with self._pinned:
            # Other streams too: the caller frees what they copy to.
            synchronize(self.device)


def _slots(count: int, stride: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """``count`` tensors of ``nbytes`` bytes that start every ``stride`` bytes. The alignment of a matrix product's operands
    decides which kernel runs, and the result's bits must not depend on the slot.
    """
    memory = torch.empty(count * stride, dtype=torch.uint8, device=device)
    starts = range(0, count * stride, stride)
    return [memory[start : start + nbytes] for start in starts]
