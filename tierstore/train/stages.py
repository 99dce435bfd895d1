"""Pipeline stages: the blocks of each, and the order of its passes in a step. Imports no torch.

Blocks are cut into contiguous ranges of balanced cost. The order of passes is that of 1F1B (PipeDream-Flush, Narayanan et
al. 2021, section 2.2.1).

Stage s of p first takes ``min(M, p - s)`` of M micro-batches forward. From then on each backward pass is followed by a
forward pass as long as there are any, so that activations of no more than these micro-batches are held at a time. The
last stage takes each micro-batch forward and immediately backward.

For the last stage, ``Schedule1F1B.pipeline_order`` of torch 2.13 differs from the sequence that its ``step`` runs. So the
list is derived here, and a test compares it with the passes that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tierstore.cache.access import Phase
from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture
from tierstore.prefetch.schedule import MicroPass
from tierstore.train.config import TrainConfig


def micro_batches_held(stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations stage ``stage`` of ``stages`` holds at a time."""
    return min(micro_batches, stages - stage)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[MicroPass, ...]:
    """The passes of stage ``stage`` (from 0) of ``stages`` in a step of ``micro_batches``, in order.

    Raises ValueError for a stage outside of the range.
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


def block_costs(architecture: Architecture) -> list[int]:
    """The cost of each block, in parameters that a token passes. The last block includes norm and head; the rows of the
    embedding cost nothing.
    """
    of = architecture
    costs = [
        unit.numel + (of.top_k * of.expert_numel if block in of.moe_layers else 0)
        for block, unit in enumerate(of.units[1:-1])
    ]
    costs[-1] += of.units[-1].numel
    return costs


def balanced_blocks(costs: Sequence[int], stages: int) -> list[range]:
    """The blocks of each stage: the cut into contiguous, non-empty ranges whose most expensive range costs least; of
    equal cuts, the one with most blocks in the later stages, which hold fewer micro-batches.

    Raises ConfigError for more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"parallel.stages: expected 1 to {len(costs)} stages of {len(costs)} blocks, got {stages}"
        )
    total = [0, *accumulate(costs)]
    count = len(costs)
    # best[i]: the least cost of the most expensive range, for blocks i and later in the remaining stages.
    best = [total[count] - total[start] for start in range(count)] + [0]
    cuts: list[list[int]] = []
    for left in range(2, stages + 1):
        cut, more = [count] * (count + 1), list(best)
        for start in range(count - left + 1):
            stops = range(start + 1, count - left + 2)
            cut[start] = min(stops, key=lambda stop: (max(total[stop] - total[start], best[stop]), stop))
            more[start] = max(total[cut[start]] - total[start], best[cut[start]])
        best = more
        cuts.append(cut)
    found, start = [], 0
    for cut in reversed(cuts):
        found.append(range(start, cut[start]))
        start = cut[start]
    return [*found, range(start, count)]


def stage_blocks(architecture: Architecture, stages: int, given: Sequence[int] = ()) -> list[range]:
    """The blocks of each of ``stages`` stages; ``given``: the number of each (empty: balanced by cost).

    Raises ConfigError naming the setting if they do not fit, or only some of the stages would have MoE layers.
    """
    count = architecture.blocks
    if not given:
        found = balanced_blocks(block_costs(architecture), stages)
    elif len(given) != stages or sum(given) != count or min(given) < 1:
        raise ConfigError(
            f"parallel.stage_blocks: expected {stages} numbers of at least 1 that add up to {count} blocks, got "
            f"{list(given)}"
        )
    else:
        found = [range(stop - own, stop) for own, stop in zip(given, accumulate(given), strict=True)]
    for stage, blocks in enumerate(found):
        if architecture.moe_layers and not any(layer in blocks for layer in architecture.moe_layers):
            raise ConfigError(
                f"parallel.stages: stage {stage} would have blocks {blocks.start} to {blocks.stop - 1}, none of them with "
                "experts; expected fewer stages, or other parallel.stage_blocks"
            )
    return found


def stage_config(config: TrainConfig, stage: int, stages: int) -> TrainConfig:
    """``config`` for stage ``stage`` of ``stages``; unchanged for one stage. Raises ConfigError."""
    if stages == 1:
        return config
    spec, count = config.spec, config.data.micro_batches
    spec.check_stages()
    if count < stages:
        raise ConfigError(
            f"data.micro_batches: expected at least parallel.stages = {stages}, got {count}: with fewer, 1F1B leaves "
            "stages without work"
        )
    layers = stage_blocks(spec.architecture, stages, config.parallel.stage_blocks)[stage]
    return replace(config, model=spec.stage(layers, held=micro_batches_held(stage, stages, count)))
