"""Stores for the block inputs of a step in layer order, until the backward pass needs them.

In layer order all micro-batches go through a block before any goes through the next one. The inputs of a block are its
*boundaries*: one tensor for each micro-batch. The forward pass keeps them; the backward pass takes them back, the last
layer's first, and recomputes each block from them::

    forward                        backward
    layer 0: keep (0, 0) (0, 1)    layer 2: take (2, 0) (2, 1)
    layer 1: keep (1, 0) (1, 1)    layer 1: take (1, 0) (1, 1)
    layer 2: keep (2, 0) (2, 1)    layer 0: take (0, 0) (0, 1)

A ``BoundaryStore`` returns the same bytes, whatever its budget. ``MemoryBoundaries`` keeps tensors of the CPU;
``SlottedBoundaries`` copies them to the slots of a budget, and spills the rest to disk.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tierstore._native import Buffer, CrcTable, HugePages, Priority
from tierstore.accelerator import has_own_memory, pinned, reached
from tierstore.capabilities import Capability
from tierstore.errors import ChecksumError
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.core import StoreCore
from tierstore.store.disk.extents import Slot
from tierstore.store.format import SECTION_ALIGNMENT
from tierstore.store.opening import budgeted_arena
from tierstore.tiers.accelerated import CopyStream, DeviceCopy
from tierstore.train.budgets import BoundarySplit


class BoundaryStore(ABC):
    """Keeps one tensor for each layer and micro-batch between the passes of a step. Calls are serialised by the caller."""

    def __init__(self) -> None:
        #: The micro-batches of each layer whose boundaries are kept; layers ascend.
        self._micros: dict[int, set[int]] = {}
        #: Disk traffic since the store was opened, padding included.
        self.read_bytes = self.written_bytes = 0

    @abstractmethod
    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        """Keeps ``tensor`` without its graph; the caller must not change it afterwards. Layers ascend.

        Raises ValueError if ``(layer, micro)`` or a higher layer is kept already; OSError if an earlier boundary could
        not be written.
        """

    @abstractmethod
    def take(self, layer: int, micro: int) -> Tensor:
        """Returns the kept tensor, contiguous, with the same values, shape, type and device, and drops it. Layers descend.

        Raises KeyError if it is not kept, ValueError if a higher layer still is, and ChecksumError or OSError if it
        cannot be read back as it was written.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drops all boundaries: the step is abandoned."""

    def close(self) -> None:
        """Drops all boundaries, and frees memory and disk."""
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_keep(self, layer: int, micro: int) -> None:
        """Records that the boundary is kept. Raises ValueError as ``keep``."""
        last = next(reversed(self._micros), layer)
        if layer < last:
            raise ValueError(f"boundaries are kept layer after layer: {last} was before {layer}")
        micros = self._micros.setdefault(layer, set())
        if micro in micros:
            raise ValueError(f"the boundary of layer {layer}, micro-batch {micro} is kept already")
        micros.add(micro)

    def _check_take(self, layer: int, micro: int) -> None:
        """Records that the boundary is taken. Raises KeyError and ValueError as ``take``."""
        if micro not in self._micros.get(layer, ()):
            raise KeyError((layer, micro))
        last = next(reversed(self._micros))
        if layer != last:
            raise ValueError(f"boundaries are taken last layer first: layer {last} comes before {layer}")
        self._micros[layer].remove(micro)
        if not self._micros[layer]:
            del self._micros[layer]


class MemoryBoundaries(BoundaryStore):
    """Boundaries without a budget: keeps the CPU tensors themselves, without copies."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, int], Tensor] = {}

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        self._check_keep(layer, micro)
        tensor = tensor.detach()
        # A part of a larger storage would keep all of it alive.
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() <= tensor.nbytes
        self._kept[layer, micro] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)

    def take(self, layer: int, micro: int) -> Tensor:
        self._check_take(layer, micro)
        return self._kept.pop((layer, micro))

    def clear(self) -> None:
        self._micros.clear()
        self._kept.clear()


# Boundaries within a budget ---------------------------------------------------------------------------------
#
# Boundaries that the backward pass needs first stay in memory; the others go to disk and back. The order of a step is
# known, so nothing is decided while it runs. Boundaries are numbered by when the backward pass needs them: 0 is the last
# layer's first micro-batch. Memory is ``n`` slots, and boundary ``r`` always lies in slot ``r mod n``. In the forward
# pass the numbers descend: each boundary from ``n`` up is written as soon as it exists, and its slot is reused when that
# write has ended. In the backward pass they ascend: when ``r`` has left its slot, ``r + n`` is read into it. So
# boundaries below ``n`` never touch the disk, each write and each read may take the time of ``n`` boundaries, and a step
# moves the fewest bytes that any order could::
#
#     5 boundaries, n = 2    forward                         backward
#     slot 0                 4 (written)  2 (written)  0     0  2 (read)  4 (read)
#     slot 1                 3 (written)  1                  1  3 (read)
#
# ``n`` is at least the number of micro-batches, so two boundaries of one layer never want the same slot.
#
# Tensors of an accelerator are copied to slots and back on a stream of their own; the slots are pinned if they can be. The
# host waits for the disk alone.
#
# Each read verifies the CRC-32C of its boundary. Disk space is reserved when the store is opened, in files without a
# name: nothing is left, however the process ends.


_SCRATCH_NAME = "boundaries"


def open_boundaries(
    store: StoreCore,
    ledger: StallLedger,
    split: BoundarySplit,
    *,
    micro_batches: int,
    device: torch.device,
    pinning: Capability = Capability.AUTO,
) -> BoundaryStore:
    """A store for the boundaries of ``split``, of all layers from 0 on, tensors on ``device``. Reserves the disk space.

    Raises BudgetError, OSError (ENOSPC), and CapabilityError where memory cannot be pinned.
    """
    if split.slots == split.count and not has_own_memory(device):
        return MemoryBoundaries()
    return SlottedBoundaries(store, ledger, split, micro_batches, device, pinning)


class SlottedBoundaries(BoundaryStore):
    """Boundaries in the slots of ``split``, the rest on disk; made by ``open_boundaries``."""

    def __init__(
        self,
        store: StoreCore,
        ledger: StallLedger,
        split: BoundarySplit,
        micro_batches: int,
        device: torch.device,
        pinning: Capability,
    ) -> None:
        super().__init__()
        self._store = store
        self._ledger = ledger
        self._split = split
        #: The layer and the micro-batch of each boundary, by number, and the inverse.
        layers = range(split.count // micro_batches)
        self._keys = [(layer, micro) for layer in reversed(layers) for micro in range(micro_batches)]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        nbytes = split.memory_bytes
        self._arena = budgeted_arena("boundary_budget", nbytes, nbytes, HugePages.AUTO)
        self._memory = torch.from_numpy(self._arena.view())
        self._device = device
        # By memory slot: the ticket of its last transfer; and the last copy between it and an accelerator.
        self._busy = [0] * split.slots
        self._copied: list[DeviceCopy | None] = [None] * split.slots
        #: Shape and type of each kept tensor, by number.
        self._kept: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._crcs = [CrcTable(1) for _ in range(split.count - split.slots)]
        self._places: list[Slot] = []
        self._copies: CopyStream | None = None
        with contextlib.ExitStack() as closing:
            if spilled := split.count - split.slots:
                extent = store.extents.open_scratch(_SCRATCH_NAME, split.slot_bytes, spilled)
                closing.callback(store.extents.close_scratch, extent)
                self._places += [extent.allocate() for _ in range(spilled)]
            if has_own_memory(device):
                closing.enter_context(pinned(self._arena, device, pinning))
                self._copies = CopyStream(store.engine, device, "tierstore-block-inputs")
                closing.callback(self._copies.close)
            self._closing = closing.pop_all()

    # Keeping -----------------------------------------------------------------------------------------------

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        number = self._numbers.get((layer, micro))
        if number is None:
            raise ValueError(
                f"layer {layer}, micro-batch {micro}: the store was opened without this boundary"
            )
        if tensor.nbytes > self._split.slot_bytes:
            raise ValueError(
                f"layer {layer}: a boundary of {tensor.nbytes} bytes, more than the {self._split.slot_bytes} of a slot"
            )
        self._check_keep(layer, micro)
        self._wait(number)
        if tensor.nbytes:
            self._copy(number, tensor.detach(), self._view(number, tensor.shape, tensor.dtype))
        self._kept[number] = tensor.shape, tensor.dtype
        if number >= self._split.slots and tensor.nbytes:
            place = self._place(number)
            ticket = place.extent.write(
                place.number, [self._buffer(number)], self._crc(number), self._copying(number)
            )
            self._busy[self._slot(number)] = ticket
            self.written_bytes += self._padded(number)

    # Taking ------------------------------------------------------------------------------------------------

    def take(self, layer: int, micro: int) -> Tensor:
        self._check_take(layer, micro)
        number = self._numbers[layer, micro]
        shape, dtype = self._kept[number]
        self._wait(number)
        taken = torch.empty(shape, dtype=dtype, device=self._device)
        if taken.nbytes:
            self._copy(number, self._view(number, shape, dtype), taken)
        del self._kept[number]
        self._read_ahead(number + self._split.slots)
        return taken

    def _read_ahead(self, number: int) -> None:
        """Reads ``number`` back into its slot, which is free."""
        if number not in self._kept or not self._nbytes(number):
            return
        place = self._place(number)
        self._busy[self._slot(number)] = place.extent.read(
            place.number,
            [self._buffer(number)],
            self._crc(number),
            self._copying(number),
            Priority.SPECULATIVE,
        )
        self.read_bytes += self._padded(number)

    def clear(self) -> None:
        self._micros.clear()
        self._kept.clear()
        with self._ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.BOUNDARY_SPILL):
            self._settle()

    def _copy(self, number: int, source: Tensor, target: Tensor) -> None:
        """Copies between the slot of ``number``, which is free or read, and a tensor. The current stream waits for a copy to
        an accelerator; the host does not.
        """
        if self._copies is None:
            target.copy_(source)
            return
        made, stream = reached(self._device), self._copies.stream

        def copy() -> None:
            stream.wait_event(made)
            target.copy_(source, non_blocking=True)
            for tensor in (source, target):
                if has_own_memory(tensor.device):
                    tensor.record_stream(stream)  # memory freed earlier is not reused before the copy

        copied = self._copied[self._slot(number)] = self._copies.submit((), copy)
        if has_own_memory(target.device):
            torch.accelerator.current_stream(self._device).wait_event(copied.queue())

    def _copying(self, number: int) -> Sequence[int]:
        """The ticket of the last copy between the slot of ``number`` and an accelerator."""
        copied = self._copied[self._slot(number)]
        return () if copied is None else (copied.ticket,)

    def _settle(self) -> None:
        for ticket in filter(None, self._busy):
            # A read's data is not needed any more; a failed write has poisoned the engine.
            with contextlib.suppress(Exception):
                self._store.engine.wait(ticket)
        self._busy = [0] * self._split.slots

    # Slots -------------------------------------------------------------------------------------------------

    def _slot(self, number: int) -> int:
        return number % self._split.slots

    def _place(self, number: int) -> Slot:
        """The place of a spilled boundary on disk."""
        return self._places[number - self._split.slots]

    def _crc(self, number: int) -> CrcTable:
        return self._crcs[number - self._split.slots]

    def _nbytes(self, number: int) -> int:
        shape, dtype = self._kept[number]
        return shape.numel() * dtype.itemsize

    def _padded(self, number: int) -> int:
        return -(-self._nbytes(number) // SECTION_ALIGNMENT) * SECTION_ALIGNMENT

    def _view(self, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        begin = self._slot(number) * self._split.slot_bytes
        return self._memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _buffer(self, number: int) -> Buffer:
        begin = self._slot(number) * self._split.slot_bytes
        return Buffer(self._arena, [(begin, self._padded(number))], self._nbytes(number))

    def _wait(self, number: int) -> None:
        """Waits for the transfer between the slot of ``number`` and the disk. Copies follow one another on their stream."""
        if not (ticket := self._busy[self._slot(number)]):
            return
        layer, micro = self._keys[number]
        with contextlib.ExitStack() as stack:
            if not self._store.engine.done(ticket):
                stack.enter_context(
                    self._ledger.stall(layer=layer, tier=Tier.NVME, cause=Cause.BOUNDARY_SPILL)
                )
            try:
                self._store.wait([ticket])
            except ChecksumError as error:
                raise ChecksumError(f"block input of layer {layer}, micro-batch {micro}: {error}") from error
        self._busy[self._slot(number)] = 0

    def close(self) -> None:
        self._micros.clear()
        self._kept.clear()
        self._settle()
        self._closing.close()
