"""Where a step in layer order keeps the inputs of its blocks until the backward pass needs them.

In layer order all micro-batches go through a block before any goes through the next one. What enters a block is its
*boundary*: one tensor for each micro-batch. The forward pass keeps them, the backward pass takes them back, the last
layer's first, and computes each block again from its own::

    forward                        backward
    layer 0: keep (0, 0) (0, 1)    layer 2: take (2, 0) (2, 1)
    layer 1: keep (1, 0) (1, 1)    layer 1: take (1, 0) (1, 1)
    layer 2: keep (2, 0) (2, 1)    layer 0: take (0, 0) (0, 1)

A ``BoundaryStore`` gives back the same bytes, whatever its budget. ``MemoryBoundaries`` keeps all of them in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BoundaryCounts:
    """Totals since the store was opened. ``peak_bytes``: the most that was in memory at once. ``read_bytes`` and
    ``written_bytes``: what went to disk and came back, padding included.
    """

    kept: int = 0
    taken: int = 0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class BoundaryStore(Protocol):
    """Keeps one tensor for each layer and micro-batch between the passes of a step. One serialised caller."""

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        """Keeps the content of ``tensor``, which nobody changes afterwards. It is kept without its graph.

        Raises ValueError where ``(layer, micro)`` is kept already, OSError where an earlier one could not be written.
        """
        ...

    def take(self, layer: int, micro: int) -> Tensor:
        """What was kept, with the same bytes, shape, type and device, for the caller to keep; it is forgotten here.

        Fastest in the order of the backward pass: layers descend, and in each micro-batches ascend. Raises KeyError,
        and ChecksumError or OSError where it does not come back as it was written.
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


class MemoryBoundaries:
    """A ``BoundaryStore`` without a budget. On a CPU it keeps the tensors themselves and copies nothing; what comes from
    another device is copied to the host.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, torch.device]] = {}
        self._nbytes = self._peak = 0
        self._counts = [0, 0]

    def keep(self, layer: int, micro: int, tensor: Tensor) -> None:
        if (layer, micro) in self._kept:
            raise ValueError(f"the boundary of layer {layer}, micro-batch {micro} is kept already")
        held = owned(tensor.detach()).to("cpu")
        self._kept[layer, micro] = held, tensor.device
        self._nbytes += held.nbytes
        self._peak = max(self._peak, self._nbytes)
        self._counts[0] += 1

    def take(self, layer: int, micro: int) -> Tensor:
        held, device = self._kept.pop((layer, micro))
        self._nbytes -= held.nbytes
        self._counts[1] += 1
        return held.to(device)

    def clear(self) -> None:
        self._kept.clear()
        self._nbytes = 0

    @property
    def counts(self) -> BoundaryCounts:
        return BoundaryCounts(kept=self._counts[0], taken=self._counts[1], peak_bytes=self._peak)

    def close(self) -> None:
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def owned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy where it is part of a larger storage, which keeping it would keep alive."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
