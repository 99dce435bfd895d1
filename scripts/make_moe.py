#!/usr/bin/env python3
"""Writes a Qwen3-MoE checkpoint of random weights, tensor by tensor: a model larger than memory, to measure with.

    scripts/make_moe.py runs/random-moe
    scripts/make_moe.py runs/small --layers 2 --experts 16 --hidden 64 --expert-width 32 --vocabulary 512

The default has 1.56 B parameters, of which 1.51 B are experts; 3.1 GB in bf16. The files are named and cut as
``save_pretrained`` does it, one tensor for each projection of each expert. The same arguments give the same
bytes. Needs numpy only; with ``--tokenizer-text``, which gives it a byte-level BPE tokenizer, tokenizers too.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

STANDARD_DEVIATION = 0.02
HEAD_DIM = 64
BYTES = 2  # of a parameter in bf16
END_OF_TEXT = "<|endoftext|>"


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, as transformers writes a Qwen3-MoE with tied embeddings."""
    hidden, width = args.hidden, args.expert_width
    heads = max(hidden // HEAD_DIM, 1)
    pairs = max(heads // 4, 1)  # of key and value
    yield "model.embed_tokens.weight", (args.vocabulary, hidden)
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for expert in range(args.experts):
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, width)
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (width, hidden)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (width, hidden)
        yield f"{prefix}.mlp.gate.weight", (args.experts, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.k_proj.weight", (pairs * HEAD_DIM, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.q_proj.weight", (heads * HEAD_DIM, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (pairs * HEAD_DIM, hidden)
    yield "model.norm.weight", (hidden,)


def configuration(args: argparse.Namespace) -> dict[str, object]:
    """What ``config.json`` says."""
    heads = max(args.hidden // HEAD_DIM, 1)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "initializer_range": STANDARD_DEVIATION,
        "intermediate_size": 4 * args.hidden,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": args.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": max(heads // 4, 1),
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": args.vocabulary,
    }


def values(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint16]:
    """The bits of a bf16 tensor: ones for a norm, normal values for a matrix, the same for the same name."""
    count = math.prod(shape)
    if name.endswith("norm.weight"):
        floats = np.ones(count, np.float32)
    else:
        random = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
        floats = random.standard_normal(count, np.float32)
        floats *= STANDARD_DEVIATION
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def shards(args: argparse.Namespace) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors of each file: as many as fit into ``--shard-bytes``."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in shapes(args):
        nbytes = math.prod(shape) * BYTES
        if files[-1] and filled + nbytes > args.shard_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, shape))
        filled += nbytes
    return files


def write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    """A safetensors file: the length of the header, the header, the tensors without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        end = at + math.prod(shape) * BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            file.write(values(name, shape, seed).tobytes())


def write_tokenizer(directory: Path, text: Path, vocabulary: int) -> None:
    """A tokenizer of ``vocabulary`` tokens, learnt from ``text``, in the files that transformers reads."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=vocabulary, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="made here")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--expert-width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--shard-bytes", type=int, default=1 << 30, help="largest file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tokenizer-text", type=Path, help="text to learn a tokenizer of the vocabulary from"
    )
    args = parser.parse_args()

    args.directory.mkdir(parents=True)
    if args.tokenizer_text is not None:
        write_tokenizer(args.directory, args.tokenizer_text, args.vocabulary)
    (args.directory / "config.json").write_text(json.dumps(configuration(args), indent=2) + "\n")
    files = shards(args)
    index: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        write_shard(args.directory / name, tensors, args.seed)
        index |= dict.fromkeys((tensor for tensor, _ in tensors), name)
    parameters = sum(math.prod(shape) for _, shape in shapes(args))
    experts = sum(math.prod(shape) for name, shape in shapes(args) if ".experts." in name)
    metadata = {"total_parameters": parameters, "total_size": parameters * BYTES}
    document = {"metadata": metadata, "weight_map": dict(sorted(index.items()))}
    (args.directory / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{parameters:,} parameters, {experts:,} of them of experts, in {len(files)} files")


if __name__ == "__main__":
    main()
