"""The built-in model as a Mixtral of transformers, where its options allow it.

The two compute the same: RMSNorm before attention and mixture, rotary positions that turn ``(x[i], x[i + C/2])``, causal
attention without biases, a softmax over all experts whose ``top_k`` largest are made to sum to one, SwiGLU experts. The
built-in model has one matrix for queries, keys and values, and one for gate and up; Mixtral has separate ones. With a tied
head the built-in model scales embeddings by ``sqrt(d_model)``: the export unties the two and scales the embedding itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from tierstore.dense import Fusion
from tierstore.dense.layout import Narrow, ParameterPlace, layouts_of_shapes
from tierstore.errors import ConfigError
from tierstore.hf.checkpoint import TensorSpec
from tierstore.hf.writing import DenseValues, ExpertValues, ExportDtype, Origin, Outline, json_bytes
from tierstore.model.config import ComputeDtype, ModelConfig, TieEmbeddings
from tierstore.moe.config import Activation, RouterNoise

#: The vocabulary of a model that reads bytes.
_BYTES = 256
_Parameter = tuple[Narrow, tuple[int, ...]]


def refusals(model: ModelConfig) -> list[str]:
    """The options of ``model`` that a Mixtral does not have, each with the value that it needs."""
    found = []
    if model.activation is not Activation.SWIGLU:
        found.append(f"model.activation = {model.activation.value} (expected swiglu)")
    if model.moe_every != 1:
        found.append(f"model.moe_every = {model.moe_every} (expected 1: experts in every block)")
    if model.shared_expert_d_ff:
        found.append(f"model.shared_expert_d_ff = {model.shared_expert_d_ff} (expected 0: no shared expert)")
    if model.capacity_factor is not None:
        found.append(f"model.capacity_factor = {model.capacity_factor} (expected none: no token is dropped)")
    if not model.router.normalized:
        option = f"top_k = {model.top_k}" if model.top_k == 1 else "normalize_topk = false"
        found.append(f"model.{option} (expected weights of the chosen experts that sum to one)")
    return found


def mixtral(
    model: ModelConfig,
    fusion: Fusion,
    ranks: int,
    dtype: ExportDtype | None,
    tables: Collection[ParameterPlace] = (),
) -> Outline:
    """The export of the built-in ``model``; ``dtype`` None: its compute type. ``tables``: the parameters whose
    rows are divided over ``ranks``.

    Raises ConfigError naming every option that a Mixtral does not have.
    """
    found = refusals(model)
    if found:
        raise ConfigError(f"the model does not export as Mixtral: {'; '.join(found)}")
    dtype = dtype or ExportDtype(model.compute_dtype.value)
    files = {
        "config.json": json_bytes(config_of(model, dtype)),
        "generation_config.json": json_bytes({"_from_model_config": True}),
    }
    notes = []
    if model.tie_embeddings is TieEmbeddings.TIED:
        notes.append(
            "the head is tied to the embedding, whose output is scaled: the two are exported as separate tensors"
        )
    if model.router_noise is not RouterNoise.NONE:
        notes.append("router_noise applies only in training and is left out")
    if model.vocab_size == _BYTES:
        files["tokenizer.json"] = json_bytes(byte_tokenizer())
        files["tokenizer_config.json"] = json_bytes(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": model.seq_len,
                "clean_up_tokenization_spaces": False,
            }
        )
    else:
        notes.append(
            f"no tokenizer is written: the vocabulary has {model.vocab_size} tokens, not one for each byte"
        )
    tensors = [
        (TensorSpec(name, dtype.safetensors, shape), origin) for name, shape, origin in _tensors(model)
    ]
    return Outline(
        dtype=dtype,
        tensors=tensors,
        layouts=layouts_of_shapes(_units(model), ranks=ranks, fusion=fusion, tables=tables),
        files=files,
        notes=tuple(notes),
    )


def _units(model: ModelConfig) -> list[tuple[str, list[_Parameter]]]:
    """The dense units of the built-in model."""
    d, no = model.d_model, Narrow.NO
    cast = Narrow.NO if model.compute_dtype is ComputeDtype.FP32 else Narrow.YES
    block: list[_Parameter] = [
        (no, (d,)),
        (cast, (3 * d, d)),
        (cast, (d, d)),
        (no, (d,)),
        (no, (model.experts, d)),
    ]
    table: _Parameter = (no, (model.vocab_size, d))
    norm: _Parameter = (no, (d,))
    head = [norm] if model.tie_embeddings is TieEmbeddings.TIED else [norm, table]
    blocks = [(f"block.{layer}", block) for layer in range(model.n_layers)]
    return [("embedding", [table]), *blocks, ("head", head)]


def _tensors(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], Origin]]:
    """Mixtral's tensors: name, shape and the origin of the values."""
    d, table = model.d_model, (model.vocab_size, model.d_model)
    tied = model.tie_embeddings is TieEmbeddings.TIED
    scale = math.sqrt(d) if tied else 1.0

    def dense(
        name: str, shape: tuple[int, ...], unit: int, index: int, begin: int = 0, by: float = 1.0
    ) -> tuple[str, tuple[int, ...], Origin]:
        return name, shape, DenseValues(name, unit, index, begin, math.prod(shape), by)

    yield dense("model.embed_tokens.weight", table, 0, 0, by=scale)
    for layer in range(model.n_layers):
        prefix, unit = f"model.layers.{layer}", layer + 1
        yield dense(f"{prefix}.input_layernorm.weight", (d,), unit, 0)
        for number, which in enumerate("qkv"):
            yield dense(f"{prefix}.self_attn.{which}_proj.weight", (d, d), unit, 1, number * d * d)
        yield dense(f"{prefix}.self_attn.o_proj.weight", (d, d), unit, 2)
        yield dense(f"{prefix}.post_attention_layernorm.weight", (d,), unit, 3)
        yield dense(f"{prefix}.block_sparse_moe.gate.weight", (model.experts, d), unit, 4)
        f, size = model.d_ff, model.d_ff * d
        for expert in range(model.experts):
            below = f"{prefix}.block_sparse_moe.experts.{expert}"
            one = range(expert, expert + 1)
            yield f"{below}.w1.weight", (f, d), ExpertValues(layer, one, 0, size)
            yield f"{below}.w3.weight", (f, d), ExpertValues(layer, one, size, size)
            yield f"{below}.w2.weight", (d, f), ExpertValues(layer, one, 2 * size, size)
    last = model.n_layers + 1
    yield dense("model.norm.weight", (d,), last, 0)
    yield dense("lm_head.weight", table, 0, 0) if tied else dense("lm_head.weight", table, last, 1)


def config_of(model: ModelConfig, dtype: ExportDtype) -> dict[str, object]:
    """Mixtral's config.json."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": dtype.torch_name,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 5 reads both keys, earlier releases and other programs only this one
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "router_aux_loss_coef": model.aux_loss_weight,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def byte_tokenizer() -> dict[str, object]:
    """tokenizer.json of a model that reads bytes: each byte is a token whose id is the byte's value."""
    # Byte-level tokenizers write bytes as characters: printable bytes as themselves, others as characters from 256 on.
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary, more = {}, 0
    for byte in range(_BYTES):
        vocabulary[chr(byte if byte in printed else _BYTES + more)] = byte
        more += byte not in printed
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
