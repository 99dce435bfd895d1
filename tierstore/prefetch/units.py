"""The schedule of a model whose dense parameters are sliced: embedding, blocks, norm and head."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.dense.config import DenseConfig
from tierstore.dense.layout import FP32, UnitLayout, blocks_held, gather_width
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.schedule import GatherBuffer, MicroPass, QueueLimits, Schedule, Unit
from tierstore.tiers.slots import ElementType


def unit_schedule(
    layouts: Sequence[UnitLayout],
    dense: DenseConfig,
    prefetch: PrefetchConfig,
    *,
    moe_layers: Sequence[int],
    compute: ElementType = FP32,
    micro_batches: int = 1,
    first_block: int = 0,
    order: Sequence[MicroPass] = (),
) -> Schedule:
    """The schedule of a model with units ``layouts``, whose block ``first_block`` is unit 1. ``order``: as in ``Schedule``.

    Its horizontal budget is that of the fusion buffers: each block takes one, whatever its size; the first and the
    last unit have buffers of their own. The step of dense parameters is deferred, clipped or not: their norm is known
    when all gradients are.
    """
    narrow = gather_width(dense, compute)
    last = len(layouts) - 1
    # At least a byte: blocks of which nothing is trained take turns with their buffers, too.
    buffer = max((layout.gathered_bytes(narrow) for layout in layouts[1:last]), default=0) or 1

    def unit(number: int, layout: UnitLayout) -> Unit:
        if number in (0, last):
            return Unit(layout.name, buffer=GatherBuffer.OWN)
        block = first_block + number - 1
        return Unit(layout.name, buffer, block if block in moe_layers else None, block)

    return Schedule(
        units=tuple(unit(number, layout) for number, layout in enumerate(layouts)),
        horizontal=QueueLimits(prefetch.gather_depth, buffer * blocks_held(layouts, dense)),
        vertical=QueueLimits(prefetch.depth),
        reshard=dense.reshard,
        micro_batches=micro_batches,
        order=tuple(order),
    )
