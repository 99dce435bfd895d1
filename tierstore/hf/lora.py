"""Low-rank adaptation of a transformers model: pairs on attention by peft, pairs of experts by their source.

peft puts its layers around linear layers of attention; their pairs are the only dense parameters that train. It cannot
reach experts that are no parameters, and adapts nothing where it is told to: that is refused. First values are functions
of the seed and of a parameter's name, so that every rank has the same.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.capabilities import require_package
from tierstore.errors import ConfigError
from tierstore.hf.pairs import MIXERS
from tierstore.moe.lora import LoraConfig
from tierstore.moe.seeds import keyed_generator

#: peft's name of the adapter.
ADAPTER = "default"
_PURPOSE = "LoRA of attention"


def peft() -> Any:
    """The package peft. Raises CapabilityError when it is missing."""
    return require_package("peft", _PURPOSE)


def attention_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of attention of ``module``, by their names."""
    inside = re.compile(rf"(?:^|\.)layers\.\d+\.({'|'.join(MIXERS)})\.")
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and inside.search(name):
            yield name, part


def target_modules(module: nn.Module, config: LoraConfig) -> list[str]:
    """What peft calls the linear layers that get pairs (``self_attn.q_proj``), sorted.

    Raises ConfigError naming those that there are, where ``config.modules`` has one that there is not.
    """
    names = {name.split(".", name.split(".").index("layers") + 2)[-1] for name, _ in attention_layers(module)}
    if not names:
        raise ConfigError("lora.targets: the model has no linear layers of attention")
    known = {name.rpartition(".")[2] for name in names}
    unknown = sorted(set(config.modules) - known)
    if unknown:
        raise ConfigError(f"lora.modules: expected some of {', '.join(sorted(known))}, got {unknown[0]}")
    return sorted(name for name in names if not config.modules or name.rpartition(".")[2] in config.modules)


def refuse_target_parameters(config: Any) -> None:
    """Raises ConfigError for a configuration of peft with ``target_parameters``: of leased experts there are none, and
    peft would adapt nothing without a word.
    """
    named = getattr(config, "target_parameters", None)
    if named:
        raise ConfigError(
            f"target_parameters: {', '.join(named)}: experts that are leased are no parameters, and peft would adapt "
            "nothing; lora.targets = experts adapts them"
        )


def refuse_adapters(module: nn.Module, arguments: object) -> None:
    """A hook before a forward pass: raises ConfigError where peft was told to adapt leased experts of ``module``."""
    for config in getattr(module, "peft_config", {}).values():
        refuse_target_parameters(config)


def adapt(module: nn.Module, config: LoraConfig) -> None:
    """Freezes every parameter of ``module``; where ``config`` wants it, puts pairs on its attention, which train.

    Raises ConfigError, CapabilityError.
    """
    module.requires_grad_(False)
    if not config.attention:
        return
    library = peft()
    described = peft_config(target_modules(module, config), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.inject_adapter_in_model(described, module, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_pair(name))
        if is_pair(name):
            parameter.data = first_values(name, parameter.shape, config.seed)


def peft_config(modules: list[str], config: LoraConfig, **options: Any) -> Any:
    """``config`` as peft has it, for the linear layers ``modules``."""
    return peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.scaled_alpha,
        target_modules=modules,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **options,
    )


def is_pair(name: str) -> bool:
    """Whether parameter ``name`` belongs to a pair of peft's."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name that parameter ``name`` has in a model without peft's layers."""
    return name.replace(".base_layer.", ".")


def exported_name(name: str) -> str:
    """What an adapter file calls a parameter of a pair."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def first_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """First values of a parameter of a pair, fp32: B is zero, A uniform within 1 / sqrt(inputs), as peft's."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=keyed_generator(seed, "lora", name))


def pair_parameters(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters of pairs on attention, by their names in ``module``."""
    return {name: parameter for name, parameter in module.named_parameters() if is_pair(name)}
