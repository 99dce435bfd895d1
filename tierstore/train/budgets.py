"""How a run's budgets are divided, before anything is opened. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from tierstore.errors import BudgetError
from tierstore.model.config import ComputeDtype
from tierstore.store.format import RecordSchema, WeightFormat
from tierstore.store.opening import minimum_host_budget
from tierstore.tiers.slots import DeviceSlots
from tierstore.train.config import TrainConfig
from tierstore.units import format_bytes

EXPERT_SCHEMA = "expert"


class DeviceKind(Enum):
    """Whether the device has memory of its own."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Budgets:
    """How ``host_budget`` is divided, in bytes. On a CPU the device slots come out of it."""

    cache: int
    device: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]


def expert_schema(config: TrainConfig) -> RecordSchema:
    split = config.model.compute_dtype is ComputeDtype.BF16
    return RecordSchema(
        EXPERT_SCHEMA,
        config.model.expert_shape.numel,
        WeightFormat.SPLIT_BF16 if split else WeightFormat.FP32,
    )


def least_host_budget(config: TrainConfig, device: DeviceKind, schema: RecordSchema | None = None) -> int:
    """The smallest host budget that ``budgets`` takes, in bytes."""
    schema = schema or expert_schema(config)
    cache = minimum_host_budget([schema], config.cache, len(config.model.moe_layers))
    return cache + (_least_slots(config, schema).nbytes if device is DeviceKind.CPU else 0)


def _least_slots(config: TrainConfig, schema: RecordSchema) -> DeviceSlots[ComputeDtype]:
    return DeviceSlots(schema.numel, config.model.compute_dtype, weights=1, gradients=1)


def budgets(config: TrainConfig, device: DeviceKind, schema: RecordSchema | None = None) -> Budgets:
    """Divides the budgets. Raises BudgetError naming the minimum. ``schema``: the experts', where they are not the
    configuration's own.

    The device tier gets as many slots as ``device_budget`` holds, or without one a few for overlap and fewer when the host
    budget is tight; at least one weight slot and one gradient slot.
    """
    schema = schema or expert_schema(config)
    least = _least_slots(config, schema)
    on_host = device is DeviceKind.CPU
    minimum = least_host_budget(config, device, schema)
    minimum_cache = minimum - (least.nbytes if on_host else 0)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert "
            f"with its gradient; the minimum is {minimum} bytes ({format_bytes(minimum)})"
        )
    if config.device_budget and config.device_budget < least.nbytes:
        raise BudgetError(
            f"device_budget: {config.device_budget} bytes cannot hold one expert and its gradient; the minimum is "
            f"{least.nbytes} bytes"
        )
    allowance = config.device_budget or (max(config.host_budget // 8, least.nbytes) if on_host else 1 << 62)
    if on_host:
        allowance = min(allowance, config.host_budget - minimum_cache)
    weights, gradients = 1, 1
    while weights < 4:
        more = replace(least, weights=weights + 1, gradients=min(gradients + 1, 3))
        if more.nbytes > allowance:
            break
        weights, gradients = more.weights, more.gradients
    slots = replace(least, weights=weights, gradients=gradients)
    cache = config.host_budget - (slots.nbytes if on_host else 0)
    lookahead = int(cache * config.prefetch.budget) if config.prefetch.depth else 0
    if cache - lookahead < minimum_cache:
        lookahead = max(cache - minimum_cache, 0)
    return Budgets(cache=cache, device=slots.nbytes, lookahead=lookahead, slots=slots)
