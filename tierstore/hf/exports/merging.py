"""An adapter of peft's from a directory, to be merged into the weights of an export.

It must be of the very model: names and shapes are checked, and where ``tierstore export --adapter`` wrote it, the model's
fingerprint. What peft can do beyond plain low-rank pairs is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.capabilities import package_path, require_package
from tierstore.errors import ConfigError, DataError
from tierstore.hf.checkpoints.checkpoint import read_header
from tierstore.hf.checkpoints.weights import PLAIN
from tierstore.hf.exports.adapter import (
    ADAPTER_FILE,
    BASE_FILE,
    CONFIG_FILE,
    Adapter,
    Floats,
    base_of,
)
from tierstore.hf.families import family_of
from tierstore.hf.pairs import AttentionPair, attention_pairs
from tierstore.hf.spec import HfSpec, stored_spec
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape

#: Settings of peft's that change what an adapter computes, and what they must be.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    # The others begin with other weights in the model (PiSSA, OLoRA, CorDA, LoftQ), which then are not those of the store.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
}


def load_adapter(directory: Path, store: Path) -> Adapter:
    """The adapter in ``directory``, for the model that was imported into ``store``.

    Raises ConfigError for one that is not plain LoRA, or was trained beside another model; DataError naming the file and
    what is wrong in it, or a tensor that is missing, unexpected, of another shape, or not finite; OSError.
    """
    spec = stored_spec(store)
    if spec is None:
        raise ConfigError(f"{store}: holds no imported model, and adapters are of those")
    config = _read_json(directory / CONFIG_FILE)
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"{directory / CONFIG_FILE}: {key}: {config[key]!r} is not supported")
    if (directory / BASE_FILE).exists():
        trained, here = _read_json(directory / BASE_FILE), dict(base_of(spec.manifest))
        if trained != here:
            raise ConfigError(
                f"{directory}: the adapter was trained beside another model: {_named(trained)}, not {_named(here)}"
            )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{directory / CONFIG_FILE}: r, lora_alpha: {error}") from error
    if rank < 1 or not alpha > 0:
        raise ConfigError(
            f"{directory / CONFIG_FILE}: r, lora_alpha: expected more than 0, got {rank}, {alpha}"
        )
    header = read_header(directory / ADAPTER_FILE)  # what is damaged is named, which the package does not
    strange = next((info for info in header.tensors.values() if info.dtype not in PLAIN), None)
    if strange is not None:
        raise DataError(
            f"{directory / ADAPTER_FILE}: {strange.name}: expected {' or '.join(PLAIN)}, found {strange.dtype}"
        )
    with package_path(directory) as path:
        tensors = require_package("safetensors.torch", "an adapter").load_file(f"{path}/{ADAPTER_FILE}")
    wide = {name: value.to(torch.float32) for name, value in tensors.items()}
    for name, value in wide.items():
        if not torch.isfinite(value).all():
            raise DataError(f"{directory / ADAPTER_FILE}: {name}: a weight is NaN or infinite")
    return _FileAdapter(directory, spec, LoraConfig(rank=rank, alpha=alpha), wide)


def _named(base: Mapping[str, Any]) -> str:
    """Which model a description is of, in short."""
    return f"{base.get('architecture')} {str(base.get('fingerprint'))[:12]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


class _FileAdapter(Adapter):
    """An adapter in memory, whole: pairs are small."""

    def __init__(
        self, directory: Path, spec: HfSpec, lora: LoraConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        """Raises DataError, ConfigError."""
        self._tensors = tensors
        self._experts = spec.experts
        module = family_of(spec.manifest.model_type, where=str(directory)).module
        self._prefix = f"base_model.model.model.layers.{{}}.{module}.experts."
        paired = any(f".{module}.experts." in name for name in tensors)
        lora_experts = LoraTargets.BOTH if paired else LoraTargets.ATTENTION
        lora = LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=lora_experts)
        attention = [pair for pair in attention_pairs(spec.manifest, lora) if _name(pair, 0) in tensors]
        shape = PairShape.of(spec.expert_shape, lora) if paired else None
        super().__init__(attention, shape, lora.scaled_alpha / lora.rank)
        wanted = {
            _name(pair, part): size
            for pair in attention
            for part, size in enumerate(((lora.rank, pair.inputs), (pair.outputs, lora.rank)))
        }
        for layer in spec.moe_layers if shape is not None else ():
            wanted |= self._expert_tensors(layer, shape)
        for name, size in wanted.items():
            if name not in tensors:
                raise DataError(f"{directory / ADAPTER_FILE}: tensor {name} is missing")
            if tuple(tensors[name].shape) != size:
                found = tuple(tensors[name].shape)
                raise DataError(f"{directory / ADAPTER_FILE}: {name}: expected shape {size}, found {found}")
        unknown = sorted(set(tensors) - set(wanted))
        if unknown:
            target = re.sub(r"^base_model\.model\.|(\.base_layer)?(\.lora_.*|\.weight)$", "", unknown[0])
            known = {entry.name for entry in spec.manifest.parameters()}
            known |= {entry.name for entry in spec.manifest.tied}
            why = (
                "only pairs of attention's linear layers and of experts can be merged"
                if {target, f"{target}.weight"} & known
                else "the model of the store has no such layer"
            )
            raise DataError(f"{directory / ADAPTER_FILE}: {unknown[0]}: {why} ({len(unknown)} such)")

    def _expert_tensors(self, layer: int, shape: PairShape | None) -> dict[str, tuple[int, int]]:
        assert shape is not None
        prefix, count = self._prefix.format(layer), self._experts
        found = {}
        for index, below in ((0, "base_layer."), (2, "")):
            (rank, inputs), (outputs, _) = shape.sizes[index : index + 2]
            found[f"{prefix}{below}lora_A.weight"] = (rank * count, inputs)
            found[f"{prefix}{below}lora_B.weight"] = (outputs, rank * count)
        return found

    def attention_part(self, pair: AttentionPair, part: int) -> Floats:
        values: Floats = self._tensors[_name(pair, part)].numpy().reshape(-1)
        return values

    def expert_pair(self, layer: int, expert: int) -> Tensor:
        parts, count = [], self._experts
        for below in ("base_layer.", ""):
            prefix = f"{self._prefix.format(layer)}{below}lora_"
            a, b = self._tensors[f"{prefix}A.weight"], self._tensors[f"{prefix}B.weight"]
            rank = a.shape[0] // count
            parts += [a[expert * rank : (expert + 1) * rank], b.view(b.shape[0], rank, count)[:, :, expert]]
        return torch.from_numpy(np.concatenate([part.numpy().reshape(-1) for part in parts]))


def _name(pair: AttentionPair, part: int) -> str:
    return f"base_model.model.{pair.name}.lora_{'AB'[part]}.weight"
