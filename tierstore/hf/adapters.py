"""Adapters of peft's: the pairs that a run with LoRA has trained, or those in a directory, merged into the weights of an
export; and the directory that ``tierstore export --adapter`` writes.

``adapter_model.safetensors`` has attention's pairs under peft's names, and those of experts as peft stacks them for
``target_parameters``: A of a layer's experts one below another, ``(E r, inputs)``, and B with its columns taking turns,
``(outputs, r E)``, column ``k E + e`` for row k of expert e. So peft loads it onto the plain model.

An adapter from a directory must be of the very model: names and shapes are checked, and where tierstore wrote it, the
model's fingerprint. What peft can do beyond plain low-rank pairs is refused by name.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.capabilities import package_path, require_package
from tierstore.dense.layout import Narrow, UnitLayout, layouts_of_shapes
from tierstore.errors import ConfigError, DataError, StoreError, StoreFormatError
from tierstore.hf.checkpoint import read_header
from tierstore.hf.families import family_of
from tierstore.hf.manifest import MANIFEST_NAME, Manifest
from tierstore.hf.spec import AttentionPair, HfSpec, attention_pairs, recorded_lora, stored_spec
from tierstore.hf.stored_weights import StoredWeights, open_weights
from tierstore.hf.weights import PLAIN
from tierstore.hf.writing import (
    Shard,
    TensorSpec,
    needed_bytes,
    new_directory,
    write_checkpoint,
    write_file,
)
from tierstore.model.store_schema import pair_key
from tierstore.moe.lora import LoraConfig, LoraTargets, PairShape
from tierstore.moe.low_rank import merge_pair
from tierstore.store.disk.home import MODEL_DIRECTORY

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
#: Which model the pairs were trained beside; peft passes it over.
BASE_FILE = "tierstore_base.json"


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written: ``nbytes`` counts the values; ``step`` is where training stands."""

    tensors: int
    nbytes: int
    step: int


class Adapter(ABC):
    """Pairs of one model. As an ``Adjustment`` they are merged into weights on their way out.

    ``attention``: the linear layers that have a pair; ``shape``: of the pairs of an expert, None where there are none.
    """

    def __init__(self, attention: Sequence[AttentionPair], shape: PairShape | None, scale: float) -> None:
        self.attention = attention
        self.shape = shape
        self._scale = scale
        self._by_name = {f"{pair.name}.weight": pair for pair in attention}

    @abstractmethod
    def attention_part(self, pair: AttentionPair, part: int) -> Floats:
        """A (``part`` 0) or B (1) of a linear layer, flat."""

    @abstractmethod
    def expert_pair(self, layer: int, expert: int) -> Tensor:
        """The pairs of an expert, flat, valid until the next is read."""

    def expert(self, layer: int, expert: int, weights: Floats) -> None:
        """Adds what the pairs of an expert add to its ``weights`` (flat), in place."""
        if self.shape is not None:
            merge_pair(self.shape, torch.from_numpy(weights), self.expert_pair(layer, expert))

    def dense(self, name: str, weights: Floats) -> None:
        """The same for dense parameter ``name``, where attention has a pair on it."""
        pair = self._by_name.get(name)
        if pair is None:
            return
        a, b = (torch.from_numpy(self.attention_part(pair, part)) for part in (0, 1))
        matrix = torch.from_numpy(weights).view(pair.outputs, pair.inputs)
        matrix.addmm_(b.view(pair.outputs, -1), a.view(-1, pair.inputs), alpha=self._scale)


class StoredAdapter(Adapter):
    """The pairs of an open store."""

    def __init__(self, source: Path, weights: StoredWeights) -> None:
        """Raises StoreError where no run with LoRA has trained the store, StoreFormatError."""
        lora = recorded_lora(source, weights.state)
        if not lora.enabled:
            raise StoreError(f"{source}: no adapter was trained in this store")
        spec = stored_spec(source, lora=lora)
        if spec is None:
            raise StoreFormatError(f"{source}: {MODEL_DIRECTORY}/{MANIFEST_NAME} is missing")
        shape = PairShape.of(spec.expert_shape, lora) if lora.experts else None
        super().__init__(attention_pairs(spec.manifest, lora), shape, lora.scaled_alpha / lora.rank)
        self.lora = lora
        self.spec: HfSpec = spec
        self.weights = weights
        self._check_base(source)
        self._layouts = self._attention_layouts()
        #: Attention's pairs of one unit: they are asked for one after another.
        self._unit: tuple[int, dict[int, Floats]] = (-1, {})

    def _check_base(self, source: Path) -> None:
        trained: Any = self.weights.state.conditions["model"]
        was, now = trained.get("fingerprint"), self.spec.manifest.fingerprint
        if was != now:
            raise StoreFormatError(
                f"{source}: the adapter was trained beside another model: {was}, and {MODEL_DIRECTORY}/{MANIFEST_NAME} "
                f"is of {now}"
            )

    def _attention_layouts(self) -> list[UnitLayout]:
        manifest, rank = self.spec.manifest, self.lora.rank
        shapes: list[list[tuple[Narrow, tuple[int, ...]]]] = [[] for _ in manifest.units]
        for pair in self.attention:
            shapes[pair.unit] += [(Narrow.NO, (rank, pair.inputs)), (Narrow.NO, (pair.outputs, rank))]
        units = [(f"lora.{unit.name}", each) for unit, each in zip(manifest.units, shapes, strict=True)]
        return layouts_of_shapes(units, ranks=self.weights.data_ranks, fusion=manifest.fusion)

    # Its values ---------------------------------------------------------------------------------------------

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
        experts = self.spec.experts
        return torch.from_numpy(self.weights.record_fp32(pair_key(layer, expert), expert, experts))


# The adapter's files ----------------------------------------------------------------------------------------


def export_adapter(
    source: Path, target: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> ExportedAdapter:
    """Writes the pairs that the store in ``source`` has trained to the new directory ``target``, as peft's adapter.

    ``progress`` is called with bytes of values written and in all. Raises StoreError, ChecksumError, OSError; on a failure
    there is nothing at ``target``.
    """
    with open_weights(source) as weights:
        adapter = StoredAdapter(source, weights)
        parts = dict(_tensors(adapter))
        shard = Shard(ADAPTER_FILE, tuple(parts))
        files = {CONFIG_FILE: _json(_config(adapter)), BASE_FILE: _json(base_of(adapter.spec.manifest))}
        done = 0

        def written(tensor: TensorSpec) -> None:
            nonlocal done
            done += tensor.nbytes
            progress(done, shard.data_bytes)

        with new_directory(target, needed_bytes([shard], files)) as directory:
            for name, content in files.items():
                write_file(directory / name, content)
            write_checkpoint(directory, [shard], lambda tensor: parts[tensor](), written)
        return ExportedAdapter(len(parts), shard.data_bytes, weights.state.position)


def base_of(manifest: Manifest) -> Mapping[str, object]:
    """What tells the model of ``manifest`` from others."""
    return {
        "fingerprint": manifest.fingerprint,
        "model_type": manifest.model_type,
        "architecture": manifest.architecture,
    }


def _json(values: Mapping[str, object]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


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
    """Each tensor of the adapter, and what gives its values."""
    rank = adapter.lora.rank
    for pair in adapter.attention:
        for part, (letter, shape) in enumerate((("A", (rank, pair.inputs)), ("B", (pair.outputs, rank)))):
            name = f"base_model.model.{pair.name}.lora_{letter}.weight"

            def values(pair: AttentionPair = pair, part: int = part) -> Iterator[Bytes]:
                yield adapter.attention_part(pair, part).view(np.uint8)

            yield TensorSpec(name, "F32", shape), values
    if adapter.shape is None:
        return
    spec = adapter.spec
    module = family_of(spec.manifest.model_type, where=MANIFEST_NAME).module
    sizes, count = adapter.shape.sizes, spec.experts
    for layer in spec.moe_layers:
        for index, below in ((0, "base_layer."), (2, "")):
            prefix = f"base_model.model.model.layers.{layer}.{module}.experts.{below}lora_"
            (_, inputs), (outputs, _) = sizes[index : index + 2]

            def rows(layer: int = layer, index: int = index) -> Iterator[Bytes]:
                for expert in range(count):
                    yield _matrix(adapter, layer, expert, index).numpy().reshape(-1).view(np.uint8)

            def columns(layer: int = layer, index: int = index, outputs: int = outputs) -> Iterator[Bytes]:
                every = np.empty((outputs, rank, count), np.float32)
                for expert in range(count):
                    every[:, :, expert] = _matrix(adapter, layer, expert, index + 1).numpy()
                yield every.reshape(-1).view(np.uint8)

            yield TensorSpec(f"{prefix}A.weight", "F32", (rank * count, inputs)), rows
            yield TensorSpec(f"{prefix}B.weight", "F32", (outputs, rank * count)), columns


def _matrix(adapter: StoredAdapter, layer: int, expert: int, index: int) -> Tensor:
    assert adapter.shape is not None
    views = adapter.shape.views(adapter.expert_pair(layer, expert))
    return (views.inner_a, views.inner_b, views.down_a, views.down_b)[index]


# An adapter of a directory ----------------------------------------------------------------------------------


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
