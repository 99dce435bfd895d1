"""How a unit's parameters lie in flat memory, and which part of it is whose: the slice index.

A *unit* is the parameters that are needed together. Each of its *regions* is one flat array of parameters of one
gathered type, padded so that every rank has an equal *slice* of it: rank r holds elements ``[r * n, (r + 1) * n)``.
A unit of which nothing is trained (LoRA leaves an embedding as it is) has no region, no slices and no record.
Gathering a region is one all-gather of slices, and the result is the flat array, of which parameters are views. A
unit has one region; two where some of its parameters are gathered in a narrower type (norms and routers stay fp32);
one for each parameter without fusion.

A rank's state of a unit is its slices of the regions, one after another: one record of its store. Parameters that may
come and go from one run to the next (a task's own head) have a region and a record each, behind the unit's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from tierstore.dense.config import Fusion
from tierstore.tiers.slots import ElementType

if TYPE_CHECKING:  # a plan lays units out without torch
    import torch
    from torch import nn

#: Slices are multiples of this many elements: 64 bytes in fp32, 32 in bf16. Then no vector kernel meets a tail.
SLICE_ALIGNMENT = 16


class Narrow(Enum):
    """Whether a region's parameters may travel in the compute type."""

    NO = "no"
    YES = "yes"  # the model casts them there before their only use


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
    #: The name of the record that keeps it, where that is not the unit's.
    record: str = ""

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(span.numel for span in self.spans)

    @property
    def slice_numel(self) -> int:
        """Elements that one rank holds, padding included."""
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
        )


def gathered_dtype(region: Region, narrow: torch.dtype) -> torch.dtype:
    """The type in which ``region`` is gathered."""
    import torch

    return narrow if region.narrow is Narrow.YES else torch.float32


def unit_layouts(
    units: Sequence[tuple[str, Sequence[nn.Parameter]]],
    *,
    ranks: int,
    narrow: Sequence[nn.Parameter] = (),
    fusion: Fusion = Fusion.UNIT,
    apart: Mapping[str, nn.Parameter] | None = None,
) -> list[UnitLayout]:
    """How ``units`` are cut for ``ranks`` ranks. ``narrow``: parameters that the model casts before their only use.
    ``apart``: those that have records of their own, by name; the last ones of their units.
    """
    cast = {id(parameter) for parameter in narrow}
    named = {id(parameter): name for name, parameter in (apart or {}).items()}

    def kind(parameter: nn.Parameter) -> Narrow:
        return Narrow.YES if id(parameter) in cast else Narrow.NO

    found = []
    for name, parameters in units:
        own = [(kind(p), tuple(p.shape)) for p in parameters if id(p) not in named]
        regions = [*_regions(own, ranks, fusion)]
        for index, parameter in enumerate(parameters[len(own) :], start=len(own)):
            span = Span(index, 0, tuple(parameter.shape))
            regions.append(Region((span,), ranks, kind(parameter), named[id(parameter)]))
        found.append(UnitLayout(name, tuple(regions)))
    return found


def layouts_of_shapes(
    units: Sequence[tuple[str, Sequence[tuple[Narrow, tuple[int, ...]]]]],
    *,
    ranks: int,
    fusion: Fusion = Fusion.UNIT,
) -> list[UnitLayout]:
    """``unit_layouts`` of parameters that are not there: of each, whether it may travel narrow, and its shape."""
    return [UnitLayout(name, tuple(_regions(parameters, ranks, fusion))) for name, parameters in units]


def _regions(
    parameters: Sequence[tuple[Narrow, tuple[int, ...]]], ranks: int, fusion: Fusion
) -> Iterator[Region]:
    if fusion is Fusion.PARAMETER:
        for index, (kind, shape) in enumerate(parameters):
            yield Region((Span(index, 0, shape),), ranks, kind)
        return
    for wanted in Narrow:
        spans: list[Span] = []
        offset = 0
        for index, (kind, shape) in enumerate(parameters):
            if kind is wanted:
                spans.append(Span(index, offset, shape))
                offset += spans[-1].numel
        if spans:
            yield Region(tuple(spans), ranks, wanted)


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

    Both must be layouts of one unit, cut for different numbers of ranks. Raises ValueError.
    """
    if [region.spans for region in old.regions] != [region.spans for region in new.regions]:
        raise ValueError(
            f"{old.key}: {old.name} and {new.name} are not the same parameters in the same order"
        )
    for (before, source), (after, target) in zip(old.slices(), new.slices(), strict=True):
        begin = rank * after.slice_numel
        end = min(begin + after.slice_numel, after.numel)
        at = begin
        while at < end:
            owner, offset = divmod(at, before.slice_numel)
            count = min(before.slice_numel - offset, end - at)
            yield Move(owner, source.start + offset, target.start + at - begin, count)
            at += count


def recut(
    old: UnitLayout, new: UnitLayout, rank: int, read: Callable[[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """The slices of ``rank`` in ``new``, fp32 [slice_numel], of what ``read(old rank, offset, count)`` gives."""
    import torch

    slices = torch.zeros(new.slice_numel)
    for move in moves(old, new, rank):
        slices[move.target : move.target + move.count] = read(move.rank, move.source, move.count)
    return slices
