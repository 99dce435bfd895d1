"""Comparison of all layouts of a number of ranks: the fastest, how much slower the others are, and why some are impossible.

Candidates differ in the arrangement of ranks, the exchange of rows, the partitioning of tables and, with
``data.micro_order = auto``, the order of micro-batches. ``train.combinations`` decides which features combine, by the same
check as in a run. Settings without effect in a layout (chunks if no rows travel, tables of a single data rank) are not
varied.

Without stages the time of a step is that of its simulated operations. With stages, each stage's operations are simulated
for all micro-batches in turn, as in a run without stages. The resulting passes of a micro-batch are then arranged over the
stages in 1F1B order (PipeDream-Flush, Narayanan et al. 2021), with a message between stages before each. With p equal
stages, M micro-batches and free messages that is ``(M + p - 1) / M`` of a stage's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.cache.access import Phase
from tierstore.errors import BudgetError, ConfigError
from tierstore.machine_profile import Evidence, Profile
from tierstore.model.config import ModelConfig, check_divisible
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout, layout_of, node_grid
from tierstore.plan.layout_workload import (
    KnownTraffic,
    LayoutChoice,
    LayoutWorkload,
    degrees_of,
    stage_workloads,
)
from tierstore.plan.predict import simulated
from tierstore.plan.workload import SETTLED
from tierstore.prefetch.operations import Kind, Resource
from tierstore.stats import OnProgress, Tier, no_progress
from tierstore.tiers.slots import DeviceKind
from tierstore.train.combinations import check_combination
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.stages import one_forward_one_backward, stage_config
from tierstore.train.vocabulary import choose_vocabulary

_PLACES = (RowPlacement.GATHERED, RowPlacement.PARTITIONED)


def layouts_of(ranks: int) -> Iterator[Layout]:
    """Yield every layout of ``ranks`` ranks once."""
    for stages in _divisors(ranks):
        each = ranks // stages
        for expert in _divisors(each):
            yield Layout(stages, each // expert, expert, 1)
            if expert > 1:
                yield Layout(stages, each // expert, expert, expert)


def candidates(config: TrainConfig, ranks: int, node_ranks: int) -> Iterator[LayoutChoice]:
    """Yield every choice for ``ranks`` ranks, ``node_ranks`` per node, possible or not, in one chunk (``degrees_of`` gives
    the other numbers of chunks worth trying).
    """
    for layout in layouts_of(ranks):
        modes = [ExchangeMode.FLAT]
        if layout.expert > 1 and not isinstance(node_grid(layout.rows("expert"), node_ranks), str):
            modes.append(ExchangeMode.HIERARCHICAL)
        tables = [(embedding, head) for embedding in _PLACES for head in _PLACES]
        for mode in modes:
            for embedding, head in tables if layout.data > 1 else tables[:1]:
                for order in _orders(config):
                    yield LayoutChoice(layout, 1, mode, embedding, head, order)


def _orders(config: TrainConfig) -> list[MicroOrder]:
    asked = config.data.micro_order
    if config.data.micro_batches == 1:
        return [MicroOrder.MICRO]
    return [MicroOrder.MICRO, MicroOrder.LAYER] if asked is MicroOrder.AUTO else [asked]


def obstacle(config: TrainConfig, choice: LayoutChoice, node_ranks: int) -> str | None:
    """The reason why a run of ``config`` cannot have the layout ``choice``; None if it can."""
    laid_out, layout = choice.configure(config, node_ranks), choice.ranks
    try:
        layout_of(laid_out.parallel, layout.world)
        check_combination(laid_out, layout)
        laid_out.parallel.most_chunks(experts=config.model.experts, sharing=layout.expert)
        choose_vocabulary(laid_out, ranks=layout.data)
        if layout.tensor > 1 and isinstance(config.model, ModelConfig):
            check_divisible(config.model, layout.tensor)
        stage_config(laid_out, 0, layout.stages)
        if config.data.batch_size % layout.data and not config.tasks:
            raise ConfigError(
                f"data.batch_size: expected a multiple of the {layout.data} data ranks, got {config.data.batch_size}"
            )
        if layout.expert > config.model.experts:
            raise ConfigError(
                f"parallel.expert: expected at most {config.model.experts} experts, got {layout.expert}"
            )
    except ConfigError as error:
        return str(error)
    return None


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


# What each costs --------------------------------------------------------------------------------------------


#: Two numbers in each message between stages: its arrival time on a limited link, and whether all values were finite.
_BESIDE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """The cost of one layout: seconds of a step, the bytes that a rank sends (``sent_bytes``) in the stage that sends most,
    and the most memory and disk of any rank.
    """

    choice: LayoutChoice
    step_s: float
    bubble_ratio: float
    sent: Mapping[str, int]
    memory_bytes: int
    disk_bytes: int
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """The compared layouts. ``costs``: possible ones, fastest first. ``refused``: impossible ones, each with the reason."""

    ranks: int
    node_ranks: int
    tokens_per_step: int
    costs: tuple[LayoutCost, ...]
    refused: tuple[tuple[LayoutChoice, str], ...]

    @property
    def best(self) -> LayoutCost:
        return self.costs[0]

    def loses(self, cost: LayoutCost) -> float:
        """How much slower ``cost`` is than the best layout, as a fraction of the best step time."""
        return cost.step_s / self.best.step_s - 1

    def variants(self) -> list[LayoutCost]:
        """The layouts with the best one's arrangement of ranks, fastest first."""
        return [cost for cost in self.costs if cost.choice.ranks == self.best.choice.ranks]

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON, with units in the keys."""
        return {
            "ranks": self.ranks,
            "node_ranks": self.node_ranks,
            "layouts": [self._one(cost) for cost in self.costs],
            "refused": [{"layout": _numbers(choice), "reason": why} for choice, why in self.refused],
        }

    def _one(self, cost: LayoutCost) -> dict[str, Any]:
        return {
            "layout": _numbers(cost.choice),
            "settings": cost.choice.settings,
            "step_s": cost.step_s,
            "tokens_per_s": self.tokens_per_step / cost.step_s,
            "loses_s": cost.step_s - self.best.step_s,
            "loses_ratio": self.loses(cost),
            "bubble_ratio": cost.bubble_ratio,
            "memory_bytes": cost.memory_bytes,
            "disk_bytes": cost.disk_bytes,
            **cost.sent,
            "evidence": cost.evidence.value,
        }


def compare_layouts(
    config: TrainConfig,
    profile: Profile,
    *,
    ranks: int,
    node_ranks: int,
    device: DeviceKind = DeviceKind.CPU,
    device_memory: int | None = None,
    progress: OnProgress = no_progress,
) -> LayoutComparison:
    """Compare all layouts of ``ranks`` ranks, ``node_ranks`` per node. ``device_memory``: as for ``stage_workloads``. Raises
    ConfigError if none is possible.
    """
    if ranks < 1 or not 1 <= node_ranks <= ranks or ranks % node_ranks:
        raise ConfigError(f"--node-ranks: expected a divisor of the {ranks} ranks, got {node_ranks}")
    config.check_length()
    costs: list[LayoutCost] = []
    refused: list[tuple[LayoutChoice, str]] = []
    listed = list(candidates(config, ranks, node_ranks))
    known: KnownTraffic = {}

    def consider(choice: LayoutChoice) -> list[LayoutWorkload]:
        """Add the cost of ``choice``, or the reason against it; returns the work of its stages."""
        why = obstacle(config, choice, node_ranks)
        works: list[LayoutWorkload] = []
        if why is None:
            try:
                works = list(
                    stage_workloads(
                        config,
                        choice,
                        profile,
                        node_ranks,
                        known,
                        device=device,
                        device_memory=device_memory,
                    )
                )
            except BudgetError as error:
                why = str(error)
        if why is None:
            costs.append(layout_cost(works))
        else:
            refused.append((choice, why))
        return works

    for done, choice in enumerate(listed, start=1):
        works = consider(choice)
        most = config.parallel.chunks_cap(experts=config.model.experts, sharing=choice.ranks.expert)
        for degree in degrees_of(works, most)[1:] if works and most > 1 else []:
            consider(replace(choice, degree=degree))
        progress(done, len(listed))
    if not costs:
        raise ConfigError(f"--layouts: no layout of {ranks} ranks is possible: {refused[0][1]}")
    costs.sort(key=lambda cost: (cost.step_s, cost.memory_bytes, cost.choice.name))
    return LayoutComparison(
        ranks=ranks,
        node_ranks=node_ranks,
        tokens_per_step=config.tokens_per_step,
        costs=tuple(costs),
        refused=tuple(refused),
    )


def layout_cost(works: Sequence[LayoutWorkload]) -> LayoutCost:
    """The cost of a step with the stages ``works``."""
    choice, profile = works[0].choice, works[0].profile
    stages, micro = choice.ranks.stages, works[0].setting.config.data.micro_batches
    steps_s = [simulated(work).step_s for work in works]
    longest = taken_s = max(steps_s)
    if stages > 1:
        passes = [_passes_seconds(work, spent / micro) for work, spent in zip(works, steps_s, strict=True)]
        taken_s = pipeline_seconds(passes, micro, works[0].passing_seconds(_stage_bytes(works[0])))
    return LayoutCost(
        choice=choice,
        step_s=taken_s,
        bubble_ratio=1 - longest / taken_s,
        sent=max(map(sent_bytes, works), key=lambda sent: sent["sent_bytes"]),
        memory_bytes=max(work.taken.total(Tier.DEVICE, Tier.HOST) for work in works),
        disk_bytes=max(work.taken.total(Tier.NVME) for work in works),
        evidence=profile.evidence.weaker(works[0].traffic.evidence),
    )


def pipeline_seconds(
    passes: Sequence[tuple[float, float]], micro_batches: int, message_s: float = 0.0
) -> float:
    """Seconds of a step in 1F1B order. ``passes``: seconds of the forward and backward pass of a micro-batch, by stage;
    ``message_s``: seconds of a message between stages.
    """
    count = len(passes)
    left = [deque(one_forward_one_backward(stage, count, micro_batches)) for stage in range(count)]
    free = [0.0] * count
    ended: dict[tuple[int, Phase, int], float] = {}
    while any(left):
        for stage, order in enumerate(left):
            while order:
                phase, micro = order[0].phase, order[0].micro
                before = stage - 1 if phase is Phase.FORWARD else stage + 1
                if 0 <= before < count:
                    if (before, phase, micro) not in ended:
                        break
                    free[stage] = max(free[stage], ended[before, phase, micro] + message_s)
                free[stage] += passes[stage][phase is not Phase.FORWARD]
                ended[stage, phase, micro] = free[stage]
                order.popleft()
    return max(free)


def _passes_seconds(work: LayoutWorkload, both_s: float) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward pass: ``both_s``, split in proportion to their computation."""
    computed = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0, Phase.OPTIMIZER: 0.0}
    for operation in work.operations:
        if operation.resource is Resource.COMPUTE:
            computed[work.passes[operation.position % len(work.passes)].phase] += work.seconds(operation)
    forward_s, backward_s = computed[Phase.FORWARD], computed[Phase.BACKWARD]
    if not forward_s + backward_s:
        return both_s / 2, both_s / 2
    share = forward_s / (forward_s + backward_s)
    return both_s * share, both_s * (1 - share)


def sent_bytes(work: LayoutWorkload) -> dict[str, int]:
    """The bytes that one rank of the stage sends in a step: all of them, those within its node and to other nodes (with
    destinations spread evenly over a group's ranks), and by purpose.
    """
    reductions = rows = tensor = 0
    for item in work.passes:
        if item.phase is Phase.OPTIMIZER:
            continue
        sizes = work.sizes(item)
        reductions += sizes.reduce if item.phase is Phase.BACKWARD else 0
        tensor += round(work.tensor_bytes(item))
        if item.moe_layer is not None and work.choice.ranks.expert > 1:
            moved = work.rows(item)
            rows += round(moved.dispatch.amount + moved.combine.amount)
    gathers = sum(
        operation.nbytes
        for operation in work.operations
        if operation.kind is Kind.GATHER and operation.position // len(work.passes) == SETTLED
    )
    vocabulary = work.vocabulary_bytes
    micro = work.setting.config.data.micro_batches
    passed = micro * work.neighbours * _stage_bytes(work)
    by_group = {
        "data": gathers + reductions + vocabulary,
        "expert": rows + tensor,
        "replica": work.replica_bytes,
        "pipeline": passed,
    }
    total = sum(by_group.values())
    across = round(sum(_outside(work, group) * nbytes for group, nbytes in by_group.items()))
    return {
        "sent_bytes": total,
        "sent_within_node_bytes": total - across,
        "sent_across_nodes_bytes": across,
        "gather_bytes": gathers,
        "reduce_bytes": reductions,
        "rows_bytes": rows,
        "tensor_sums_bytes": tensor,
        "expert_sums_bytes": work.replica_bytes,
        "stages_bytes": passed,
        "vocabulary_bytes": vocabulary,
    }


def _outside(work: LayoutWorkload, dimension: str) -> float:
    """The fraction of the other ranks in rank 0's ``dimension`` group that are on other nodes."""
    group = work.choice.ranks.rows(dimension)[0]
    if len(group) == 1:
        return 0.0
    if dimension == "pipeline":  # sends to the next stage only
        return float(group[0] // work.node_ranks != group[1] // work.node_ranks)
    return work.elsewhere(dimension) / (len(group) - 1)


def _stage_bytes(work: LayoutWorkload) -> int:
    """Bytes of a message to the next stage: the residual stream of one micro-batch, and two numbers."""
    model = work.setting.config.model
    return work.setting.micro_tokens * model.d_model * model.compute_dtype.itemsize + _BESIDE_BYTES


def _numbers(choice: LayoutChoice) -> dict[str, object]:
    ranks = choice.ranks
    return {
        "data_ranks": ranks.data,
        "expert_ranks": ranks.expert,
        "tensor_ranks": ranks.tensor,
        "stages": ranks.stages,
        "pipeline_degree": choice.degree,
        "exchange": choice.exchange.value,
        "embedding": choice.embedding.value,
        "head": choice.head.value,
        "micro_order": choice.order.value,
    }


def best_of_each_kind(costs: Sequence[LayoutCost]) -> list[LayoutCost]:
    """The fastest layout of each arrangement of ranks, in the order of ``costs``."""
    found: dict[Layout, LayoutCost] = {}
    for cost in costs:
        found.setdefault(cost.choice.ranks, cost)
    return list(found.values())
