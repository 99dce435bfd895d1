"""The layout of parameter groups in flat memory, and of each rank's slices of it.

A *parameter group* (``unit``) is the parameters that are needed together. Each of its *regions* is one flat array of
parameters of one gathered type, padded so that every rank has an equal *slice*: rank r holds elements ``[r * n, (r + 1) *
n)``. A group without trained parameters (an embedding with LoRA) has no region, no slices and no record. Gathering a
region is one all-gather of slices, and the result is the flat array, of which parameters are views. A group has one
region; two if some of its parameters are gathered in a narrower type (norms and routers stay fp32); one for each
parameter without fusion.

A table whose rows are divided over ranks (``Gathered.NO``) is a region of its own, cut between rows, and never gathered:
each rank's slice is its part of the parameter.

A rank's state of a group is its slices of the regions, one after another: one record of its store. Parameters that a run
may add or drop (a task's own head) have a region and a record each, after the group's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tierstore.accelerator import pinned_bytes
from tierstore.dense.config import DenseConfig, Fusion, GatherDtype, OptimizerState, Reshard
from tierstore.model.config import ComputeDtype
from tierstore.parallel.layout import SLICE_ALIGNMENT, TableRows
from tierstore.store.format import SECTION_ALIGNMENT
from tierstore.tiers.slots import ElementType

if TYPE_CHECKING:
    import torch
    from torch import nn

#: A parameter: the name of its group, and its index in it.
ParameterPlace = tuple[str, int]


class Narrow(Enum):
    """Whether a region's parameters may be sent in the compute type."""

    NO = "no"
    YES = "yes"  # the model casts them to it before their only use


class Gathered(Enum):
    """Whether a region's slices are gathered for a pass."""

    YES = "yes"
    NO = "no"  # a divided table: each rank has the rows of its slice


@dataclass(frozen=True, slots=True)
class Span:
    """Parameter ``index`` of the group, at ``offset`` (elements) in its region."""

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
    #: The name of its record, if not the group's.
    record: str = ""

    @property
    def table(self) -> TableRows:
        """The division of the rows of a region that is not gathered."""
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
    """One parameter group: its name and its regions, in the order of a rank's slices."""

    name: str
    regions: tuple[Region, ...]

    @property
    def key(self) -> str:
        """The key of the group's record."""
        return f"dense.{self.name}"

    @property
    def empty(self) -> bool:
        """Whether the group has no trained parameter, and so no record."""
        return not self.regions

    @property
    def parameters(self) -> int:
        """The number of parameters (tensors)."""
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
        """Each record's content, as a layout of its own (with the same indices), and its offset among a rank's slices.
        Empty if no parameter of the group is trained.
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
        """Elements of all ranks' slices of gathered regions: the gradients that a rank computes for all ranks."""
        return sum(region.padded_numel for region in self.regions if region.gathered is Gathered.YES)

    def divided(self, index: int) -> bool:
        """Whether parameter ``index`` is a table whose rows are divided over ranks."""
        return any(
            region.gathered is Gathered.NO and any(span.index == index for span in region.spans)
            for region in self.regions
        )

    def slices(self) -> Iterator[tuple[Region, slice]]:
        """The regions, and the offset of each one's slice among a rank's slices."""
        start = 0
        for region in self.regions:
            yield region, slice(start, start + region.slice_numel)
            start += region.slice_numel

    def parts(self, rank: int) -> Iterator[tuple[Region, Span, slice, slice]]:
        """For each parameter of which ``rank`` has a part: its region and span, the part's elements in the rank's slices,
        and those in the flat parameter; of a divided table, in the whole table.
        """
        for region, kept in self.slices():
            begin, end = rank * region.slice_numel, (rank + 1) * region.slice_numel
            for span in region.spans:
                low, high = max(span.offset, begin), min(span.offset + span.numel, end)
                if low < high:
                    own = slice(kept.start + low - begin, kept.start + high - begin)
                    yield region, span, own, slice(low - span.offset, high - span.offset)

    def gathered_bytes(self, narrow: ElementType) -> int:
        """Bytes of the gathered group, with narrow regions in ``narrow``, the others in fp32."""
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
    """The layouts of ``units`` for ``ranks`` ranks. ``narrow``: parameters that the model casts before their only use.
    ``tables``: parameters whose rows are divided over ranks, so that each rank may have its own part. ``apart``:
    parameters with records of their own, by name; the last ones of their groups.
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
    """``unit_layouts`` from shapes alone: for each parameter, whether it may be sent narrow, and its whole shape."""
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


def recut(
    old: UnitLayout, new: UnitLayout, rank: int, read: Callable[[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """The slices of ``rank`` in ``new``, fp32 [slice_numel], read by ``read(old rank, offset, count)`` in ascending order;
    padding is zero.

    Both must be layouts of one group; ranks, fusion and gathered regions may differ. Raises ValueError.
    """
    import torch

    held = {span.index: (region, kept, span) for region, kept in old.slices() for span in region.spans}
    wanted = {span.index: span.shape for region in new.regions for span in region.spans}
    if {index: span.shape for index, (_, _, span) in held.items()} != wanted:
        raise ValueError(
            f"{old.key}: {old.name} and {new.name} are not the same parameters in the same order"
        )
    slices = torch.zeros(new.slice_numel)
    for _, span, own, part in new.parts(rank):
        before, source, was = held[span.index]
        done, count = 0, own.stop - own.start
        while done < count:
            owner, offset = divmod(was.offset + part.start + done, before.slice_numel)
            step, start = min(before.slice_numel - offset, count - done), own.start + done
            slices[start : start + step] = read(owner, source.start + offset, step)
            done += step
    return slices


# Bytes of one rank ------------------------------------------------------------------------------------------
#
# By formula, from layout and configuration. For S parameters on N ranks: 16 S / N bytes of state (fp32 weight, gradient,
# two moments), and buffers that do not depend on the number of blocks.


#: Parameter groups whose moments are in memory at once, if moments live on disk: one is stepped, one is being written.
MOMENT_PLACES = 2


@dataclass(frozen=True, slots=True)
class DenseBytes:
    """Bytes of dense parameters on one rank, by purpose."""

    slices: int  # weights, gradients and moments in memory: the host's unless OptimizerState.DEVICE
    fusion: int  # fusion buffers, with the memory of the backend's gather
    gradients: int  # gradient buffers: a group's own gradients, and those from other ranks
    staging: int = 0  # pinned host memory between slices on the host and buffers on an accelerator

    @property
    def total(self) -> int:
        return self.slices + self.fusion + self.gradients + self.staging


def dense_bytes(
    layouts: Sequence[UnitLayout],
    config: DenseConfig,
    *,
    ranks: int,
    compute: ElementType = ComputeDtype.FP32,
    device_type: str = "cpu",
) -> DenseBytes:
    """The memory of a DenseSlices of ``layouts``, cut for ``ranks``. The first and the last group are the ends."""
    narrow = gather_width(config, compute)
    ends = {0, len(layouts) - 1}
    gathered = [layout.gathered_bytes(narrow) for layout in layouts]
    padded = [layout.exchanged_numel * 4 for layout in layouts]

    def of_blocks(sizes: Sequence[int]) -> list[int]:
        return [size for unit, size in enumerate(sizes) if unit not in ends]

    buffers: list[int] = []
    if needs_gather(layouts, config, ranks, narrow):
        buffers += [gathered[unit] for unit in sorted(ends)]
        buffers += [max(of_blocks(gathered), default=0)] * blocks_held(layouts, config)
    fusion = sum(buffers) * (2 if gather_copies(ranks, device_type) else 1)
    slots: list[int] = []
    if needs_exchange(config, ranks):
        blocks = of_blocks(padded)
        slots += [max(padded[unit] for unit in ends)]
        slots += [max(blocks, default=0)] * min(config.gradient_buffers, len(blocks))
    staging = 0
    if device_type != "cpu" and config.optimizer_state is not OptimizerState.DEVICE:
        staging = sum(pinned_bytes(nbytes // ranks) for nbytes in [*buffers, *slots])
    held, most = sum(layout.slice_numel for layout in layouts), max(layout.slice_numel for layout in layouts)
    on_disk = config.optimizer_state is OptimizerState.NVME
    slices = 8 * held + moment_bytes(most) if on_disk else 16 * held
    return DenseBytes(slices, fusion, 2 * sum(slots), staging)


def gather_width(config: DenseConfig, compute: ElementType) -> ElementType:
    """The size of the type in which narrow regions are gathered."""
    return compute if config.gather is GatherDtype.COMPUTE else ComputeDtype.FP32


def moment_bytes(largest: int) -> int:
    """Staging memory for moments on disk: two arrays of ``largest`` elements for each staging buffer."""
    return MOMENT_PLACES * 2 * (-(-largest * 4 // SECTION_ALIGNMENT) * SECTION_ALIGNMENT)


def gather_copies(ranks: int, device_type: str) -> bool:
    """Whether a gather needs the same memory again: Gloo's is an all-to-all, which sends from a copy on three or more
    ranks."""
    return ranks > 2 and device_type == "cpu"


def blocks_held(layouts: Sequence[UnitLayout], config: DenseConfig) -> int:
    """The number of fusion buffers shared by blocks: one for each block that can be gathered at once."""
    blocks = max(len(layouts) - 2, 0)
    return blocks if config.reshard is Reshard.AFTER_BACKWARD else min(config.buffers, blocks)


def needs_gather(layouts: Sequence[UnitLayout], config: DenseConfig, ranks: int, narrow: ElementType) -> bool:
    """Whether parameters need buffers, instead of being views of the slices."""
    narrows = narrow.itemsize != ComputeDtype.FP32.itemsize and any(
        region.narrow is Narrow.YES for layout in layouts for region in layout.regions
    )
    return ranks > 1 or narrows or config.optimizer_state is not OptimizerState.DEVICE


def needs_exchange(config: DenseConfig, ranks: int) -> bool:
    """Whether gradients need an exchange, instead of going straight to the slices."""
    return ranks > 1 or config.optimizer_state is not OptimizerState.DEVICE
