"""The norm of a step's gradients over all ranks of the mesh.

Each gradient counts once, wherever copies of it are: an expert's on the first of its replicas, a dense parameter's once
for the ranks that hold it whole, each part of a divided one. Sums of squares are in double precision. Those of experts
are added without rounding but the last, so that it does not matter which rank holds which; those of dense units are added
in the order of units, which is that of stages. So the bits are those of one process with the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tierstore.dense import DenseSlices
from tierstore.parallel import Channel, Mesh
from tierstore.prefetch.gradients import ExpertGradients
from tierstore.stats import Cause, StallLedger, Tier

#: Doubles that a rank's sum travels in: with four of them what is cut off is below 2**-159 of it.
_PARTS = 4


def gradient_norm(gradients: ExpertGradients, dense: DenseSlices, mesh: Mesh, ledger: StallLedger) -> float:
    """Of the experts' gradients and the dense ones, on every rank the same bits; NaN where any is not finite.

    A collective of all ranks of ``mesh``, all of whose gradients are final. Raises PeerError.
    """
    with ledger.stall(layer=None, tier=Tier.HOST, cause=Cause.OPTIMIZER):
        squares = gradients.squares()
    total = _of_experts(squares, mesh, ledger) + _of_units(dense.squares(), mesh, ledger)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def _of_experts(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    world = mesh.world
    if world.size == 1:
        return math.fsum(squares)
    # Replicas of an expert have the same gradient: it counts once.
    own = torch.tensor(expansion(squares if mesh.replica.rank == 0 else ()), dtype=torch.float64)
    every = own.new_empty(world.size * _PARTS)
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        world.all_gather(every, own, channel=Channel.EXCHANGE).wait()
    return math.fsum(every.tolist())


def _of_units(squares: Sequence[float], mesh: Mesh, ledger: StallLedger) -> float:
    with ledger.stall(layer=None, tier=Tier.RANKS, cause=Cause.AGREEMENT):
        stages: list[Sequence[float]] = mesh.pipeline.all_gather_object(squares)
    total = 0.0
    for stage in stages:
        for square in stage:
            total += square
    return total


def expansion(values: Sequence[float]) -> list[float]:
    """Four doubles, each the rounding of what those before leave of the sum of ``values``; the sum itself first, and alone
    where it is not finite.
    """
    parts = [math.fsum(values)]
    while len(parts) < _PARTS:
        left = math.fsum([*values, *(-part for part in parts)]) if math.isfinite(parts[0]) else 0.0
        parts.append(left)
    return parts
