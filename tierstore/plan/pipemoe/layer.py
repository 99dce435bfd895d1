"""The passes of a run's MoE layers in chunks: what each of three solvers chooses, and what it loses.

Bytes and operations are those of ``plan.workload``, messages those of ``moe.computing``; loads are even. A chunk is a group
of experts, each computed whole: that an expert takes a while to start is the same in any number of chunks, and part of the
work. What every chunk adds to it is taken to be one such start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tierstore.cache.access import Phase
from tierstore.hf.spec import HfSpec
from tierstore.moe.config import SaveActivations
from tierstore.parallel.pipeline_degree import (
    Inputs,
    LayerPass,
    PipelineCosts,
    Share,
    WeightGradients,
    backward_pass,
    best_degree,
    forward_pass,
    pass_seconds,
)
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.costs import Cost, Profile
from tierstore.plan.evidence import Evidence
from tierstore.plan.pipemoe.algorithm import algorithm_1
from tierstore.plan.pipemoe.simulation import exhaustive_degree
from tierstore.plan.traffic import Traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.schedule import Pass
from tierstore.train.stages.spec import whole_model

#: The highest number of chunks that is simulated.
_SIMULATED = 64
#: Bytes of a router's weight.
_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class SolvedDegree:
    """What one solver chooses for a pass. ``loss_ratio``: by how much longer it takes than the best."""

    solver: str
    degree: int
    seconds: float
    loss_ratio: float


@dataclass(frozen=True)
class PassDegrees:
    """One pass of one layer. ``one_s``: in one chunk; ``wanted``: the best number if no rank's experts capped it."""

    phase: Phase
    costs: PipelineCosts
    work: LayerPass
    one_s: float
    wanted: int
    solved: tuple[SolvedDegree, ...]

    @property
    def exact(self) -> SolvedDegree:
        return self.solved[0]

    def as_json(self) -> dict[str, Any]:
        return {
            "chunks_count": self.exact.degree,
            "pass_s": self.exact.seconds,
            "one_chunk_s": self.one_s,
            "uncapped_chunks_count": self.wanted,
            "solvers": [
                {
                    "solver": one.solver,
                    "chunks_count": one.degree,
                    "pass_s": one.seconds,
                    "loss_ratio": one.loss_ratio,
                }
                for one in self.solved
            ],
        }


@dataclass(frozen=True)
class LayerDegrees:
    """Every pass of a MoE layer. ``most``: the fewest experts that any rank owns, which cap the number of chunks."""

    most: int
    passes: tuple[PassDegrees, ...]
    evidence: Evidence

    def as_json(self) -> dict[str, Any]:
        return {
            "most_chunks_count": self.most,
            "evidence": self.evidence.value,
            **{one.phase.name.lower(): one.as_json() for one in self.passes},
        }


def layer_degrees(
    setting: Setting, profile: Profile, taken: Capacity, traffic: Traffic
) -> LayerDegrees | None:
    """The numbers of chunks of ``setting``'s passes; None where no tokens travel to experts."""
    sharing = setting.ranks.sharing
    if sharing == 1 or setting.config.parallel.tensor > 1:
        return None
    workload = StepWorkload(setting, taken, traffic, profile)
    most = max(setting.model.experts // sharing, 1)
    first: dict[Phase, Pass] = {}
    for item in workload.passes:
        if item.moe_layer is not None:
            first.setdefault(item.phase, item)
    passes = tuple(
        _solve(phase, *_modelled(workload, item, profile), most=most) for phase, item in first.items()
    )
    return LayerDegrees(most, passes, profile.evidence.weaker(traffic.evidence))


def _modelled(workload: StepWorkload, item: Pass, profile: Profile) -> tuple[PipelineCosts, LayerPass]:
    """The costs and the work of ``item``."""
    setting = workload.setting
    sharing = setting.ranks.sharing
    link = setting.config.links.exchange
    link = link if link.on else setting.config.links.gather
    exchange = profile.exchange(sharing)
    per_byte = 1 / exchange.per_s
    if link.bandwidth:
        per_byte = max(per_byte, 1 / link.bandwidth)
    forward = item.phase is Phase.FORWARD
    expert = (profile.expert_forward if forward else profile.expert_backward) or profile.expert_flops
    costs = PipelineCosts(max(exchange.latency_s, link.latency), per_byte, expert.latency_s, 1.0)
    sent = _sent(workload, item)
    starts = setting.together  # every micro-batch has messages of its own
    work = LayerPass(
        replace(sent.dispatch, starts=sent.dispatch.starts * starts),
        Share(1, workload.experts * _products(workload, item, expert)),
        replace(sent.combine, starts=sent.combine.starts * starts),
    )
    return costs, work


def _products(workload: StepWorkload, item: Pass, cost: Cost) -> float:
    """Seconds of one expert."""
    return cost.seconds(workload.expert_flops(item))


def _sent(workload: StepWorkload, item: Pass) -> LayerPass:
    """What ``item`` sends, without its products."""
    setting = workload.setting
    config, sharing = setting.config, setting.ranks.sharing
    rows_bytes = float(workload.sizes(item).all_to_all)
    if item.phase is Phase.FORWARD:
        return forward_pass(rows_bytes, 0.0)
    rows = setting.tokens * setting.model.top_k * (sharing - 1) / sharing
    # Rows are kept with what feeds the activations, or not at all.
    saves = config.model.expert_activations is SaveActivations.SAVE and not config.data.layer_major
    outputs = isinstance(whole_model(config.model), HfSpec)
    return backward_pass(
        rows_bytes,
        0.0,
        weights_bytes=rows * _WEIGHT_BYTES,
        inputs=Inputs.SAVED if saves else Inputs.SENT_AGAIN,
        gradients=WeightGradients.AT_TOKENS if outputs else WeightGradients.AT_EXPERTS,
    )


def _solve(phase: Phase, costs: PipelineCosts, work: LayerPass, *, most: int) -> PassDegrees:
    best = best_degree(costs, work, most=most)
    seconds: Callable[[int], float] = partial(pass_seconds, costs, work)
    simulated = exhaustive_degree(costs, work, most=min(most, _SIMULATED))
    chosen = {
        "exact": best.degree,
        "exhaustive simulation": simulated.degree,
        "Algorithm 1 as printed": min(algorithm_1(costs, work, seconds=seconds), most),
        "one chunk": 1,
    }
    solved = tuple(
        SolvedDegree(
            name, degree, seconds(degree), seconds(degree) / best.seconds - 1 if best.seconds else 0.0
        )
        for name, degree in chosen.items()
    )
    return PassDegrees(phase, costs, work, seconds(1), best.wanted, solved)
