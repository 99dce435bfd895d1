"""What one rank of a layout moves and computes in a step: ``StepWorkload`` with chunks, tensor parallelism and stages.

A stage is planned as a model of its own (``StageSpec``) on its data ranks. Tensor-parallel ranks divide matrices and
experts, sum each divided pair of products over the group in both passes, and give every rank the rows of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tierstore.cache.access import Phase
from tierstore.model.architecture import Architecture
from tierstore.model.config import ModelConfig
from tierstore.model.vocabulary.cost import VocabularyCost
from tierstore.moe.config import SaveActivations
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.pipeline_degree import (
    Inputs,
    LayerPass,
    PipelineCosts,
    backward_pass,
    forward_pass,
    pass_seconds,
)
from tierstore.parallel.rows import TableRows
from tierstore.plan.capacity import Ranks, Setting, capacity
from tierstore.plan.costs import Cost, Profile
from tierstore.plan.layouts.candidates import LayoutChoice
from tierstore.plan.ppmoe import DivisionBytes, RowBytes
from tierstore.plan.traffic import step_traffic
from tierstore.plan.workload import StepWorkload
from tierstore.prefetch.operations import Kind, Operation, PassSizes
from tierstore.prefetch.schedule import Pass
from tierstore.train.config import TrainConfig
from tierstore.train.stages.spec import StageSpec, stage_config

#: A row's weight, and its gradient, travel in fp32.
_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class LayoutWorkload(StepWorkload):
    """Operations of one rank of ``choice``. ``node_ranks`` ranks are on one node."""

    choice: LayoutChoice
    node_ranks: int

    # Bytes --------------------------------------------------------------------------------------------------

    def sizes(self, item: Pass) -> PassSizes:
        found = super().sizes(item)
        vocabulary = item.unit in (0, len(self.layouts) - 1) and self.choice.rows is RowPlacement.PARTITIONED
        if vocabulary:
            found = replace(found, gather=0, reduce=0)
        if item.moe_layer is None:
            return found
        return replace(found, all_to_all=round(self.rows(item).dispatch.amount) if self._exchanges else 0)

    @property
    def _exchanges(self) -> bool:
        return self.choice.ranks.expert > 1

    def rows(self, item: Pass) -> LayerPass:
        """The rows of a MoE layer's pass, sent by one rank: to the experts, their work, and back."""
        layout, model = self.choice.ranks, self.setting.config.model
        tokens, itemsize = self.setting.tokens, model.compute_dtype.itemsize
        work = self.experts * self.expert_flops(replace(item, phase=Phase.FORWARD))
        if layout.tensor > 1:
            sent = RowBytes(
                tokens=tokens,
                width=model.d_model,
                itemsize=itemsize,
                ranks=layout.tensor,
                top_k=model.architecture.top_k,
            ).rows
            if item.phase is Phase.BACKWARD:  # and the gradient of each row's weight
                sent += sent / (model.d_model * itemsize) * _WEIGHT_BYTES
            one = forward_pass(sent, work)
            return replace(one, dispatch=replace(one.dispatch, starts=0, amount=0))
        share = (layout.expert - 1) / layout.expert * tokens * self.setting.model.top_k
        sent = share * model.d_model * itemsize
        if item.phase is Phase.FORWARD:
            return forward_pass(sent, work)
        again = self._again or model.expert_activations is SaveActivations.RECOMPUTE
        return backward_pass(
            sent,
            work,
            weights_bytes=share * _WEIGHT_BYTES,
            inputs=Inputs.SENT_AGAIN if again else Inputs.SAVED,
            again=max(self.experts * self.expert_flops(item) - 2 * work, 0.0),
        )

    def tensor_bytes(self, item: Pass) -> float:
        """Sums over the tensor-parallel group in a pass, sent by one rank."""
        layout, model = self.choice.ranks, self.setting.config.model
        divided = isinstance(model, ModelConfig | StageSpec)
        if layout.tensor == 1 or not divided or not 0 < item.unit < len(self.layouts) - 1:
            return 0.0
        block = DivisionBytes(
            tokens=self.setting.tokens,
            width=model.d_model,
            itemsize=model.compute_dtype.itemsize,
            ranks=layout.tensor,
            pairs=1 if item.moe_layer is not None else 2,
        )
        return block.both_passes / 2

    @property
    def replica_bytes(self) -> int:
        """Gradients of experts in a step, summed over the copies of each, micro-batch by micro-batch, sent by one rank."""
        copies, config = self.choice.ranks.replicas, self.setting.config
        numel = self.setting.model.expert_numel * self.experts * len(config.model.moe_layers)
        return 2 * (copies - 1) * numel * 4 // copies * config.data.micro_batches

    @property
    def neighbours(self) -> int:
        """Stages that this one sends to: the next one rows, and the one before their gradients."""
        stage = self.setting.config.model
        if not isinstance(stage, StageSpec):
            return 0
        count = len(stage.model.architecture.units) - 2
        return (stage.layers.start > 0) + (stage.layers.stop < count)

    @property
    def vocabulary(self) -> VocabularyCost | None:
        """What divided tables send in a step; None where they are gathered."""
        layout, model = self.choice.ranks, self.setting.config.model
        if self.choice.rows is not RowPlacement.PARTITIONED:
            return None
        return VocabularyCost(
            table=TableRows(model.vocab_size, model.d_model, layout.data),
            tokens=self.setting.micro_tokens,
            micro_batches=self.setting.config.data.micro_batches,
            value_bytes=model.compute_dtype.itemsize,
        )

    # Seconds ------------------------------------------------------------------------------------------------

    def expert_flops(self, item: Pass) -> float:
        whole = super().expert_flops(item)
        # The ranks of a tensor-parallel group have the same tokens, not each its own.
        return whole / self.choice.ranks.tensor

    def seconds(self, operation: Operation) -> float:
        item = self.passes[operation.position % len(self.passes)]
        if operation.kind is Kind.ALL_TO_ALL:
            return self._exposed(item) / 2  # one operation each way
        found = super().seconds(operation)
        if operation.kind is Kind.DENSE:
            found += 2 * self._message(self.tensor_bytes(item) / 2)
            if (table := self.vocabulary) is not None:
                found += self._vocabulary_seconds(item, table)
        return found

    def _exposed(self, item: Pass) -> float:
        """Seconds that a MoE layer's pass takes beside its experts' computation."""
        work = self.rows(item)
        network = self._network
        if self.choice.ranks.tensor > 1:
            return 2 * self._message(work.combine.amount)
        flops = self.profile.expert_flops
        costs = PipelineCosts(
            network.latency_s, 1 / network.per_s, self.experts * flops.latency_s, 1 / flops.per_s
        )
        alone = costs.alpha_e * work.experts.starts + costs.beta_e * work.experts.amount
        return max(pass_seconds(costs, work, self.choice.degree) - alone, 0.0)

    @cached_property
    def _network(self) -> Cost:
        """The slower of the machine and the links that are limited, for an exchange of rows."""
        links, layout = self.setting.config.links, self.choice.ranks
        own = links.exchange if links.exchange.on else links.gather
        found = _slower(self.profile.all_to_all, own.latency, own.bandwidth)
        if not links.node.on or layout.expert <= self.node_ranks:
            return found
        outside = (layout.expert - self.node_ranks) / (layout.expert - 1)
        messages = layout.expert - self.node_ranks
        if self.choice.exchange is ExchangeMode.HIERARCHICAL:
            messages //= self.node_ranks
        between = _slower(found, messages * links.node.latency, links.node.bandwidth)
        return Cost(
            between.latency_s + found.latency_s, 1 / (outside / between.per_s + (1 - outside) / found.per_s)
        )

    def _message(self, nbytes: float) -> float:
        links = self.setting.config.links
        return _slower(self.profile.gather, links.gather.latency, links.gather.bandwidth).seconds(nbytes)

    def _vocabulary_seconds(self, item: Pass, table: VocabularyCost) -> float:
        ends = {0: table.embedding_sent, len(self.layouts) - 1: table.head_sent}
        sent = ends.get(item.unit, 0) / (2 * table.micro_batches)
        return self._message(sent)


def _slower(cost: Cost, latency: float, bandwidth: int) -> Cost:
    """``cost`` over a link of ``bandwidth`` bytes a second (0: any)."""
    return Cost(max(cost.latency_s, latency), min(cost.per_s, bandwidth or cost.per_s))


def stage_workloads(
    config: TrainConfig, choice: LayoutChoice, profile: Profile, node_ranks: int
) -> Iterator[LayoutWorkload]:
    """The work of a rank of each stage of ``choice``. Raises BudgetError where a budget is too small."""
    layout = choice.ranks
    laid_out = choice.configure(config, node_ranks)
    for stage in range(layout.stages):
        own = stage_config(laid_out, stage, layout.stages)
        model = own.model.architecture
        if layout.tensor > 1:  # experts are divided over the group, whose ranks share a piece of the batch
            model = _part(model, config, layout.tensor)
        ranks = Ranks(count=layout.data, expert=1 if layout.tensor > 1 else layout.expert)
        setting = Setting(config=own, model=model, ranks=ranks)
        taken = capacity(setting)
        yield LayoutWorkload(setting, taken, step_traffic(setting, taken), profile, choice, node_ranks)


def _part(model: Architecture, config: TrainConfig, ranks: int) -> Architecture:
    """What one of ``ranks`` tensor-parallel ranks has of ``model``: of an imported model whole dense units."""
    parts = ranks if isinstance(config.model, ModelConfig) else 1
    units = tuple(replace(unit, matrices=unit.matrices // parts) for unit in model.units)
    experts = -(-model.experts // ranks)
    return replace(model, units=units, experts=experts, top_k=min(model.top_k, experts))
