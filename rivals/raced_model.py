"""The model that every rival of generation continues: the same weights as a checkpoint, a store and a GGUF file; and the
page cache that lies between them and the disk.

The GGUF file is what llama.cpp reads, without quantisation. Of the families whose tensors need no permutation it is made
here: Qwen3-MoE. Experts of a layer become one tensor each of gate, up and down; norms and routers are fp32, as llama.cpp
wants them. The vocabulary is made of the tokens' numbers: prompts are numbers, and no text is compared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore.bench.harness import Progress
from tierstore.errors import CapabilityError, ConfigError, DataError
from tierstore.hf.describing import CONFIG_NAME, read_config
from tierstore.hf.manifest import MANIFEST_NAME, Manifest, Weights
from tierstore.store.disk.home import MODEL_DIRECTORY

_SPARE_BYTES = 64 << 20  # beyond the experts, where all of them are to be in memory
_DROP = Path("/proc/sys/vm/drop_caches")
_SYS = Path("/sys")


class RacedModel:
    """The model that every rival generates with: the same weights as a checkpoint, a store and a GGUF file.

    ``path`` is a directory of transformers or a store; ``store`` and ``gguf`` are the same model, if they are there already.
    ``prepare`` makes what is missing. Raises ConfigError.
    """

    manifest: Manifest

    def __init__(self, path: Path, *, store: Path | None = None, gguf: Path | None = None) -> None:
        stored = (path / MODEL_DIRECTORY / MANIFEST_NAME).exists()
        if stored and store is not None:
            raise ConfigError(f"{path}: is a store; expected no --imported")
        self.checkpoint, self.store, self.gguf = (None, path, gguf) if stored else (path, store, gguf)
        for given in (path, store, gguf):
            if given is not None and not given.exists():
                raise ConfigError(f"{given}: missing")
        config = read_config(path / MODEL_DIRECTORY if stored else path)
        self.name = str(config.get("model_type", CONFIG_NAME))
        self.vocabulary = vocabulary_of(config)

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert in the type that computes."""
        return self.manifest.experts.numel * self.manifest.compute.itemsize

    @property
    def experts_budget(self) -> int:
        """A host budget for all experts."""
        return (self.manifest.experts.records + 4) * self.expert_bytes * 9 // 8 + _SPARE_BYTES

    def prepare(self, names: Set[str], directory: Path, progress: Progress) -> None:
        """Makes what the rivals need in ``directory``: the store (whose sizes are read in any case), the checkpoint, the
        GGUF file. Raises ConfigError for a family without the last, StoreError, OSError.
        """
        if self.checkpoint is None and names & {"transformers", "accelerate", "llama.cpp"}:
            from tierstore.hf.exporting import export

            progress.say("writing a checkpoint of the store")
            export(self.store, directory / "checkpoint")
            self.checkpoint = directory / "checkpoint"
        if self.store is None:
            from tierstore.hf.importing import ImportOptions, import_model

            progress.say("importing the checkpoint, frozen")
            self.store = directory / "store"
            import_model(self.checkpoint, self.store, ImportOptions(weights=Weights.FROZEN))
        self.manifest = Manifest.read(self.store)
        if self.gguf is None and "llama.cpp" in names:
            progress.say("writing a GGUF file of the checkpoint")
            write_gguf(self.checkpoint, directory / "model.gguf")
            self.gguf = directory / "model.gguf"


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """The number of tokens of a model's configuration. Raises ConfigError where it does not say."""
    for table in (config, config.get("text_config") or {}):
        if "vocab_size" in table:
            return int(table["vocab_size"])
    raise ConfigError("config.json: vocab_size: missing")


def drop_page_cache(file: Path = _DROP) -> str | None:
    """Writes out and drops the whole machine's page cache. None, or why it could not."""
    os.sync()
    try:
        file.write_text("3\n")
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def _read_ahead_file(directory: Path, sys: Path) -> Path | None:
    """Where the kernel says how far it reads ahead on the disk under ``directory``."""
    number = os.stat(directory).st_dev
    entry = sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
    holders = (entry, entry.resolve().parent)  # a partition's queue is its disk's
    files = [holder / "queue/read_ahead_kb" for holder in holders]
    return next((file for file in files if file.exists()), None)


def read_ahead_bytes(directory: Path, sys: Path = _SYS) -> int | None:
    """What the kernel reads at most around a missing page of a mapped file in ``directory``; None where it does not say."""
    file = _read_ahead_file(directory, sys)
    return None if file is None else int(file.read_text()) << 10


@contextlib.contextmanager
def read_ahead_of(directory: Path, nbytes: int, sys: Path = _SYS) -> Iterator[None]:
    """Sets the readahead of the disk under ``directory``, and restores it at exit. Raises CapabilityError."""
    file = _read_ahead_file(directory, sys)
    if file is None:
        raise CapabilityError(f"read-ahead: {directory}: its disk has no such setting")
    before = file.read_text()
    try:
        file.write_text(f"{nbytes >> 10}\n")
    except OSError as error:
        raise CapabilityError(f"read-ahead: {file}: {error.strerror}") from error
    try:
        yield
    finally:
        file.write_text(before)


# The GGUF file ----------------------------------------------------------------------------------------------

_FAMILY, _ARCHITECTURE = "qwen3_moe", "qwen3moe"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Tensors of the file's ends and of a layer: the name in the GGUF file, the name in the checkpoint.
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
#: What llama.cpp computes with in fp32.
_EXACT = ("norm", "gate_inp")
_NORMAL, _CONTROL, _BYTE, _UNKNOWN = 1, 3, 6, 2


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Writes the model of the directory ``checkpoint`` to ``path``, whole or not at all.

    Raises ConfigError for another family, DataError for a tensor that is missing, OSError. Needs gguf and safetensors.
    """
    import gguf

    config = read_config(checkpoint)
    if config.get("model_type") != _FAMILY:
        raise ConfigError(
            f"{checkpoint}: model_type: expected {_FAMILY}, got {config.get('model_type')!r}: other families' GGUF files "
            "are made by llama.cpp's own converter; give one with --gguf"
        )
    files, names = _open_files(checkpoint), dict(_tensors(config))
    for part in itertools.chain(*names.values()):
        if part not in files:
            raise DataError(f"{checkpoint}: has no tensor {part}")
    beside = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(beside, _ARCHITECTURE)
    try:
        _write_keys(writer, config)
        for name, parts in names.items():
            exact = any(word in name for word in _EXACT)
            one = tuple(files[parts[0]].get_slice(parts[0]).get_shape())
            shape = one if len(parts) == 1 else (len(parts), *one)
            dtype = np.dtype(np.float32 if exact else np.uint16)
            kind = gguf.GGMLQuantizationType.F32 if exact else gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, parts in names.items():
            loaded = [files[part].get_tensor(part) for part in parts]
            tensor = loaded[0] if len(parts) == 1 else torch.stack(loaded)
            if any(word in name for word in _EXACT):
                writer.write_tensor_data(tensor.float().contiguous().numpy())
            else:
                writer.write_tensor_data(tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy())
        writer.close()
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """The tensors of the file by name: what of the checkpoint is stacked in each (one, or every expert's)."""
    for name, of in _ENDS.items():
        if name != "output" or not config.get("tie_word_embeddings"):
            yield f"{name}.weight", (f"{of}.weight",)
    for layer in range(config["num_hidden_layers"]):
        for name, of in _OF_LAYER.items():
            yield f"blk.{layer}.{name}.weight", (f"model.layers.{layer}.{of}.weight",)
        for name, of in _OF_EXPERTS.items():
            experts = range(config.get("num_experts") or config["num_local_experts"])
            parts = [f"model.layers.{layer}.mlp.experts.{e}.{of}.weight" for e in experts]
            yield f"blk.{layer}.{name}.weight", parts


def _open_files(directory: Path) -> dict[str, Any]:
    """The safetensors file of each tensor."""
    from safetensors import safe_open

    index = directory / _INDEX
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        opened = {name: safe_open(directory / name, "pt") for name in {*files.values()}}
        return {tensor: opened[name] for tensor, name in files.items()}
    single = safe_open(directory / _SINGLE, "pt")
    return dict.fromkeys(single.keys(), single)


def _write_keys(writer: Any, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(_FAMILY)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(vocabulary)
    special = {0: "<unk>", 1: "<s>", 2: "</s>"}
    bytes_ = {3 + value: f"<0x{value:02X}>" for value in range(256)}
    names = special | bytes_
    writer.add_tokenizer_model("llama")
    writer.add_token_list([names.get(i, f"t{i}") for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    kinds = {0: _UNKNOWN, 1: _CONTROL, 2: _CONTROL, **dict.fromkeys(bytes_, _BYTE)}
    writer.add_token_types([kinds.get(i, _NORMAL) for i in range(vocabulary)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
