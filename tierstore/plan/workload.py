"""The bytes, floating point operations and seconds of each operation in a run's schedule.

Bytes come from the configuration and from the traffic of the residency core; seconds from a machine's profile or the
configured link limits, whichever takes longer. Floating point operations are counted as usual: 2 per parameter and token
forward, 4 backward, and ``2 T S D`` (causal) for attention's two products over S positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from tierstore.cache.access import Phase
from tierstore.dense.layout import UnitLayout, gather_width
from tierstore.hf.spec import HfSpec, attention_sizes
from tierstore.links import LinkConfig
from tierstore.machine_profile import Cost, Evidence, Profile, over_link
from tierstore.model.config import CheckpointActivations
from tierstore.moe.config import SaveActivations
from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    Degree,
    Inputs,
    LayerPass,
    Share,
    WeightGradients,
    backward_pass,
    best_degree,
    chosen_degrees,
    forward_pass,
    pass_seconds,
)
from tierstore.parallel.config import fewest_experts
from tierstore.plan.capacity import Capacity, Setting
from tierstore.plan.traffic import Moved, Traffic
from tierstore.prefetch.operations import Kind, Operation, PassSizes, StepPasses, operations
from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule
from tierstore.store.format import MomentFormat
from tierstore.tiers.slots import DeviceKind
from tierstore.train.budgets import copies_weights

#: Steps simulated from a cold start, and how many of the first are not counted.
STEPS, SETTLED = 3, 1
#: The most experts of a pass, and of a step, simulated one by one; more experts are grouped into that many equal parts.
_MOST_OF_A_PASS, _MOST_OF_A_STEP = 16, 256
#: Device slots through which experts go that are not kept: the one that is computed, and the next one.
_SLOTS_AHEAD = 2
#: Bytes of a router weight that travels with a row, and of its gradient: fp32.
WEIGHT_BYTES = 4
#: Bytes per parameter that AdamW touches: weight, exp_avg and exp_avg_sq read and written, the gradient read.
_STEP_BYTES = 28


@dataclass(frozen=True)
class StepWorkload:
    """Operations of one rank, with the ``sizes`` and ``seconds`` that a simulation needs. ``chunks``: of the passes over
    experts, by phase (default: 1).
    """

    setting: Setting
    taken: Capacity
    traffic: Traffic
    profile: Profile
    chunks: Mapping[Phase, int] = field(default_factory=dict, kw_only=True)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, with the lookahead that the store allows."""
        asked, allowed = self.setting.schedule, self.taken.divided.lookahead
        vertical = QueueLimits(asked.vertical.depth, allowed) if allowed else QueueLimits(0)
        return replace(asked, vertical=vertical)

    @cached_property
    def layouts(self) -> list[UnitLayout]:
        return self.setting.layouts

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of one step."""
        return self.schedule.passes if self.setting.usage.trains else self.schedule.forward_passes

    @cached_property
    def operations(self) -> Sequence[Operation]:
        """The operations of a few steps, in program order."""
        slots = self.taken.divided.slots
        each = self.experts / min(self.parts(item) for item in self.passes)
        return operations(
            self.schedule,
            cache(self.sizes),
            steps=STEPS,
            # A part of several experts takes all of their slots; at least one more part is loaded meanwhile.
            slots=max(int(slots.weights / each), 2),
            gradient_slots=max(int(slots.gradients / each), 2),
            spare=int(slots.spare / each),
            passes=StepPasses.TRAINING if self.setting.usage.trains else StepPasses.FORWARD,
        )

    # Bytes -------------------------------------------------------------------------------------------------

    @cached_property
    def experts(self) -> int:
        """Experts that one pass of one rank computes."""
        return max(round(self.traffic.active * self.setting.local_experts), 1)

    def parts(self, item: Pass) -> int:
        """The number of operations for the experts of the pass ``item``, each for ``experts / parts`` experts; a multiple of
        the number of chunks.
        """
        passes = sum(item.moe_layer is not None for item in self.passes)
        few = min(self.experts, _MOST_OF_A_PASS, max(_MOST_OF_A_STEP // max(passes, 1), 4))
        chunks = self.degree(item)
        return -(-few // chunks) * chunks

    def degree(self, item: Pass) -> int:
        """The number of chunks in which the rows of ``item`` travel."""
        return self.chunks.get(item.phase, 1)

    def sizes(self, item: Pass) -> PassSizes:
        """The bytes that the pass ``item`` moves."""
        setting = self.setting
        others = setting.ranks - 1
        layout = self.layouts[item.unit]
        narrow = gather_width(setting.config.dense, setting.config.model.compute_dtype)
        gather = layout.gathered_bytes(narrow) * others // (others + 1)
        # Gathered once for all micro-batches that pass together; gradients are reduced one by one, to keep the bits.
        reduced = self._stepped(item.unit) if setting.usage.frozen else layout.exchanged_numel // (others + 1)
        reduce = reduced * others * 4 * setting.together
        if item.moe_layer is None:
            spilled = self._spilled if 0 < item.unit < len(self.layouts) - 1 else 0
            return PassSizes(gather=gather, reduce=reduce, rows=self._divided_sent(item), spilled=spilled)
        dispatch, combine = self._sent(item)
        parts = self.parts(item)
        slots, each = self.taken.divided.slots, self.experts / parts
        stepped = self.taken.divided.pairs or slots
        leaves = item.phase is Phase.BACKWARD and stepped.gradients and setting.device is not DeviceKind.CPU
        moved, divided = self._moved_for(item), self._passes * parts
        return PassSizes(
            gather=gather,
            reduce=reduce,
            dispatch=round(dispatch.amount),
            combine=round(combine.amount),
            chunks=self.degree(item),
            experts=parts,
            fetch=round(moved.loaded / divided),
            fetch_state=round(moved.state / divided),
            evict=round(moved.written / divided),
            load=round(slots.weight_bytes * each * self._copied(item.phase)),
            to_host=round(stepped.gradient_content_bytes * each) if leaves else 0,
        )

    def _copied(self, phase: Phase) -> float:
        """The share of a pass's experts that are copied to device slots, as the mean of a step's micro-batches.

        The slots keep experts as well as any policy can, but for ``_SLOTS_AHEAD`` of them where not all fit. An expert that
        is stepped is copied again by its next forward pass.
        """
        setting, slots = self.setting, self.taken.divided.slots.weights
        if not copies_weights(setting.config, setting.device):
            return 0.0
        kept = 1.0 if slots >= setting.records else max(slots - _SLOTS_AHEAD, 0) / setting.records
        missing = 1.0 - kept
        if phase is Phase.FORWARD and setting.usage.trains and not setting.usage.frozen:
            return (1.0 + (self._passes - 1) * missing) / self._passes
        return missing

    def exchange(self, item: Pass) -> LayerPass:
        """The messages that one rank sends in the pass ``item`` over experts; each micro-batch that passes sends its own."""
        setting, config, sharing = self.setting, self.setting.config, self.setting.sharing
        rows = setting.tokens * setting.model.top_k * (sharing - 1) / sharing
        rows_bytes = float(int(rows * config.model.d_model * config.model.compute_dtype.itemsize))
        if item.phase is Phase.FORWARD:
            found = forward_pass(rows_bytes, 0.0)
        else:
            outputs = isinstance(config.model, HfSpec)
            found = backward_pass(
                rows_bytes,
                0.0,
                weights_bytes=rows * WEIGHT_BYTES,
                inputs=Inputs.SAVED if config.keeps_activations else Inputs.SENT_AGAIN,
                gradients=WeightGradients.AT_TOKENS if outputs else WeightGradients.AT_EXPERTS,
            )
        dispatch, combine = (
            replace(way, starts=way.starts * setting.together) for way in (found.dispatch, found.combine)
        )
        return replace(found, dispatch=dispatch, combine=combine)

    def _sent(self, item: Pass) -> tuple[Share, Share]:
        """What ``item`` dispatches and combines, including a repeated forward pass."""
        found = self.exchange(item)
        if not self.repeats(item):
            return found.dispatch, found.combine
        again = self.exchange(replace(item, phase=Phase.FORWARD))
        dispatch, combine = (
            Share(one.starts + other.starts, one.amount + other.amount)
            for one, other in ((found.dispatch, again.dispatch), (found.combine, again.combine))
        )
        return dispatch, combine

    def repeats(self, item: Pass) -> bool:
        """Whether ``item`` first repeats the forward pass; in layer order its outputs are kept."""
        return item.phase is Phase.BACKWARD and self._again and not self.setting.config.data.layer_major

    def _divided_sent(self, item: Pass) -> int:
        """Bytes that a pass over embedding or head sends if their rows are partitioned."""
        choice, last = self.setting.vocabulary, len(self.layouts) - 1
        if choice.cost is None or not self.setting.usage.trains:
            return 0
        passes = self.setting.config.data.passes
        forward = item.phase is Phase.FORWARD
        if item.unit == 0 and choice.partition.embedding is not None:
            return choice.cost.embedding_sent // passes // 2  # rows come forward, gradients go back
        if item.unit == last and choice.partition.head is not None and forward:
            return choice.cost.head_sent // passes
        return 0

    @property
    def _spilled(self) -> int:
        """Bytes of a block's spilled inputs in a model without experts; otherwise passes over experts move all of them."""
        kept, model = self.setting.boundaries, self.setting.model
        return 0 if kept is None or model.moe_layers else kept.spilled_bytes // model.blocks

    def _stepped(self, unit: int) -> int:
        """The number of ``unit``'s dense parameters that one rank's optimizer steps."""
        usage = self.setting.usage
        if not usage.frozen:
            return self.layouts[unit].slice_numel
        return -(-usage.attention[unit] // self.setting.ranks) if usage.attention else 0

    def _moved_for(self, item: Pass) -> Moved:
        """Bytes that a step moves for ``item``'s phase and layer; deferred optimizer steps count as forward."""
        assert item.moe_layer is not None
        phases = [Phase.BACKWARD] if item.phase is Phase.BACKWARD else [Phase.FORWARD, Phase.OPTIMIZER]
        experts = sum(
            (self.traffic.moved_for.get((phase, item.moe_layer), Moved()) for phase in phases), Moved()
        )
        kept = self.setting.boundaries
        if kept is None:
            return experts
        each = kept.spilled_bytes // len(self.setting.model.moe_layers)
        return experts + (Moved(loaded=each) if item.phase is Phase.BACKWARD else Moved(written=each))

    # Seconds -----------------------------------------------------------------------------------------------

    def seconds(self, operation: Operation) -> float:
        """Seconds that ``operation`` takes once it runs."""
        item = self.passes[operation.position % len(self.passes)]
        each = self.experts / self.parts(item) if operation.kind in _OF_EXPERTS else 1.0
        if operation.kind in self._moved:
            cost, link = self._moved[operation.kind]
            limited = Cost(link.latency, link.bandwidth or math.inf)
            return each * cost.slower(limited, operation.nbytes / each)
        if operation.kind in (Kind.DISPATCH, Kind.COMBINE):
            dispatch, combine = self._sent(item)
            way = dispatch if operation.kind is Kind.DISPATCH else combine
            return way.starts * self.network.latency_s + operation.nbytes / self.network.per_s
        if operation.kind is Kind.DENSE:
            return self.profile.dense_flops.seconds(self.dense_flops(item))
        if operation.kind is Kind.EXPERT:
            # Every chunk after the first starts the pass's experts once more.
            starts, cost = (self.degree(item) - 1) / self.parts(item), self.expert_cost(item)
            return each * cost.seconds(self.expert_flops(item)) + starts * cost.latency_s
        if operation.kind is Kind.STEP:
            return self.profile.adamw.seconds(self._stepped(item.unit) * _STEP_BYTES)
        steps = 1 / self._passes  # earlier passes only accumulate gradients
        return each * steps * self.profile.adamw.seconds(self._step_bytes)

    @cached_property
    def network(self) -> Cost:
        """The cost of one message of an exchange."""
        return over_link(self.profile.exchange(self.setting.sharing), self.setting.config.links.rows)

    def expert_cost(self, item: Pass) -> Cost:
        """The cost of one expert in the pass ``item``."""
        forward = item.phase is Phase.FORWARD
        own = self.profile.expert_forward if forward else self.profile.expert_backward
        return own or self.profile.expert_flops

    @property
    def _step_bytes(self) -> float:
        """Bytes of an expert, or of its pairs, that AdamW touches. int8 moments count as fp32: quantising takes the time
        saved.
        """
        trained = self.setting.schemas[-1]
        if trained.frozen:
            return 0.0
        if trained.moments is MomentFormat.INT8:
            return trained.numel * _STEP_BYTES
        return 2 * trained.record_bytes + 4 * trained.numel

    @property
    def _passes(self) -> int:
        return self.setting.config.data.passes if self.setting.usage.trains else 1

    @cached_property
    def _again(self) -> bool:
        """Whether the backward pass recomputes blocks."""
        config = self.setting.config
        block = config.model.checkpoint_activations is CheckpointActivations.BLOCK
        return block or (config.data.layer_major and self.setting.usage.trains)

    @cached_property
    def _moved(self) -> dict[Kind, tuple[Cost, LinkConfig]]:
        """The cost of moving bytes, by kind: on the machine, and on the link that may be limited."""
        profile, links = self.profile, self.setting.config.links
        disk = profile.disk_mixed
        if not self.traffic.written_bytes:
            disk = profile.disk_read
        elif not self.traffic.read_bytes:
            disk = profile.disk_write
        return {
            Kind.GATHER: (profile.gather, links.gather),
            Kind.REDUCE: (profile.reduce_scatter, links.gather),
            Kind.ALL_TO_ALL: (profile.all_to_all, links.rows),
            Kind.FETCH: (disk, links.disk),
            Kind.WRITE: (disk, links.disk),
            Kind.LOAD: (profile.copy, links.copy),
            Kind.COPY_TO_HOST: (profile.copy, links.copy),
        }

    def dense_flops(self, item: Pass) -> int:
        """Floating point operations of one pass outside its experts."""
        config, model = self.setting.config, self.setting.model
        tokens, d = self.setting.tokens, config.model.d_model
        if item.unit == 0:
            return 0  # the embedding is a lookup
        if item.unit == len(model.units) - 1:
            # A pipeline stage without the head has an empty unit there.
            forward = 2 * tokens * config.model.vocab_size * d * config.spec.ends
        else:
            width = self._attention[item.unit]
            forward = 2 * tokens * (model.units[item.unit].numel + config.model.seq_len * width)
        again = self._again
        back = 1 if self.setting.usage.frozen else 2  # frozen weights get no gradients
        return forward if item.phase is Phase.FORWARD else forward * (back + again)

    @cached_property
    def _attention(self) -> list[int]:
        """The mean width of attention's two products, by unit."""
        model = self.setting.config.model
        if isinstance(model, HfSpec):
            products = [attention_sizes(model, unit).products for unit in model.manifest.units]
            return list(model.own(products, 0))
        return [model.d_model] * len(self.setting.model.units)

    def expert_flops(self, item: Pass) -> float:
        """Floating point operations of one expert in one pass, with its share of all ranks' tokens."""
        config, model = self.setting.config, self.setting.model
        tokens = self.setting.tokens * self.setting.sharing
        rows = tokens * model.top_k / (model.experts * self.traffic.active)
        pairs = self.setting.usage.pairs
        forward = 2 * rows * (model.expert_numel + (pairs.numel if pairs else 0))
        if item.phase is Phase.FORWARD:
            return forward
        again = 0.0
        if self.repeats(item):
            again = forward
        # Only the products that feed the activation function are recomputed.
        elif self._again or config.model.expert_activations is SaveActivations.RECOMPUTE:
            again = 2 * rows * config.model.expert_shape.inner_rows * config.model.d_model
        if self.setting.usage.frozen:
            return forward + again + (2 * rows * pairs.numel if pairs else 0)
        return 2 * forward + again


_OF_EXPERTS = frozenset({Kind.FETCH, Kind.WRITE, Kind.LOAD, Kind.COPY_TO_HOST, Kind.EXPERT, Kind.EXPERT_STEP})


# Chunks of a run's MoE layers (PipeMoE) ---------------------------------------------------------------------
#
# Experts have equal loads. A chunk is a group of experts or of parts of experts; the experts' start times are part of the
# work, whatever the number of chunks. Every chunk after the first is assumed to add one more start.


@dataclass(frozen=True)
class PassDegrees:
    """One pass of one layer in up to ``most`` chunks. ``taken``: the number of chunks that a run uses, configured or chosen
    by AUTO.
    """

    phase: Phase
    costs: ChunkCosts
    work: LayerPass
    most: int
    taken: int

    @cached_property
    def best(self) -> Degree:
        """The best number of chunks, with the cap of a rank's experts and (``wanted``) without."""
        return best_degree(self.costs, self.work, most=self.most)

    @property
    def one_s(self) -> float:
        """Seconds of the pass in one chunk."""
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
    """The chunks of a MoE layer's passes. ``most``: the cap on their number (``ParallelConfig.chunks_cap``). ``auto``:
    whether the run chooses the number.
    """

    most: int
    auto: bool
    passes: tuple[PassDegrees, ...]
    evidence: Evidence

    @property
    def taken(self) -> dict[Phase, int]:
        """The number of chunks that a run uses, by phase."""
        return {one.phase: one.taken for one in self.passes}

    def as_json(self) -> dict[str, Any]:
        return {
            "most_chunks_count": self.most,
            "chosen_by": "auto" if self.auto else "parallel.pipeline_degree",
            "evidence": self.evidence.value,
            **{one.phase.name.lower(): one.as_json() for one in self.passes},
        }


def layer_degrees(workload: StepWorkload) -> LayerDegrees | None:
    """The chunks of a run's passes; None if no tokens travel to experts, or nothing is trained."""
    setting = workload.setting
    sharing, parallel = setting.sharing, setting.config.parallel
    if sharing == 1 or parallel.tensor > 1 or not setting.usage.trains or not setting.model.moe_layers:
        return None
    auto, most = parallel.auto_degree, parallel.chunks_cap(experts=setting.model.experts, sharing=sharing)
    first: dict[Phase, Pass] = {}
    for item in workload.passes:
        if item.moe_layer is not None:
            first.setdefault(item.phase, item)
    works = [modelled(workload, item) for item in first.values()]
    taken = [parallel.pipeline_degree] * len(works)
    if auto:
        owned = fewest_experts(setting.model.experts, sharing)
        chosen = chosen_degrees(works, present=[1] * len(works), owned=owned, most=most)
        taken = [one.degree for one in chosen]
    passes = tuple(
        PassDegrees(phase, costs, work, most, own)
        for phase, (costs, work), own in zip(first, works, taken, strict=True)
    )
    return LayerDegrees(most, auto, passes, workload.profile.evidence.weaker(workload.traffic.evidence))


def modelled(workload: StepWorkload, item: Pass) -> tuple[ChunkCosts, LayerPass]:
    """The costs and work of ``item``, without a repeated forward pass, which has its own chunks."""
    network, expert = workload.network, workload.expert_cost(item)
    flops = workload.expert_flops(item)
    if workload.repeats(item):
        flops -= workload.expert_flops(replace(item, phase=Phase.FORWARD))
    seconds = workload.experts * expert.seconds(flops)
    costs = ChunkCosts(network.latency_s, 1 / network.per_s, expert.latency_s, 1.0)
    return costs, replace(workload.exchange(item), experts=Share(1, seconds))
