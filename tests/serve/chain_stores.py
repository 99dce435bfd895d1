"""Stores of a model whose next token is a table of the last one, with one of the small tokenizers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import imported
from tiny_families import make_config, plain_model

from tierstore.hf.manifest import Weights


def chain_store(
    directory: Path,
    tokenizer: Any,
    scripts: Sequence[Sequence[int]],
    *,
    generation: dict[str, Any] | None = None,
) -> tuple[Any, Path]:
    """transformers' own Mixtral, and a store that it was imported into. ``scripts``: tokens that follow each other; behind
    all others comes ``</s>``. ``generation``: values of its generation_config.json.
    """
    from transformers import GenerationConfig

    size, end = len(tokenizer), tokenizer.eos_token_id
    follows = dict.fromkeys(range(size), end)
    for script in scripts:
        follows.update(itertools.pairwise(script))
    width = -(-size // 32) * 32
    plain = plain_model(
        make_config("mixtral", vocab_size=size, hidden_size=width, max_position_embeddings=256), torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        plain.model.embed_tokens.weight.copy_(torch.eye(size, width))
        plain.lm_head.weight.zero_()
        for last, token in follows.items():
            plain.lm_head.weight[token, last] = 1.0
    plain.generation_config = GenerationConfig(**{"eos_token_id": end, **(generation or {})})
    plain.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    imported(directory / "model", directory / "store", weights=Weights.FROZEN)
    return plain, directory / "store"
