"""What configurations say: the totals that were published, to the last digit; and names, without any weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_families import make_config

from tierstore.hf.describing import describe, describe_config
from tierstore.hf.families import FAMILIES
from tierstore.hf.manifest import ExpertLayout, Quantization
from tierstore.model.config import ComputeDtype

_DEEPSEEK = {
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
#: The values of the published configurations that sizes depend on, the total, and the share of experts in percent.
_PUBLISHED: dict[str, tuple[dict[str, Any], int, float]] = {
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        46_702_792_704,
        96.6,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
        95.0,
    ),
    "OLMoE-1B-7B": (
        {
            "model_type": "olmoe",
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        6_919_161_856,
        93.1,
    ),
    "DeepSeek-V2-Lite": (
        {
            **_DEEPSEEK,
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
        },
        15_706_484_224,
        91.6,
    ),
    "DeepSeek-V3": (
        {
            **_DEEPSEEK,
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        671_026_404_352,
        97.4,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        20_914_757_184,
        91.4,
    ),
}


@pytest.mark.parametrize("name", list(_PUBLISHED))
def test_published_totals(name: str) -> None:
    config, total, percent = _PUBLISHED[name]
    described = describe_config(config)
    assert described.total_parameters == total
    assert round(100 * described.expert_parameters / total, 1) == percent
    quantised = "quantization_config" in config
    assert (described.quantization is not Quantization.NONE) == quantised
    assert not quantised or described.compute is ComputeDtype.BF16


@pytest.mark.parametrize("family", list(FAMILIES))
def test_units_cover_the_model_in_the_order_of_the_forward_pass(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    described = describe(tmp_path, ComputeDtype.BF16)
    layers = config.num_hidden_layers
    assert [unit.name for unit in described.units] == [
        "embedding",
        *(f"block.{layer}" for layer in range(layers)),
        "head",
    ]
    assert [entry.name for entry in described.units[0].parameters] == ["model.embed_tokens.weight"]
    assert described.units[-1].parameters[0].name == "model.norm.weight"
    assert all(unit.parameters for unit in described.units)
    assert {entry.dtype for entry in described.parameters()} == {"bfloat16"}
    assert {entry.dtype for entry in described.buffers} <= {"float32"}
    biased = described.experts.layout is ExpertLayout.INTERLEAVED_BIASED
    assert biased == (family == "gpt_oss")
    assert describe(tmp_path / "config.json", ComputeDtype.BF16) == described


def test_the_type_of_computing_follows_the_configuration() -> None:
    config = {"model_type": "olmoe", "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 2}
    assert describe_config(config).compute is ComputeDtype.FP32
    assert describe_config({**config, "torch_dtype": "bfloat16"}).compute is ComputeDtype.BF16
    assert describe_config({**config, "dtype": "float32"}).compute is ComputeDtype.FP32
