"""transformers modules without expert parameters, and their adaptation by low-rank pairs.

Two ways to make one: :func:`build_module`, whose dense parameters take no memory until a store gives them theirs, and
:func:`load_module`, whose dense parameters are read from a checkpoint, for somebody's own loop. In neither is anything
of the experts allocated or read. Parameters are taken away, not left on the meta device: otherwise ``.to``,
``save_pretrained`` and the wrappers for several devices fail.

For LoRA, peft puts its layers around linear layers of attention (:func:`adapt`); their pairs are the only dense
parameters that train. It cannot reach experts that are no parameters, and adapts nothing where it is told to: that is
refused. First values are functions of the seed and of a parameter's name, so that every rank has the same.
"""

from __future__ import annotations

import copy
import math
import re
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierstore.capabilities import package_path, require_package
from tierstore.errors import ConfigError
from tierstore.hf.describing import (
    CONFIG_NAME,
    FILE_KEYS,
    OUTPUT_KEYS,
    ignored_attention,
    read_config,
    transformers,
)
from tierstore.hf.experts import (
    IMPLEMENTATION,
    LoadedModule,
    expert_shape_of,
    experts_modules,
    is_experts,
    register,
)
from tierstore.hf.spec import MIXERS
from tierstore.moe.config import ExpertShape
from tierstore.moe.lora import LoraConfig
from tierstore.moe.seeds import keyed_generator

#: Families whose experts are computed in code of their own, out of reach of the experts interface.
_OWN_CODE = ("dbrx", "jetmoe", "llama4", "llama4_text", "longcat_flash", "switch_transformers", "nllb-moe")


def parse_config(
    values: Mapping[str, Any],
    *,
    where: str = CONFIG_NAME,
    without: Collection[str] = (*FILE_KEYS, *OUTPUT_KEYS),
) -> Any:
    """transformers' configuration of the values of a config.json, ``without`` these keys. Raises ConfigError."""
    plain = {key: value for key, value in values.items() if key not in without}
    family = plain.get("model_type")
    known = transformers().CONFIG_MAPPING
    if not isinstance(family, str) or family not in known:
        raise ConfigError(f"{where}: model_type: transformers knows no {family!r}")
    try:
        return known[family].from_dict(plain)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def build_module(config: Any, dtype: torch.dtype) -> LoadedModule:
    """The module of ``config``, computing in ``dtype``; nothing is read, and no weight is allocated.

    Dense parameters have their shape and type and one element of memory, NaN, until they are given other data; what the
    family keeps in fp32 is fp32. Buffers are what they are in a new model. Raises ConfigError.
    """
    register()
    kind = class_of(config)
    config = copy.deepcopy(config)  # transformers notes in it what the module is made with
    ignored_attention(kind, config)
    with torch.device("meta"):
        module = kind._from_config(config, dtype=dtype, experts_implementation=IMPLEMENTATION)
    shape, experts, experts_at = _take_experts(config, module)
    wide = [re.compile(pattern.replace("*", ".*")) for pattern in module._get_dtype_plan(dtype)]
    for name, parameter in list(module.named_parameters()):
        kept = torch.float32 if any(pattern.search(name) for pattern in wide) else parameter.dtype
        _set_parameter(module, name, torch.full((), torch.nan, dtype=kept).expand(parameter.shape))
    module.tie_weights()
    _make_buffers(module, wide)
    return LoadedModule.whole(module, experts_at, experts, shape)


def cut_module(loaded: LoadedModule, layers: range) -> LoadedModule:
    """What a pipeline stage with the decoder layers ``layers`` has of ``loaded``, which is changed: the first one starts
    from tokens, others from ``inputs_embeds``; all but the last leave the stream as their ``last_hidden_state``.

    Layers keep their places, by which a family's forward pass chooses masks: the others pass the stream on.
    """
    base = loaded.module.base_model
    for number in loaded.layers:
        if number not in layers:
            base.layers[number] = _Elsewhere()
    at = {number: experts for number, experts in loaded.experts_at.items() if number in layers}
    cut = replace(loaded, experts_at=at, layers=layers)
    if not cut.begins:
        base.embed_tokens = _Elsewhere()
        if hasattr(base, "embedding_multiplier"):  # Granite scales whatever it starts from
            base.embedding_multiplier = 1.0
    if not cut.ends:
        base.norm = nn.Identity()
        loaded.module.lm_head = None
    return cut


class _Elsewhere(nn.Module):
    """A decoder layer, or the embedding, that another stage has."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return hidden_states


def load_module(path: Path | str, dtype: torch.dtype | None = None, **options: Any) -> LoadedModule:
    """The module of the checkpoint in directory ``path``, with its dense parameters.

    ``dtype``: None is the checkpoint's own. ``options`` are those of ``from_pretrained``. Not to be called while another
    thread makes models of the same family. Raises ConfigError.
    """
    register()
    # What its passes return is for the loop: transformers' own loss has the balance loss only with the router's logits.
    config = parse_config(read_config(Path(path)), where=str(path), without=FILE_KEYS)
    kind = class_of(config)
    known: dict[nn.Module, tuple[ExpertShape, int]] = {}
    with _LOADING, _without_experts(kind, known), package_path(path) as name:
        module = kind.from_pretrained(
            name,
            config=config,
            dtype="auto" if dtype is None else dtype,
            experts_implementation=IMPLEMENTATION,
            **options,
        )
    shape, experts, experts_at = _found(config, module, known)
    return LoadedModule.whole(module, experts_at, experts, shape)


def checkpoint_activations(module: Any) -> None:
    """Has each decoder layer computed again in its backward pass, from its input, with the same random numbers."""
    # transformers 5.23 renames it; with reentrant checkpoints a layer's own inputs would get no gradients.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})


# Experts ----------------------------------------------------------------------------------------------------


def class_of(config: Any) -> Any:
    """The class of causal language models. Raises ConfigError where its experts cannot be leased."""
    family = config.model_type
    kind = transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ConfigError(f"model_type {family}: transformers has no causal language model of it")
    code = __import__(kind.__module__, fromlist=["_"])
    if not any(isinstance(value, type) and is_experts(value) for value in vars(code).values()):
        if family in _OWN_CODE:
            raise ConfigError(
                f"model_type {family}: transformers computes its experts in code of its own, not under its experts "
                "interface"
            )
        raise ConfigError(
            f"model_type {family}: the model has no experts under transformers' experts interface"
        )
    return kind


def _take_experts(config: Any, module: nn.Module) -> tuple[ExpertShape, int, dict[int, nn.Module]]:
    """Takes the parameters of every experts module away."""
    known: dict[nn.Module, tuple[ExpertShape, int]] = {}
    for _, experts in experts_modules(module):
        known[experts] = _emptied(experts)
    return _found(config, module, known)


def _emptied(experts: Any) -> tuple[ExpertShape, int]:
    shape = expert_shape_of(experts), int(experts.num_experts)
    experts._parameters.clear()
    experts._is_hf_initialized = True
    return shape


def _found(
    config: Any, module: nn.Module, known: dict[nn.Module, tuple[ExpertShape, int]]
) -> tuple[ExpertShape, int, dict[int, nn.Module]]:
    experts_at: dict[int, nn.Module] = {}
    for layer, each in experts_modules(module):
        if layer in experts_at:
            raise ConfigError(f"model_type {config.model_type}: layer {layer} has two sets of experts")
        experts_at[layer] = each
    kinds = {known[each] for each in experts_at.values()}
    if not kinds:
        raise ConfigError(f"model_type {config.model_type}: no layer of this configuration has experts")
    if len(kinds) > 1:
        raise ConfigError(f"model_type {config.model_type}: layers have experts of different shapes")
    ((shape, experts),) = kinds
    return shape, experts, dict(sorted(experts_at.items()))


#: ``from_pretrained`` makes experts modules itself: their classes are changed while it runs, by one thread at a time.
_LOADING = threading.Lock()


@contextmanager
def _without_experts(kind: Any, known: dict[nn.Module, tuple[ExpertShape, int]]) -> Iterator[None]:
    """Experts modules that are made here have no parameters, and the weights of a checkpoint's experts are passed over."""
    code = __import__(kind.__module__, fromlist=["_"])
    classes: list[Any] = [
        value for value in vars(code).values() if isinstance(value, type) and is_experts(value)
    ]
    made: dict[Any, Any] = {each: vars(each)["__init__"] for each in classes}
    ignored = vars(kind).get("_keys_to_ignore_on_load_unexpected", _ABSENT)

    def without(original: Any) -> Any:
        @wraps(original)
        def make(self: nn.Module, *arguments: Any, **options: Any) -> None:
            with torch.device("meta"):
                original(self, *arguments, **options)
            known[self] = _emptied(self)

        return make

    try:
        for each in classes:
            each.__init__ = without(made[each])
        inherited = kind._keys_to_ignore_on_load_unexpected or []
        kind._keys_to_ignore_on_load_unexpected = [*inherited, r"\.experts\."]
        yield
    finally:
        for each in classes:
            each.__init__ = made[each]
        if ignored is _ABSENT:
            del kind._keys_to_ignore_on_load_unexpected
        else:
            kind._keys_to_ignore_on_load_unexpected = ignored


_ABSENT = object()

# Parameters and buffers -------------------------------------------------------------------------------------


def _set_parameter(module: nn.Module, name: str, data: torch.Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    parameter = nn.Parameter(data)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers fills no parameter of ours
    module.get_submodule(prefix)._parameters[last] = parameter


def _make_buffers(module: Any, wide: list[re.Pattern[str]]) -> None:
    """Gives every buffer memory, and has transformers fill it as it does behind a checkpoint without it."""
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
