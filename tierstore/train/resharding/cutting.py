"""What each rank of a layout has of the logical model: which units, which parts of their parameters, which slices.

A unit lies in the stage that has its block; the first stage has the embedding, and the last one norm and head. There
tensor-parallel ranks have the parts of its parameters that ``Division`` says, and the others whole; the ranks with the
same parts and other pieces of the batch have each one slice of every region (``tierstore.dense.layout``). ``join`` and
``part`` are the two directions, of one array at a time: the weights, or one of the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from tierstore.dense import Fusion, UnitLayout, recut
from tierstore.dense.layout import Narrow, ParameterPlace, layouts_of_shapes
from tierstore.parallel.layout import Division, Layout
from tierstore.parallel.tensor import part_of, whole_of


@dataclass(frozen=True, slots=True)
class DenseParameter:
    """A whole parameter: its shape, whether it may travel narrow, and how tensor-parallel ranks divide it, if they do."""

    shape: tuple[int, ...]
    narrow: Narrow
    division: Division | None = None

    def part_shape(self, ranks: int) -> tuple[int, ...]:
        """What one of ``ranks`` tensor-parallel ranks has of it."""
        return self.shape if self.division is None else self.division.part_shape(self.shape, ranks)


@dataclass(frozen=True, slots=True)
class DenseUnitShape:
    """A unit of whole parameters."""

    name: str
    parameters: tuple[DenseParameter, ...]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands in a layout: its stage, its number among ``data``, and in its tensor-parallel group."""

    stage: int
    data: int
    tensor: int


def place_of(layout: Layout, rank: int) -> RankPlace:
    """The place of ``rank`` in ``layout``."""
    stage, within = divmod(rank, layout.replicas * layout.expert)
    if layout.tensor == 1:
        return RankPlace(stage, within, 0)
    return RankPlace(stage, *divmod(within, layout.expert))


def rank_at(layout: Layout, place: RankPlace) -> int:
    """The rank whose place is ``place``."""
    within = place.data if layout.tensor == 1 else place.data * layout.expert + place.tensor
    return place.stage * layout.replicas * layout.expert + within


class DenseCut:
    """``units`` as ``layout`` divides them: embedding, blocks, norm and head, in the order of the forward pass, and then
    heads of tasks.

    ``blocks``: those of each stage. ``tables``: parameters of which each data rank has some of the rows.
    """

    def __init__(
        self,
        units: Sequence[DenseUnitShape],
        layout: Layout,
        fusion: Fusion,
        *,
        blocks: Sequence[range],
        tables: Collection[ParameterPlace] = (),
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.tables = tables
        self._units = units
        self._records = self._layouts(fusion, layout.data)
        #: The same as one of the data ranks would have them alone.
        self._whole = self._layouts(fusion, 1)

    def record(self, number: int) -> UnitLayout:
        """How a rank's record of unit ``number`` lies; alike on all that have it."""
        return self._records[number]

    def stage(self, number: int) -> int:
        """The stage of unit ``number``."""
        block = min(max(number - 1, 0), self.blocks[-1].stop - 1)
        return next(stage for stage, blocks in enumerate(self.blocks) if block in blocks)

    def units_of(self, rank: int) -> list[int]:
        """The units that have a record on ``rank``."""
        stage = place_of(self.layout, rank).stage
        return [
            number
            for number in range(len(self._units))
            if self.stage(number) == stage and not self._records[number].empty
        ]

    def holders(self, number: int) -> list[int]:
        """The ranks that have a record of unit ``number``."""
        size, stage = self.layout.replicas * self.layout.expert, self.stage(number)
        return list(range(stage * size, (stage + 1) * size))

    def join(self, number: int, read: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """The whole parameters of unit ``number``, fp32, where ``read(rank)`` gives the slices of each of its holders."""
        parts = [self._joined_slices(number, tensor, read) for tensor in range(self.layout.tensor)]
        return [
            parts[0][index]
            if parameter.division is None
            else whole_of([of_rank[index] for of_rank in parts], parameter.division)
            for index, parameter in enumerate(self._units[number].parameters)
        ]

    def part(self, number: int, whole: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The slices of ``rank`` of unit ``number``, fp32 [slice_numel], whose whole parameters are ``whole``."""
        place = place_of(self.layout, rank)
        own = [
            full
            if parameter.division is None
            else part_of(full, parameter.division, place.tensor, self.layout.tensor)
            for parameter, full in zip(self._units[number].parameters, whole, strict=True)
        ]
        before = self._whole[number]
        flat = torch.zeros(before.slice_numel)
        for region, kept in before.slices():
            for span in region.spans:
                start = kept.start + span.offset
                flat[start : start + span.numel] = own[span.index].reshape(-1)

        def read(_: int, offset: int, count: int) -> torch.Tensor:
            return flat[offset : offset + count]

        return recut(before, self._records[number], place.data, read)

    def _joined_slices(
        self, number: int, tensor: int, read: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """The parameters as tensor-parallel rank ``tensor`` has them."""
        before, after, stage = self._records[number], self._whole[number], self.stage(number)
        slices = [
            read(rank_at(self.layout, RankPlace(stage, data, tensor))) for data in range(self.layout.data)
        ]
        flat = recut(before, after, 0, lambda data, offset, count: slices[data][offset : offset + count])
        found: dict[int, torch.Tensor] = {}
        for region, kept in after.slices():
            for span in region.spans:
                start = kept.start + span.offset
                found[span.index] = flat[start : start + span.numel].view(span.shape)
        return [found[index] for index in range(len(found))]

    def _layouts(self, fusion: Fusion, ranks: int) -> list[UnitLayout]:
        tensor = self.layout.tensor
        shapes = [
            (unit.name, [(p.narrow, p.part_shape(tensor)) for p in unit.parameters]) for unit in self._units
        ]
        return layouts_of_shapes(shapes, ranks=ranks, fusion=fusion, tables=self.tables if ranks > 1 else ())
