"""transformers modules without expert parameters, and their adaptation with low-rank pairs.

:func:`build_module` makes one: its dense parameters take no memory until a store provides it, and no memory is allocated
for the experts. Experts' parameters are removed rather than left on the meta device: otherwise ``.to``, ``save_pretrained``
and the wrappers for several devices fail.

For LoRA, peft puts its layers around linear layers of attention (:func:`adapt`); their pairs are the only dense
parameters that train. peft cannot reach leased experts, which are no parameters, and would silently adapt nothing; a peft
configuration that names them is refused. Initial values depend only on the seed and the parameter's name, so that all
ranks have the same.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tierstore.capabilities import require_package
from tierstore.errors import ConfigError
from tierstore.hf.describing import model_class
from tierstore.hf.experts import IMPLEMENTATION, LoadedModule, found_experts, register
from tierstore.hf.spec import MIXERS
from tierstore.moe.lora import LoraConfig
from tierstore.moe.seeds import keyed_generator


def build_module(config: Any, dtype: torch.dtype) -> LoadedModule:
    """The module of ``config``, computing in ``dtype``; nothing is read, and no weight is allocated.

    Dense parameters have their shape and type and one element of memory, NaN, until they are given other data. Those that
    the family keeps in fp32 are fp32. Buffers have the values of a new model. Raises ConfigError.
    """
    register()
    config = copy.deepcopy(config)  # transformers records in it how the module is made
    kind, _ = model_class(config)
    with torch.device("meta"):
        module = kind._from_config(config, dtype=dtype, experts_implementation=IMPLEMENTATION)
    experts_at, shape, count = found_experts(module, where=f"model_type {config.model_type}")
    for experts in experts_at.values():
        experts._parameters.clear()
        experts._is_hf_initialized = True  # type: ignore[assignment]
    layers = len(module.base_model.layers)
    loaded = LoadedModule(module, experts_at, count, shape, range(layers), layers)
    wide = [re.compile(pattern.replace("*", ".*")) for pattern in module._get_dtype_plan(dtype)]
    for name, parameter in list(module.named_parameters()):
        kept = torch.float32 if any(pattern.search(name) for pattern in wide) else parameter.dtype
        empty = nn.Parameter(torch.full((), torch.nan, dtype=kept).expand(parameter.shape))
        empty._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers initialises no parameter of this module
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._parameters[last] = empty
    module.tie_weights()
    _make_buffers(module, wide)
    return loaded


def cut_module(loaded: LoadedModule, layers: range) -> LoadedModule:
    """Reduces ``loaded``, in place, to the pipeline stage with the decoder layers ``layers``. The first stage starts from
    tokens, the others from ``inputs_embeds``; all but the last return the stream as their ``last_hidden_state``.

    Layers keep their positions, by which a family's forward pass chooses masks; layers of other stages only pass the
    stream on.
    """
    base = loaded.module.base_model
    for number in loaded.layers:
        if number not in layers:
            base.layers[number] = _Elsewhere()
    at = {number: experts for number, experts in loaded.experts_at.items() if number in layers}
    cut = replace(loaded, experts_at=at, layers=layers)
    if not cut.begins:
        base.embed_tokens = _Elsewhere()
        if hasattr(
            base, "embedding_multiplier"
        ):  # Granite scales its input embeddings, and would scale the stream
            base.embedding_multiplier = 1.0
    if not cut.ends:
        base.norm = nn.Identity()
        loaded.module.lm_head = None
    return cut


class _Elsewhere(nn.Module):
    """A placeholder for a decoder layer, or the embedding, of another stage."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return hidden_states


def checkpoint_activations(module: Any) -> None:
    """Turns gradient checkpointing on: each decoder layer is recomputed in its backward pass, from its input, with the same
    random numbers."""
    # transformers 5.23 renames the attribute; with reentrant checkpoints a layer's own inputs would get no gradients.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})


# Parameters and buffers -------------------------------------------------------------------------------------


def _make_buffers(module: Any, wide: list[re.Pattern[str]]) -> None:
    """Gives every buffer memory, and has transformers fill it as for a checkpoint that lacks the buffer."""
    for prefix, part in module.named_modules():
        part._is_hf_initialized = True
        for name, buffer in list(part._buffers.items()):
            if buffer is None:
                continue
            full = f"{prefix}.{name}"
            dtype = torch.float32 if any(pattern.search(full) for pattern in wide) else buffer.dtype
            part._buffers[name] = torch.empty_like(buffer, device="cpu", dtype=dtype)
            part._is_hf_initialized = False
    module.initialize_weights()


# Low-rank pairs on attention --------------------------------------------------------------------------------


#: peft's name of the adapter.
ADAPTER = "default"


def target_modules(module: nn.Module, config: LoraConfig) -> list[str]:
    """peft's names of the linear layers that get pairs (``self_attn.q_proj``), sorted.

    Raises ConfigError listing the known names if ``config.modules`` has an unknown one.
    """
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    found = (re.search(rf"(?:^|\.)layers\.\d+\.((?:{'|'.join(MIXERS)})\..*)", name) for name in linears)
    names = {one[1] for one in found if one is not None}
    if not names:
        raise ConfigError("lora.targets: the model has no linear layers of attention")
    known = {name.rpartition(".")[2] for name in names}
    unknown = sorted(set(config.modules) - known)
    if unknown:
        raise ConfigError(f"lora.modules: expected some of {', '.join(sorted(known))}, got {unknown[0]}")
    return sorted(name for name in names if not config.modules or name.rpartition(".")[2] in config.modules)


def refuse_adapters(module: Any, arguments: object) -> None:
    """A hook before a forward pass: raises ConfigError where a configuration of peft in ``module`` names
    ``target_parameters``. Leased experts are no parameters, and peft would silently adapt nothing.
    """
    for config in getattr(module, "peft_config", {}).values():
        if named := getattr(config, "target_parameters", None):
            raise ConfigError(
                f"target_parameters: {', '.join(named)}: leased experts are no parameters, and peft would adapt "
                "nothing; lora.targets = experts adapts them"
            )


def adapt(module: nn.Module, config: LoraConfig) -> None:
    """Freezes every parameter of ``module``; if ``config`` asks for it, adds trainable pairs to its attention.

    Raises ConfigError, CapabilityError.
    """
    module.requires_grad_(False)
    if not config.attention:
        return
    library = require_package("peft", "LoRA of attention")
    described = library.LoraConfig(
        r=config.rank,
        lora_alpha=config.scaled_alpha,
        target_modules=target_modules(module, config),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.inject_adapter_in_model(described, module, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        is_pair = ".lora_A." in name or ".lora_B." in name
        parameter.requires_grad_(is_pair)
        if is_pair:
            parameter.data = _first_values(name, parameter.shape, config.seed)


def _first_values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Initial values of a pair's parameter, fp32, as peft's: B is zero, A uniform within 1 / sqrt(inputs)."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=keyed_generator(seed, "lora", name))
