"""The order in which the micro-batches of a step pass through the layers: the cost of either order, and AUTO's choice.

In micro order each of M micro-batches passes through all layers: experts are fetched M times, forward and backward, and
their gradients are stored between micro-batches. In layer order each layer computes all micro-batches: experts are fetched
as for one micro-batch of M-fold size, gradients are accumulated in place, and dense parameters are gathered once; block
inputs are kept meanwhile, and every block is recomputed. The bits are the same; only the cost differs. AUTO is decided once,
before a run, from its configuration alone: layer order if it moves fewer bytes and its step is estimated to be faster, by
``parallel.profile`` or, without one, by assumed costs.

One micro-batch of M-fold size with block checkpointing moves the same bytes. Its sums have another order, and it keeps
the graph of a block, and the logits, for all of its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tierstore.decision import Decision
from tierstore.errors import BudgetError, ConfigError, DataError
from tierstore.machine_profile import ASSUMED, Evidence, Profile, find_profile
from tierstore.model.config import CheckpointActivations
from tierstore.plan.capacity import Setting, as_configured, capacity
from tierstore.plan.predict import Prediction, predict
from tierstore.plan.traffic import Traffic
from tierstore.prefetch.operations import Resource
from tierstore.stats import Tier
from tierstore.tiers.slots import DeviceKind
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.footprint import within_memory
from tierstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tierstore.parallel import Mesh


@dataclass(frozen=True)
class OrderCost:
    """The cost of a step on one rank. ``memory_bytes``: the peak, device included. ``moved_bytes``: read from and written to
    disk, spilled block inputs included.
    """

    memory_bytes: int
    moved_bytes: int
    step_s: float
    evidence: Evidence


def in_order(config: TrainConfig, order: Decision[MicroOrder]) -> TrainConfig:
    """``config`` with the chosen order."""
    return replace(config, data=replace(config.data, micro_order=order.value))


def order_lines(order: Decision[MicroOrder]) -> list[str]:
    """The line on the order at the head of a run; none for a single micro-batch."""
    return [order.describe()] if order.facts["micro_batches"] > 1 else []


def order_advice(order: Decision[MicroOrder]) -> str | None:
    """Compare one larger micro-batch with layer order; None if either cost is unknown."""
    layer, whole = order.facts["layer"], order.facts["one_larger"]
    if layer is None or whole is None:
        return None
    layer_is_better = (
        layer.memory_bytes < whole.memory_bytes
        or layer.moved_bytes < whole.moved_bytes
        or layer.step_s < whole.step_s
    )
    return (
        f"one micro-batch of {order.facts['micro_batches']}-fold size with checkpoint_activations = block (sums in another "
        f"order) moves {format_bytes(whole.moved_bytes)} per step in {format_seconds(whole.step_s)} and peaks at "
        f"{format_bytes(whole.memory_bytes)}; layer order moves {format_bytes(layer.moved_bytes)} in "
        f"{format_seconds(layer.step_s)} and peaks at {format_bytes(layer.memory_bytes)}"
        + ("" if layer_is_better else ": the larger micro-batch is as good")
    )


def _decision(
    order: MicroOrder,
    reason: str,
    micro_batches: int,
    micro: OrderCost | None = None,
    layer: OrderCost | None = None,
    whole: OrderCost | None = None,
) -> Decision[MicroOrder]:
    """``whole``: one micro-batch of M-fold size with block checkpointing. A cost is None if not computed or if the budgets
    are too small.
    """
    facts = {"micro_batches": micro_batches, "micro": micro, "layer": layer, "one_larger": whole}
    return Decision(f"order of {micro_batches} micro-batches", order, reason, facts)


def choose_order(
    config: TrainConfig, *, ranks: int = 1, device: DeviceKind = DeviceKind.CPU
) -> Decision[MicroOrder]:
    """The order of a run of ``config``, as configured or as AUTO chooses. Depends on the arguments and on
    ``parallel.profile`` only. Raises ConfigError.
    """
    asked, count = config.data.micro_order, config.data.micro_batches
    if count == 1:
        return _decision(MicroOrder.MICRO, "one micro-batch", count)
    if asked is not MicroOrder.AUTO:
        return _decision(asked, "as configured", count)
    if config.parallel.stages > 1:
        return _decision(MicroOrder.MICRO, "auto: pipeline stages run micro-batches in 1F1B order", count)
    setting = Setting(
        config=config,
        model=config.model.architecture,
        ranks=ranks,
        expert=config.parallel.expert,
        device=device,
    )
    return compare_orders(as_configured(setting), _run_profile(config))


def _run_profile(config: TrainConfig) -> Profile:
    """The profile by which a run of ``config`` chooses."""
    named = config.parallel.profile
    try:
        return ASSUMED if named is None else find_profile(named)
    except (DataError, OSError) as error:
        raise ConfigError(f"parallel.profile: {error}") from error


def agreed_order(config: TrainConfig, mesh: Mesh) -> Decision[MicroOrder]:
    """The order for all ranks of ``mesh``: rank 0's choice, since ``[links]`` may differ between ranks. A collective."""
    own = choose_order(config, ranks=mesh.data.size, device=DeviceKind.of(mesh.device.type))
    agreed: Decision[MicroOrder] = mesh.world.all_gather_object(own)[0]
    return agreed


def compare_orders(setting: Setting, profile: Profile) -> Decision[MicroOrder]:
    """The order of ``setting``, with the costs of both orders and of one larger micro-batch by ``profile``.

    AUTO's choice is that of a run, which knows no other profile than ``parallel.profile``.
    """
    data = setting.config.data
    micro, layer = _costs(setting, profile)
    order, reason = data.micro_order, "as configured"
    if order is MicroOrder.AUTO:
        found, _ = _auto(micro, layer)
        own = _run_profile(setting.config)
        order, reason = _auto(*((micro, layer) if profile == own else _costs(setting, own)))
        if found is not order:
            reason += (
                f"; by the profile of {profile.machine}, {found.value} order is faster (set parallel.profile)"
            )
    return _decision(order, reason, data.micro_batches, micro, layer, _cost(_whole(setting), profile))


def _costs(setting: Setting, profile: Profile) -> tuple[OrderCost | None, OrderCost | None]:
    """The costs of micro order and of layer order."""
    config = setting.config
    micro, layer = (
        _cost(replace(setting, config=replace(config, data=replace(config.data, micro_order=order))), profile)
        for order in (MicroOrder.MICRO, MicroOrder.LAYER)
    )
    return micro, layer


def _auto(micro: OrderCost | None, layer: OrderCost | None) -> tuple[MicroOrder, str]:
    if layer is None:
        return MicroOrder.MICRO, "auto: boundary_budget is too small for layer order"
    if micro is None:
        return MicroOrder.LAYER, "auto: the budgets are too small for micro order"
    moved = f"a step moves {format_bytes(layer.moved_bytes)} in layer order and {format_bytes(micro.moved_bytes)} in micro"
    took = f"in {format_seconds(layer.step_s)} and {format_seconds(micro.step_s)} ({layer.evidence.value})"
    pays = layer.moved_bytes < micro.moved_bytes and layer.step_s < micro.step_s
    return MicroOrder.LAYER if pays else MicroOrder.MICRO, f"auto: {moved}, {took}"


def _whole(setting: Setting) -> Setting:
    """``setting`` with the step as one micro-batch and block checkpointing."""
    config, data = setting.config, setting.config.data
    model = config.model.vary("checkpoint_activations", CheckpointActivations.BLOCK)
    one = replace(data, batch_size=data.batch_size * data.micro_batches, micro_batches=1)
    return replace(setting, config=replace(config, data=one, model=model or config.model))


def _cost(setting: Setting, profile: Profile) -> OrderCost | None:
    """The cost of a step; None if the budgets are too small."""
    planned = _planned(setting, profile)
    return planned and planned[0]


def _planned(
    setting: Setting, profile: Profile, traffic: Traffic | None = None
) -> tuple[OrderCost, Prediction] | None:
    """The cost of a step, whose ``traffic`` may be known, and its prediction; None if the budgets are too small."""
    try:
        within = within_memory(setting.config, setting.fixed, setting.device, sums=setting.sums)
        setting = replace(setting, config=within)
        taken = capacity(setting)
        made = predict(setting, profile, taken, traffic)
    except BudgetError:
        return None
    kept = setting.boundaries
    spilled = 0 if kept is None else 2 * kept.spilled_bytes
    moved = made.traffic.read_bytes + made.traffic.written_bytes + spilled
    return OrderCost(taken.total(Tier.HOST, Tier.DEVICE), moved, made.step_s, made.evidence), made


# The step that hides the disk -------------------------------------------------------------------------------

_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class StepProposal(OrderCost):
    """The smallest step in layer order, of micro-batches of the given size, for which the disk takes no longer than the
    computation.
    """

    micro_batches_count: int
    tokens: int
    tokens_per_s: float

    def describe(self) -> str:
        """The proposal in one line."""
        return (
            f"the disk takes no longer than the computation from {self.tokens:,} tokens a step on "
            f"(data.micro_batches = {self.micro_batches_count} in layer order): {format_seconds(self.step_s)}, "
            f"{self.tokens_per_s:,.4g} tokens/s, {format_bytes(self.memory_bytes)} of memory"
        )


def propose_step(setting: Setting, profile: Profile) -> StepProposal | None:
    """The larger step of ``setting`` that its disk does not bound; None if the budgets are too small for one."""
    config, traffic = setting.config, None
    # A single micro-batch recomputes no block, so it says nothing of the computation in layer order.
    count = config.data.micro_batches + (1 if config.data.passes == 1 else 0)
    for _ in range(_ROUNDS):
        data = replace(config.data, micro_batches=count, micro_order=MicroOrder.LAYER)
        planned = _planned(replace(setting, config=replace(config, data=data)), profile, traffic)
        if planned is None:
            return None
        cost, made = planned
        computing, disk = made.busy_ratio[Resource.COMPUTE], made.busy_ratio[Resource.DISK]
        if disk <= computing:
            tokens = config.tokens_per_micro_batch * count
            speed = made.tokens_per_s
            return StepProposal(**vars(cost), micro_batches_count=count, tokens=tokens, tokens_per_s=speed)
        if made.traffic.active == 1.0 and not config.memory:  # more tokens move the same bytes
            traffic = made.traffic
        # Never too many: part of the computation does not grow with the tokens, and the bytes do not fall.
        count = max(math.ceil(count * disk / computing), count + 1)
    return None
