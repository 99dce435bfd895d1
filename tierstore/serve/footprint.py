"""The memory that serving needs, computed before anything is opened. Imports no torch.

``host_budget`` is for experts only: the host cache of their weights, scratch for records whose missed steps are replayed,
and on a CPU the slots of the device tier. It does not include dense parameters and the cache of keys and values.

A sequence takes memory as it grows, up to what its context needs. So ``batch.sequences`` sequences of ``batch.context``
tokens are the upper bound, which is compared with the machine's memory before anything is served.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.capabilities import Capability
from tierstore.errors import BudgetError, ConfigError
from tierstore.hf.spec import HfSpec
from tierstore.model.config import ComputeDtype
from tierstore.model.spec import ModelSpec
from tierstore.serve.config import BatchConfig, ExpertMemory, ServeConfig
from tierstore.store.config import StoreAccess
from tierstore.store.format import RecordSchema
from tierstore.store.opening import minimum_host_budget
from tierstore.tiers.slots import DeviceKind, DeviceSlots
from tierstore.units import format_bytes

#: Weight slots if no budget asks for more; further slots would not improve overlap.
_FEW = 4


def copies_weights(config: ServeConfig, device: DeviceKind) -> bool:
    """Whether experts are copied to device slots. A CPU computes with them in place in the host cache, unless a ring, copies
    or a limited copy link are configured. Raises ConfigError for a ring with ``weights_in_place = on``.
    """
    if device is not DeviceKind.CPU:
        return True
    if config.ring.memory is ExpertMemory.RING:
        if config.weights_in_place is Capability.ON:
            raise ConfigError(
                "weights_in_place: expected off or auto with ring.memory = ring, which copies experts, got on"
            )
        return True
    return config.weights_in_place is Capability.OFF or config.links.copy.on


def slot_count(
    config: ServeConfig, spec: ModelSpec, device: DeviceKind, *, each: int, room: int, free: int | None = None
) -> int:
    """Number of device slots of ``each`` bytes. ``room``: bytes of the host budget left for them on a CPU. ``free``: bytes
    of an accelerator that they may take if ``device_budget`` is 0.

    As many as ``ring.layers`` needs, or as fit in ``device_budget`` or ``free``; without any of these a few, for overlap.
    Raises BudgetError, ConfigError.
    """
    layers = len(spec.moe_layers)
    if not layers and config.ring.memory is ExpertMemory.RING:
        raise ConfigError("ring.memory: expected auto or sparse: the model has no experts, got ring")
    if config.ring.layers > layers:
        raise ConfigError(f"ring.layers: expected at most {layers}, the MoE layers, got {config.ring.layers}")
    copied, on_host = copies_weights(config, device), device is DeviceKind.CPU
    if config.device_budget and config.device_budget < each:
        raise BudgetError(
            f"device_budget: {config.device_budget} bytes cannot hold one expert; the minimum is {each} bytes"
        )
    asked = config.ring.layers * spec.experts if copied else 0
    if config.device_budget and asked * each > config.device_budget:
        raise _too_small("device_budget", config.device_budget, config.ring.layers, asked * each)
    if on_host and asked * each > room:
        least = asked * each + config.host_budget - room
        raise _too_small("host_budget", config.host_budget, config.ring.layers, least)
    if config.device_budget:
        budget = config.device_budget
    elif asked:
        budget = max(asked, _FEW) * each
    elif on_host:
        budget = max(config.host_budget // 8, each)
    else:
        budget = max(free or 0, _FEW * each)
    count = (min(budget, room) if on_host else budget) // each
    keeps = copied and (config.device_budget or asked or free is not None)
    most = max(layers * spec.experts, 1) if keeps else _FEW
    return min(count, most)


def _too_small(name: str, budget: int, layers: int, least: int) -> BudgetError:
    return BudgetError(
        f"{name}: {budget} bytes ({format_bytes(budget)}) cannot hold a ring of {layers} layers (ring.layers); the minimum "
        f"is {least} bytes ({format_bytes(least)})"
    )


#: Slots for LoRA pairs, which a pass copies one after another.
_PAIR_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class ServedBudgets:
    """How the budgets for experts are divided, in bytes. ``cache`` includes the ``scratch`` of replays; on a CPU, cache and
    slots together are the host budget. ``lookahead``: the part of the cache that speculation may hold.
    """

    cache: int
    scratch: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]
    #: Slots for the LoRA pairs of frozen experts.
    pairs: DeviceSlots[ComputeDtype] | None = None


def served_budgets(
    config: ServeConfig,
    spec: ModelSpec,
    schema: RecordSchema,
    device: DeviceKind,
    *,
    scratch: int = 0,
    pairs: RecordSchema | None = None,
    free: int | None = None,
) -> ServedBudgets:
    """Divide the budgets of ``config`` for experts with records of ``schema``, and their LoRA ``pairs``. ``scratch``: bytes
    for replaying missed steps (``replay_scratch_bytes``). ``free``: bytes of an accelerator that experts may take if
    ``device_budget`` is 0 (None: not known). Raises BudgetError naming the minimum.

    The device tier gets ``slot_count`` slots: fewer if the host budget is tight, but at least one.
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
        config,
        spec,
        device,
        each=one.nbytes,
        room=config.host_budget - least_cache - beside_bytes,
        free=None if free is None else free - beside_bytes,
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


def dense_parameter_bytes(spec: ModelSpec) -> int:
    """Bytes that the dense parameters of ``spec`` take on the device."""
    compute = spec.compute_dtype.itemsize
    units = sum(compute * unit.matrices + 4 * unit.others for unit in spec.architecture.units)
    return units + 4 * sum(spec.adapter_units)


def check_memory(host_budget: int, dense: int, device: DeviceKind, *, usable: int) -> None:
    """Raise BudgetError if this machine's ``usable`` bytes cannot hold ``host_budget`` for experts and, on a CPU, the
    ``dense`` parameters.
    """
    beside = dense if device is DeviceKind.CPU else 0
    if host_budget + beside > usable:
        named = f" beside {format_bytes(dense)} of dense parameters" if device is DeviceKind.CPU else ""
        raise BudgetError(
            f"host_budget: expected at most {format_bytes(max(usable - beside, 0))}{named}, since this machine has "
            f"{format_bytes(usable)} to use; got {format_bytes(host_budget)}"
        )


#: The shortest useful context.
_LEAST_CONTEXT = 128
#: A reduced context is a multiple of this.
_ROUND = 64


def sequence_bytes(spec: ModelSpec, tokens: int) -> int:
    """Most bytes that the keys and values of a sequence of ``tokens`` tokens take."""
    if not isinstance(spec, HfSpec):
        return tokens * 2 * spec.d_model * (len(spec.architecture.units) - 2) * spec.compute_dtype.itemsize
    return spec.cache_bytes(tokens) + _state_bytes(spec)


def batch_bytes(spec: ModelSpec, *, sequences: int, context: int) -> int:
    """Most bytes that a batch takes: while a pass appends to a layer, that layer exists twice."""
    layers = len(spec.architecture.units) - 2
    whole = sequences * sequence_bytes(spec, context)
    return whole + -(-whole // layers)


def fitted_context(spec: ModelSpec, batch: BatchConfig, *, longest: int, room: int) -> int:
    """The context of ``batch``; if it is 0, the longest up to ``longest`` tokens such that all sequences fit in ``room``.

    Raises BudgetError if the given context, or without one the shortest useful one, does not fit.
    """
    asked = batch.context or longest
    needed = batch_bytes(spec, sequences=batch.sequences, context=asked)
    if needed <= room:
        return asked
    constant = batch_bytes(spec, sequences=batch.sequences, context=0)
    most = (room - constant) * asked // max(needed - constant, 1) // _ROUND * _ROUND
    if batch.context or most < _LEAST_CONTEXT:
        raise BudgetError(
            f"batch.context: {batch.sequences} sequences of {asked} tokens need {format_bytes(needed)} for keys and "
            f"values, but only {format_bytes(max(room, 0))} are left; {max(most, 0)} tokens would fit, or fewer "
            "sequences (batch.sequences)"
        )
    return most


def _state_bytes(spec: HfSpec) -> int:
    """Bytes of linear attention's states (gated delta rule): the convolution's window, and a matrix for each head."""
    config, total = spec.config, 0
    heads = int(config.get("linear_num_value_heads", 0))
    matrix = int(config.get("linear_key_head_dim", 0)) * int(config.get("linear_value_head_dim", 0))
    for unit in spec.manifest.units:
        for parameter in unit.parameters:
            if ".linear_attn.conv1d." in parameter.name:
                total += parameter.numel * spec.compute_dtype.itemsize + heads * matrix * 4
    return total
