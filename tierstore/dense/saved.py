"""What autograd keeps for the backward pass must not point into a buffer that another unit will be gathered into.

Inside the context of ``saved_by_place`` every tensor that autograd saves and whose memory lies in a fusion buffer (a
parameter, a transposed view of one) is kept as its place in the unit, and comes back as a view of the buffer that the
unit is gathered in by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierstore.dense.fusion import FusionBuffer, FusionPool


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a gathered unit: ``offset`` and ``strides`` in elements of ``dtype``."""

    unit: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def saved_by_place(
    pool: FusionPool, present: Callable[[int], FusionBuffer]
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context. ``present(unit)`` gives the buffer in which the unit is whole, gathering it if it must."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if not tensor.numel():
            return tensor
        buffer = pool.find(tensor.untyped_storage().data_ptr())
        if buffer is None or buffer.unit is None:
            return tensor
        return _Saved(
            buffer.unit, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )

    def unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        flat = present(saved.unit).memory.view(saved.dtype)
        return flat.as_strided(saved.shape, saved.strides, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
