"""How a unit's parameters lie in flat memory, and which part of it is whose: the slice index.

A *unit* is the parameters that are needed together. Each of its *regions* is one flat array of parameters of one
gathered type, padded so that every rank has an equal *slice* of it: rank r holds elements ``[r * n, (r + 1) * n)``.
A unit of which nothing is trained (LoRA leaves an embedding as it is) has no region, no slices and no record.
Gathering a region is one all-gather of slices, and the result is the flat array, of which parameters are views. A
unit has one region; two where some of its parameters are gathered in a narrower type (norms and routers stay fp32);
one for each parameter without fusion.

A table whose rows are divided over ranks (``Gathered.NO``) is a region of its own, cut between rows: each rank's slice is
the part of the parameter that it has, and it is not gathered.

A rank's state of a unit is its slices of the regions, one after another: one record of its store. Parameters that may
come and go from one run to the next (a task's own head) have a region and a record each, behind the unit's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tierstore.dense.config import DenseConfig, Fusion, GatherDtype, OptimizerState, Reshard
from tierstore.parallel.layout import SLICE_ALIGNMENT, TableRows
from tierstore.store.format import SECTION_ALIGNMENT
from tierstore.tiers.slots import ElementType

if TYPE_CHECKING:
    import torch
    from torch import nn

#: A parameter by the name of its unit and its number in it.
ParameterPlace = tuple[str, int]


class Narrow(Enum):
    """Whether a region's parameters may travel in the compute type."""

    NO = "no"
    YES = "yes"  # the model casts them there before their only use


class Gathered(Enum):
    """Whether a region's slices are gathered for a pass."""

    YES = "yes"
    NO = "no"  # a table: each rank has the rows of its slice


@dataclass(frozen=True, slots=True)
class Span:
    """Parameter ``index`` of the unit, at ``offset`` (elements) in its region."""

    index: int
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Region:
    """Parameters side by side, cut into ``ranks`` equal slices."""

    spans: tuple[Span, ...]
    ranks: int
    narrow: Narrow
    gathered: Gathered = Gathered.YES
    #: The name of the record that keeps it, where that is not the unit's.
    record: str = ""

    @property
    def table(self) -> TableRows:
        """How the rows of a region that is not gathered are divided."""
        rows, width = self.spans[0].shape
        return TableRows(rows, width, self.ranks)

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(span.numel for span in self.spans)

    @property
    def slice_numel(self) -> int:
        """Elements that one rank holds, padding included."""
        if self.gathered is Gathered.NO:
            return self.table.each * self.table.width
        step = self.ranks * SLICE_ALIGNMENT
        return -(-self.numel // step) * SLICE_ALIGNMENT

    @property
    def padded_numel(self) -> int:
        """Elements of the gathered region, padding included."""
        return self.slice_numel * self.ranks


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit: its name and its regions, in the order in which a rank's slices of them are kept."""

    name: str
    regions: tuple[Region, ...]

    @property
    def key(self) -> str:
        """The key of its record."""
        return f"dense.{self.name}"

    @property
    def empty(self) -> bool:
        """Whether nothing of the unit is trained: it has no record."""
        return not self.regions

    @property
    def parameters(self) -> int:
        """How many parameters (tensors) it has."""
        return sum(len(region.spans) for region in self.regions)

    @property
    def slice_numel(self) -> int:
        """Elements of one rank's slices."""
        return sum(region.slice_numel for region in self.regions)

    @property
    def padded_numel(self) -> int:
        """Elements of all ranks' slices."""
        return sum(region.padded_numel for region in self.regions)

    def records(self) -> list[tuple[UnitLayout, slice]]:
        """What each of its records keeps, as a unit of its own (its indices stay), and where that lies among a rank's
        slices. None where nothing of the unit is trained.
        """
        found: list[tuple[UnitLayout, slice]] = []
        for region, kept in self.slices():
            name, alone = region.record or self.name, replace(region, record="")
            if found and found[-1][0].name == name:
                before, start = found[-1][0], found[-1][1].start
                found[-1] = (UnitLayout(name, (*before.regions, alone)), slice(start, kept.stop))
            else:
                found.append((UnitLayout(name, (alone,)), kept))
        return found

    @property
    def exchanged_numel(self) -> int:
        """Elements of all ranks' slices of what is gathered: the gradients that a rank makes for all of them."""
        return sum(region.padded_numel for region in self.regions if region.gathered is Gathered.YES)

    def divided(self, index: int) -> bool:
        """Whether parameter ``index`` is a table whose rows are divided over ranks."""
        return any(
            region.gathered is Gathered.NO and any(span.index == index for span in region.spans)
            for region in self.regions
        )

    def slices(self) -> Iterator[tuple[Region, slice]]:
        """The regions, and where a rank's slice of each lies among its slices."""
        start = 0
        for region in self.regions:
            yield region, slice(start, start + region.slice_numel)
            start += region.slice_numel

    def gathered_bytes(self, narrow: ElementType) -> int:
        """Bytes of the gathered unit, with its narrow regions in ``narrow``, the others in fp32."""
        return sum(
            region.padded_numel * (narrow.itemsize if region.narrow is Narrow.YES else 4)
            for region in self.regions
            if region.gathered is Gathered.YES
        )


def unit_layouts(
    units: Sequence[tuple[str, Sequence[nn.Parameter]]],
    *,
    ranks: int,
    narrow: Sequence[nn.Parameter] = (),
    fusion: Fusion = Fusion.UNIT,
    tables: Mapping[ParameterPlace, TableRows] | None = None,
    apart: Mapping[str, nn.Parameter] | None = None,
) -> list[UnitLayout]:
    """How ``units`` are cut for ``ranks`` ranks. ``narrow``: parameters that the model casts before their only use.
    ``tables``: those of which each rank has some of the rows, so that a parameter may be a rank's own. ``apart``: those that
    have records of their own, by name; the last ones of their units.
    """
    cast = {id(parameter) for parameter in narrow}
    tables = tables or {}
    named = {id(parameter): name for name, parameter in (apart or {}).items()}

    def described(name: str, index: int, parameter: nn.Parameter) -> tuple[Narrow, tuple[int, ...]]:
        table = tables.get((name, index))
        shape = tuple(parameter.shape) if table is None else (table.rows, table.width)
        return Narrow.YES if id(parameter) in cast else Narrow.NO, shape

    shapes = [
        (name, [described(name, i, p) for i, p in enumerate(parameters) if id(p) not in named])
        for name, parameters in units
    ]
    layouts = layouts_of_shapes(shapes, ranks=ranks, fusion=fusion, tables=tables.keys())
    for number, (_, parameters) in enumerate(units):
        own = [
            Region((Span(index, 0, tuple(parameter.shape)),), ranks, Narrow.NO, record=named[id(parameter)])
            for index, parameter in enumerate(parameters)
            if id(parameter) in named
        ]
        layouts[number] = replace(layouts[number], regions=(*layouts[number].regions, *own))
    return layouts


def layouts_of_shapes(
    units: Sequence[tuple[str, Sequence[tuple[Narrow, tuple[int, ...]]]]],
    *,
    ranks: int,
    fusion: Fusion = Fusion.UNIT,
    tables: Collection[ParameterPlace] = (),
) -> list[UnitLayout]:
    """``unit_layouts`` of parameters that are not there: of each, whether it may travel narrow, and its whole shape."""
    found = []
    for name, parameters in units:
        divided = [index for index in range(len(parameters)) if (name, index) in tables]
        found.append(UnitLayout(name, tuple(_regions(parameters, ranks, fusion, divided))))
    return found


def _regions(
    parameters: Sequence[tuple[Narrow, tuple[int, ...]]], ranks: int, fusion: Fusion, divided: Sequence[int]
) -> Iterator[Region]:
    gathered = [(index, *each) for index, each in enumerate(parameters) if index not in divided]
    if fusion is Fusion.PARAMETER:
        for index, kind, shape in gathered:
            yield Region((Span(index, 0, shape),), ranks, kind)
    else:
        for wanted in Narrow:
            spans: list[Span] = []
            offset = 0
            for index, kind, shape in gathered:
                if kind is wanted:
                    spans.append(Span(index, offset, shape))
                    offset += spans[-1].numel
            if spans:
                yield Region(tuple(spans), ranks, wanted)
    for index in divided:
        kind, shape = parameters[index]
        yield Region((Span(index, 0, shape),), ranks, kind, Gathered.NO)


# Another number of ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` elements from ``source`` in the slices of old rank ``rank`` to ``target`` in the new slices."""

    rank: int
    source: int
    target: int
    count: int


def moves(old: UnitLayout, new: UnitLayout, rank: int) -> Iterator[Move]:
    """What the slices of ``rank`` in ``new`` are made of, in ascending order; what is not covered is padding: zero.

    Both must be layouts of one unit; ranks, fusion and what is gathered may differ. Raises ValueError.
    """
    held = {span.index: (region, kept, span) for region, kept in old.slices() for span in region.spans}
    wanted = {span.index: span.shape for region in new.regions for span in region.spans}
    if {index: span.shape for index, (_, _, span) in held.items()} != wanted:
        raise ValueError(
            f"{old.key}: {old.name} and {new.name} are not the same parameters in the same order"
        )
    for after, target in new.slices():
        begin, end = rank * after.slice_numel, (rank + 1) * after.slice_numel
        for span in after.spans:
            before, source, was = held[span.index]
            low, high = max(span.offset, begin), min(span.offset + span.numel, end)
            while low < high:
                owner, offset = divmod(was.offset + low - span.offset, before.slice_numel)
                count = min(before.slice_numel - offset, high - low)
                yield Move(owner, source.start + offset, target.start + low - begin, count)
                low += count


def recut(
    old: UnitLayout, new: UnitLayout, rank: int, read: Callable[[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """The slices of ``rank`` in ``new``, fp32 [slice_numel], of what ``read(old rank, offset, count)`` gives."""
    import torch

    slices = torch.zeros(new.slice_numel)
    for move in moves(old, new, rank):
        slices[move.target : move.target + move.count] = read(move.rank, move.source, move.count)
    return slices


# Bytes of one rank ------------------------------------------------------------------------------------------
#
# By formula, from the layout and the configuration alone. Of S parameters on N ranks: 16 S / N bytes of state (fp32
# weight, gradient, two moments), and buffers that do not depend on how many blocks there are.


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
    """The fusion buffers that blocks share: one for each that can be gathered at once."""
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
