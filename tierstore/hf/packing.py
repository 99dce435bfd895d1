"""Packed documents in models of transformers: which families keep them apart, and what they must be given.

Most build a block-diagonal mask from positions that begin again, if they are called with ``position_ids``, without
``attention_mask`` and with ``use_cache=False``: beside a cache, and ``use_cache`` is on by default, the same positions are
ignored without a word. gpt-oss does not hand positions to its masks, and takes masks made for it. Linear attention carries
its state across documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BY_POSITIONS = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "granitemoe",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
    }
)
_BY_MASKS = frozenset({"gpt_oss"})


def together(model_type: str) -> str:
    """Why a model of ``model_type`` cannot keep packed documents apart; empty where it does."""
    if model_type in _BY_POSITIONS | _BY_MASKS:
        return ""
    if model_type == "qwen3_next":
        return "the linear attention of qwen3_next carries its state from one document to the next"
    return f"that {model_type} keeps documents apart has not been checked"


def attention_masks(config: Any, positions_BT: Tensor | None, dtype: torch.dtype) -> dict[str, Any] | None:
    """What to give a model of ``config`` as ``attention_mask`` beside ``positions_BT``: None, but for gpt-oss.

    ``dtype``: of the hidden states.
    """
    if positions_BT is None or config.model_type not in _BY_MASKS:
        return None
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    batch = {
        "config": config,
        "inputs_embeds": torch.empty((*positions_BT.shape, 0), dtype=dtype, device=positions_BT.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions_BT,
    }
    return {
        "full_attention": create_causal_mask(**batch),
        "sliding_attention": create_sliding_window_causal_mask(**batch),
    }
