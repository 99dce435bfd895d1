"""A checkpoint of transformers as the GGUF file that llama.cpp reads, without quantisation.

Of the families whose tensors need no permutation: Qwen3-MoE. Experts of a layer become one tensor each of gate, up and down;
norms and routers are fp32, as llama.cpp wants them. The vocabulary is made of the tokens' numbers: prompts are given as
numbers, and no text is compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.errors import ConfigError, DataError
from tierstore.hf.describing import read_config

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


@dataclass(frozen=True)
class _Source:
    """A tensor of the file: its name, and what of the checkpoint is stacked in it (one, or every expert's)."""

    name: str
    parts: tuple[str, ...]

    @property
    def exact(self) -> bool:
        return any(word in self.name for word in _EXACT)


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
    tensors = _Checkpoint(checkpoint)
    sources = [*_sources(config, tensors)]
    beside = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(beside, _ARCHITECTURE)
    try:
        _write_keys(writer, config)
        for source in sources:
            shape, dtype = tensors.shape(source), np.dtype(np.float32 if source.exact else np.uint16)
            kind = gguf.GGMLQuantizationType.F32 if source.exact else gguf.GGMLQuantizationType.BF16
            nbytes = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(source.name, shape, dtype, nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for source in sources:
            writer.write_tensor_data(tensors.read(source))
        writer.close()
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _sources(config: Mapping[str, Any], tensors: _Checkpoint) -> Iterator[_Source]:
    for name, of in _ENDS.items():
        if name != "output" or not config.get("tie_word_embeddings"):
            yield _Source(f"{name}.weight", (f"{of}.weight",))
    for layer in range(config["num_hidden_layers"]):
        for name, of in _OF_LAYER.items():
            yield _Source(f"blk.{layer}.{name}.weight", (f"model.layers.{layer}.{of}.weight",))
        for name, of in _OF_EXPERTS.items():
            experts = range(config.get("num_experts") or config["num_local_experts"])
            parts = tuple(f"model.layers.{layer}.mlp.experts.{e}.{of}.weight" for e in experts)
            yield _Source(f"blk.{layer}.{name}.weight", parts)


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


class _Checkpoint:
    """The tensors of a directory of safetensors files."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        index = directory / _INDEX
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            opened = {name: safe_open(directory / name, "pt") for name in {*files.values()}}
            self._files = {tensor: opened[name] for tensor, name in files.items()}
        else:
            single = safe_open(directory / _SINGLE, "pt")
            self._files = dict.fromkeys(single.keys(), single)  # type: ignore[no-untyped-call]
        self._directory = directory

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise DataError(f"{self._directory}: has no tensor {name}")
        return self._files[name]

    def shape(self, source: _Source) -> tuple[int, ...]:
        one = tuple(self._file(source.parts[0]).get_slice(source.parts[0]).get_shape())
        return one if len(source.parts) == 1 else (len(source.parts), *one)

    def read(self, source: _Source) -> NDArray[Any]:
        parts = [self._file(name).get_tensor(name) for name in source.parts]
        tensor = parts[0] if len(parts) == 1 else torch.stack(parts)
        if source.exact:
            return tensor.float().contiguous().numpy()
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
