"""How a run's budgets are divided, before anything is opened. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.errors import BudgetError
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import PAIR_SCHEMA, expert_record, quantized_layout
from tierstore.moe.lora import PairShape
from tierstore.store.format import SECTION_ALIGNMENT, RecordSchema, Training
from tierstore.store.opening import minimum_host_budget
from tierstore.tiers.slots import DeviceKind, DeviceSlots
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes

#: Weight slots beyond which overlap gains nothing.
_MOST_SLOTS = 4


@dataclass(frozen=True)
class Budgets:
    """How ``host_budget`` is divided, in bytes. On a CPU the device slots come out of it."""

    cache: int
    device: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]
    #: Beside frozen experts: the slots of their pairs.
    pairs: DeviceSlots[ComputeDtype] | None = None


@dataclass(frozen=True)
class BoundarySplit:
    """Where the block inputs of a step in layer order lie: ``count`` of them, each of ``slot_bytes`` (padding included).

    ``slots`` of them are in memory at once. Those that the backward pass needs last are spilled; every other one never
    leaves memory.
    """

    count: int
    slot_bytes: int
    slots: int

    @property
    def memory_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def spilled_bytes(self) -> int:
        """What a step writes to disk, and reads back."""
        return (self.count - self.slots) * self.slot_bytes


def split_boundaries(layers: int, micro_batches: int, nbytes: int, budget: int) -> BoundarySplit:
    """Divides the boundaries of ``nbytes`` bytes of ``layers`` layers under ``budget`` (0: all in memory).

    Raises BudgetError for less than one layer's: while a layer computes, all of its micro-batches are under way.
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
    """The records of experts; LoRA leaves them as they are."""
    training = Training.FROZEN if config.lora.enabled else Training.TRAINED
    numel, compute = config.model.expert_shape.numel, config.model.compute_dtype
    return expert_record(
        numel, compute, training, config.adamw.moments, quantized=quantized_layout(config.spec)
    )


def pair_schema(config: TrainConfig) -> RecordSchema | None:
    """The records of the experts' pairs; None where there are none."""
    if not (config.lora.enabled and config.lora.experts):
        return None
    numel = PairShape.of(config.model.expert_shape, config.lora).numel
    return RecordSchema(PAIR_SCHEMA, numel, moments=config.adamw.moments)


def trained_schema(config: TrainConfig) -> RecordSchema | None:
    """The records that steps change: the experts', or with LoRA those of their pairs; None where LoRA adapts no experts."""
    return pair_schema(config) if config.lora.enabled else expert_schema(config)


def least_host_budget(config: TrainConfig, device: DeviceKind, schema: RecordSchema | None = None) -> int:
    """The smallest host budget that ``budgets`` takes, in bytes."""
    schema, pairs = schema or expert_schema(config), pair_schema(config)
    schemas = [schema] if pairs is None else [schema, pairs]
    cache = minimum_host_budget(schemas, config.cache, len(config.model.moe_layers))
    return cache + (_nbytes(_slots(config, schema, 1)) if device is DeviceKind.CPU else 0)


def _slots(config: TrainConfig, schema: RecordSchema, count: int) -> list[DeviceSlots[ComputeDtype]]:
    """Slots for ``count`` experts at a time, and of their pairs if there are any. Gradients leave as they come."""
    gradients, pairs = min(count, 3), pair_schema(config)
    compute = config.model.compute_dtype
    slots = [DeviceSlots(schema.numel, compute, count, 0 if schema.frozen else gradients, schema.quantized)]
    if pairs is not None:
        slots.append(DeviceSlots(pairs.numel, ComputeDtype.FP32, count, gradients))
    return slots


def _nbytes(slots: Iterable[DeviceSlots[ComputeDtype]]) -> int:
    return sum(each.nbytes for each in slots)


def budgets(config: TrainConfig, device: DeviceKind, schema: RecordSchema | None = None) -> Budgets:
    """Divides the budgets. Raises BudgetError naming the minimum. ``schema``: the experts', where they are not the
    configuration's own.

    The device tier gets as many slots as ``device_budget`` holds, or without one a few for overlap and fewer when the host
    budget is tight; at least one weight slot and one gradient slot.
    """
    schema = schema or expert_schema(config)
    slots = _slots(config, schema, 1)
    least, on_host = _nbytes(slots), device is DeviceKind.CPU
    minimum = least_host_budget(config, device, schema)
    minimum_cache = minimum - (least if on_host else 0)
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
    allowance = config.device_budget or (max(config.host_budget // 8, least) if on_host else 1 << 62)
    if on_host:
        allowance = min(allowance, config.host_budget - minimum_cache)
    for count in range(2, _MOST_SLOTS + 1):
        more = _slots(config, schema, count)
        if _nbytes(more) > allowance:
            break
        slots = more
    cache = config.host_budget - (_nbytes(slots) if on_host else 0)
    lookahead = int(cache * config.prefetch.budget) if config.prefetch.depth else 0
    if cache - lookahead < minimum_cache:
        lookahead = max(cache - minimum_cache, 0)
    experts, *pairs = slots
    return Budgets(
        cache=cache,
        device=_nbytes(slots),
        lookahead=lookahead,
        slots=experts,
        pairs=pairs[0] if pairs else None,
    )
