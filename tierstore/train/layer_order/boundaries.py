"""Where a step in layer order keeps the inputs of its blocks until the backward pass needs them.

In layer order all micro-batches go through a block before any goes through the next one. What enters a block is its
*boundary*: one tensor for each micro-batch. The forward pass keeps them, the backward pass takes them back, the last
layer's first, and computes each block again from its own::

    forward                        backward
    layer 0: keep (0, 0) (0, 1)    layer 2: take (2, 0) (2, 1)
    layer 1: keep (1, 0) (1, 1)    layer 1: take (1, 0) (1, 1)
    layer 2: keep (2, 0) (2, 1)    layer 0: take (0, 0) (0, 1)

A ``BoundaryStore`` gives back the same bytes, whatever its budget. ``MemoryBoundaries`` keeps all of them in memory;
``SpilledBoundaries`` (``tierstore.train.layer_order.spilling``) has a budget, and what does not fit goes to disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BoundaryCounts:
    """Since the store was opened. ``peak_bytes``: the most that was in memory at once. ``read_bytes`` and
    ``written_bytes``: what came back from disk and what went there, padding included.
    """

    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class BoundaryStore(Protocol):
    """Keeps one tensor for each layer and micro-batch between the passes of a step. One serialised caller."""

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        """Keeps the content of ``tensor``, which nobody changes afterwards. It is kept without its graph. Layers ascend.

        Raises ValueError where ``(layer, micro)`` is kept already, or a higher layer is; OSError where an earlier one could
        not be written.
        """
        ...

    def take(self, layer: int, micro: int) -> Tensor:
        """What was kept, contiguous, with the same values, shape, type and device; it is forgotten here. Layers descend.

        Raises KeyError where it is not kept, ValueError where a higher layer still is, and ChecksumError or OSError where
        it does not come back as it was written.
        """
        ...

    def clear(self) -> None:
        """Forgets what is kept: the step is given up."""
        ...

    @property
    def counts(self) -> BoundaryCounts: ...

    def close(self) -> None:
        """Forgets everything and frees memory and disk."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class BoundaryOrder:
    """Which boundaries are kept. It holds callers to the order of a step."""

    def __init__(self) -> None:
        self._kept: dict[int, set[int]] = {}  # ascending

    def keep(self, layer: int, micro: int) -> None:
        """Raises ValueError as ``BoundaryStore.keep``."""
        last = next(reversed(self._kept), layer)
        if layer < last:
            raise ValueError(f"boundaries are kept layer after layer: {last} was before {layer}")
        micros = self._kept.setdefault(layer, set())
        if micro in micros:
            raise ValueError(f"the boundary of layer {layer}, micro-batch {micro} is kept already")
        micros.add(micro)

    def take(self, layer: int, micro: int) -> None:
        """Raises KeyError and ValueError as ``BoundaryStore.take``."""
        micros = self._kept.get(layer, ())
        if micro not in micros:
            raise KeyError((layer, micro))
        last = next(reversed(self._kept))
        if layer != last:
            raise ValueError(f"boundaries are taken last layer first: layer {last} comes before {layer}")
        self._kept[layer].remove(micro)
        if not self._kept[layer]:
            del self._kept[layer]

    def clear(self) -> None:
        self._kept.clear()


class MemoryBoundaries:
    """A ``BoundaryStore`` without a budget. On a CPU it keeps the tensors themselves and copies nothing; what comes from
    another device is copied to the host.
    """

    def __init__(self) -> None:
        self._order = BoundaryOrder()
        self._kept: dict[tuple[int, int], tuple[Tensor, torch.device]] = {}
        self._nbytes = self._peak = 0

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        self._order.keep(layer, micro)
        held = _owned(tensor.detach()).to("cpu")
        self._kept[layer, micro] = held, tensor.device
        self._nbytes += held.nbytes
        self._peak = max(self._peak, self._nbytes)

    def take(self, layer: int, micro: int) -> Tensor:
        self._order.take(layer, micro)
        held, device = self._kept.pop((layer, micro))
        self._nbytes -= held.nbytes
        return held.to(device)

    def clear(self) -> None:
        self._order.clear()
        self._kept.clear()
        self._nbytes = 0

    @property
    def counts(self) -> BoundaryCounts:
        return BoundaryCounts(peak_bytes=self._peak)

    def close(self) -> None:
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _owned(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous; a copy where it is part of a larger storage, which keeping it would keep alive."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() <= tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
