"""What dense parameters take on one rank: by formula, from the layout and the configuration alone.

Of S parameters on N ranks: 16 S / N bytes of state (fp32 weight, gradient, two moments), and buffers that do not depend
on how many blocks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.dense.config import DenseConfig, GatherDtype, OptimizerState, Reshard
from tierstore.dense.layout import Narrow, UnitLayout
from tierstore.store.format import SECTION_ALIGNMENT
from tierstore.tiers.slots import ElementType

#: Units whose moments are in memory at once when they live on disk: one is stepped, one write drains.
MOMENT_PLACES = 2


@dataclass(frozen=True, slots=True)
class Width:
    """A type by its size alone."""

    itemsize: int


FP32 = Width(4)


@dataclass(frozen=True, slots=True)
class DenseBytes:
    """Bytes of dense parameters on one rank, by what they are for."""

    slices: int  # weights, gradients and moments that are in memory: the host's unless OptimizerState.DEVICE
    fusion: int  # fusion buffers, with what the backend's gather needs beside them
    gradients: int  # gradient buffers: a unit's own gradients, and what the other ranks send

    @property
    def total(self) -> int:
        return self.slices + self.fusion + self.gradients


def dense_bytes(
    layouts: Sequence[UnitLayout],
    config: DenseConfig,
    *,
    ranks: int,
    compute: ElementType = FP32,
    device_type: str = "cpu",
) -> DenseBytes:
    """What a DenseSlices of ``layouts``, cut for ``ranks``, allocates. The first and the last unit are the ends."""
    narrow = gather_width(config, compute)
    ends = {0, len(layouts) - 1}
    gathered = [layout.gathered_bytes(narrow) for layout in layouts]
    padded = [layout.exchanged_numel * 4 for layout in layouts]

    def of_blocks(sizes: Sequence[int]) -> list[int]:
        return [size for unit, size in enumerate(sizes) if unit not in ends]

    fusion = gradients = 0
    if needs_gather(layouts, config, ranks, narrow):
        fusion = sum(gathered[unit] for unit in ends)
        fusion += blocks_held(layouts, config) * max(of_blocks(gathered), default=0)
        if gather_copies(ranks, device_type):
            fusion *= 2
    if needs_exchange(config, ranks):
        blocks = of_blocks(padded)
        gradients = max(padded[unit] for unit in ends)
        gradients += min(config.gradient_buffers, len(blocks)) * max(blocks, default=0)
        gradients *= 2
    held, most = sum(layout.slice_numel for layout in layouts), max(layout.slice_numel for layout in layouts)
    if config.optimizer_state is OptimizerState.NVME:
        return DenseBytes(8 * held + moment_bytes(most), fusion, gradients)
    return DenseBytes(16 * held, fusion, gradients)


def gather_width(config: DenseConfig, compute: ElementType) -> ElementType:
    """The type in which narrow regions are gathered, by its size."""
    return compute if config.gather is GatherDtype.COMPUTE else FP32


def moment_bytes(largest: int) -> int:
    """Memory through which moments on disk pass: two arrays of ``largest`` elements at each place."""
    return MOMENT_PLACES * 2 * (-(-largest * 4 // SECTION_ALIGNMENT) * SECTION_ALIGNMENT)


def gather_copies(ranks: int, device_type: str) -> bool:
    """Whether a gather needs as much again: Gloo's is an all-to-all, which for three ranks and more sends a copy."""
    return ranks > 2 and device_type == "cpu"


def blocks_held(layouts: Sequence[UnitLayout], config: DenseConfig) -> int:
    """The fusion buffers that blocks share: as many as can be gathered at once."""
    blocks = max(len(layouts) - 2, 0)
    return blocks if config.reshard is Reshard.AFTER_BACKWARD else min(config.buffers, blocks)


def needs_gather(layouts: Sequence[UnitLayout], config: DenseConfig, ranks: int, narrow: ElementType) -> bool:
    """Whether parameters are anything but views of the slices."""
    narrows = narrow.itemsize != FP32.itemsize and any(
        region.narrow is Narrow.YES for layout in layouts for region in layout.regions
    )
    return ranks > 1 or narrows or config.optimizer_state is not OptimizerState.DEVICE


def needs_exchange(config: DenseConfig, ranks: int) -> bool:
    """Whether gradients go anywhere but straight to the slices."""
    return ranks > 1 or config.optimizer_state is not OptimizerState.DEVICE
