"""peft adapters. An export merges the pairs that a LoRA run has trained, or the pairs of an adapter directory, into the
weights; ``tierstore export --adapter`` writes such a directory.

``adapter_model.safetensors`` has attention's pairs under peft's names, and those of experts as peft stacks them for
``target_parameters``: A of a layer's experts one below another, ``(E r, inputs)``, and B with its columns taking turns,
``(outputs, r E)``, column ``k E + e`` for row k of expert e. So peft loads it onto the plain model.

An adapter directory must belong to the store's model: names and shapes are checked, and the model's fingerprint if
tierstore wrote the directory. Any peft feature beyond plain low-rank pairs is refused by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.capabilities import package_path, require_package
from tierstore.dense.layout import Narrow, layouts_of_shapes
from tierstore.errors import ConfigError, DataError, StoreError, StoreFormatError
from tierstore.hf.checkpoint import TensorSpec, read_header, read_object
from tierstore.hf.families import family_of
from tierstore.hf.manifest import MANIFEST_NAME, Manifest
from tierstore.hf.spec import AttentionPair, HfSpec, attention_pairs, recorded_lora, stored_spec
from tierstore.hf.stored_weights import StoredWeights, open_weights
from tierstore.hf.weights import PLAIN, Floats
from tierstore.hf.writing import Bytes, Shard, json_bytes, write_model
from tierstore.model.store_schema import pair_key
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape
from tierstore.moe.low_rank import merge_pair
from tierstore.stats import OnProgress, no_progress
from tierstore.store.disk.home import MODEL_DIRECTORY

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
#: The model that the pairs were trained for; peft ignores this key.
BASE_FILE = "tierstore_base.json"


@dataclass(frozen=True)
class ExportedAdapter:
    """Summary of an adapter export: ``nbytes``, the bytes of values; ``step``, the training step."""

    tensors: int
    nbytes: int
    step: int


class Adapter(ABC):
    """Pairs of the model ``spec``. As an ``Adjustment`` they are merged into weights on their way out.

    ``attention``: the linear layers that have a pair; ``shape``: of the pairs of an expert, None where there are none.
    """

    def __init__(self, spec: HfSpec, lora: LoraConfig, attention: Sequence[AttentionPair]) -> None:
        self.spec, self.lora, self.attention = spec, lora, attention
        self.shape = PairShape.of(spec.expert_shape, lora) if lora.experts else None
        self._by_name = {f"{pair.name}.weight": pair for pair in attention}

    @abstractmethod
    def attention_part(self, pair: AttentionPair, part: int) -> Floats:
        """A (``part`` 0) or B (1) of a linear layer, flat."""

    @abstractmethod
    def expert_pair(self, layer: int, expert: int) -> Tensor:
        """The pairs of an expert, flat, valid until the next is read."""

    def expert_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """Name and shape of each tensor with the pairs of a layer's experts, in the order of the matrices of a pair."""
        module = family_of(self.spec.manifest.model_type, where=MANIFEST_NAME).module
        count = self.spec.experts
        for index, (rows, columns) in enumerate(() if self.shape is None else self.shape.sizes):
            below, letter = ("base_layer.", "")[index // 2], "AB"[index % 2]
            name = f"base_model.model.model.layers.{layer}.{module}.experts.{below}lora_{letter}.weight"
            yield name, (rows, columns * count) if index % 2 else (rows * count, columns)

    def expert(self, layer: int, expert: int, weights: Floats) -> None:
        """Adds what the pairs of an expert add to its ``weights`` (flat), in place."""
        if self.shape is not None:
            merge_pair(self.shape, torch.from_numpy(weights), self.expert_pair(layer, expert))

    def dense(self, name: str, weights: Floats) -> None:
        """The same for dense parameter ``name``, if attention has a pair for it."""
        pair = self._by_name.get(name)
        if pair is None:
            return
        a, b = (torch.from_numpy(self.attention_part(pair, part)) for part in (0, 1))
        matrix = torch.from_numpy(weights).view(pair.outputs, pair.inputs)
        matrix.addmm_(
            b.view(pair.outputs, -1), a.view(-1, pair.inputs), alpha=self.lora.scaled_alpha / self.lora.rank
        )


class StoredAdapter(Adapter):
    """The pairs of an open store."""

    def __init__(self, source: Path, weights: StoredWeights) -> None:
        """Raises StoreError if no LoRA run has trained the store; StoreFormatError."""
        lora = recorded_lora(source, weights.state)
        if not lora.enabled:
            raise StoreError(f"{source}: no adapter was trained in this store")
        spec = stored_spec(source, lora=lora)
        if spec is None:
            raise StoreFormatError(f"{source}: {MODEL_DIRECTORY}/{MANIFEST_NAME} is missing")
        manifest = spec.manifest
        trained: Any = weights.state.conditions["model"]
        if trained.get("fingerprint") != manifest.fingerprint:
            raise StoreFormatError(
                f"{source}: the adapter was trained for another model: {trained.get('fingerprint')}, and "
                f"{MODEL_DIRECTORY}/{MANIFEST_NAME} is of {manifest.fingerprint}"
            )
        super().__init__(spec, lora, attention_pairs(manifest, lora))
        self.weights = weights
        shapes: list[list[tuple[Narrow, tuple[int, ...]]]] = [[] for _ in manifest.units]
        for pair in self.attention:
            shapes[pair.unit] += [(Narrow.NO, size) for size in pair.sizes(lora.rank)]
        units = [(f"lora.{unit.name}", each) for unit, each in zip(manifest.units, shapes, strict=True)]
        self._layouts = layouts_of_shapes(units, ranks=weights.data_ranks, fusion=manifest.fusion)
        #: Attention's pairs of one unit: callers read them one after another.
        self._unit: tuple[int, dict[int, Floats]] = (-1, {})

    def attention_part(self, pair: AttentionPair, part: int) -> Floats:
        if self._unit[0] != pair.unit:
            layout = self._layouts[pair.unit]
            parts = {
                index: np.concatenate(list(self.weights.dense(layout, index)))
                for index in range(layout.parameters)
            }
            self._unit = (pair.unit, parts)
        return self._unit[1][pair.index + part]

    def expert_pair(self, layer: int, expert: int) -> Tensor:
        return torch.from_numpy(self.weights.record_fp32(pair_key(layer, expert)))


# The adapter's files ----------------------------------------------------------------------------------------


def export_adapter(source: Path, target: Path, *, progress: OnProgress = no_progress) -> ExportedAdapter:
    """Writes the trained pairs of the store in ``source`` to the new directory ``target``, as peft's adapter.

    ``progress`` receives the bytes of values written so far and the total. Raises StoreError, ChecksumError, OSError; after
    a failure nothing exists at ``target``.
    """
    with open_weights(source) as weights:
        adapter = StoredAdapter(source, weights)
        parts = dict(_tensors(adapter))
        shard = Shard(ADAPTER_FILE, tuple(parts))
        base = base_of(adapter.spec.manifest)
        described = {CONFIG_FILE: _config(adapter), BASE_FILE: base}
        files = {name: json_bytes(value, ensure_ascii=True) for name, value in described.items()}
        write_model(target, [shard], files, lambda tensor: parts[tensor](), progress)
        return ExportedAdapter(len(parts), shard.data_bytes, weights.state.position)


def base_of(manifest: Manifest) -> Mapping[str, object]:
    """The keys that identify the model of ``manifest``."""
    return {
        "fingerprint": manifest.fingerprint,
        "model_type": manifest.model_type,
        "architecture": manifest.architecture,
    }


def _config(adapter: StoredAdapter) -> Mapping[str, object]:
    manifest, lora = adapter.spec.manifest, adapter.lora
    below = sorted({pair.name.split(".", 3)[3] for pair in adapter.attention})
    fused = family_of(manifest.model_type, where=MANIFEST_NAME).fused_names
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": manifest.source,
        "r": lora.rank,
        "lora_alpha": lora.scaled_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": below,
        "target_parameters": [name for name in fused if not name.endswith("bias")] if lora.experts else None,
    }


def _tensors(adapter: StoredAdapter) -> Iterator[tuple[TensorSpec, Callable[[], Iterator[Bytes]]]]:
    """Each tensor of the adapter, with the function that returns its values."""
    for pair in adapter.attention:
        for part, size in enumerate(pair.sizes(adapter.lora.rank)):
            yield TensorSpec(_name(pair, part), "F32", size), partial(_attention, adapter, pair, part)
    for layer in adapter.spec.moe_layers:
        for index, (name, size) in enumerate(adapter.expert_tensors(layer)):
            yield TensorSpec(name, "F32", size), partial(_stacked, adapter, layer, index)


def _attention(adapter: StoredAdapter, pair: AttentionPair, part: int) -> Iterator[Bytes]:
    yield adapter.attention_part(pair, part).view(np.uint8)


def _stacked(adapter: StoredAdapter, layer: int, index: int) -> Iterator[Bytes]:
    """Matrix ``index`` of the pairs of all experts of ``layer``, as peft stacks them."""
    shape, count = adapter.shape, adapter.spec.experts
    assert shape is not None
    every = np.empty((*shape.sizes[index], count), np.float32)
    for expert in range(count):
        views = shape.views(adapter.expert_pair(layer, expert))
        matrix = (views.inner_a, views.inner_b, views.down_a, views.down_b)[index].numpy()
        if index % 2:  # B: columns take turns
            every[:, :, expert] = matrix
        else:
            yield matrix.reshape(-1).view(np.uint8)
    if index % 2:
        yield every.reshape(-1).view(np.uint8)


def _name(pair: AttentionPair, part: int) -> str:
    return f"base_model.model.{pair.name}.lora_{'AB'[part]}.weight"


# An adapter of a directory ----------------------------------------------------------------------------------


#: peft settings that change what an adapter computes, with the values that are accepted.
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
    # The other initialisations (PiSSA, OLoRA, CorDA, LoftQ) change the model's own weights; the store has the original ones.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
}


def load_adapter(directory: Path, store: Path) -> Adapter:
    """The adapter in ``directory``, for the model that was imported into ``store``.

    Raises ConfigError if the adapter is not plain LoRA or was trained for another model; DataError naming the file and its
    fault, or a tensor that is missing, unexpected, of another shape, or not finite; OSError.
    """
    spec = stored_spec(store)
    if spec is None:
        raise ConfigError(f"{store}: holds no imported model; adapters apply only to imported models")
    file, base = directory / CONFIG_FILE, directory / BASE_FILE
    config = read_object(file, ConfigError)
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"{file}: {key}: {config[key]!r} is not supported")
    if base.exists():
        trained, here = read_object(base, ConfigError), dict(base_of(spec.manifest))
        if trained != here:
            raise ConfigError(
                f"{directory}: the adapter was trained for another model: {_named(trained)}, not {_named(here)}"
            )
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: r, lora_alpha: {error}") from error
    if rank < 1 or not alpha > 0:
        raise ConfigError(f"{file}: r, lora_alpha: expected more than 0, got {rank}, {alpha}")
    # Headers are read here first, because the package safetensors does not name the damaged tensor.
    for info in read_header(directory / ADAPTER_FILE).values():
        if info.dtype not in PLAIN:
            raise DataError(f"{info.file}: {info.name}: expected {' or '.join(PLAIN)}, found {info.dtype}")
    with package_path(directory) as path:
        tensors = require_package("safetensors.torch", "an adapter").load_file(f"{path}/{ADAPTER_FILE}")
    wide = {name: value.to(torch.float32) for name, value in tensors.items()}
    for name, value in wide.items():
        if not torch.isfinite(value).all():
            raise DataError(f"{directory / ADAPTER_FILE}: {name}: a weight is NaN or infinite")
    return _FileAdapter(directory, spec, LoraConfig(rank=rank, alpha=alpha), wide)


def _named(base: Mapping[str, Any]) -> str:
    """A short name of the model that a description identifies."""
    return f"{base.get('architecture')} {str(base.get('fingerprint'))[:12]}"


class _FileAdapter(Adapter):
    """An adapter in memory, whole: pairs are small."""

    def __init__(
        self, directory: Path, spec: HfSpec, lora: LoraConfig, tensors: Mapping[str, Tensor]
    ) -> None:
        """Raises DataError, ConfigError."""
        self._tensors = tensors
        module = family_of(spec.manifest.model_type, where=str(directory)).module
        paired = any(f".{module}.experts." in name for name in tensors)
        lora = replace(lora, targets=LoraTargets.BOTH if paired else LoraTargets.ATTENTION)
        attention = [pair for pair in attention_pairs(spec.manifest, lora) if _name(pair, 0) in tensors]
        super().__init__(spec, lora, attention)
        wanted = {
            _name(pair, part): size for pair in attention for part, size in enumerate(pair.sizes(lora.rank))
        }
        for layer in spec.moe_layers:
            wanted.update(self.expert_tensors(layer))
        file = directory / ADAPTER_FILE
        for name, size in wanted.items():
            if name not in tensors:
                raise DataError(f"{file}: tensor {name} is missing")
            if (found := tuple(tensors[name].shape)) != size:
                raise DataError(f"{file}: {name}: expected shape {size}, found {found}")
        unknown = sorted(set(tensors) - set(wanted))
        if unknown:
            target = re.sub(r"^base_model\.model\.|(\.base_layer)?(\.lora_.*|\.weight)$", "", unknown[0])
            known = {entry.name for entry in spec.manifest.parameters()}
            known |= {entry.name for entry in spec.manifest.tied}
            why = (
                "only pairs on attention's linear layers and on experts can be merged"
                if {target, f"{target}.weight"} & known
                else "the store's model has no such layer"
            )
            raise DataError(f"{file}: {unknown[0]}: {why} ({len(unknown)} such)")

    def attention_part(self, pair: AttentionPair, part: int) -> Floats:
        values: Floats = self._tensors[_name(pair, part)].numpy().reshape(-1)
        return values

    def expert_pair(self, layer: int, expert: int) -> Tensor:
        assert self.shape is not None
        parts, count, rank = [], self.spec.experts, self.shape.rank
        for index, (name, _) in enumerate(self.expert_tensors(layer)):
            stacked = self._tensors[name]
            if index % 2:
                parts.append(stacked.view(len(stacked), rank, count)[:, :, expert])
            else:
                parts.append(stacked[expert * rank : (expert + 1) * rank])
        return torch.cat([part.reshape(-1) for part in parts])
