"""Which dense parameters of the built-in model tensor parallelism divides, and how. Imports no torch.

Attention and feed-forward networks are divided as in Megatron-LM (Shoeybi et al. 2019, section 3; Pipeline MoE, section
3.1.3): the first product of each pair by its outputs (dimension 0 of the parameter), the second by its inputs (dimension
1), so that one sum over ranks a pair is enough. Embedding, head, norms and routers are not divided: every rank has them
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.model.architecture import DenseUnit
from tierstore.moe.config import Activation, ExpertShape, network_divisions
from tierstore.parallel.layout import Division

if TYPE_CHECKING:
    from tierstore.model.config import ModelConfig
    from tierstore.model.spec import ModelSpec

#: Queries, keys and values; what comes behind attention.
ATTENTION = Division(0, blocks=3), Division(1)


def divisions(config: ModelConfig) -> dict[str, Division]:
    """The parameters of ``config``'s transformer that are divided, by their names in it."""
    found: dict[str, Division] = {}
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        found[f"{block}.attention.qkv"], found[f"{block}.attention.out"] = ATTENTION
        if layer not in config.moe_layers:
            found.update(_network(f"{block}.ffn", config.dense_shape))
        elif config.shared_expert_d_ff:
            shared = ExpertShape(config.d_model, config.shared_expert_d_ff, config.activation)
            found.update(_network(f"{block}.mixture.shared", shared))
    return found


def _network(name: str, shape: ExpertShape) -> dict[str, Division]:
    inner, down = network_divisions(Activation(shape.activation))
    return {f"{name}.inner": inner, f"{name}.down": down}


def check_divisible(config: ModelConfig, ranks: int) -> None:
    """Raises ConfigError naming the setting, unless ``ranks`` tensor-parallel ranks can divide the model's layers."""
    asked = f"expected a multiple of parallel.tensor = {ranks}"
    if config.n_heads % ranks:
        raise ConfigError(f"model.n_heads: {asked}, which divides attention by heads, got {config.n_heads}")
    if len(config.moe_layers) < config.n_layers and config.dense_shape.d_ff % ranks:
        raise ConfigError(f"model.d_ff_dense: {asked}, got {config.dense_shape.d_ff}")
    if config.shared_expert_d_ff % ranks:
        raise ConfigError(f"model.shared_expert_d_ff: {asked}, got {config.shared_expert_d_ff}")


def divided_units(model: ModelSpec, ranks: int) -> tuple[DenseUnit, ...]:
    """What one of ``ranks`` tensor-parallel ranks holds of the dense units of ``model``: its part of the matrices, and the
    others whole. Of another library's model nothing is divided.
    """
    from tierstore.model.spec import BuiltInSpec

    units = model.architecture.units
    parts = ranks if isinstance(model, BuiltInSpec) and model.whole is None else 1
    return tuple(DenseUnit(matrices=unit.matrices // parts, others=unit.others) for unit in units)
