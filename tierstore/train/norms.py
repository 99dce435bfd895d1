"""The gradient norm of a model that is cut into pipeline stages, with the bits that its ranks would find without stages.

Dense squares are added unit by unit, from the embedding to the head. An expert's squares are added exactly and rounded
once (``math.fsum``), so each stage sends its part of that sum exactly, as a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierstore.dense import DenseSlices
from tierstore.parallel import Mesh
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.stats import Cause, StallLedger, Tier


def exact_sum(values: Sequence[float]) -> list[float]:
    """A few numbers whose exact sum is that of ``values``, largest first; one that is not finite where the sum is not."""
    parts: list[float] = []
    while rest := _rounded([*values, *(-part for part in parts)]):
        parts.append(rest)
        if not math.isfinite(rest):
            return [rest]
    return parts


def squares_over_stages(
    experts: ExpertGradients, dense: DenseSlices, mesh: Mesh, ledger: StallLedger
) -> float:
    """The sum of squares of all gradients of all stages: the same bits on every rank. A collective of the world.

    Not finite where any gradient is not.
    """
    with ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.OPTIMIZER):
        # Replicas of an expert have the same gradient: it counts once.
        own = exact_sum(experts.squares()) if mesh.replica.rank == 0 else []
    units = dense.squares()
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        ranks: list[tuple[list[float], list[float]]] = mesh.world.all_gather_object((own, units))
    each = mesh.world.size // mesh.stages
    total = 0.0
    for place in range(each):
        total += _rounded([part for parts, _ in ranks[place::each] for part in parts])
    total = total / each * each  # as the mean over ranks has it
    squares = 0.0
    for _, stage in ranks[::each]:
        for square in stage:
            squares += square
    return total + squares


def _rounded(values: Sequence[float]) -> float:
    """Their sum, rounded once; NaN where it is not finite."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
