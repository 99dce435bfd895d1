"""The memory that serving needs, computed before anything is opened. Imports no torch.

``host_budget`` is for experts only: the host cache of their weights, scratch for records whose missed steps are replayed,
and on a CPU the slots of the device tier. It does not include dense parameters and the cache of keys and values.

A sequence takes memory as it grows, up to what its context needs. So ``batch.sequences`` sequences of ``batch.context``
tokens are the upper bound, which is compared with the machine's memory before anything is served.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from tierstore.capabilities import Capability
from tierstore.errors import BudgetError, ConfigError
from tierstore.hf.spec import HfSpec
from tierstore.machine import MemoryAccount, working_bytes
from tierstore.model.config import ComputeDtype
from tierstore.model.spec import ModelSpec
from tierstore.serve.config import BatchConfig, ExpertMemory, ServeConfig
from tierstore.store.config import StoreAccess
from tierstore.store.format import Group, RecordSchema
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


def _too_small(name: str, budget: int, layers: int, least: int) -> BudgetError:
    return BudgetError(
        f"{name}: {budget} bytes ({format_bytes(budget)}) cannot hold a ring of {layers} layers (ring.layers); the minimum "
        f"is {least} bytes ({format_bytes(least)})"
    )


#: Slots for LoRA pairs, which a pass copies one after another.
_PAIR_SLOTS = 2


@dataclass(frozen=True, kw_only=True)
class ServedRecords:
    """The records that serving reads: schemas of experts and of their LoRA pairs (None: no pairs), and the scratch bytes
    for replaying missed steps (``replay_scratch_bytes``). ``ranks``: those that share them.
    """

    experts: RecordSchema
    pairs: RecordSchema | None = None
    scratch: int = 0
    ranks: int = 1

    @property
    def schemas(self) -> list[RecordSchema]:
        return [self.experts] if self.pairs is None else [self.experts, self.pairs]


@dataclass(frozen=True, kw_only=True)
class ServedBudgets:
    """How the budgets for experts are divided, in bytes. ``cache`` includes the scratch of replays; on a CPU, cache and
    slots together are the host budget. ``lookahead``: the part of the cache that speculation may hold.
    """

    cache: int
    lookahead: int
    slots: DeviceSlots[ComputeDtype]
    #: Slots for the LoRA pairs of frozen experts.
    pairs: DeviceSlots[ComputeDtype] | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertBudget:
    """The memory for the experts of ``spec``, which are ``records``, served as ``config`` on ``device``."""

    config: ServeConfig
    spec: ModelSpec
    records: ServedRecords
    device: DeviceKind

    def of(self, host_budget: int) -> ExpertBudget:
        """The same with another ``host_budget``."""
        return replace(self, config=replace(self.config, host_budget=host_budget))

    @property
    def least(self) -> int:
        """The smallest host budget that can be divided, in bytes."""
        return self._least_cache + self._host_slot_bytes

    @property
    def _least_cache(self) -> int:
        schemas, layers = self.records.schemas, len(self.spec.moe_layers)
        return self.records.scratch + minimum_host_budget(
            schemas, self.config.cache, layers, StoreAccess.READ
        )

    def full(self, share: float = 1.0) -> int:
        """The host budget with which the cache holds ``share`` of all experts of a rank, in bytes."""
        count = -(-self.spec.experts // self.records.ranks) * len(self.spec.moe_layers)
        each = sum(part.padded_nbytes for part in self.records.experts.layout(Group.WEIGHTS).sections)
        ample = max(16 * count * each, self.least)  # beside the cache it leaves the most of any
        beside = ample - self.of(ample).divided().cache
        return max(round(share * count), 1) * each + beside + self.records.scratch

    def within(self, allowed: int, process: int) -> int:
        """The host budget that ``allowed`` bytes of memory leave beside the ``process``, at most that for all experts. If
        ``batch.context`` is 0, keys and values get what a useful context needs, and up to a quarter of the rest. Raises
        BudgetError naming the minimum.
        """
        least, config = self.least, self.config
        longest = self.spec.positions or self.spec.seq_len
        context = config.batch.context or min(_LEAST_CONTEXT, longest)
        given = self.of(least).config

        def account(context: int) -> MemoryAccount:
            return served_account(given, self.spec, self.device, process=process, context=context)

        account(context).check(allowed, "batch.sequences or batch.context")
        left = allowed - account(context).nbytes
        if not config.batch.context:
            left -= min(account(longest).nbytes - account(context).nbytes, left // 4)
        return least + min(left, max(self.full() - least, 0))

    def divided(self, *, free: int | None = None) -> ServedBudgets:
        """Cache and slots. ``free``: bytes of an accelerator that experts may take if ``device_budget`` is 0 (None: not
        known). Raises BudgetError naming the minimum.

        The device tier gets as many slots as ``_slot_count`` says: fewer if the host budget is tight, but at least one.
        """
        config, least, pairs = self.config, self.least, self._pair_slots
        if config.host_budget < least:
            raise BudgetError(
                f"host_budget: {config.host_budget} bytes ({format_bytes(config.host_budget)}) are too few for one expert; "
                f"the minimum is {least} bytes ({format_bytes(least)})"
            )
        beside = 0 if pairs is None else pairs.nbytes
        each, least_cache = self._slots(1).nbytes, self._least_cache
        room = config.host_budget - least_cache - beside
        slots = self._slots(self._slot_count(each, room, None if free is None else free - beside))
        cache = config.host_budget - (slots.nbytes + beside if self.device is DeviceKind.CPU else 0)
        speculated = int((cache - self.records.scratch) * config.prefetch.budget)
        lookahead = min(speculated, cache - least_cache) if config.prefetch.depth else 0
        return ServedBudgets(cache=cache, lookahead=lookahead, slots=slots, pairs=pairs)

    def _slots(self, count: int) -> DeviceSlots[ComputeDtype]:
        experts = self.records.experts
        return DeviceSlots(experts.numel, self.spec.compute_dtype, count, 0, experts.quantized)

    @property
    def _pair_slots(self) -> DeviceSlots[ComputeDtype] | None:
        pairs = self.records.pairs
        return None if pairs is None else DeviceSlots(pairs.numel, ComputeDtype.FP32, _PAIR_SLOTS, 0)

    @property
    def _host_slot_bytes(self) -> int:
        """What a slot for an expert, and those for pairs, take of the host budget."""
        pairs = self._pair_slots
        slots = self._slots(1).nbytes + (0 if pairs is None else pairs.nbytes)
        return slots if self.device is DeviceKind.CPU else 0

    def _slot_count(self, each: int, room: int, free: int | None) -> int:
        """Number of device slots of ``each`` bytes. ``room``: bytes of the host budget left for them on a CPU. ``free``:
        bytes of an accelerator that they may take if ``device_budget`` is 0.

        As many as ``ring.layers`` needs, or as fit in ``device_budget`` or ``free``; else a few, for overlap.
        Raises BudgetError, ConfigError.
        """
        config, spec, device = self.config, self.spec, self.device
        layers = len(spec.moe_layers)
        if not layers and config.ring.memory is ExpertMemory.RING:
            raise ConfigError("ring.memory: expected auto or sparse: the model has no experts, got ring")
        if config.ring.layers > layers:
            raise ConfigError(
                f"ring.layers: expected at most {layers}, the MoE layers, got {config.ring.layers}"
            )
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


def served_account(
    config: ServeConfig, spec: ModelSpec, device: DeviceKind, *, process: int, context: int
) -> MemoryAccount:
    """What a process that serves ``config`` with ``context`` tokens a sequence will hold in host memory. ``process``: bytes
    that it held before.
    """
    sequences = config.batch.sequences
    prefill = max(min(config.limits.prefill_tokens, sequences * context), context)
    cached = batch_bytes(spec, sequences, context)
    return pass_account(
        config, spec, device, process=process, tokens=prefill, logits=sequences, cached=cached
    )


def pass_account(
    config: ServeConfig,
    spec: ModelSpec,
    device: DeviceKind,
    *,
    process: int,
    tokens: int,
    logits: int | None = None,
    cached: int = 0,
) -> MemoryAccount:
    """The same for passes of ``tokens`` tokens, which compute the logits of ``logits`` of them (None: of all), beside
    ``cached`` bytes of keys and values. No gaps are between activations, since a forward pass keeps none of them.
    """
    on_cpu = {
        "dense parameters": dense_parameter_bytes(spec),
        "keys and values": cached,
        "activations": spec.forward_bytes(tokens, logits=logits),
    }
    return MemoryAccount(
        {
            "experts": config.host_budget,
            "process": process,
            **(on_cpu if device is DeviceKind.CPU else {}),
            "working memory": working_bytes(0),
        }
    )


#: The shortest useful context.
_LEAST_CONTEXT = 128
#: A reduced context is a multiple of this.
_ROUND = 64


def sequence_bytes(spec: ModelSpec, tokens: int) -> int:
    """Most bytes that the keys and values of a sequence of ``tokens`` tokens take."""
    if not isinstance(spec, HfSpec):
        return tokens * 2 * spec.d_model * spec.architecture.blocks * spec.compute_dtype.itemsize
    return spec.cache_bytes(tokens) + _state_bytes(spec)


def batch_bytes(spec: ModelSpec, sequences: int, context: int) -> int:
    """Most bytes that a batch takes: while a pass appends to a layer, that layer exists twice."""
    layers = spec.architecture.blocks
    whole = sequences * sequence_bytes(spec, context)
    return whole + -(-whole // layers)


def fitted_context(needed: Callable[[int], int], batch: BatchConfig, *, longest: int, allowed: int) -> int:
    """The context of ``batch``; if it is 0, the longest up to ``longest`` tokens with which a process takes at most
    ``allowed`` bytes. ``needed``: what it takes with a context.

    Raises BudgetError if the given context, or without one the shortest useful one, does not fit.
    """
    asked = batch.context or longest
    if needed(asked) <= allowed:
        return asked
    most = _ROUND * (bisect_right(range(asked // _ROUND + 1), allowed, key=lambda n: needed(_ROUND * n)) - 1)
    if batch.context or most < _LEAST_CONTEXT:
        raise BudgetError(
            f"batch.context: with {batch.sequences} sequences of {asked} tokens the process needs "
            f"{format_bytes(needed(asked))}, but may take {format_bytes(max(allowed, 0))}; {max(most, 0)} tokens would fit, "
            "or fewer sequences (batch.sequences)"
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
