"""What one rank of a layout moves and computes in a step: ``StepWorkload`` with chunks, tensor parallelism and stages.

A stage is planned as a separate model (``ModelSpec.stage``) on its data ranks. Tensor-parallel ranks divide matrices and
experts, sum each divided pair of products over the group in both passes, and send their experts' rows to the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tierstore.cache.access import Phase
from tierstore.links import LinkConfig
from tierstore.machine_profile import Cost, Profile, over_link
from tierstore.model.architecture import Architecture
from tierstore.model.config import ModelConfig
from tierstore.model.spec import BuiltInSpec
from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    LayerPass,
    Share,
    pass_seconds,
)
from tierstore.parallel.config import ExchangeMode, RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.plan.capacity import Setting, as_configured, capacity
from tierstore.plan.papers import RowBytes, division_bytes
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import WEIGHT_BYTES, StepWorkload
from tierstore.prefetch.operations import Kind, Operation, PassSizes
from tierstore.prefetch.schedule import MicroPass, Pass
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.stages import one_forward_one_backward, stage_config

#: Bytes of a row count, or of a loss, that ranks exchange.
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout of ranks with its settings. ``degree``: chunks of rows. ``exchange``: direct or through nodes. ``embedding``
    and ``head``: gathered or partitioned. ``order``: of micro-batches.
    """

    ranks: Layout
    degree: int = 1
    exchange: ExchangeMode = ExchangeMode.FLAT
    embedding: RowPlacement = RowPlacement.GATHERED
    head: RowPlacement = RowPlacement.GATHERED
    order: MicroOrder = MicroOrder.MICRO

    @property
    def name(self) -> str:
        """For tables: data, expert and tensor ranks, stages, and the settings that are not default."""
        ranks = self.ranks
        further = [f"r={self.degree}"] if self.degree > 1 else []
        further += [self.exchange.value] if self.exchange is not ExchangeMode.FLAT else []
        divided = [
            name
            for name, place in (("embedding", self.embedding), ("head", self.head))
            if place is RowPlacement.PARTITIONED
        ]
        further += ["divided tables"] if len(divided) == 2 else [f"divided {name}" for name in divided]
        further += ["layer order"] if self.order is MicroOrder.LAYER else []
        size = f"data {ranks.data}, expert {ranks.expert}, tensor {ranks.tensor}, stages {ranks.stages}"
        return ", ".join([size, *further])

    @property
    def settings(self) -> dict[str, str]:
        """The configuration settings of this layout, by dotted key."""
        ranks = self.ranks
        return {
            "parallel.expert": str(ranks.expert),
            "parallel.tensor": str(ranks.tensor),
            "parallel.stages": str(ranks.stages),
            "parallel.pipeline_degree": str(self.degree),
            "parallel.exchange": self.exchange.value,
            "parallel.embedding": self.embedding.value,
            "parallel.head": self.head.value,
            "data.micro_order": self.order.value,
        }

    def configure(self, config: TrainConfig, node_ranks: int) -> TrainConfig:
        """``config`` with this layout."""
        parallel = replace(
            config.parallel,
            expert=self.ranks.expert,
            tensor=self.ranks.tensor,
            stages=self.ranks.stages,
            pipeline_degree=self.degree,
            profile=None,  # only AUTO uses it
            exchange=self.exchange,
            node_ranks=node_ranks,
            embedding=self.embedding,
            head=self.head,
        )
        return replace(config, parallel=parallel, data=replace(config.data, micro_order=self.order))


@dataclass(frozen=True)
class LayoutWorkload(StepWorkload):
    """Operations of one rank of ``choice``. ``node_ranks``: ranks on each node."""

    choice: LayoutChoice
    node_ranks: int

    # Bytes --------------------------------------------------------------------------------------------------

    def sizes(self, item: Pass) -> PassSizes:
        found = super().sizes(item)
        vocabulary = self.setting.vocabulary.partition
        divided = {0: vocabulary.embedding, len(self.layouts) - 1: vocabulary.head}
        if divided.get(item.unit) is not None:
            found = replace(found, gather=0, reduce=0, rows=0 if self._apart else found.rows)
        if item.moe_layer is None or self._queued:
            return found
        return replace(found, dispatch=0, combine=0)

    @property
    def _exchanges(self) -> bool:
        """Whether rows travel to their experts and back."""
        return self.choice.ranks.expert > 1 and self.choice.ranks.tensor == 1

    @property
    def _queued(self) -> bool:
        """Whether exchanges and gathers share one link, in turns."""
        return self._exchanges and not self._apart

    def degree(self, item: Pass) -> int:
        return self.choice.degree if self._queued else 1

    def exchange(self, item: Pass) -> LayerPass:
        """As in ``StepWorkload``, but tensor-parallel ranks already hold all rows and send only results."""
        layout, model = self.choice.ranks, self.setting.config.model
        if layout.tensor == 1:
            return super().exchange(item)
        sent = RowBytes(
            tokens=self.setting.tokens,
            width=model.d_model,
            itemsize=model.compute_dtype.itemsize,
            ranks=layout.tensor,
            top_k=model.architecture.top_k,
        ).rows
        if item.phase is Phase.BACKWARD:  # plus the gradient of each row's weight
            sent += sent / (model.d_model * model.compute_dtype.itemsize) * WEIGHT_BYTES
        return LayerPass(Share(0, 0), Share(1, 0), Share(self.setting.together, sent))

    def rows(self, item: Pass) -> LayerPass:
        """A MoE layer's pass on one rank: the rows sent to the experts, the experts' work, and the rows sent back."""
        dispatch, combine = self._sent(item)
        return LayerPass(dispatch, Share(1, self.experts * self.expert_flops(item)), combine)

    def tensor_bytes(self, item: Pass) -> float:
        """Bytes that one rank sends in a pass for sums over its tensor-parallel group."""
        layout, model = self.choice.ranks, self.setting.config.model
        divided = isinstance(self.setting.config.spec, BuiltInSpec)
        if layout.tensor == 1 or not divided or not 0 < item.unit < len(self.layouts) - 1:
            return 0.0
        both_passes = division_bytes(
            tokens=self.setting.tokens,
            width=model.d_model,
            itemsize=model.compute_dtype.itemsize,
            ranks=layout.tensor,
            pairs=1 if item.moe_layer is not None else 2,
        )
        return both_passes / 2

    @property
    def replica_bytes(self) -> int:
        """Bytes that one rank sends in a step to sum expert gradients over the copies of each expert, pass by pass."""
        copies, config = self.choice.ranks.replicas, self.setting.config
        numel = self.setting.model.expert_numel * self.experts * len(config.model.moe_layers)
        return 2 * (copies - 1) * numel * 4 // copies * config.data.passes

    @property
    def neighbours(self) -> int:
        """The number of stages that this one sends to: rows to the next, their gradients to the previous one."""
        spec = self.setting.config.spec
        return (not spec.begins) + (not spec.ends)

    @property
    def vocabulary_bytes(self) -> int:
        """Bytes that one rank sends in a step for partitioned tables."""
        choice = self.setting.vocabulary
        if choice.cost is None:
            return 0
        embedding = choice.cost.embedding_sent if choice.partition.embedding is not None else 0
        return embedding + (choice.cost.head_sent if choice.partition.head is not None else 0)

    # Seconds ------------------------------------------------------------------------------------------------

    def expert_flops(self, item: Pass) -> float:
        whole = super().expert_flops(item)
        # All ranks of a tensor-parallel group have the same tokens.
        return whole / self.choice.ranks.tensor

    @cached_property
    def _attention(self) -> list[int]:
        """As in ``StepWorkload``; tensor-parallel ranks of a built-in model divide the heads."""
        divided = isinstance(self.setting.config.spec, BuiltInSpec)
        parts = self.choice.ranks.tensor if divided else 1
        return [width // parts for width in super()._attention]

    def seconds(self, operation: Operation) -> float:
        item = self.passes[operation.position % len(self.passes)]
        kind, links, profile = operation.kind, self.setting.config.links, self.profile
        if kind is Kind.ALL_TO_ALL:
            return self._message(operation.nbytes)
        if kind is Kind.GATHER:
            return self._carried("data", operation.nbytes, profile.gather, links.gather)
        if kind is Kind.REDUCE:
            return self._carried("data", operation.nbytes, profile.reduce_scatter, links.gather)
        found = super().seconds(operation)
        if kind is Kind.DENSE:
            found += self._waited(item)
        return found

    def _waited(self, item: Pass) -> float:
        """Seconds for which a pass's computation waits for other ranks, apart from the exchanges in the schedule."""
        layout, forward = self.choice.ranks, item.phase is Phase.FORWARD
        found = 2 * self._messages(self.tensor_bytes(item) / 2, "tensor")
        if item.moe_layer is not None:
            if not self._queued:
                found += self.exposed_seconds(item, self.choice.degree)
            if layout.data > 1 and forward:  # ranks exchange the row counts of experts
                counts = _COUNT_BYTES * self.setting.config.model.experts * (layout.data - 1)
                found += self._messages(counts * self.setting.together)
            if not forward:
                found += self._replicas_seconds(item)
        elif self._apart:
            found += self._messages(self._divided_sent(item))
        if item.unit == len(self.layouts) - 1 and forward and layout.data > 1:  # the sum of the loss
            found += self._message(_COUNT_BYTES * layout.data)
        return found

    @property
    def _apart(self) -> bool:
        """Whether exchanges have their own link, so that they never wait for gathers."""
        return self.setting.config.links.exchange.on

    def exposed_seconds(self, item: Pass, degree: int) -> float:
        """Seconds that a MoE layer's pass in ``degree`` chunks takes in addition to its experts' computation."""
        cost, layout = self.expert_cost(item), self.choice.ranks
        alone = self.experts * cost.seconds(self.expert_flops(item))
        if layout.tensor > 1:
            return self._returning_seconds(item, degree, alone)
        if layout.expert == 1:
            return 0.0
        # Each expert is leased once per pass, however many chunks and products there are.
        starts = 1 if self._queued else 0
        work = replace(self.rows(item), experts=Share(starts, alone))
        costs = ChunkCosts(self.network.latency_s, 1 / self.network.per_s, cost.latency_s, 1.0)
        return max(pass_seconds(costs, work, degree) - alone, 0.0)

    def _returning_seconds(self, item: Pass, degree: int, alone: float) -> float:
        """``exposed_seconds`` of tensor-parallel ranks, whose rows are only sent back: those of the first chunk once it is
        computed, those of the last chunk at the end.
        """
        each = self._messages(self.rows(item).combine.amount / degree, "tensor")
        return max(each, alone / degree + degree * each - alone)

    @cached_property
    def network(self) -> Cost:
        """The cost of an exchange of rows: the slower of the machine and the limited links."""
        links, layout = self.setting.config.links, self.choice.ranks
        real, own, node = self.profile.exchange(layout.expert), links.rows, links.node
        elsewhere = layout.expert - self.node_ranks
        if not node.on or elsewhere <= 0:
            return over_link(real, own)
        others, nodes = layout.expert - 1, layout.expert // self.node_ranks
        if self.choice.exchange is ExchangeMode.HIERARCHICAL:
            # Rows are first exchanged within a node; then a rank sends one message to every other node.
            within = layout.expert * (self.node_ranks - 1) / (self.node_ranks * others)
            between = layout.expert * (nodes - 1) / (nodes * others)
            first, second = over_link(real, own), over_link(real, node)
            latency = first.latency_s + max(real.latency_s, (nodes - 1) * node.latency)
            return Cost(latency, 1 / (within / first.per_s + between / second.per_s))
        # Both links transfer their parts concurrently.
        outside = elsewhere / others
        rates = [real.per_s, (node.bandwidth or math.inf) / outside]
        if outside < 1:
            rates.append((own.bandwidth or math.inf) / (1 - outside))
        return Cost(max(real.latency_s, own.latency, elsewhere * node.latency), min(rates))

    def _message(self, nbytes: float, dimension: str = "data") -> float:
        """Seconds of a message of ``nbytes`` that computation waits for, from one rank to the others of its group."""
        links = self.setting.config.links
        return self._carried(dimension, nbytes, self.profile.all_to_all, links.rows)

    def _messages(self, nbytes: float, dimension: str = "data") -> float:
        """Seconds of ``nbytes``, sent as one message for each micro-batch that passes together."""
        count = self.setting.together
        return count * self._message(nbytes / count, dimension)

    def passing_seconds(self, nbytes: float) -> float:
        """Seconds of a message of ``nbytes`` to the next stage; node links are not counted."""
        return over_link(self.profile.all_to_all, self.setting.config.links.rows).seconds(nbytes)

    def _carried(self, dimension: str, nbytes: float, cost: Cost, link: LinkConfig) -> float:
        """Seconds of a collective in which a rank sends ``nbytes``, evenly to the others of its ``dimension`` group."""
        if nbytes <= 0:
            return 0.0
        node, elsewhere = self.setting.config.links.node, self.elsewhere(dimension)
        outside = (
            nbytes * elsewhere / max(len(self.choice.ranks.rows(dimension)[0]) - 1, 1) if node.on else 0.0
        )
        between = elsewhere * node.latency + outside / (node.bandwidth or math.inf) if outside else 0.0
        within = link.latency + (nbytes - outside) / (link.bandwidth or math.inf) if nbytes > outside else 0.0
        return max(cost.seconds(nbytes), within, between)

    def elsewhere(self, dimension: str) -> int:
        """The number of ranks on other nodes in rank 0's ``dimension`` group."""
        group = self.choice.ranks.rows(dimension)[0]
        return sum(rank // self.node_ranks != group[0] // self.node_ranks for rank in group)

    def _replicas_seconds(self, item: Pass) -> float:
        """Seconds that summing expert gradients over copies adds to a backward pass: each batch is sent while the next one
        is computed, and the pass waits for the last.
        """
        copies = self.choice.ranks.replicas
        if copies == 1:
            return 0.0
        slots = self.taken.divided.slots
        numel = self.setting.model.expert_numel
        batches = -(-self.experts // max(slots.gradients // 2, 1))
        nbytes = (1 if copies == 2 else 2 * (copies - 1) / copies) * numel * 4 * self.experts / batches
        parts = 1 if copies == 2 else 2
        links, profile = self.setting.config.links, self.profile
        each = parts * self._carried("replica", nbytes / parts, profile.reduce_scatter, links.gather)
        computing = self.experts * self.expert_cost(item).seconds(self.expert_flops(item)) / batches
        return each + (batches - 1) * max(each - computing, 0.0)


def degrees_of(works: Sequence[LayoutWorkload], most: int) -> list[int]:
    """The numbers of chunks, up to ``most``, that may be fastest for a layout with the stages ``works``: 1, and all from the
    smallest to the largest best number of any pass. A pass's time is convex in the number of chunks, so no other is faster.
    """
    best = {
        min(range(1, most + 1), key=lambda degree: (work.exposed_seconds(item, degree), degree))
        for work in works
        for item in {item.phase: item for item in work.passes if item.moe_layer is not None}.values()
    }
    return sorted({1, *range(min(best, default=1), max(best, default=1) + 1)})


#: Traffic of a step by what it depends on: layout, order of micro-batches, whether rows travel in chunks, stage.
KnownTraffic = dict[tuple[Layout, MicroOrder, bool, int], Traffic]


def stage_workloads(
    config: TrainConfig,
    choice: LayoutChoice,
    profile: Profile,
    node_ranks: int,
    known: KnownTraffic | None = None,
    *,
    device: DeviceKind = DeviceKind.CPU,
    device_memory: int | None = None,
) -> Iterator[LayoutWorkload]:
    """The work of one rank of each stage of ``choice``. ``known``: a cache of traffic across calls with the same device.
    ``device_memory``: of each rank's ``device``, in bytes, if known. Raises BudgetError if a budget is too small.
    """
    known = {} if known is None else known
    layout = choice.ranks
    laid_out = choice.configure(config, node_ranks)
    for stage in range(layout.stages):
        own = stage_config(laid_out, stage, layout.stages)
        model = own.model.architecture
        if layout.tensor > 1:  # the group's ranks divide the experts and share their tokens
            model = _part(model, config, layout.tensor)
        expert = 1 if layout.tensor > 1 else layout.expert
        setting = Setting(
            config=own,
            model=model,
            ranks=layout.data,
            expert=expert,
            device=device,
            device_memory=device_memory,
        )
        setting = as_configured(setting)
        taken = capacity(setting)
        key = (layout, choice.order, choice.degree > 1, stage)
        if key not in known:
            order: tuple[MicroPass, ...] = ()
            if layout.stages > 1:
                order = one_forward_one_backward(stage, layout.stages, own.data.micro_batches)
            known[key] = step_traffic(setting, taken, order=order)
        yield LayoutWorkload(setting, taken, known[key], profile, choice, node_ranks)


def _part(model: Architecture, config: TrainConfig, ranks: int) -> Architecture:
    """The part of ``model`` on one of ``ranks`` tensor-parallel ranks; dense units of an imported model stay whole."""
    parts = ranks if isinstance(config.model, ModelConfig) else 1
    units = tuple(replace(unit, matrices=unit.matrices // parts) for unit in model.units)
    experts = -(-model.experts // ranks)
    return replace(model, units=units, experts=experts, top_k=min(model.top_k, experts))
