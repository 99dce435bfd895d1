"""A pass in chunks, simulated event by event: the network serves one message at a time, the device one chunk's experts.

All dispatches are issued before all combines, each in the order of chunks; a chunk's experts follow its dispatch, its
combine follows its experts. ``plan.simulate`` runs it. What it finds owes nothing to the closed form of
``parallel.pipeline_degree``, so that each checks the other; and chunks need not be equal here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.parallel.pipeline_degree import Degree, LayerPass, PipelineCosts
from tierstore.plan.simulate import Run, simulate
from tierstore.prefetch.operations import Kind, Operation

#: Times that differ by less than this share are equal.
_EQUAL = 1e-12


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of one chunk's dispatch, of its experts and of its combine."""

    dispatch: float
    experts: float
    combine: float


def equal_chunks(costs: PipelineCosts, work: LayerPass, degree: int) -> list[ChunkTimes]:
    """``work`` in ``degree`` equal chunks."""
    one = ChunkTimes(
        costs.alpha_a * work.dispatch.starts + costs.beta_a * work.dispatch.amount / degree,
        costs.alpha_e * work.experts.starts + costs.beta_e * work.experts.amount / degree,
        costs.alpha_a * work.combine.starts + costs.beta_a * work.combine.amount / degree,
    )
    return [one] * degree


def simulate_chunks(chunks: Sequence[ChunkTimes]) -> Run:
    """When each operation of ``chunks`` begins and ends: r dispatches, r computations, r combines."""
    count = len(chunks)
    listed = [Operation(Kind.ALL_TO_ALL, 0, chunk, ()) for chunk in range(count)]
    listed += [Operation(Kind.EXPERT, 1, chunk, (chunk,)) for chunk in range(count)]
    listed += [Operation(Kind.ALL_TO_ALL, 2, chunk, (count + chunk,)) for chunk in range(count)]

    def seconds(operation: Operation) -> float:
        chunk = chunks[operation.nbytes]  # its number stands where bytes would
        return (chunk.dispatch, chunk.experts, chunk.combine)[operation.position]

    return simulate(listed, seconds)


def exhaustive_degree(costs: PipelineCosts, work: LayerPass, *, most: int) -> Degree:
    """The best of 1..``most``, each simulated; of equal ones the smallest. ``wanted`` is no more than that."""
    times = [simulate_chunks(equal_chunks(costs, work, r)).seconds for r in range(1, most + 1)]
    limit = min(times) * (1 + _EQUAL)
    best = next(r for r, spent in enumerate(times, start=1) if spent <= limit)
    return Degree(best, times[best - 1], best)
