"""What serving takes of memory, before anything is opened. Imports no torch.

``host_budget`` holds experts and nothing else: the host cache of their weights, scratch for records whose missed steps are
replayed, and on a CPU the slots of the device tier. Dense parameters and the cache of keys and values are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import BudgetError
from tierstore.model.config import ComputeDtype
from tierstore.model.spec import ModelSpec
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts.sizes import slot_count
from tierstore.store.config import StoreAccess
from tierstore.store.format import RecordSchema
from tierstore.store.opening import minimum_host_budget
from tierstore.tiers.slots import DeviceKind, DeviceSlots
from tierstore.units import format_bytes

#: Of pairs, which a pass copies one after another.
_PAIR_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class ServedBudgets:
    """How the budgets for experts are divided, in bytes. ``cache`` includes the ``scratch`` of replays; on a CPU cache and
    slots are the host budget. ``lookahead``: what speculation may hold of the cache.
    """

    cache: int
    scratch: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]
    #: Of the pairs that were trained beside frozen experts.
    pairs: DeviceSlots[ComputeDtype] | None = None


@dataclass(frozen=True, kw_only=True)
class ServedFootprint:
    """What serving holds, in bytes, beside the interpreter, activations, and keys and values: ``experts`` on the host and
    ``slots`` for them on a device with memory of its own, and ``dense`` parameters, which are on the device.
    """

    experts: int
    slots: int
    dense: int

    def host_bytes(self, device: DeviceKind) -> int:
        """What of it is in the host's memory."""
        return self.experts + (self.dense if device is DeviceKind.CPU else 0)


def served_budgets(
    config: ServeConfig,
    spec: ModelSpec,
    schema: RecordSchema,
    device: DeviceKind,
    *,
    scratch: int = 0,
    pairs: RecordSchema | None = None,
) -> ServedBudgets:
    """Divides the budgets of ``config`` for experts whose records are of ``schema``, and their ``pairs``. ``scratch``: what
    replays of missed steps need (``replay_scratch_bytes``). Raises BudgetError naming the minimum.

    The device tier gets as many slots as ``ring.layers`` or ``device_budget`` say, or without either a few for overlap
    (``serve/experts/sizes.py``), and fewer where the host budget is tight; at least one.
    """
    one = DeviceSlots(schema.numel, spec.compute_dtype, weights=1, gradients=0, quantized=schema.quantized)
    on_host = device is DeviceKind.CPU
    beside = None if pairs is None else DeviceSlots(pairs.numel, ComputeDtype.FP32, _PAIR_SLOTS, 0)
    beside_bytes = 0 if beside is None else beside.nbytes
    least_cache = scratch + minimum_host_budget(
        [schema] if pairs is None else [schema, pairs], config.cache, len(spec.moe_layers), StoreAccess.READ
    )
    minimum = least_cache + (one.nbytes + beside_bytes if on_host else 0)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert; "
            f"the minimum is {minimum} bytes ({format_bytes(minimum)})"
        )
    count = slot_count(
        config, spec, device, each=one.nbytes, room=config.host_budget - least_cache - beside_bytes
    )
    slots = DeviceSlots(
        schema.numel, spec.compute_dtype, weights=count, gradients=0, quantized=schema.quantized
    )
    cache = config.host_budget - (slots.nbytes + beside_bytes if on_host else 0)
    speculated = int((cache - scratch) * config.prefetch.budget) if config.prefetch.depth else 0
    return ServedBudgets(
        cache=cache,
        scratch=scratch,
        lookahead=min(speculated, cache - least_cache),
        slots=slots,
        pairs=beside,
    )


def served_footprint(
    config: ServeConfig, spec: ModelSpec, budgets: ServedBudgets, device: DeviceKind
) -> ServedFootprint:
    """What a server of ``spec`` holds with ``budgets``."""
    compute = spec.compute_dtype.itemsize
    slots = budgets.slots.nbytes + (0 if budgets.pairs is None else budgets.pairs.nbytes)
    return ServedFootprint(
        experts=config.host_budget,
        slots=slots if device is DeviceKind.CUDA else 0,
        dense=sum(compute * unit.matrices + 4 * unit.others for unit in spec.architecture.units)
        + 4 * sum(spec.adapter_units),
    )


def check_memory(footprint: ServedFootprint, device: DeviceKind, *, usable: int) -> None:
    """Raises BudgetError where this machine's ``usable`` bytes of memory are fewer than what is to be held in it."""
    needed = footprint.host_bytes(device)
    if needed > usable:
        dense = format_bytes(footprint.dense)
        beside = f" beside {dense} of dense parameters" if device is DeviceKind.CPU else ""
        raise BudgetError(
            f"host_budget: expected at most {format_bytes(max(usable - needed + footprint.experts, 0))}{beside}, for this "
            f"machine gives {format_bytes(usable)}; got {format_bytes(footprint.experts)}"
        )
