"""In how many chunks the passes of a run's MoE layers go (PipeMoE), and what that saves.

Bytes and operations are those of ``plan.workload``, messages those of ``moe.computing``; loads are even. A chunk is a group
of experts, each computed whole: that an expert takes a while to start is the same in any number of chunks, and part of the
work. What every chunk adds to it is taken to be one such start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tierstore.cache.access import Phase
from tierstore.machine_profile import Evidence
from tierstore.parallel.config import AUTO_DEGREE
from tierstore.parallel.pipeline_degree import (
    Degree,
    LayerPass,
    PipelineCosts,
    Share,
    best_degree,
    pass_seconds,
    worthwhile_degree,
)
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.schedule import Pass


@dataclass(frozen=True)
class PassDegrees:
    """One pass of one layer, in ``most`` chunks at most. ``taken``: what a run takes: the number that is configured, or
    AUTO's, which begins with one chunk.
    """

    phase: Phase
    costs: PipelineCosts
    work: LayerPass
    most: int
    taken: int

    @cached_property
    def best(self) -> Degree:
        """The best number of chunks, and the one that would be best if no rank's experts capped it."""
        return best_degree(self.costs, self.work, most=self.most)

    @property
    def one_s(self) -> float:
        """Seconds in one chunk."""
        return pass_seconds(self.costs, self.work, 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "chunks_count": self.best.degree,
            "pass_s": self.best.seconds,
            "one_chunk_s": self.one_s,
            "uncapped_chunks_count": self.best.wanted,
            "taken_chunks_count": self.taken,
            "taken_pass_s": pass_seconds(self.costs, self.work, self.taken),
        }


@dataclass(frozen=True)
class LayerDegrees:
    """Every pass of a MoE layer. ``most``: the fewest experts that any rank owns, which cap the number of chunks; ``auto``:
    whether the run chooses.
    """

    most: int
    auto: bool
    passes: tuple[PassDegrees, ...]
    evidence: Evidence

    @property
    def taken(self) -> dict[Phase, int]:
        """The number of chunks of a run's passes."""
        return {one.phase: one.taken for one in self.passes}

    def as_json(self) -> dict[str, Any]:
        return {
            "most_chunks_count": self.most,
            "chosen_by": "auto" if self.auto else "parallel.pipeline_degree",
            "evidence": self.evidence.value,
            **{one.phase.name.lower(): one.as_json() for one in self.passes},
        }


def layer_degrees(workload: StepWorkload) -> LayerDegrees | None:
    """The numbers of chunks of a run's passes; None where no tokens travel to experts, or nothing is trained."""
    setting = workload.setting
    sharing, parallel = setting.ranks.sharing, setting.config.parallel
    if sharing == 1 or parallel.tensor > 1 or not setting.usage.trains:
        return None
    auto = parallel.pipeline_degree == AUTO_DEGREE
    most = max(setting.model.experts // sharing, 1)
    first: dict[Phase, Pass] = {}
    for item in workload.passes:
        if item.moe_layer is not None:
            first.setdefault(item.phase, item)
    passes = []
    for phase, item in first.items():
        costs, work = modelled(workload, item)
        taken = (
            worthwhile_degree(costs, work, present=1, most=most).degree if auto else parallel.pipeline_degree
        )
        passes.append(PassDegrees(phase, costs, work, most, taken))
    return LayerDegrees(
        most, auto, tuple(passes), workload.profile.evidence.weaker(workload.traffic.evidence)
    )


def modelled(workload: StepWorkload, item: Pass) -> tuple[PipelineCosts, LayerPass]:
    """The costs and the work of ``item``, without the forward pass that it may repeat, which has chunks of its own."""
    network, expert = workload.network, workload.expert_cost(item)
    flops = workload.expert_flops(item)
    if workload.repeats(item):
        flops -= workload.expert_flops(replace(item, phase=Phase.FORWARD))
    seconds = workload.experts * expert.seconds(flops)
    costs = PipelineCosts(network.latency_s, 1 / network.per_s, expert.latency_s, 1.0)
    return costs, replace(workload.exchange(item), experts=Share(1, seconds))
