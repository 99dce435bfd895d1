"""config.json of a small model whose passes can be planned: three layers of eight experts."""

from typing import Any

SMALL_QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
