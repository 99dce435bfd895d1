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
from tierstore.tiers.slots import DeviceSlots
from tierstore.train.budgets import DeviceKind
from tierstore.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ServedBudgets:
    """How the budgets for experts are divided, in bytes. ``cache`` includes the ``scratch`` of replays; on a CPU cache and
    slots are the host budget. ``lookahead``: what speculation may hold of the cache.
    """

    cache: int
    scratch: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]


@dataclass(frozen=True, kw_only=True)
class ServedFootprint:
    """What a server holds, in bytes: experts on the host and on the device, and the dense parameters on the device."""

    host: int
    device: int
    dense: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.host + self.device + self.dense


def served_budgets(
    config: ServeConfig, spec: ModelSpec, schema: RecordSchema, device: DeviceKind, *, scratch: int = 0
) -> ServedBudgets:
    """Divides the budgets of ``config`` for experts whose records are of ``schema``. ``scratch``: what replays of missed
    steps need (``replay_scratch_bytes``). Raises BudgetError naming the minimum.

    The device tier gets as many slots as ``ring.layers`` or ``device_budget`` say, or without either a few for overlap
    (``serve/experts/sizes.py``), and fewer where the host budget is tight; at least one.
    """
    one = DeviceSlots(schema.numel, spec.compute_dtype, weights=1, gradients=0, quantized=schema.quantized)
    on_host = device is DeviceKind.CPU
    least_cache = scratch + minimum_host_budget(
        [schema], config.cache, len(spec.moe_layers), StoreAccess.READ
    )
    minimum = least_cache + (one.nbytes if on_host else 0)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert; "
            f"the minimum is {minimum} bytes ({format_bytes(minimum)})"
        )
    count = slot_count(config, spec, device, each=one.nbytes, room=config.host_budget - least_cache)
    slots = DeviceSlots(
        schema.numel, spec.compute_dtype, weights=count, gradients=0, quantized=schema.quantized
    )
    cache = config.host_budget - (slots.nbytes if on_host else 0)
    speculated = int((cache - scratch) * config.prefetch.budget) if config.prefetch.depth else 0
    return ServedBudgets(
        cache=cache, scratch=scratch, lookahead=min(speculated, cache - least_cache), slots=slots
    )


def served_footprint(config: ServeConfig, spec: ModelSpec, budgets: ServedBudgets) -> ServedFootprint:
    """What a server of ``spec`` holds beside the interpreter, activations, and keys and values."""
    compute = spec.compute_dtype.itemsize
    return ServedFootprint(
        host=config.host_budget,
        device=config.host_budget and budgets.slots.nbytes,
        dense=sum(compute * unit.matrices + 4 * unit.others for unit in spec.architecture.units),
    )
