"""The order of passes of a pipeline stage under 1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2.1).

Stage s of p first takes ``min(M, p - s)`` of M micro-batches forward. From then on each backward pass is followed by a
forward pass as long as there are any, so that no more micro-batches than these have their activations held at a time. The
last stage takes each micro-batch forward and at once backward.

``Schedule1F1B.pipeline_order`` of torch 2.13 is another sequence for the last stage than the one that its ``step`` takes.
So the list is derived here, and a test compares it with what ran.
"""

from __future__ import annotations

from tierstore.cache.access import Phase
from tierstore.prefetch.schedule import MicroPass


def micro_batches_held(stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches stage ``stage`` of ``stages`` holds activations at most."""
    return min(micro_batches, stages - stage)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[MicroPass, ...]:
    """The passes of stage ``stage`` (from 0) of ``stages`` in a step of ``micro_batches``, in order.

    Raises ValueError for a stage that there is not.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"expected a stage of 0 to {stages - 1}, got {stage}")
    held = micro_batches_held(stage, stages, micro_batches)
    order = [MicroPass(Phase.FORWARD, micro) for micro in range(held)]
    for micro in range(micro_batches):
        order.append(MicroPass(Phase.BACKWARD, micro))
        if micro + held < micro_batches:
            order.append(MicroPass(Phase.FORWARD, micro + held))
    return tuple(order)
