"""How many experts the device holds, and how: before anything is opened. Imports no torch."""

from __future__ import annotations

from tierstore.capabilities import Capability
from tierstore.errors import BudgetError, ConfigError
from tierstore.model.spec import ModelSpec
from tierstore.serve.config import ExpertMemory, ServeConfig
from tierstore.tiers.slots import DeviceKind
from tierstore.units import format_bytes

#: Weight slots beyond which overlap gains nothing, where a budget does not ask for more.
_FEW = 4


def copies_weights(config: ServeConfig, device: DeviceKind) -> bool:
    """Whether experts are copied to slots of the device. A CPU computes with them where they lie in the host cache, unless a
    ring is asked for, or the configuration says otherwise. Raises ConfigError where it says both.
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


def slot_count(config: ServeConfig, spec: ModelSpec, device: DeviceKind, *, each: int, room: int) -> int:
    """Slots of ``each`` bytes. ``room``: bytes of the host budget that are left for them on a CPU.

    As many as ``ring.layers`` needs, or as ``device_budget`` holds; without either a few, for overlap. Raises BudgetError,
    ConfigError.
    """
    layers = len(spec.moe_layers)
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
    budget = config.device_budget or max(asked, _FEW) * each
    if on_host and not config.device_budget and not asked:
        budget = max(config.host_budget // 8, each)
    count = (min(budget, room) if on_host else budget) // each
    most = layers * spec.experts if copied and (config.device_budget or asked) else _FEW
    return min(count, most)


def ring_layers(config: ServeConfig, spec: ModelSpec, slots: int) -> int:
    """Layers of a ring in ``slots``; 0: they cannot hold one."""
    return config.ring.layers or min(len(spec.moe_layers), slots // spec.experts)


def _too_small(name: str, budget: int, layers: int, least: int) -> BudgetError:
    return BudgetError(
        f"{name}: {budget} bytes ({format_bytes(budget)}) cannot hold a ring of {layers} layers (ring.layers); the minimum "
        f"is {least} bytes ({format_bytes(least)})"
    )
