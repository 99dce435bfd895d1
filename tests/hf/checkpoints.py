"""Checkpoints of tiny models on disk, and what an import of them must hold: values that tell every tensor from others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_families import FAMILIES, make_config

from tierstore.hf.families import FAMILIES as NAMES
from tierstore.hf.importing import ImportOptions, ImportReport, import_model
from tierstore.hf.manifest import Manifest
from tierstore.model.store_schema import BUFFERS_KEY, expert_key, unpack_arrays
from tierstore.store.config import StoreConfig
from tierstore.store.disk.home import rank_directories
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.reading import read_schemas

__all__ = ["FAMILIES"]


def save(
    directory: Path, family: str, dtype: torch.dtype = torch.float32, *, shard: str = "1GB", **options: Any
) -> Any:
    """Saves a tiny model with random weights, no two alike, as transformers does it; returns the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(family, **options), dtype=dtype)
    with torch.no_grad():
        for number, (name, value) in enumerate(model.state_dict().items()):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(value.shape, generator=generator)
            value.copy_(drawn + (number if "norm" not in name else 0))
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by their names on disk: read by the package safetensors."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file, by the package."""
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})


def split_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def join_header(header: object, data: bytes) -> bytes:
    """A safetensors file of a header, which may be bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def rewrite(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Makes ``tensors`` the checkpoint in ``directory``, in one file."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    write(directory / "model.safetensors", tensors)


def change_config(directory: Path, **values: Any) -> None:
    """Sets keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def imported(source: Path, store: Path, **options: Any) -> ImportReport:
    """An import with small commits."""
    return import_model(source, store, ImportOptions(**options))


def open_store(directory: Path) -> ParameterStore:
    return ParameterStore.open(
        directory, StoreConfig(host_budget=4 * minimum_host_budget(read_schemas(directory)))
    )


def experts_of(store: Path) -> dict[tuple[int, int], torch.Tensor]:
    """The flat fp32 weights of every expert of a job's stores; moments are checked to be zero."""
    manifest = Manifest.read(store)
    found = {}
    for directory in rank_directories(store) or [store]:
        with open_store(directory) as opened:
            for layer in manifest.experts.layers:
                for expert in range(manifest.experts.count):
                    key = expert_key(layer, expert)
                    if key in opened.core.records:
                        found[layer, expert] = torch.from_numpy(_weight(opened, key))
    return found


def _weight(store: ParameterStore, key: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    groups = COMMITTED_GROUPS
    if store.info(key).schema.frozen:
        groups = groups[:1]
    with store.fetch([key], groups) as lease:
        record = lease[key]
        parts = {name: record.copy(name) for name in record.sections}
    assert not any(parts[name].any() for name in ("exp_avg", "exp_avg_sq") if name in parts)
    if "weight" in parts and parts["weight"].dtype == np.float32:
        return parts["weight"]
    high = parts["weight"] if "weight" in parts else parts["weight_hi"]
    wide = high.view(np.uint16).astype(np.uint32) << 16
    if "weight_lo" in parts:
        wide = (wide.astype(np.int64) + parts["weight_lo"]).astype(np.uint32)
    return wide.view(np.float32)


def dense_of(store: Path) -> dict[str, torch.Tensor]:
    """Every dense parameter, fp32, put together from the slices of all ranks."""
    from tierstore.dense.slices import UnitSlices

    manifest = Manifest.read(store)
    directories = rank_directories(store) or [store]
    layouts = manifest.unit_layouts(len(directories))
    regions: dict[tuple[int, int], list[torch.Tensor]] = {}
    for rank, directory in enumerate(directories):
        with open_store(directory) as opened:
            for number, layout in enumerate(layouts):
                slices = UnitSlices(layout, rank, torch.device("cpu"), opened.core.adamw)
                slices.load(opened.core, 0)
                assert not slices.host["exp_avg"].any()
                assert not slices.host["exp_avg_sq"].any()
                for index, (_, kept) in enumerate(layout.slices()):
                    regions.setdefault((number, index), []).append(slices.weight[kept].clone())
    found = {}
    for number, (layout, unit) in enumerate(zip(layouts, manifest.units, strict=True)):
        for index, region in enumerate(layout.regions):
            flat = torch.cat(regions[number, index])
            for span in region.spans:
                part = flat[span.offset : span.offset + span.numel]
                found[unit.parameters[span.index].name] = part.view(span.shape)
    return found


def buffers_of(store: Path) -> dict[str, Any]:
    """The buffers in the last commit."""
    directory = (rank_directories(store) or [store])[0]
    with open_store(directory) as opened:
        return unpack_arrays(opened.last_commit.state[BUFFERS_KEY], where=str(directory))


def fused_experts(model: Any) -> dict[tuple[int, int], torch.Tensor]:
    """What each expert's record must hold: transformers' in-memory slices, flat, fp32."""
    family = NAMES[model.config.model_type]
    parameters = dict(model.named_parameters())
    found = {}
    for layer in range(model.config.num_hidden_layers):
        names = [f"model.layers.{layer}.{name}" for name in family.fused_names]
        if names[0] in parameters:
            for expert in range(parameters[names[0]].shape[0]):
                parts = [parameters[name][expert].detach().float().flatten() for name in names]
                found[layer, expert] = torch.cat(parts)
    return found


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes: as many tokens as the tiny models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token="<end>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
