"""Divides a run's budgets, before anything is opened. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tierstore.capabilities import Capability
from tierstore.errors import BudgetError
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import PAIR_SCHEMA, expert_record, quantized_layout
from tierstore.moe.lora import PairShape
from tierstore.store.format import SECTION_ALIGNMENT, RecordSchema, Training
from tierstore.store.opening import minimum_host_budget, resident_cache_bytes
from tierstore.tiers.slots import DeviceKind, DeviceSlots, SlotGradient
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes

#: More weight slots do not improve overlap, if slots keep no experts from pass to pass.
_FEW_SLOTS = 4


@dataclass(frozen=True)
class Budgets:
    """The parts of ``host_budget``, in bytes. On a CPU it includes the device slots; ``landing`` is the memory of the
    host buffers into which a device copies gradients.
    """

    cache: int
    device: int
    landing: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]
    #: With frozen experts: the slots of their low-rank pairs.
    pairs: DeviceSlots[ComputeDtype] | None = None


@dataclass(frozen=True)
class BoundarySplit:
    """Memory and disk for the block inputs of a step in layer order: ``count`` inputs of ``slot_bytes`` (padding included).

    ``slots`` of them are in memory at once. Those that the backward pass needs last are spilled; the others never leave
    memory.
    """

    count: int
    slot_bytes: int
    slots: int

    @property
    def memory_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes that a step writes to disk and reads back."""
        return (self.count - self.slots) * self.slot_bytes


def split_boundaries(layers: int, micro_batches: int, nbytes: int, budget: int) -> BoundarySplit:
    """Divides the boundaries of ``nbytes`` bytes of ``layers`` layers under ``budget`` (0: all in memory).

    Raises BudgetError for less than one layer's: while a layer computes, the inputs of all its micro-batches are in memory.
    """
    count, slot_bytes = layers * micro_batches, -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    slots = min(budget // slot_bytes, count) if budget else count
    if slots < min(micro_batches, count):
        least = micro_batches * slot_bytes
        raise BudgetError(
            f"boundary_budget: {budget} bytes ({format_bytes(budget)}) cannot hold the inputs of one block for "
            f"{micro_batches} micro-batches; the minimum is {least} bytes ({format_bytes(least)})"
        )
    return BoundarySplit(count, slot_bytes, slots)


def expert_schema(config: TrainConfig) -> RecordSchema:
    """The schema of expert records, which LoRA does not change."""
    training = Training.FROZEN if config.lora.enabled else Training.TRAINED
    numel, compute = config.model.expert_shape.numel, config.model.compute_dtype
    return expert_record(
        numel, compute, training, config.adamw.moments, quantized=quantized_layout(config.spec)
    )


def pair_schema(config: TrainConfig) -> RecordSchema | None:
    """The schema of the experts' low-rank pairs; None without such pairs."""
    if not (config.lora.enabled and config.lora.experts):
        return None
    numel = PairShape.of(config.model.expert_shape, config.lora).numel
    return RecordSchema(PAIR_SCHEMA, numel, moments=config.adamw.moments)


def trained_schema(config: TrainConfig) -> RecordSchema | None:
    """The schema of the records that steps change: the experts', or with LoRA their pairs'; None if LoRA adapts no
    experts."""
    return pair_schema(config) if config.lora.enabled else expert_schema(config)


def least_host_budget(
    config: TrainConfig, device: DeviceKind, schema: RecordSchema | None = None, *, sums: bool = False
) -> int:
    """The smallest host budget that ``budgets`` accepts, in bytes."""
    schema, pairs = schema or expert_schema(config), pair_schema(config)
    schemas = [schema] if pairs is None else [schema, pairs]
    cache = minimum_host_budget(schemas, config.cache, len(config.model.moe_layers))
    slots = _slots(config, schema, 1, sums)
    return cache + _landing(config, device, slots) + (_nbytes(slots) if device is DeviceKind.CPU else 0)


def _slots(
    config: TrainConfig, schema: RecordSchema, count: int, sums: bool
) -> list[DeviceSlots[ComputeDtype]]:
    """Slots for ``count`` experts at a time, and for their pairs, if any. Gradients are moved off as they become final."""
    gradients, pairs = 0 if schema.frozen else min(count, 3), pair_schema(config)
    # In layer order a slot adds up the micro-batches' products.
    gradient = SlotGradient.SUM if sums or config.data.layer_major else SlotGradient.PRODUCT
    compute = config.model.compute_dtype
    slots = [DeviceSlots(schema.numel, compute, count, gradients, schema.quantized, gradient)]
    if pairs is not None:
        slots.append(DeviceSlots(pairs.numel, ComputeDtype.FP32, count, min(count, 3)))
    return slots


def adds_up(config: TrainConfig, *, experts: int, replicas: int, sharing: int) -> bool:
    """Whether gradient slots hold fp32 sums in micro order too: over ``replicas`` of the experts, or over the parts into
    which the configuration divides the rows of a layer's ``experts``, which ``sharing`` ranks share.
    """
    return replicas > 1 or config.parallel.divides_experts(experts=experts, sharing=sharing)


def _nbytes(slots: Iterable[DeviceSlots[ComputeDtype]]) -> int:
    return sum(each.nbytes for each in slots)


def _landing(config: TrainConfig, device: DeviceKind, slots: Iterable[DeviceSlots[ComputeDtype]]) -> int:
    """Bytes of the host buffers into which a device copies gradients."""
    return sum(each.host_bytes for each in slots) if copies_weights(config, device) else 0


def copies_weights(config: TrainConfig, device: DeviceKind) -> bool:
    """Whether experts are copied to device slots, which keep them. A CPU computes with experts in place in the host
    cache, unless the configuration says otherwise.
    """
    return device is not DeviceKind.CPU or config.weights_in_place is Capability.OFF or config.links.copy.on


def budgets(
    config: TrainConfig,
    device: DeviceKind,
    *,
    experts: int,
    schema: RecordSchema | None = None,
    free: int | None = None,
    sums: bool = False,
    external: bool = False,
) -> Budgets:
    """Divides the budgets for a rank that has ``experts`` experts in all of its layers. Raises BudgetError naming the
    minimum. ``schema``: that of the experts (None: the configuration's). ``free``: bytes of an accelerator that experts may
    take if ``device_budget`` is 0 (None: not known). ``sums``: see ``adds_up``. ``external``: an external loop trains, which
    keeps all gradients until it steps.

    The device tier gets as many slots as ``device_budget`` or ``free`` holds, at most one for each expert. It gets a few,
    for overlap, without either, if ``free`` holds fewer, or if the device computes with the host cache. A tight host
    budget, which a CPU's slots and the landing of gradients are part of, leaves fewer: at least one for weights and one for
    gradients. If gradients are stepped at once, memory that the cache cannot use, because all records fit, becomes spare
    buffers for the gradients of up to half of the experts.
    """
    schema = schema or expert_schema(config)
    slots = _slots(config, schema, 1, sums)
    least, on_host = _nbytes(slots), device is DeviceKind.CPU
    minimum = least_host_budget(config, device, schema, sums=sums)
    minimum_cache = minimum - _landing(config, device, slots) - (least if on_host else 0)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert "
            f"with its gradient; the minimum is {minimum} bytes ({format_bytes(minimum)})"
        )
    if config.device_budget and config.device_budget < least:
        raise BudgetError(
            f"device_budget: {config.device_budget} bytes cannot hold one expert and its gradient; the minimum is "
            f"{least} bytes"
        )
    if config.device_budget:
        allowance = config.device_budget
    elif on_host:
        allowance = max(config.host_budget // 8, least)
    else:
        allowance = max(free or 0, _nbytes(_slots(config, schema, _FEW_SLOTS, sums)))
    keeps = copies_weights(config, device) and (config.device_budget or free is not None)
    most = experts if keeps else _FEW_SLOTS

    def cache_beside(asked: Sequence[DeviceSlots[ComputeDtype]]) -> int:
        return config.host_budget - _landing(config, device, asked) - (_nbytes(asked) if on_host else 0)

    def lacks(count: int) -> bool:
        """Whether the budgets are too small for ``count`` slots."""
        asked = _slots(config, schema, count, sums)
        return _nbytes(asked) > allowance or cache_beside(asked) < minimum_cache

    slots = _slots(config, schema, max(bisect_left(range(1, most + 1), True, key=lacks), 1), sums)
    cache = cache_beside(slots)
    if copies_weights(config, device) and not (schema.frozen or external or config.keeps_gradients):
        idle = max(cache - minimum_cache - resident_cache_bytes(schema, experts), 0)
        slots = [replace(slots[0], spare=min(idle // slots[0].gradient_bytes, experts // 2))]
        cache = cache_beside(slots)
    lookahead = int(cache * config.prefetch.budget) if config.prefetch.depth else 0
    if cache - lookahead < minimum_cache:
        lookahead = max(cache - minimum_cache, 0)
    of_experts, *pairs = slots
    return Budgets(
        cache=cache,
        device=_nbytes(slots),
        landing=_landing(config, device, slots),
        lookahead=lookahead,
        slots=of_experts,
        pairs=pairs[0] if pairs else None,
    )
